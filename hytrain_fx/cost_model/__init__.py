"""From measured times to a plan: the equation, the planner, the simulator, the offline report."""
