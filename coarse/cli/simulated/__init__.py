"""Questions of `coarse simulate` and `coarse plan --what-if` to the simulator."""
