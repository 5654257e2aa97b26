"""Simulates training steps on machines that need not exist: every figure is *simulated* (docs/simulator.md).

Imports the runtime's pure planners and machine descriptions, never its processes.
"""
