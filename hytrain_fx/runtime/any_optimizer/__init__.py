"""Optimizers other than Adam and AdamW, row by row, by their own code.

Is given an optimizer of any class. Returns the update of one row as a function. Never changes
what the class computes.
"""
