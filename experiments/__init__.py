"""The paper's experiments, run with this project. See `python -m experiments --help`."""
