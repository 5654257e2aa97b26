"""DistributedDataParallel: the wrapper, its compatibility with torch's, and what it checks."""
