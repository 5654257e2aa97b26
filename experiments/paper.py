"""The sections, figures and tables of the paper, which citations may name."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS: Mapping[str, str] = {
    "I": "introduction: up to 48.3% faster than AllReduce",
    "II": "background and motivation",
    "II-A": "parallelism: data, parameter server, model, pipeline",
    "II-B": "communication: up to 76% of the training time on 4 T4",
    "II-C": "cache-coherent interconnects and peer-to-peer access",
    "III": "overview of the design",
    "III-A": "deployment: each GPU is paired with a memory device behind one switch",
    "III-B": "DENSE, the naive design: a parameter server in one memory device",
    "III-C": "the disaggregated design: a memory device for each GPU",
    "III-D": "decentralised synchronisation: client, proxy, storage",
    "III-E": "routing, partitioning, profiling; bandwidths of V100 and P100",
    "III-F": "dual synchronisation, its estimate; deadlocks, a queue for each client",
    "IV": "implementation",
    "IV-A": "sync cores, groups and rings; fault tolerance: copy-on-write, snapshots at each epoch",
    "IV-B": "library and TensorFlow strategy, GPU partition table, offline profiling, client, proxy, storage",
    "IV-C": "prototype of two FPGAs",
    "V": "evaluation",
    "V-A": "setup: machines, half of the GPUs are memory devices; 2:1 on p3",
    "V-B": "bandwidth of the prototype; the performance model of DENSE",
    "V-C": "routing tables of T4, V100 and P100",
    "V-D": "training speed: models and batches, largest batch, several nodes",
    "V-E": "blocked communication time",
    "VI": "related work",
    "VII": "conclusion",
}
"""Topics by section."""

FIGURES: Mapping[str, str] = {
    "Fig 1": "communication schemes of distributed training",
    "Fig 2": "share of communication in training on T4",
    "Fig 3": "CCI bandwidth: load/store, GPU indirect, GPU direct",
    "Fig 4": "deployment on one node",
    "Fig 5": "architecture of DENSE",
    "Fig 6": "architecture of COARSE",
    "Fig 7": "client, proxy and storage",
    "Fig 8": "bidirectional bandwidth between GPUs of V100 and P100",
    "Fig 9": "timeline: partitioning and dual synchronisation",
    "Fig 10": "deadlock in first-come-first-serve synchronisation",
    "Fig 11": "sync cores: buffers, groups of both directions, scheme",
    "Fig 12": "prototype of two FPGAs",
    "Fig 13": "CCI bandwidth by access size",
    "Fig 14": "DMA bandwidth from the processor to the FPGA by access size",
    "Fig 15": "local and remote proxies of T4, V100 and P100",
    "Fig 16": "training speed: (a-b) T4, (c) P100, (d) V100, (e) one node, (f) several nodes",
    "Fig 17": "blocked communication time, in the panels of Fig 16",
}
"""Topics by figure."""

PANELS: Mapping[str, str] = {
    "Fig 2": "ab",
    "Fig 3": "ab",
    "Fig 8": "ab",
    "Fig 11": "abc",
    "Fig 13": "ab",
    "Fig 14": "ab",
    "Fig 15": "abc",
    "Fig 16": "abcdef",
    "Fig 17": "abcdef",
}
"""Letters of the panels of those figures that have some."""

TABLES = ("Table I",)


def is_citation(name: str) -> bool:
    """Whether the paper has a section, a figure, a panel of a figure or a table of this name, such as "Fig 16e"."""
    is_panel = bool(name) and name[-1] in PANELS.get(name[:-1], "")
    return name in SECTIONS or name in FIGURES or name in TABLES or is_panel
