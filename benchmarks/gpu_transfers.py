"""Pushes and pulls of a tensor on a GPU against pinned copies in the same run, with their CPU time.

    coarse run -n 2 benchmarks/gpu_transfers.py [--megabytes 100] [--json results.jsonl]

Every worker pushes and pulls; worker 0 prints and writes its own figures. Results are verified before they are timed.
Every figure is measured and includes the GPU's name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from coarse.bench.provenance import Provenance, append_records
from coarse.client.gpu.gpu_transfers import GpuTensor, GpuTransfers
from coarse.client.tensor_group import TensorGroup
from coarse.kernels import _native
from coarse.schema import TensorSpec
from coarse.torch.session import session_of_group

DEVICE = "cuda:0"
ROUNDS = 30
WARM_UP = 5


class Link:
    """A tensor on the GPU, its slot, and pinned memory of the same length for comparison."""

    def __init__(self, transfers: GpuTransfers, num_elements: int) -> None:
        self.transfers = transfers
        self.tensor = torch.empty(num_elements, device=DEVICE)
        self._pinned_in = torch.empty(num_elements, pin_memory=True)
        self._pinned_out = torch.empty(num_elements, pin_memory=True)
        self._copied = torch.empty_like(self.tensor)
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_out(self) -> None:
        self._pinned_out.copy_(self.tensor, non_blocking=True)

    def copy_in(self) -> None:
        self._copied.copy_(self._pinned_in, non_blocking=True)

    def copy_both(self) -> None:
        for stream, copy in zip(self._streams, (self.copy_out, self.copy_in), strict=True):
            with torch.cuda.stream(stream):
                copy()

    def push(self) -> None:
        """Pushes the tensor and leaves the result in the slot."""
        self._exchange(source=self.tensor.data_ptr(), destination=0)

    def pull(self) -> None:
        """Contributes the slot's present contents and pulls the result."""
        self._exchange(source=0, destination=self.tensor.data_ptr())

    def push_and_pull(self) -> None:
        self._exchange(source=self.tensor.data_ptr(), destination=self.tensor.data_ptr())

    def _exchange(self, *, source: int, destination: int) -> None:
        tensor: GpuTensor = (0, _native.PRESENT, source, destination, 0)
        stream = torch.cuda.current_stream().cuda_stream
        self.transfers.push([tensor], stream)
        self.transfers.join(stream)


def verify(link: Link) -> None:
    """Checks that a pull returns the mean of the workers' tensors."""
    for step in range(3):
        link.tensor.copy_(torch.arange(link.tensor.numel(), device=DEVICE) % 1000 + dist.get_rank() + step)
        link.push_and_pull()
        expected = torch.arange(link.tensor.numel(), device=DEVICE) % 1000 + step
        shift = (dist.get_world_size() - 1) / 2
        assert torch.equal(link.tensor, expected + shift), f"wrong mean at step {step}"


def seconds_of(work: Callable[[], None]) -> tuple[float, float]:
    """Median seconds until the GPU has finished, and median CPU seconds of the call."""
    done_s, asked_s = [], []
    for _ in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        work()
        asked_s.append(time.perf_counter() - began_s)
        torch.cuda.synchronize()
        done_s.append(time.perf_counter() - began_s)
    return statistics.median(done_s[WARM_UP:]), statistics.median(asked_s[WARM_UP:])


def measure(link: Link) -> dict[str, float]:
    """Figures of this worker; the others do the same work at the same time."""
    num_bytes = link.tensor.nbytes
    works = {
        "pinned_d2h": (link.copy_out, 1),
        "pinned_h2d": (link.copy_in, 1),
        "pinned_both": (link.copy_both, 2),
        "push": (link.push, 1),
        "pull": (link.pull, 1),
        "push_and_pull": (link.push_and_pull, 2),
    }
    figures: dict[str, float] = {}
    for name, (work, directions) in works.items():
        done_s, asked_s = seconds_of(work)
        figures[f"{name}_gbytes_per_s"] = directions * num_bytes / done_s / 1e9
        figures[f"{name}_host_us_per_25_mb"] = asked_s * 1e6 * 25e6 / num_bytes
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--json", type=Path, help="append a line of results here")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.cuda.set_device(DEVICE)
    num_elements = int(arguments.megabytes * 1e6) // 4
    session = session_of_group(dist.group.WORLD).session
    specs = [TensorSpec(name="tensor", dtype="float32", num_elements=num_elements, op="mean")]
    group = session.register("benchmark", specs)
    assert isinstance(group, TensorGroup), "start at least two workers: coarse run -n 2"
    link = Link(group.open_gpu_transfers(_native.CudaContext(0)), num_elements)
    verify(link)
    figures = measure(link)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name()
        print(f"measured, {name}, {arguments.megabytes:g} MB, {dist.get_world_size()} workers at once")
        for figure, value in figures.items():
            print(f"  {figure:40} {value:10.2f}")
        if arguments.json:
            record = {"bench": "gpu-transfers", "gpu": name, **figures}
            append_records(arguments.json, [record], Provenance.here())


if __name__ == "__main__":
    main()
