"""Arrays of other libraries, each with one protocol alone."""

from __future__ import annotations

import numpy as np

from coarse.kernels import _native


class DlpackAlone:
    """An array in the host's memory, or what says that it is on another device, that has only DLPack."""

    def __init__(self, values: np.ndarray, device: tuple[int, int] = (1, 0), *, is_versioned: bool = True):
        self.values = values
        self._device = device
        self._is_versioned = is_versioned

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**(options if self._is_versioned else {}))

    def __dlpack_device__(self):
        return self._device


class CudaInterfaceAlone:
    """An array in the memory of a GPU that has only the CUDA array interface."""

    def __init__(
        self, address: int, shape: tuple[int, ...], typestr="<f4", strides=None, *, is_read_only=False
    ):
        self.__cuda_array_interface__ = {
            "data": (address, is_read_only),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


class GpuArray(CudaInterfaceAlone):
    """An array of floats of its own on a GPU, which also tells its device."""

    def __init__(self, device: int, values: list[float]):
        self._device = device
        self._length = len(values)
        self._context = _native.CudaContext(device)
        self._memory = _native.CudaMemory.allocate(self._context, max(1, 4 * len(values)))
        super().__init__(self._memory.address, (len(values),))
        self._copy("copy_to_device", values)

    def __dlpack_device__(self):
        return 2, self._device

    def tolist(self) -> list[float]:
        return self._copy("copy_to_host", [0.0] * self._length)

    def _copy(self, way: str, values: list[float]) -> list[float]:
        array = np.array(values, dtype=np.float32)
        stream = _native.CudaStream(self._context)
        there, here = self._memory.address, array.ctypes.data
        getattr(stream, way)(*((there, here) if way == "copy_to_device" else (here, there)), array.nbytes)
        stream.synchronize()
        return array.tolist()
