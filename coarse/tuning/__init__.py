"""Adapts a running session to its machine: measures its links, times its steps, and plans again while it trains.

`coarse.profiler` computes plans from the measurements.
"""
