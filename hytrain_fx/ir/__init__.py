"""Values that pass between rooms.

Is given nothing but numbers and names. Returns frozen values: profile, plan, schedule, task
graph, start-up. Never knows torch.
"""
