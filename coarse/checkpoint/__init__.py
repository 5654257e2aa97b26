"""Checkpoints: training state in folders of safetensors files with a manifest that verifies them.

Independent of frameworks, so that memory devices can write them; training loops use `coarse.torch.checkpoint`.
"""
