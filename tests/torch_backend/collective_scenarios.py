"""Collectives on plain tensors; each returns this rank's resulting tensors, for a comparison with gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LARGE = 300_001  # float32 of more than one buffer, and of no whole number of them
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _rank() -> int:
    return dist.get_rank()


def _size() -> int:
    return dist.get_world_size()


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other values in each rank."""
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def all_reduce_sums_every_dtype() -> Any:
    results = []
    for dtype in (*FLOATS, *INTEGERS):
        for shape in ((), (0,), (1,), (7, 3), (LARGE,)):
            tensor = _values(*shape, dtype=dtype)
            dist.all_reduce(tensor)
            results.append(tensor)
    return results


def all_reduce_takes_every_operator() -> Any:
    results = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            tensor = _values(1000, dtype=dtype)
            dist.all_reduce(tensor, op=op)
            results.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = _values(1000, dtype=torch.int64)
        dist.all_reduce(tensor, op=op)
        results.append(tensor)
    return results


def all_reduce_averages_whole_numbers() -> Any:
    """Also those whose sum is none of their type; gloo averages none, and says here what they are."""
    results = []
    for dtype in INTEGERS:
        tensor = torch.full((1000,), 100 + 3 * _rank(), dtype=dtype)
        if dist.get_backend() == "coarse":
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        else:
            total = tensor.long()
            dist.all_reduce(total)
            tensor = (total // _size()).to(dtype)
        results.append(tensor)
    return results


def all_reduce_adds_complex_and_strided_tensors() -> Any:
    numbers = torch.complex(_values(50), _values(50))
    dist.all_reduce(numbers)
    strided = _values(40, 30).t()
    dist.all_reduce(strided)
    return [torch.view_as_real(numbers), strided]


def strided_tensors_and_barriers_whatever_the_default_device() -> Any:
    """By methods of the group: torch's functions around them leave the default device aside, from some version on."""
    strided, outputs = _values(40, 30).t(), [torch.zeros(40, 30).t() for _ in range(_size())]
    group = dist.group.WORLD
    with torch.device("meta"):
        group.allgather([outputs], [strided]).wait()
        group.barrier().wait()
    return outputs


def all_reduce_adds_sparse_tensors() -> Any:
    indices = torch.tensor([[0, 2 + _rank(), 5]])
    tensor = torch.sparse_coo_tensor(indices, _values(3, 4), (8, 4))
    if _rank() == 0:
        tensor = torch.sparse_coo_tensor(indices[:, :1], _values(1, 4), (8, 4))
    dist.all_reduce(tensor)
    return tensor.to_dense()


def broadcast_and_reduce_take_every_root() -> Any:
    results = []
    for root in range(_size()):
        for numel in (1, 1000, LARGE):
            tensor = _values(numel)
            dist.broadcast(tensor, root)
            results.append(tensor)
            addend = _values(numel)
            dist.reduce(addend, root)
            if _rank() == root:  # elsewhere it is not said what is left
                results.append(addend)
    return results


def gathers_and_scatters() -> Any:
    results = []
    for numel in (0, 3, LARGE):
        outputs = [torch.zeros(numel) for _ in range(_size())]
        dist.all_gather(outputs, _values(numel))
        flat = torch.zeros(_size() * numel)
        dist.all_gather_into_tensor(flat, _values(numel))
        root = _size() - 1
        collected = [torch.zeros(numel) for _ in range(_size())] if _rank() == root else None
        dist.gather(_values(numel), collected, dst=root)
        mine = torch.zeros(numel)
        dist.scatter(mine, [_values(numel) for _ in range(_size())] if _rank() == root else None, src=root)
        results += [outputs, flat, collected or [], mine]
    return results


def reduce_scatters() -> Any:
    results = []
    for numel in (1, 1000, LARGE):
        piece = torch.zeros(numel)
        dist.reduce_scatter(piece, [_values(numel) for _ in range(_size())])
        flat = torch.zeros(numel)
        dist.reduce_scatter_tensor(flat, _values(_size() * numel))
        results += [piece, flat]
    return results


def all_to_all_single_with_uneven_splits() -> Any:
    send = [3 * (_rank() + 1) + peer for peer in range(_size())]
    receive = [3 * (peer + 1) + _rank() for peer in range(_size())]
    uneven = torch.zeros(sum(receive), 5)
    dist.all_to_all_single(uneven, _values(sum(send), 5), receive, send)
    even = torch.zeros(LARGE // _size() * _size())
    dist.all_to_all_single(even, _values(LARGE // _size() * _size()))
    return [uneven, even]


def coalesced_collectives() -> Any:
    tensors = [_values(3), _values(100), _values(LARGE)]
    dist.all_reduce_coalesced(tensors)
    outputs = [[torch.zeros(4), torch.zeros(2, 3)] for _ in range(_size())]
    dist.all_gather_coalesced(outputs, [_values(4), _values(2, 3)])
    return [tensors, outputs]


def sub_groups() -> Any:
    groups = [dist.new_group([rank]) for rank in range(_size())]
    everyone = dist.new_group(list(range(_size())), timeout=timedelta(seconds=60))
    alone = torch.full((3,), float(_rank()))
    dist.all_reduce(alone, group=groups[_rank()])
    together = torch.full((3,), float(_rank()))
    dist.all_reduce(together, group=everyone)
    names = [dist.get_backend(everyone) == dist.get_backend(), dist.get_world_size(everyone)]
    for group in (*groups, everyone):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return [alone, together, names]


def sub_groups_of_sub_groups() -> Any:
    """Each rank makes groups of its own, to which torch gives the same name."""
    own, groups = dist.new_subgroups_by_enumeration([[rank] for rank in range(_size())])
    below, groups_below = dist.new_subgroups(1, group=own)
    alone = torch.full((3,), float(_rank()))
    dist.all_reduce(alone, group=below)
    for group in (*groups_below, *groups):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return alone


def work_handles_and_futures() -> Any:
    tensors = [torch.full((1000,), float(_rank() + i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    now = torch.ones(5)
    dist.all_reduce(now)  # behind all others
    for work in works:
        work.wait()
    return [tensors, doubled.wait(), now, [work.is_completed() and work.is_success() for work in works]]


def futures_are_completed_once_their_work_was_waited_for() -> Any:
    results = []
    for _ in range(200):
        tensor = torch.full((3,), float(_rank()))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        results.append(work.get_future().value())
    return results


def object_collectives() -> Any:
    everyone: list[Any] = [None] * _size()
    dist.all_gather_object(everyone, {"rank": _rank(), "text": "x" * 1000 * (_rank() + 1)})
    told = [f"from {_rank()}", _rank()]
    dist.broadcast_object_list(told, src=_size() - 1)
    collected: list[Any] | None = [None] * _size() if _rank() == 0 else None
    dist.gather_object(("rank", _rank()), collected, dst=0)
    given: list[Any] = [None]
    dist.scatter_object_list(
        given, [{"for": rank} for rank in range(_size())] if _rank() == 0 else None, src=0
    )
    return [everyone, told, collected, given]


def messages_by_tag_in_any_order() -> Any:
    """Each rank sends to the next one, whatever the sizes, and takes what it gets in another order."""
    following, previous = (_rank() + 1) % _size(), (_rank() - 1) % _size()
    sent = [_values(numel) for numel in (3, LARGE, 0, 1000)]
    sends = [dist.isend(tensor, following, tag=tag) for tag, tensor in enumerate(sent)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    receives = [dist.irecv(received[tag], previous, tag=tag) for tag in (1, 3, 0, 2)]
    for work in (*receives, *sends):
        work.wait()
    return received


def messages_in_batches_and_from_anybody() -> Any:
    following, previous = (_rank() + 1) % _size(), (_rank() - 1) % _size()
    received = torch.zeros(5, 2)
    operations = [
        dist.P2POp(dist.isend, _values(5, 2), following),
        dist.P2POp(dist.irecv, received, previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    anybody, total, sources = torch.zeros(4, 2), torch.zeros(4, 2), []
    if _rank() == 0:
        for _ in range(1, _size()):
            sources.append(dist.recv(anybody))
            total += anybody
    else:
        dist.send(torch.full((4, 2), float(_rank())), 0)
    return [received, total, sorted(sources)]  # they come in any order


COLLECTIVES: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        all_reduce_sums_every_dtype,
        all_reduce_takes_every_operator,
        all_reduce_averages_whole_numbers,
        all_reduce_adds_complex_and_strided_tensors,
        strided_tensors_and_barriers_whatever_the_default_device,
        all_reduce_adds_sparse_tensors,
        broadcast_and_reduce_take_every_root,
        gathers_and_scatters,
        reduce_scatters,
        all_to_all_single_with_uneven_splits,
        coalesced_collectives,
        sub_groups,
        sub_groups_of_sub_groups,
        work_handles_and_futures,
        futures_are_completed_once_their_work_was_waited_for,
        object_collectives,
        messages_by_tag_in_any_order,
        messages_in_batches_and_from_anybody,
    )
}
