"""What a memory device keeps across restarts, and copies of other devices' contents."""
