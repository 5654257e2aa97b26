"""DistributedDataParallel: the wrapper, its compatibility with torch's, and its checks."""
