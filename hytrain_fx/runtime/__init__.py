"""What runs behind the inserted nodes: slabs, lanes, workers, kernels."""
