"""The paper's experiments, run on this project. `python -m experiments --help`."""
