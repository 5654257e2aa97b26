"""The kernels of coarse/kernels/cuda, compiled for the GPU at hand by NVRTC: no nvcc is needed.

`batches.cuh` declares the kernels and their arguments. Native code launches them by the handles that
`CudaKernels.function` gives; `CudaKernels.launch` does so from Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from coarse.kernels import _native
from coarse.kernels.cuda_compiling import choose_compiler, compiled
from coarse.kernels.nvrtc import Nvrtc, find_nvrtc

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
"""In the order of the native DType."""

MEASURED_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of gradients for which reductions and updates are measured."""

THREADS_PER_BLOCK = 256
"""kThreads of platform.cuh."""

_MAJOR, _MINOR, _COUNT = 75, 76, 16  # CUdevice_attribute: compute capability, multiprocessors
_BLOCKS_PER_MULTIPROCESSOR = 24  # of 2, 3 or 4 that run at once, a whole number of times

_SOURCES = Path(__file__).with_name("cuda")
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


def kernel_names() -> dict[str, tuple[str, ...]]:
    """The kernels of each source file, by its name without ending."""
    kinds = [f"{op}_{dtype}" for dtype in DTYPES for op in ("sum", "max")]
    return {
        "reduce": tuple(f"reduce_{kind}" for kind in kinds),
        "ring": tuple(f"ring_{kind}" for kind in kinds),
        "measure": tuple(f"measure_{dtype}" for dtype in MEASURED_DTYPES),
        "update": tuple(f"update_{dtype}" for dtype in MEASURED_DTYPES),
        "delay": ("hold_until",),
    }


def source(name: str) -> str:
    """One source file with all that it includes, so that it compiles, and is cached, by its text alone."""
    return "".join(_expand(f"{name}.cu", set()))


def _expand(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    text = (_SOURCES / name).read_text().replace("#pragma once\n", "\n")
    position, line = 0, 1
    yield f'#line 1 "{name}"\n'
    for match in _INCLUDE.finditer(text):
        line += text.count("\n", position, match.end())
        yield text[position : match.start()]
        yield from _expand(match.group(1), seen)
        yield f'#line {line} "{name}"\n'
        position = match.end()
    yield text[position:]


class CudaKernels:
    """All kernels for one GPU.

    A source file is compiled when one of its kernels is first asked for, or all by load(); the machine code is kept
    in the user's cache folder (XDG_CACHE_HOME).

    Thread safety: one caller at a time. Handles are valid in the primary context of the GPU while this exists.

    Args:
        device: Ordinal of the GPU, as CUDA counts them in this process.

    Raises:
        CudaError: If there is no driver, or no such GPU.
        CoarseError: If there is no NVRTC that goes with the driver; says what to install.
    """

    def __init__(self, device: int = 0) -> None:
        self.context = _native.CudaContext(device)
        self.architecture = _architecture(device)
        """Compute capability, such as 90 for 9.0."""
        self.most_blocks = _native.cuda_device_attribute(device, _COUNT) * _BLOCKS_PER_MULTIPROCESSOR
        """Blocks beyond which a grid gains nothing."""
        self.compiler = find_compiler(device)
        self._modules: dict[str, int] = {}

    def load(self) -> None:
        """Has all kernels at hand.

        Raises:
            CoarseError: If one cannot be compiled for this GPU.
            CudaError: If one cannot be loaded.
        """
        self._load(*(kernel_names().keys() - self._modules.keys()))

    def function(self, name: str) -> int:
        """The CUfunction of a kernel, as an address.

        Raises:
            ValueError: If there is no such kernel.
            CoarseError: If it cannot be compiled for this GPU.
            CudaError: If it cannot be loaded.
        """
        file = next((file for file, names in kernel_names().items() if name in names), None)
        if file is None:
            raise ValueError(f"there is no kernel {name!r}; batches.cuh lists them")
        if file not in self._modules:
            self._load(file)
        return self.context.find_kernel(self._modules[file], name)

    def _load(self, *files: str) -> None:
        sources = {file: source(file) for file in sorted(files)}
        for file, cubin in compiled(sources, self.compiler, self.architecture).items():
            self._modules[file] = self.context.load_module(cubin)

    def launch(self, name: str, batch: bytes, *, num_tiles: int, stream: int) -> None:
        """Launches a kernel that takes one batch.

        Args:
            name: Of the kernel.
            batch: Of native cuda_reduce_batch() or cuda_update_batch(), followed by the fields of a MeasureBatch.
            num_tiles: Of the batch.
            stream: A CUstream as an address.

        Raises:
            CudaError: If CUDA refuses.
        """
        num_blocks = min(num_tiles, self.most_blocks)
        if num_blocks > 0:
            self.context.launch(self.function(name), num_blocks, THREADS_PER_BLOCK, stream, [batch])


def find_compiler(device: int) -> Nvrtc:
    """Finds the compiler for a GPU; compiles nothing, and makes no context.

    Raises:
        CudaError: If there is no driver, or no such GPU.
        CoarseError: If there is no NVRTC that goes with the driver and the GPU; says what to install.
    """
    return choose_compiler(find_nvrtc(), _driver_version(), _architecture(device))


def _architecture(device: int) -> int:
    return 10 * _native.cuda_device_attribute(device, _MAJOR) + _native.cuda_device_attribute(device, _MINOR)


def _driver_version() -> tuple[int, int]:
    return divmod(_native.cuda_driver_version() // 10, 100)
