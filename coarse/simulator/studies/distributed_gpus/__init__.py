"""Ways in which distributed GPUs exchange data, after Oden's dissertation of 2014."""
