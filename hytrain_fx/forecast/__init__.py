"""What a step will take on a machine: told from data sheets, without a GPU, or timed there.

Is given shapes of a model and numbers of a machine. Returns predictions and their pages. Never
runs a model, except in `bench`, which times one.
"""
