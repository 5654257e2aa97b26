"""Benchmarks behind `coarse bench`: several systems in one run, each verified before it is timed."""
