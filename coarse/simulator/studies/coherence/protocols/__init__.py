"""Coherence protocols between GPUs."""
