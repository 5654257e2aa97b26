"""The contracts between client and memory device: messages, registration, segments, placement. Imports neither."""
