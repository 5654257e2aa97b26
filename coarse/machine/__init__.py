"""Machines as values: devices and links of this machine and of machines that COARSE can emulate."""
