"""Device memory on a GPU, where kernels are the sync cores (docs/design/gpu.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from coarse.errors import CoarseError, OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.kernels.cuda_kernels import DTYPES, MEASURED_DTYPES, CudaKernels
from coarse.machine.host import nearest_cores, read_numa_nodes
from coarse.machine.pci import read_pci_node
from coarse.proxy.memory.host import HostMemory
from coarse.wire.segments import Extent, Segment

_POSIX_FD_SUPPORTED = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class CudaMemory:
    """Memory of one GPU, shared through file descriptors that other processes map for GPUs.

    It holds tensors; control words and the workers' host data lie in the host's memory.

    Args:
        device: The GPU's ordinal.

    Raises:
        ValueError: As for check_cuda(), or if CUDA refuses to share memory.
        OutOfDeviceMemoryError: If less than a page is free.
        CoarseError: If kernels cannot be compiled here.
    """

    kind = "cuda"
    is_mappable = False
    takes_pages_later = False
    num_places = 1
    message_bytes = _native.CUDA_MESSAGE_BYTES

    def __init__(self, device: int) -> None:
        check_cuda(device)
        self.device = device
        self.name = f"cuda:{device} ({_native.cuda_device_name(device)})"
        self._uuid = _native.cuda_device_uuid(device)
        self._context = _native.CudaContext(device)
        self._stream = _native.CudaStream(self._context)
        self._try_sharing()
        self._host = HostMemory()
        self._kernels = CudaKernels(device)  # must outlive the tensor memory, which holds its handles
        self._tensor_memory: _native.CudaTensorMemory | None = None

    def allocate(self, label: str, num_bytes: int) -> Segment:
        memory = self._take(label, num_bytes)
        self._stream.fill(memory.address, 0, memory.num_bytes)
        self._stream.synchronize()
        return Segment(memory.export_fd(), num_bytes, Extent(0, memory.num_bytes, self._uuid))

    def _take(self, label: str, num_bytes: int) -> _native.CudaMemory:
        try:
            return _native.CudaMemory.allocate(self._context, num_bytes)
        except _native.CudaOutOfMemoryError as error:
            raise OutOfDeviceMemoryError(self.shortage(label, num_bytes)) from error

    def _try_sharing(self) -> None:
        """Allocates a page, exports and maps it as another process would, and frees everything."""
        try:
            memory = self._take("a trial", self.page_bytes())
            fd = memory.export_fd()
            try:
                _native.CudaMemory.import_region(
                    self._context, _native.Region(fd, 0, memory.num_bytes, self._uuid)
                )
            finally:
                os.close(fd)
        except _native.CudaError as error:
            raise ValueError(_unshared(self.device, f": {error}")) from error

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self._host.allocate(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        return self._host.allocate_sparse(label, num_bytes)

    def upload(self, source: Segment, destination: Segment) -> None:
        """Copies host memory to a segment of this memory; returns when the copy is complete."""
        mapping, imported = _native.Mapping(source.region, source.num_bytes), self._import(destination)
        self._stream.copy_to_device(imported.address, mapping.address, source.num_bytes)
        self._stream.synchronize()

    def download(self, source: Segment, destination: Segment) -> None:
        """Copies a segment of this memory to host memory; returns when the copy is complete."""
        mapping, imported = _native.Mapping(destination.region, source.num_bytes), self._import(source)
        self._stream.copy_to_host(mapping.address, imported.address, source.num_bytes)
        self._stream.synchronize()

    def _import(self, segment: Segment) -> _native.CudaMemory:
        return _native.CudaMemory.import_region(self._context, segment.region)

    def page_bytes(self) -> int:
        """The unit of allocation in bytes."""
        return _native.CudaMemory.page_bytes(self._context)

    def available_bytes(self) -> int:
        free_bytes, _ = self._context.memory_info()
        return free_bytes

    def cores(self) -> tuple[int, ...]:
        return nearest_cores(read_numa_nodes(), read_pci_node(_native.cuda_device_bus_id(self.device)))

    def try_compiler(self) -> None:
        """Compiles and loads the shortest kernels, because a compiler may be incomplete.

        Raises:
            CoarseError: If they cannot be compiled.
            _native.CudaError: If they cannot be loaded.
        """
        self._kernels.function("hold_until")

    def tensor_memory(self) -> _native.CudaTensorMemory:
        if self._tensor_memory is None:
            kernels = self._kernels
            kernels.load()

            def handles(name: str, dtypes: tuple[str, ...] = DTYPES) -> list[int]:
                return [kernels.function(f"{name}_{dtype}") if dtype in dtypes else 0 for dtype in DTYPES]

            self._tensor_memory = _native.CudaTensorMemory(
                self._context,
                reduce_sum=handles("reduce_sum"),
                reduce_max=handles("reduce_max"),
                ring_sum=handles("ring_sum"),
                ring_max=handles("ring_max"),
                measure=handles("measure", MEASURED_DTYPES),
                update=handles("update", MEASURED_DTYPES),
                hold_until=kernels.function("hold_until"),
            )
        return self._tensor_memory

    def join_nccl(
        self,
        library: _native.NcclLibrary,
        unique_id: bytes,
        rank: int,
        num_ranks: int,
        local_clients: Sequence[int],
    ) -> _native.NcclRunner:
        """Joins the other memory devices on GPUs; waits until all have joined. Like NcclCommunicator, NcclRunner."""
        assert self._tensor_memory is not None
        communicator = _native.NcclCommunicator(library, unique_id, rank, num_ranks, self._context)
        return _native.NcclRunner(communicator, self._tensor_memory, local_clients)

    def snapshot_pool(self, plan: _native.GroupPlan) -> _native.SnapshotPool:
        return _native.CudaSnapshotPool(self._context, plan)

    def close(self) -> None:
        """Does nothing: memory is freed with its segments."""

    def shortage(self, label: str, num_bytes: int) -> str:
        """The message for too little memory, with the available amount and advice."""
        free_bytes, total_bytes = self._context.memory_info()
        return (
            f"{label} needs {num_bytes / 2**20:.1f} MiB of {self.name}, {free_bytes / 2**20:.1f} of its "
            f"{total_bytes / 2**20:.1f} MiB are available. Use fewer workers on this GPU, a smaller model, or "
            "another GPU for memory devices."
        )


def check_cuda(device: int) -> None:
    """Checks, using the driver's data, that a GPU can be a memory device; allocates nothing, creates no context.

    Raises:
        ValueError: If it cannot; gives the reason and advice.
    """
    name = f"memory device cuda:{device}"
    if reason := _native.cuda_unavailable_reason():
        raise ValueError(f"{name}: {reason}")
    count = _native.cuda_num_devices()
    if device >= count:
        gpus = ", ".join(f"cuda:{each} ({_native.cuda_device_name(each)})" for each in range(count))
        raise ValueError(f"{name}: there is no such GPU; CUDA finds {gpus or 'none'} in this process")
    if not _native.cuda_device_attribute(device, _POSIX_FD_SUPPORTED):
        raise ValueError(_unshared(device, ", by its driver"))


def describe_gpus() -> tuple[str, str]:
    """The GPUs that CUDA finds, by their names as memory devices, and the requirements that they lack.

    Creates a context on each in turn and compiles the shortest kernels: for a process that ends soon.

    Returns:
        Both as readable text; "" for no GPUs, and for no missing requirement.
    """
    if _native.cuda_unavailable_reason():
        return "", ""
    ordinals = range(_native.cuda_num_devices())
    gpus = [f"cuda:{gpu} ({_native.cuda_device_name(gpu)})" for gpu in ordinals]
    missing = dict.fromkeys(
        filter(None, map(_missing_for, ordinals))
    )  # a requirement that all lack appears once
    return ", ".join(gpus), "; ".join(missing)


def _missing_for(device: int) -> str:
    """Why a GPU cannot be a memory device; "" if it can."""
    try:
        CudaMemory(device).try_compiler()
    except (CoarseError, ValueError) as error:
        return str(error)
    except _native.CudaError as error:
        return f"memory device cuda:{device}: {error}"
    return ""


def _unshared(device: int, reason: str) -> str:
    return (
        f"memory device cuda:{device} ({_native.cuda_device_name(device)}) cannot share memory with other processes "
        f"by file descriptors{reason}. In a container, its runtime and seccomp profile have to allow it; memory "
        "devices on the host work without"
    )
