"""The `coarse` command: one module per sub-command, loaded when it is asked for."""
