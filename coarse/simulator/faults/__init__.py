"""Stragglers, jitter, slow links and failures, and what they cost."""
