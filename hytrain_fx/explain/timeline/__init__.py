"""What ran when, as `record` shows it.

Is given the engine's records, marks and a schedule. Returns lanes of spans, as text, picture and
trace file. Never runs anything, and never measures.
"""
