"""Who may talk to a process of a job: the user's own peers, proofs of the job's secret, limits for all others."""
