"""What client and memory device share: messages, registration, segments, placement. Below both."""
