"""The jobs by which `coarse profile` and `coarse doctor` measure this machine."""
