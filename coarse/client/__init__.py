"""The worker's part of COARSE: registers tensors with the memory devices, pushes and pulls them."""
