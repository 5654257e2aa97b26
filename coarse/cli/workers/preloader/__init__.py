"""`coarse run --preload`: the process from which workers are forked, and its handle in the supervisor."""
