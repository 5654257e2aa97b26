"""Simulates training steps on machines that nobody has: every figure is *simulated* (docs/simulator.md).

Imports the runtime's pure planners and machine descriptions, never its processes.
"""
