"""Training on DGX-1 and two machines with two GPUs: MXNet's tree over GPUs, and NCCL (docs/simulator/dgx1.md)."""
