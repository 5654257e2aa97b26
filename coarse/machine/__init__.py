"""Machines as values: their devices and links, those at hand and those that COARSE can pretend to be."""
