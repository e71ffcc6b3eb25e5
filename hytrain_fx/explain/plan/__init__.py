"""The plan in force as `explain` shows it.

Is given plan, profile and measured times. Returns what they say, as values, text and JSON. Never
changes the plan.
"""
