"""Arrays of any library as numpy arrays in the host's memory, by DLPack or the CUDA array interface."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from coarse.errors import GpuUnavailableError
from coarse.kernels import _native
from coarse.schema import TensorSpec

_DLPACK_HOST = (1, 3, 11)  # the host's memory; pinned by CUDA; pinned by ROCm
_DLPACK_CUDA = (2, 13)  # memory of a GPU; managed memory


class DlpackArray(Protocol):
    """An array of NumPy, PyTorch, JAX, CuPy and others: https://dmlc.github.io/dlpack."""

    def __dlpack__(self, *arguments: Any, **options: Any) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class CudaArray(Protocol):
    """An array in the memory of a GPU, of CuPy, PyTorch, JAX, Numba and others."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


AnyArray: TypeAlias = DlpackArray | CudaArray
"""An array that HostValues takes."""


class HostValues:
    """The elements of an array in the host's memory, C-contiguous, within a `with` block.

    Host arrays are not copied. Elements on a GPU are copied to the host when all work that this process has given to
    that GPU is done, and copied back at the end unless there is an error.

    Args:
        array: Contiguous; if `writes`, writable.
        user: Begins error messages, such as "all_reduce".
        reads: Whether the elements are needed.
        writes: Whether they change.

    Raises:
        TypeError: If it is no array.
        ValueError: If it is not contiguous, not writable, of a dtype that numpy does not have, or on another device.
        GpuUnavailableError: If this process cannot use the array's GPU.
        _native.CudaError: If CUDA cannot copy.
    """

    def __init__(self, array: AnyArray, user: str, *, reads: bool = True, writes: bool = False) -> None:
        self._result: _GpuArray | None = None
        on_host = _on_host(array, user)
        if on_host is not None:
            flags = on_host.flags
            _check_layout(user, flags.c_contiguous, not writes or flags.writeable)
            self._values = on_host
            return
        on_gpu = _GpuArray(array, user)
        _check_layout(user, on_gpu.is_contiguous, not writes or on_gpu.is_writable)
        self._values = on_gpu.read() if reads else on_gpu.empty()
        if writes:
            self._result = on_gpu

    def __enter__(self) -> npt.NDArray[Any]:
        return self._values

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._result is not None:
            self._result.write(self._values)


@contextlib.contextmanager
def tensor_address(array: AnyArray, spec: TensorSpec, group: str, *, writes: bool) -> Iterator[int]:
    """The address of an array's elements in the host's memory, for one push or pull.

    Args:
        array: As for HostValues, of the tensor's dtype and length, or its bytes as uint8.
        spec: The tensor.
        group: Name of its group.
        writes: Whether the tensor is copied to the array; otherwise the array is copied to the tensor.

    Raises:
        ValueError: Also if the array is of another dtype or length.
        TypeError, GpuUnavailableError, _native.CudaError: As for HostValues.
    """
    user = f"tensor {spec.name!r} of {group}"
    with HostValues(array, user, reads=not writes, writes=writes) as values:
        if values.dtype.name not in (spec.dtype, "uint8") or values.nbytes != spec.nbytes:
            raise ValueError(
                f"{user}: has {spec.num_elements} x {spec.dtype}, but the array {values.size} x {values.dtype}; "
                "pass as many elements of that dtype, or their bytes as uint8"
            )
        yield values.ctypes.data


def _on_host(array: Any, user: str) -> npt.NDArray[Any] | None:
    """A view of an array in the host's memory; None if it is on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack_device__"):
        kind, _ = array.__dlpack_device__()
        if kind not in _DLPACK_HOST + _DLPACK_CUDA:
            raise ValueError(
                f"{user} takes arrays in the memory of the host or of a CUDA device, and this {_type(array)} lies on "
                f"a device of DLPack's type {int(kind)}; pass a copy in the host's memory"
            )
        return _by_dlpack(array, user) if kind in _DLPACK_HOST else None
    if hasattr(array, "__cuda_array_interface__"):
        return None
    raise TypeError(
        f"{user} takes an array with __dlpack__ or __cuda_array_interface__, not a {_type(array)}; pass a numpy array"
    )


def _by_dlpack(array: Any, user: str) -> npt.NDArray[Any]:
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        raise ValueError(
            f"{user}: numpy cannot take this {_type(array)} by DLPack ({error}); pass a numpy array of its "
            "memory (of ml_dtypes.bfloat16 for bfloat16)"
        ) from error


def _check_layout(user: str, is_contiguous: bool, is_writable: bool) -> None:
    if not is_contiguous:
        raise ValueError(f"{user} needs a C-contiguous array; pass a contiguous copy")
    if not is_writable:
        raise ValueError(
            f"{user} writes its result to the array, which is not writable, as JAX's arrays and all that DLPack "
            "before version 1.0 exports; pass a numpy array, such as numpy.array(array)"
        )


class _GpuArray:
    """An array in the memory of a GPU, which the host reads and writes by copies.

    Args:
        array: An array with the CUDA array interface.
        user: As for HostValues.
    """

    def __init__(self, array: Any, user: str) -> None:
        if not hasattr(array, "__cuda_array_interface__"):
            raise ValueError(
                f"{user}: this {_type(array)} lies on a GPU and has no __cuda_array_interface__, by which COARSE "
                "takes arrays of GPUs; pass a PyTorch or CuPy array of its memory (from_dlpack)"
            )
        if reason := _native.cuda_unavailable_reason():
            raise GpuUnavailableError(
                f"{user}: this {_type(array)} lies on a GPU that this worker cannot use: {reason}; pass a copy in "
                "the host's memory"
            )
        self._array = array  # keeps its memory
        layout = array.__cuda_array_interface__
        self._shape: tuple[int, ...] = tuple(layout["shape"])
        self._dtype = np.dtype(layout["typestr"])
        self._address, is_read_only = layout["data"]
        self.is_writable = not is_read_only
        self.is_contiguous = layout.get("strides") in (None, _c_strides(self._shape, self._dtype.itemsize))
        self._context = _native.CudaContext(_device_of(array, user))

    def empty(self) -> npt.NDArray[Any]:
        """Memory of the host for the elements."""
        return np.empty(self._shape, self._dtype)

    def read(self) -> npt.NDArray[Any]:
        """The elements, when all work on the GPU is done."""
        values = self.empty()
        with self._stream() as stream:
            stream.copy_to_host(values.ctypes.data, self._address, values.nbytes)
        return values

    def write(self, values: npt.NDArray[Any]) -> None:
        """Replaces the elements, when all work on the GPU is done."""
        with self._stream() as stream:
            stream.copy_to_device(self._address, values.ctypes.data, values.nbytes)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[_native.CudaStream]:
        self._context.synchronize()
        stream = _native.CudaStream(self._context)
        yield stream
        stream.synchronize()


def _device_of(array: Any, user: str) -> int:
    """Ordinal of the array's GPU. The CUDA array interface does not have it."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    if _native.cuda_num_devices() > 1:
        raise ValueError(
            f"{user}: this {_type(array)} does not say on which GPU it lies; pass one with __dlpack_device__, such "
            "as cupy.asarray(array)"
        )
    return 0


def _c_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape)))


def _type(array: object) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
