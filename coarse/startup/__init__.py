"""Brings the workers and memory devices of a node together before training starts."""
