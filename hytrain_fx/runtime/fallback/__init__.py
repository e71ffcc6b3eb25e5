"""The engine in plain torch: for optimizers without a kernel of ours, and without a C++ compiler.

Is given the engine's calls. Returns the same bits, slower (those of DeepSpeed's CPU Adam where it
is asked for). Never builds anything of ours.
"""
