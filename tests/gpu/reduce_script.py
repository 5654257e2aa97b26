"""A worker of tests/gpu/test_gpu_devices.py: reduces tensors of every kind and prints a hash of their bits.

Arguments: a folder for the rendezvous; "host" if this worker's tensors are in the host's memory, "gpu" if they are
on the GPU of the memory devices.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import torch

from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes, gpu_uuid
from coarse.env import WorkerIdentity
from coarse.schema import ITEM_BYTES, OPS, TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

NUM_STEPS = 3
SPECS = [
    TensorSpec(name=f"{dtype} {op} {length}", dtype=dtype, num_elements=length, op=op)
    for dtype in ITEM_BYTES
    for op in OPS
    if not (op == "mean" and dtype in ("int32", "int64", "uint8"))
    for length in (1, 4097, 300_011)
]


def contribution(spec: TensorSpec, seed: list[int]) -> np.ndarray:
    """Random numbers as bytes, the same for every place of the reduction."""
    numbers = np.random.default_rng(seed).normal(scale=100, size=spec.num_elements)
    if spec.dtype in ("bfloat16", "float16"):
        return torch.from_numpy(numbers).to(getattr(torch, spec.dtype)).view(torch.uint8).numpy()
    return np.abs(numbers).astype(spec.dtype) if spec.dtype == "uint8" else numbers.astype(spec.dtype)


def bytes_of(memory: TensorBytes) -> torch.Tensor:
    if isinstance(memory, GpuBytes):
        return torch.from_dlpack(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def stored_values(session: Session) -> list[memoryview]:
    """Values that the node's workers stored, some larger than a GPU page, and the same values from a snapshot."""
    rank, lengths = session.identity.rank, (7, 1 << 20)
    for length in lengths:
        session.store(f"{rank}/{length}", np.arange(length, dtype=np.float32) + rank)
    session.barrier()
    keys = [f"{other}/{length}" for other in session.node_workers for length in lengths]
    with session.snapshot_stored() as snapshot:
        session.barrier()
        session.store(f"{rank}/{lengths[1]}", np.full(lengths[1], rank, dtype=np.float32))
        session.barrier()
        found = [session.load(key) for key in keys] + [snapshot.load(key) for key in keys]
    num_workers = len(session.node_workers)
    assert [value.version for value in found] == [1, 2] * num_workers + [1, 1] * num_workers
    last = session.node_workers[-1]
    assert (np.frombuffer(found[-1].value, np.float32) == np.arange(lengths[1]) + last).all()
    return [value.value for value in found]


def main() -> None:
    folder, place = sys.argv[1:]
    identity = WorkerIdentity.from_environment()
    results = hashlib.sha256()
    with Session.join(identity=identity, store=DirectoryStore(folder)) as session:
        gpu = gpu_uuid(0) if place == "gpu" else ""
        group = session.register("tensors", SPECS, are_gradients=True, gpu=gpu)
        slots = [bytes_of(group.buffer(index)) for index in range(len(SPECS))]
        contributors = []
        for step in range(NUM_STEPS):
            for index, spec in enumerate(SPECS):
                mine = contribution(spec, [identity.rank, step, index]).view(np.uint8)
                slots[index].copy_(torch.from_numpy(mine))
            if place == "gpu":
                torch.cuda.synchronize()
            for index in range(len(SPECS)):
                group.push(index, present=(index + step) % 3 != identity.rank)
            contributors += group.pull_all()
            for slot in slots:
                results.update(slot.cpu().numpy())
        for value in stored_values(session):
            results.update(value)
        print(*session.decisions(), sep="\n", file=sys.stderr)
    print(
        json.dumps({"rank": identity.rank, "hash": results.hexdigest(), "contributors": contributors}),
        flush=True,
    )


if __name__ == "__main__":
    main()
