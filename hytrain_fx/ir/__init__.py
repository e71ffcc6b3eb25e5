"""Values that pass between rooms: the task DAG, the plan, the schedule. Knows no torch."""
