"""Measures the running program and decides when to solve again.

Is given marks, records and memory of the last steps. Returns the plan to put in force, or none.
Never moves a state.

    controller    when: named states, from what each step has shown (`watches`)
    planning      what the session calls; does what the controller says
    solving       a profile (`profiling`, from `marks`) to a plan, by cost_model/planner.py
    balancing     another streamed share for the same k
"""
