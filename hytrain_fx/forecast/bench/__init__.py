"""Step times on the user's own machine: ways of training timed beside each other.

Is given a model, its batches and a way to train it. Returns figures of steps that really ran.
"""
