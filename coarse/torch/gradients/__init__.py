"""The path of gradients from backward to their slots and back."""
