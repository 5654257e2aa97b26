"""What links carry and what follows from it: profiles as values; routes, shards and rings planned by pure functions.

`coarse.tuning` measures the links of a session and has it follow such plans.
"""
