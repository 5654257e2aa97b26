"""The `coarse` command: one module per sub-command, loaded on request."""
