"""The processes that `coarse run` starts and watches, and what it prints of them."""
