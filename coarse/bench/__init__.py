"""Benchmarks behind `coarse bench`: peers side by side in one run, each verified before it is timed."""
