"""Graphs as `inspect` shows them.

Is given the records of the passes, the rows and what is known of times. Returns questions answered,
texts, pages and JSON. Never looks at a graph itself, only at its text.
"""
