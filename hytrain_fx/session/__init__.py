"""One compiled model: what `compile` makes, and what the loop calls.

Is given model, optimizer and options. Returns graphs that run the nodes, an optimizer and the
model's guarded weights. Never renders a text for people, except in the log.
"""
