"""Fits a running session to its machine: measures its links, times its steps, and plans again while it trains.

What follows from a measurement is said by `coarse.profiler`.
"""
