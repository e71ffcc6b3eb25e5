"""Measurements that anyone with a GPU can run: `python -m benchmarks --help`."""
