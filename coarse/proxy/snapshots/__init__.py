"""Copy-on-write snapshots: reading them, serving workers, writing them to disk."""
