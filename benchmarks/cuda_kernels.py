"""Speed of the CUDA kernels against device-to-device copies on the same GPU in the same run.

    python benchmarks/cuda_kernels.py [--json FILE] [--repeats N]

Bandwidth is that of device memory: bytes read plus bytes written, in 1e9 bytes per second. Each time is one launch
between two CUDA events, the median of the repeats. The arrays together are many times as large as the second-level
cache. Every case is verified against the sync cores of the host before it is timed. All figures are measured.

A mean reads k contributions and writes the result to all k slots, as a memory device does, or to one array. AdamW
reads k gradients, a parameter, two moments and, with bfloat16, float32 master weights. It writes all of these except
the gradients.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from coarse.bench.provenance import Provenance, append_records
from coarse.client.update_settings import SETTINGS_DTYPE
from coarse.kernels import _native
from coarse.kernels.cuda_compiling import OPTIONS
from coarse.kernels.cuda_kernels import DTYPES, THREADS_PER_BLOCK, CudaKernels

ARRAY_BYTES = 256 << 20
SMALL_BYTES = 64 << 10
NUM_SMALL = 60
VERIFIED_ELEMENTS = 100_003
TARGET = 0.85
ADAM = 4
WARM_UPS = 3

COPY_KERNEL = """
extern "C" __global__ void __launch_bounds__(256) copy(const uint4* from, uint4* to, unsigned long numVectors) {
  const unsigned long step = gridDim.x * 1024ul;
  for (unsigned long start = blockIdx.x * 1024ul + threadIdx.x; start < numVectors; start += step) {
    uint4 loaded[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) if (start + i * 256 < numVectors) loaded[i] = from[start + i * 256];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) if (start + i * 256 < numVectors) to[start + i * 256] = loaded[i];
  }
}
"""

Launch = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case to time: the kernel that `launch` launches reads and writes `nbytes` in total."""

    name: str
    nbytes: int
    launch: Launch
    is_kernel: bool = True


class Bench:
    """Builds, verifies and times cases on the current GPU."""

    def __init__(self, repeats: int) -> None:
        self.kernels = CudaKernels(torch.cuda.current_device())
        self.repeats = repeats
        self.stream = torch.cuda.current_stream().cuda_stream

    def launch_batch(self, name: str, batch: tuple[bytes, int]) -> Launch:
        function = self.kernels.function(name)
        num_blocks = min(batch[1], self.kernels.most_blocks)
        return lambda: self.kernels.context.launch(
            function, num_blocks, THREADS_PER_BLOCK, self.stream, [batch[0]]
        )

    def copies(self) -> list[Case]:
        source, target = empty("float32", ARRAY_BYTES), empty("float32", ARRAY_BYTES)
        kernels, context = self.kernels, self.kernels.context
        cubin = kernels.compiler.compile(
            COPY_KERNEL, name="copy.cu", architecture=kernels.architecture, options=OPTIONS
        )
        module = context.load_module(cubin)
        function, vectors = context.find_kernel(module, "copy"), ARRAY_BYTES // 16
        arguments = [struct.pack("Q", value) for value in (source.data_ptr(), target.data_ptr(), vectors)]

        def kernel() -> None:
            context.launch(function, kernels.most_blocks, THREADS_PER_BLOCK, self.stream, arguments)

        source.fill_(1.5)
        kernel()
        check("copy kernel", bool(torch.equal(source, target)))
        return [
            Case(
                name="cudaMemcpyAsync",
                nbytes=2 * ARRAY_BYTES,
                launch=lambda: target.copy_(source),
                is_kernel=False,
            ),
            Case(name="copy kernel", nbytes=2 * ARRAY_BYTES, launch=kernel, is_kernel=False),
        ]

    def mean(self, dtype: str, num_inputs: int, num_outputs: int) -> Case:
        number = DTYPES.index(dtype)

        def batch(arrays: Sequence[torch.Tensor]) -> tuple[bytes, int]:
            addresses = [array.data_ptr() for array in arrays]
            outputs = addresses[-num_outputs:]
            return _native.cuda_reduce_batch(
                number, [(arrays[0].numel(), num_inputs, addresses, outputs, 0, 0)]
            )

        name = f"mean of {num_inputs} to {num_outputs}, {dtype}"
        small = [random(dtype, VERIFIED_ELEMENTS) for _ in range(num_inputs)]
        expected = [array.cpu() for array in small]
        addresses = [array.data_ptr() for array in expected]
        _native.reduce_arrays(number, 1, addresses, addresses[-num_outputs:], VERIFIED_ELEMENTS, num_inputs)
        self.launch_batch(f"reduce_sum_{dtype}", batch(small))()
        check(name, all(same_bits(a, b) for a, b in zip(small, expected, strict=True)))
        arrays = [random(dtype, ARRAY_BYTES // getattr(torch, dtype).itemsize) for _ in range(num_inputs)]
        launch = self.launch_batch(f"reduce_sum_{dtype}", batch(arrays))
        return Case(
            name=name, nbytes=(num_inputs + num_outputs) * ARRAY_BYTES, launch=keeping(launch, arrays)
        )

    def adamw(self, dtype: str, num_gradients: int, *, has_zeros: bool = False) -> Case:
        """An AdamW update. With `has_zeros` all gradients, parameters and moments are zero, as in unused rows."""
        number, is_narrow = DTYPES.index(dtype), dtype != "float32"
        settings = np.zeros(1, SETTINGS_DTYPE)
        settings[0] = (ADAM, 1.0, 0.0, 0.99999, 1e-3, 0.0, 0.1, 0.0, 0.999, 0.001, 0.03, 1e-8, 1, 1)

        def make(num_elements: int, values: Callable[[str, int], torch.Tensor]) -> list[torch.Tensor]:
            gradients = [values(dtype, num_elements) for _ in range(num_gradients)]
            moments = [values("float32", num_elements).abs_() for _ in range(2)]
            master = [values("float32", num_elements)] if is_narrow else []
            return [*gradients, values(dtype, num_elements), *moments, *master]

        def row(arrays: Sequence[torch.Tensor]) -> tuple[int, int, list[int], int, int, list[int], bytes]:
            address = [array.data_ptr() for array in arrays]
            g = num_gradients
            master = address[g + 3] if is_narrow else 0
            states = address[g + 1 : g + 3]
            return (arrays[0].numel(), g, address[:g], address[g], master, states, settings.tobytes())

        name = f"AdamW by {num_gradients} gradients{' of zeros' if has_zeros else ''}, {dtype}"
        small = make(VERIFIED_ELEMENTS, random)
        expected = [array.cpu() for array in small]
        _native.update_arrays(number, row(expected))
        self.launch_batch(f"update_{dtype}", _native.cuda_update_batch(number, [row(small)]))()
        check(name, all(same_bits(a, b) for a, b in zip(small, expected, strict=True)))
        num_elements = ARRAY_BYTES // 4
        arrays = make(num_elements, random)
        for array in arrays if has_zeros else []:
            array.zero_()
        launch = self.launch_batch(f"update_{dtype}", _native.cuda_update_batch(number, [row(arrays)]))
        lengths = [array.numel() * array.element_size() for array in arrays]
        return Case(
            name=name, nbytes=2 * sum(lengths) - sum(lengths[:num_gradients]), launch=keeping(launch, arrays)
        )

    def small_shards(self, is_batched: bool) -> Case:
        number, count = DTYPES.index("float32"), SMALL_BYTES // 4
        arrays = [torch.zeros(count, device="cuda") for _ in range(2 * NUM_SMALL)]
        rows = []
        for i in range(NUM_SMALL):
            addresses = [array.data_ptr() for array in arrays[2 * i : 2 * i + 2]]
            rows.append((count, 2, addresses, addresses, 0, 0))
        groups = [rows] if is_batched else [[row] for row in rows]
        launches = [
            self.launch_batch("reduce_sum_float32", _native.cuda_reduce_batch(number, group))
            for group in groups
        ]

        def launch() -> None:
            for one in launches:
                one()

        how = "one launch" if is_batched else "a launch each"
        name = f"{NUM_SMALL} shards of {SMALL_BYTES >> 10} KiB, {how}"
        return Case(name=name, nbytes=4 * SMALL_BYTES * NUM_SMALL, launch=keeping(launch, arrays))

    def time_us(self, case: Case) -> float:
        """Median time of one launch."""
        for _ in range(WARM_UPS):
            case.launch()
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(self.repeats)]
        for begin, end in pairs:
            begin.record()
            case.launch()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in pairs) * 1e3


def keeping(launch: Launch, arrays: Sequence[torch.Tensor]) -> Launch:
    """The same launch, which keeps these arrays alive."""

    def kept() -> None:
        assert arrays
        launch()

    return kept


def empty(dtype: str, nbytes: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.empty(nbytes // kind.itemsize, dtype=kind, device="cuda")


def random(dtype: str, num_elements: int) -> torch.Tensor:
    return torch.randn(num_elements, device="cuda").to(getattr(torch, dtype))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8)))


def check(name: str, is_right: bool) -> None:
    if not is_right:
        raise SystemExit(f"{name}: the result is wrong")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    parser.add_argument("--repeats", type=int, default=31, metavar="N")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use", file=sys.stderr)
        return 1
    figures = measure_all(Bench(arguments.repeats))
    print_table(figures)
    if arguments.json is not None:
        append_records(arguments.json, figures, Provenance.here())
    return 0


def measure_all(bench: Bench) -> list[dict[str, Any]]:
    makers: list[Callable[[], list[Case]]] = [bench.copies]
    for dtype in ("float32", "bfloat16"):
        for count in (2, 3, 4, 8):
            makers += [lambda d=dtype, k=count, m=outputs: [bench.mean(d, k, m)] for outputs in (1, count)]
        makers += [lambda d=dtype, k=count: [bench.adamw(d, k)] for count in (2, 3, 8)]
        makers.append(lambda d=dtype: [bench.adamw(d, 2, has_zeros=True)])
    makers += [lambda b=is_batched: [bench.small_shards(b)] for is_batched in (False, True)]
    records: list[dict[str, Any]] = []
    for make in makers:  # one at a time: memory holds the arrays of only one case
        for case in make():
            time_us = bench.time_us(case)
            gbytes_per_s = case.nbytes / time_us / 1e3
            records.append(
                {
                    "bench": "cuda_kernels",
                    "gpu": torch.cuda.get_device_name(),
                    "case": case.name,
                    "bytes": case.nbytes,
                    "time_us": time_us,
                    "gbytes_per_s": gbytes_per_s,
                    "is_kernel": case.is_kernel,
                }
            )
    fastest_copy = max(record["gbytes_per_s"] for record in records if not record["is_kernel"])
    return [{**record, "of_copy": record["gbytes_per_s"] / fastest_copy} for record in records]


def print_table(records: Sequence[dict[str, Any]]) -> None:
    print(f"measured on {records[0]['gpu']}; G is 1e9; bytes read and written; target {TARGET:.0%} of a copy")
    for record in records:
        print(
            f"{record['case']:<40} {record['time_us']:9.1f} us {record['gbytes_per_s']:7.0f} GB/s "
            f"{record['of_copy']:5.0%} of a copy"
        )


if __name__ == "__main__":
    sys.exit(main())
