"""Who prepares, triggers and completes the messages of GPUs, after LeBeane's defense of 2018."""
