"""Messages between a worker and its memory devices, and the loss of either."""
