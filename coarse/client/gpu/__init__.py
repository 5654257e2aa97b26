"""Tensors on GPUs: transfers, routes, NCCL between the workers."""
