"""Emulated links: another machine's, to which the real runtime is paced (docs/design/emulation.md)."""
