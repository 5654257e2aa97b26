"""The memory of a worker's tensor groups: slots, optimizer memory, stored values, snapshots."""
