"""What `coarse simulate` and `coarse plan --what-if` ask the simulator."""
