"""`coarse bench checkpoint`: saves during training."""
