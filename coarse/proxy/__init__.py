"""Memory devices: processes that own memory, reduce pushed tensors, run optimizers and write snapshots."""
