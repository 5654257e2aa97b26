"""`coarse bench sync`: all-reduce of one tensor."""
