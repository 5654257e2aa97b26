"""Document 000: memory that several GPUs share (MGPU-TSM), and protocols that keep their caches coherent.

A protocol is a class whose `read` and `write` are generators: each message, and each wait for a locked line, is a
`yield`. The same protocol runs under two drivers: `interleaving` delivers messages in any order, for properties;
`timing` delivers them when links and memory controllers let them through, for run times.
"""
