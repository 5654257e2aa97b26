"""The processes that `coarse run` starts and watches, and their output."""
