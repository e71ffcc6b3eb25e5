"""Every private name of torch, by kind.

Is given torch as installed. Returns small functions with names of our own. Never patches torch; a
name that has gone is one error that says torch's version.
"""
