"""Measures the running program and decides when to solve again.

Is given marks, records and memory of the last steps. Returns the plan to put in force, or none.
Never moves a state.
"""
