"""Processes of a job say what they do, at any time, to other processes of their user (docs/design/status.md)."""
