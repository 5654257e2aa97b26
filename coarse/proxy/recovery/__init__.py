"""A memory device's contents that survive restarts, and replicas of other devices' contents."""
