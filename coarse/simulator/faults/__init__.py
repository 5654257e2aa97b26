"""Stragglers, jitter, slow links and failures, and their cost."""
