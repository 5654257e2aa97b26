"""CARVE: each of four GPUs caches the others' memory in a part of its own, kept coherent by software or by hardware.

`workloads` makes address streams, `placement` gives pages their homes, `last_level_cache` and `remote_cache` find
hits, `kernel_times` turns traffic into time, and `protocol` is the coherence protocol message by message.
"""
