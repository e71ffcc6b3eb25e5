"""The engine in plain torch, for machines without a C++ compiler.

Is given the engine's calls. Returns the same bits, slower. Never builds anything.
"""
