"""Reductions by memory devices on a GPU, from the push to the last pull.

    [COARSE_ALGORITHM=nccl] python benchmarks/gpu_devices.py [--memory-devices cuda:0,cuda:1] [--place gpu|host]

Two workers push and pull one float32 mean of each size, with their tensors on the GPU or in the host's memory.
Results are checked before times are reported. `make gpu` runs it with each algorithm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from coarse.bench.provenance import MEASURED, Provenance, append_records
from coarse.bench.timing import Timing
from coarse.client.memory.tensor_bytes import GpuBytes, gpu_uuid
from coarse.env import WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

NUM_WORKERS = 2
SIZES_MIB = (1, 25, 100)
NUM_WARM_UPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory-devices", default="cuda:0,cuda:0")
    parser.add_argument("--place", choices=("gpu", "host"), default="gpu", help="where workers have tensors")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "coarse", "run", "-n", str(NUM_WORKERS)]
        command += ["--memory-devices", arguments.memory_devices, "--no-prefix", *sys.argv]
        return subprocess.run(command, env=os.environ | {"RENDEZVOUS": folder}, check=False).returncode


def measure(arguments: argparse.Namespace) -> None:
    """Runs in each worker; the first worker prints."""
    identity = WorkerIdentity.from_environment()
    store = DirectoryStore(os.environ["RENDEZVOUS"])
    specs = [
        TensorSpec(name=f"{size} MiB", dtype="float32", num_elements=size << 18, op="mean")
        for size in SIZES_MIB
    ]
    with Session.join(identity=identity, store=store) as session:
        group = session.register("tensors", specs, gpu=gpu_uuid(0) if arguments.place == "gpu" else "")
        records = []
        for index, spec in enumerate(specs):
            values = as_floats(group.buffer(index))
            pattern = torch.arange(spec.num_elements, dtype=torch.float32, device=values.device).remainder_(
                1000
            )
            times_s = [
                time_round(session, group, index, values, pattern)
                for _ in range(NUM_WARM_UPS + arguments.rounds)
            ]
            timing = Timing.from_seconds(times_s[NUM_WARM_UPS:])
            records.append(
                {
                    "bench": "GPU memory devices",
                    "memory_devices": arguments.memory_devices,
                    "algorithm": os.environ.get("COARSE_ALGORITHM", "auto"),
                    "place": arguments.place,
                    "nbytes": spec.nbytes,
                    **asdict(timing),
                    "gbytes_per_s": timing.algbw_gbytes_per_s(spec.nbytes),
                }
            )
    if identity.rank == 0:
        report(records, arguments)


def as_floats(memory: memoryview | GpuBytes) -> torch.Tensor:
    if isinstance(memory, GpuBytes):
        return torch.as_tensor(memory, device=f"cuda:{memory.device}").view(torch.float32)
    return torch.frombuffer(memory, dtype=torch.float32)


def time_round(session: Session, group, index: int, values: torch.Tensor, pattern: torch.Tensor) -> float:
    """Seconds of one push and pull, which all workers start together."""
    torch.add(pattern, session.identity.rank, out=values)
    if values.is_cuda:
        torch.cuda.synchronize()
    session.barrier()
    begin_s = time.perf_counter()
    group.push(index)
    group.pull(index)
    elapsed_s = time.perf_counter() - begin_s
    values.sub_(0.5)
    if not torch.equal(values, pattern):
        raise RuntimeError(f"the mean of {group.specs[index].name} is wrong")
    return elapsed_s


def report(records: list[dict], arguments: argparse.Namespace) -> None:
    provenance = Provenance.here()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(
        f"{NUM_WORKERS} workers with tensors on the {arguments.place}, memory devices {arguments.memory_devices}"
    )
    print(f"measured on {gpu}, {provenance.machine}")
    print(f"{'MiB':>6}{'min us':>10}{'p50 us':>10}{'p99 us':>10}{'GB/s p50':>10}")
    for record in records:
        print(
            f"{record['nbytes'] / 2**20:>6.0f}{record['min_us']:>10.1f}{record['p50_us']:>10.1f}"
            f"{record['p99_us']:>10.1f}{record['gbytes_per_s']:>10.2f}"
        )
    if arguments.json is not None:
        append_records(
            arguments.json, [{**record, "gpu": gpu} for record in records], provenance, kind=MEASURED
        )


if __name__ == "__main__":
    sys.exit(main())
