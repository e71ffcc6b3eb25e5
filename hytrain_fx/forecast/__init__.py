"""The report without a GPU: machines, models and sweeps from data sheets.

Is given shapes of a model and numbers of a machine. Returns predictions and their pages. Never
runs a model.
"""
