"""Checkpoints: training state in folders of safetensors files that a manifest vouches for.

Knows no framework, so that memory devices can write them; `coarse.torch.checkpoint` is what a training loop uses.
"""
