"""The engine in C++ (`runtime/csrc`).

Is given the engine's calls. Returns their effect, by its own threads. Never holds Python's
lock while it waits.
"""
