"""The timeline of a job: each process records its events, and the launcher merges them into one trace."""
