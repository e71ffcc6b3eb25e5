"""Updates, copies, memory.

Is given rows (a parameter, its states, their places) and calls of the graphs' nodes. Returns
updated weights, in the order of the device's streams. Never decides what is updated where, and
knows no graph.
"""
