"""`coarse bench train-step`: a real training step."""
