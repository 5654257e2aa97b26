"""The caches of remote data and the protocol that keeps them coherent."""
