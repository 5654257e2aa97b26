"""Machines as networks of endpoints and buckets."""
