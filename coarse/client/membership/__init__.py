"""Who takes part in a session's steps: members, newcomers, workers that leave."""
