"""A worker whose tensors are on a GPU, with memory devices anywhere: reduces them as its measurements suggest.

Arguments: a folder for the rendezvous; the number of the worker's GPU, or "own" for that of its rank; the number of
steps; and, for the stand-in of CUDA's driver, a step from which links take other times, and
these. Prints the hash of the results, and the decisions.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import numpy as np
import pytest

from coarse.client.gpu.gpu_transfers import GpuTensor
from coarse.client.memory.tensor_bytes import gpu_context, gpu_uuid
from coarse.env import WorkerIdentity
from coarse.kernels import _native
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

LINGERS_S = 0.5
LENGTHS = (1_100_003, 7, *[100_003] * 6, 2_000_000, 4097, *[100_000] * 6, 1_500_000)
"""Lengths of float32 tensors, large and small ones alternating: 5 MB of small ones, 18 MB of large ones."""


def main() -> None:
    folder, place, num_steps, *change = sys.argv[1:]
    identity = WorkerIdentity.from_environment()
    gpu = gpu_uuid(identity.rank if place == "own" else int(place))
    specs = [
        TensorSpec(name=str(index), dtype="float32", num_elements=length, op="mean")
        for index, length in enumerate(LENGTHS)
    ]
    hashed = hashlib.sha256()
    with Session.join(identity=identity, store=DirectoryStore(folder)) as session:
        group = session.register("tensors", specs, gpu=gpu)
        context = gpu_context(gpu)
        stream = _native.CudaStream(context)
        group.open_gpu_transfers(context)
        memories = [_native.CudaMemory.allocate(context, spec.nbytes) for spec in specs]
        addresses = [memory.address for memory in memories]
        if group.is_on_gpu:
            addresses = [group.buffer(index).address for index in range(len(specs))]
        if group.address_on_gpu:
            with pytest.raises(ValueError, match="tensors: this worker's slots lie on a GPU; copy to and"):
                group.push(0, source=np.zeros(LENGTHS[0], dtype=np.float32))
        for step in range(int(num_steps)):
            if change and step == int(change[0]):
                os.environ["STAND_IN_LINKS"] = change[1]
            transfers = group.gpu  # another one when the slots have moved
            random = np.random.default_rng([identity.rank, step])
            given = [random.normal(size=length).astype(np.float32) for length in LENGTHS]
            tensors: list[GpuTensor] = []
            for index, (address, values) in enumerate(zip(addresses, given, strict=True)):
                stream.copy_to_device(address, values.ctypes.data, values.nbytes)
                source = 0 if group.is_on_gpu else address
                tensors.append((index, _native.PRESENT, source, source, 0))
            transfers.push(tensors, stream.handle)
            transfers.join(stream.handle)
            if group.is_watched:
                group.pull_all()
            for address, values in zip(addresses, given, strict=True):
                stream.copy_to_host(values.ctypes.data, address, values.nbytes)
            stream.synchronize()
            for values in given:
                hashed.update(values)
        decisions = session.decisions()
        if identity.rank == 0:  # a finished worker may leave while others use memory devices
            time.sleep(LINGERS_S)
            session.store("last", np.ones(1))
            assert np.frombuffer(session.load("last").value) == 1.0
    print(json.dumps({"hash": hashed.hexdigest(), "decisions": decisions}), flush=True)


if __name__ == "__main__":
    main()
