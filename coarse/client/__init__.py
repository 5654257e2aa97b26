"""What a worker has of COARSE: it registers tensors with the memory devices, pushes and pulls them."""
