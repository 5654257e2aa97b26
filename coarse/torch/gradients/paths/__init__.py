"""The ways of gradients to their slots and of averages back, by where both lie."""
