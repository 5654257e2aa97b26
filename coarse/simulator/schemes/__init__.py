"""Schemes: the tasks of one training step, by way of synchronising it."""
