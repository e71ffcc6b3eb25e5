"""Memory of states: allocated, moved, counted.

Is given rows and where their states are to rest. Returns tensors there, with the same bits after
every move. Never updates a state.
"""
