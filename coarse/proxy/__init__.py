"""Memory devices: processes that own memory, reduce what workers push, run optimizers and write snapshots."""
