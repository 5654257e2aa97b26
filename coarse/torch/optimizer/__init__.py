"""DistributedOptimizer: an optimizer that runs in the memory devices."""
