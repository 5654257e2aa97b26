"""Profiles of links as values, and plans of routes, shards and rings as pure functions of them.

`coarse.tuning` measures the links of a session and applies such plans.
"""
