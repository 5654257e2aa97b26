"""The other memory devices, of the same node and of other nodes."""
