"""The process group where the C++ backend cannot be compiled: the same collectives, called from Python.

Every call takes the interpreter, its thread and several objects, so that small operations take some times longer;
torch.compile does not trace through a process group that is written in Python.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from coarse.kernels import _native
from coarse.kernels._native import CollectiveKind, Combine, ElementType
from coarse.torch.backend.fallback_tensors import ELEMENTS, Memory, combine_of, name_of, split
from coarse.torch.backend.fallback_work import Work, WorkQueue

_MOST_DIMS = 8
_ROOTED = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)
_UNSET = timedelta(milliseconds=-1)
_DRAIN_LIMIT_S = 5.0  # how long operations that were issued before a group is destroyed may still take


class PythonProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A ProcessGroup on the native collectives, for a torch for which there is no C++ backend.

    Args:
        collectives: Of the group.
        rank, size: Of this process, and of the group.
        timeout: Of operations that bring none of their own.
    """

    def __init__(self, collectives: _native.Collectives, *, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._collectives = collectives
        self._own_rank, self._num_ranks = rank, size
        self._timeout = timeout
        self._queue = WorkQueue()
        self._num_issued = 0
        self._name = self._description = ""
        # Also at exit: a script that ends by an exception has destroyed no group, and others may wait for this rank.
        self._leave = weakref.finalize(self, _leave, self._queue, collectives, os.getpid())

    # ---- what torch asks of every process group ----

    def getBackendName(self) -> str:  # noqa: N802
        return "coarse"

    def rank(self) -> int:
        return self._own_rank

    def size(self) -> int:
        return self._num_ranks

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, _device: torch.device) -> PythonProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 in all ranks."""

    def _get_sequence_number_for_group(self) -> int:
        return self._num_issued

    def shutdown(self) -> None:
        """Lets what was issued take some seconds more, and leaves the group."""
        self._queue.drain(_DRAIN_LIMIT_S)
        self._leave()

    def abort(self) -> None:
        """Leaves the group; what was issued fails."""
        self._leave()

    # ---- collectives; names as in torch 2.13 and, where it renamed them, as before ----

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        tensors = _listed(tensors)
        steps = [self._reduction(CollectiveKind.ALL_REDUCE, [tensor], [tensor], opts) for tensor in tensors]
        return self._submit(steps, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Work:
        tensors = _listed(tensors)
        kind = CollectiveKind.REDUCE
        return self._submit(
            [self._reduction(kind, [tensor], [tensor], opts, root=opts.rootRank) for tensor in tensors],
            tensors,
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensors, root = _listed(tensors), opts.rootRank
        kind = CollectiveKind.BROADCAST
        return self._submit([self._move(kind, [t], [t], t, opts, root=root) for t in tensors], tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        self._check_count(outputs[0])
        step = self._move(CollectiveKind.ALL_GATHER, inputs, outputs[0], inputs[0], opts)
        return self._submit([step], outputs[0])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        kind = CollectiveKind.ALL_GATHER
        return self._submit(
            [
                self._move(kind, [tensor], [of_rank[i] for of_rank in outputs], tensor, opts)
                for i, tensor in enumerate(inputs)
            ],
            outputs,
        )

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self._submit([self._gather_flat(output, tensor, opts)], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([self._gather_flat(output, tensor, opts) for output, tensor in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        pieces = outputs[0] if self._own_rank == opts.rootRank else []
        if self._own_rank == opts.rootRank:
            self._check_count(pieces)
        step = self._move(CollectiveKind.GATHER, inputs, pieces, inputs[0], opts, root=opts.rootRank)
        return self._submit([step], pieces)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        pieces = inputs[0] if self._own_rank == opts.rootRank else []
        if self._own_rank == opts.rootRank:
            self._check_count(pieces)
        step = self._move(CollectiveKind.SCATTER, pieces, outputs, outputs[0], opts, root=opts.rootRank)
        return self._submit([step], outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        self._check_count(inputs[0])
        return self._submit(
            [self._reduction(CollectiveKind.REDUCE_SCATTER, inputs[0], outputs, opts)], outputs
        )

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self._submit([self._scatter_flat(output, tensor, opts)], [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([self._scatter_flat(output, tensor, opts) for output, tensor in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        self._check_count(outputs)
        self._check_count(inputs)
        step = self._move(CollectiveKind.ALL_TO_ALL, inputs, outputs, inputs[0], opts)
        return self._submit([step], outputs)

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        memory = Memory()
        target = memory.write(output)
        inputs = split(memory.read(tensor), input_splits, self._num_ranks)
        outputs = split(target, output_splits, self._num_ranks)
        step = self._move(CollectiveKind.ALL_TO_ALL, inputs, outputs, tensor, opts, finish=memory.finish)
        return self._submit([step], [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._submit([self._move(CollectiveKind.BARRIER, [], [], nothing, opts)], [])

    # ---- messages ----

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        self._check_peer(destination)
        memory = Memory()
        return self._post(memory, memory.read(tensors[0]), tensors, destination, tag, is_send=True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        self._check_peer(source)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Any, source: int, tag: int) -> Work:
        memory = Memory()
        return self._post(memory, memory.write(tensors[0]), tensors, source, tag, is_send=False)

    def _post(
        self, memory: Memory, plain: torch.Tensor, tensors: Any, peer: int, tag: int, *, is_send: bool
    ) -> Work:
        self._check_owner()
        work = Work(tensors)

        def done(text: str, source: int) -> None:
            error: Exception | None = dist.DistBackendError(f"coarse: {text}") if text else None
            if error is None:
                try:
                    memory.finish()
                except Exception as failure:  # of the user's tensor; the thread has others to tell
                    error = failure
            work.complete(error, source=source)

        self._collectives.post(
            is_send=is_send,
            peer=peer,
            tag=tag,
            data=plain.data_ptr(),
            num_bytes=plain.nbytes,
            dtype=name_of(plain.dtype),
            timeout=self._timeout,
            done=done,
        )
        return work

    # ---- steps ----

    def _submit(self, steps: Sequence[Callable[[], None]], result: Any) -> Work:
        self._check_owner()
        self._num_issued += 1
        work = Work(result)

        def run() -> None:
            for step in steps:
                step()

        self._queue.run(work, run)
        return work

    def _gather_flat(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Callable[[], None]:
        memory = Memory()
        self._check_flat(output, tensor)
        pieces = list(memory.write(output).view(-1).chunk(self._num_ranks)) if output.numel() else []
        pieces = pieces or [output.view(-1)] * self._num_ranks
        return self._move(CollectiveKind.ALL_GATHER, [tensor], pieces, tensor, opts, finish=memory.finish)

    def _scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Callable[[], None]:
        opts = opts or dist.ReduceScatterOptions()
        self._check_flat(tensor, output)
        flat = Memory().read(tensor).view(-1)
        pieces = list(flat.chunk(self._num_ranks)) if flat.numel() else [flat] * self._num_ranks
        return self._reduction(CollectiveKind.REDUCE_SCATTER, pieces, [output], opts)

    def _reduction(
        self, kind: CollectiveKind, inputs: Any, outputs: Any, opts: Any, root: int = -1
    ) -> Callable[[], None]:
        combine = combine_of(opts.reduceOp)
        piece = outputs[0]
        if piece.is_complex():  # added as pairs of real numbers, which is how they lie in memory
            if combine not in (Combine.SUM, Combine.MEAN):
                raise ValueError("coarse: complex tensors take SUM and AVG alone")
            piece = torch.view_as_real(torch.empty(piece.shape, dtype=piece.dtype, device="meta"))
        if not _native.can_combine(ELEMENTS.get(piece.dtype, ElementType.OPAQUE), combine):
            raise ValueError(f"coarse: tensors of {name_of(piece.dtype)} cannot be reduced by this operator")
        return self._move(kind, inputs, outputs, piece, opts, combine=combine, root=root)

    def _move(
        self,
        kind: CollectiveKind,
        inputs: Any,
        outputs: Any,
        piece: torch.Tensor,
        opts: Any,
        *,
        combine: Combine = Combine.NONE,
        root: int = -1,
        finish: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """What is to be done for one collective; checks and copies happen now, in the caller's thread."""
        if kind in _ROOTED and not 0 <= root < self._num_ranks:
            raise ValueError(f"coarse: root {root} is none of the {self._num_ranks} ranks")
        memory = Memory()
        is_in_place = len(inputs) == len(outputs) == 1 and inputs[0] is outputs[0]
        targets = [memory.write(output, is_read=is_in_place) for output in outputs]
        sources = targets if is_in_place else [memory.read(tensor) for tensor in inputs]
        is_exchange = kind == CollectiveKind.ALL_TO_ALL
        is_told = not is_exchange and kind != CollectiveKind.BARRIER
        limit = getattr(opts, "timeout", _UNSET)
        arguments: dict[str, Any] = {
            "kind": kind,
            "dtype": name_of(piece.dtype),
            "element": ELEMENTS.get(piece.dtype, ElementType.OPAQUE),
            "element_bytes": piece.element_size(),
            "combine": combine,
            "root": root,
            "dims": list(piece.shape) if is_told else [0] * (_MOST_DIMS + 1),
            "piece_bytes": piece.nbytes if is_told else 0,
            "inputs": [tensor.data_ptr() for tensor in sources],
            "outputs": [tensor.data_ptr() for tensor in targets],
            "input_bytes": [tensor.nbytes for tensor in sources] if is_exchange else [],
            "output_bytes": [tensor.nbytes for tensor in targets] if is_exchange else [],
            "timeout": self._timeout if limit == _UNSET else limit,
        }
        everything = (*sources, *targets)
        for tensor in everything:
            if tensor.dtype != everything[0].dtype:
                raise ValueError(
                    f"coarse: there must be one dtype, not {tensor.dtype} and {everything[0].dtype}"
                )
            if is_told and tensor.nbytes != piece.nbytes:
                raise ValueError(
                    f"coarse: pieces must be alike: {tuple(tensor.shape)} and {tuple(piece.shape)}"
                )

        def step(_kept: Any = (sources, targets)) -> None:
            try:
                self._collectives.run(**arguments)
            except (RuntimeError, ValueError) as error:
                raise dist.DistBackendError(f"coarse: {error}") from None
            memory.finish()
            finish()

        return step

    def _check_flat(self, whole: torch.Tensor, piece: torch.Tensor) -> None:
        if whole.numel() != piece.numel() * self._num_ranks or whole.dtype != piece.dtype:
            raise ValueError(
                f"coarse: the larger tensor must have {self._num_ranks} times the elements of the other one, and its "
                f"dtype: {name_of(whole.dtype)} {tuple(whole.shape)} and {name_of(piece.dtype)} {tuple(piece.shape)}"
            )

    def _check_owner(self) -> None:
        try:
            self._collectives.check_owner()
        except RuntimeError as error:
            raise dist.DistBackendError(f"coarse: {error}") from None

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"coarse: {rank} is none of the {self._num_ranks} ranks")

    def _check_count(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._num_ranks:
            raise ValueError(
                f"coarse: there must be {self._num_ranks} tensors, one per rank, not {len(tensors)}"
            )


def _leave(queue: WorkQueue, collectives: _native.Collectives, owner_pid: int) -> None:
    # Forked children inherit exit handlers; the group is not theirs to leave.
    if os.getpid() == owner_pid:
        collectives.close()
        queue.stop()


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
