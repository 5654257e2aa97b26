"""A worker of an emulated machine whose memory devices own GPU memory: computes sums and measures their time.

Arguments: a folder for the rendezvous. Each worker pushes every shard to its own one of two memory devices, so half
of each shard crosses the links between the devices in both directions. Prints a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np

from coarse.client.link_probes import Probe
from coarse.env import WorkerIdentity
from coarse.kernels._native import ProbeKind
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

MIB = 1 << 20
NUM_STEPS = 3
SHARD = TensorSpec(name="one shard", dtype="float32", num_elements=4 * MIB // 4, op="mean")
SMALL = [
    TensorSpec(name=f"{dtype} {op} {length}", dtype=dtype, num_elements=length, op=op)
    for dtype, op in (("float32", "mean"), ("float64", "sum"), ("int64", "max"), ("uint8", "sum"))
    for length in (1, 70_001)
]
SPECS = [SHARD, *SMALL]


def numbers(noise: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    if spec.dtype.startswith("float"):
        return noise.normal(size=spec.num_elements).astype(spec.dtype)
    return noise.integers(0, 100, size=spec.num_elements, dtype=spec.dtype)


def links_s(session: Session, way: list[tuple[int, int, int]]) -> float:
    """Undilated seconds of the links for transfers one after the other: (source, target, bytes) of each."""
    links = session.emulation.links
    return sum(
        nbytes / (links.bandwidth_gbytes_per_s(source, target) * 1e9)
        + links.path(source, target).latency_us * 1e-6
        for source, target, nbytes in way
    )


def way_of_the_shard(session: Session) -> list[tuple[int, int, int]]:
    """Push, both halves of the exchange, pull."""
    links, rank, nbytes = session.emulation.links, session.identity.rank, SHARD.nbytes
    worker, device, other = links.worker(rank), links.device(rank), links.device(1 - rank)
    exchange = [(other, device, nbytes // 2), (device, other, nbytes // 2)]
    return [(worker, device, nbytes), *exchange, (device, worker, nbytes)]


def main() -> None:
    identity = WorkerIdentity.from_environment()
    rank = identity.rank
    noise, results = np.random.default_rng(rank), hashlib.sha256()
    with Session.join(identity=identity, store=DirectoryStore(sys.argv[1])) as session:
        links = session.emulation.links
        group = session.register("tensors", SPECS)
        slots = [np.frombuffer(group.buffer(i), dtype=spec.dtype) for i, spec in enumerate(SPECS)]
        shortest_s = float("inf")
        for _ in range(NUM_STEPS):
            for slot, spec in zip(slots, SPECS, strict=True):
                slot[:] = numbers(noise, spec)
            session.barrier()
            begin_s = time.monotonic()
            group.push(0)
            group.pull_all()
            shortest_s = min(shortest_s, time.monotonic() - begin_s)
            for index in range(1, len(SPECS)):
                group.push(index, present=index % 3 != rank)
            group.pull_all()
            for slot in slots:
                results.update(slot)
        probes = session.open_probes(MIB)
        probe = Probe(kind=ProbeKind.PUSH, device=rank)
        report = {
            "rank": rank,
            "hash": results.hexdigest(),
            "dilation": session.emulation.time_dilation,
            "shortest_s": shortest_s,
            "least_s": links_s(session, way_of_the_shard(session)),
            "probe_s": probes.time_s([probe], MIB),
            "least_probe_s": links_s(session, [(links.worker(rank), links.device(rank), MIB)]),
            "num_arrivals": session.emulation.pacing().num_arrivals,
        }
        session.barrier()
        probes.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
