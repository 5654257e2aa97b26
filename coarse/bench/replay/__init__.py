"""`coarse bench replay`: a training step with recorded computation, on emulated links."""
