"""Fault scenarios; each returns the texts of this rank's errors."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PROMPT_S = 10.0  # on a busy machine; the time-out is 30 minutes


def _error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def mismatches_are_told_and_survived() -> Any:
    rank = dist.get_rank()
    errors = {
        "shape": _error_of(lambda: dist.all_reduce(torch.zeros(3 + rank))),
        "dtype": _error_of(
            lambda: dist.all_reduce(torch.zeros(3, dtype=(torch.float32, torch.float64)[rank % 2]))
        ),
        "operation": _error_of(
            lambda: dist.all_reduce(torch.zeros(3)) if rank == 0 else dist.broadcast(torch.zeros(3), 0)
        ),
        "root": _error_of(lambda: dist.broadcast(torch.zeros(3), rank)),
        "operator": _error_of(
            lambda: dist.all_reduce(torch.zeros(3), (dist.ReduceOp.MAX, dist.ReduceOp.MIN)[rank % 2])
        ),
        "split": _error_of(
            lambda: dist.all_to_all_single(
                torch.zeros(2 * dist.get_world_size()),
                torch.zeros(dist.get_world_size() * (2 + rank)),
            )
        ),
    }
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    return [errors, tensor.tolist()]


def _rooted(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def wrong_arguments_are_refused() -> Any:
    size = dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # torch itself lets meta tensors do nothing
    return {
        "op": _error_of(lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND)),
        "device": _error_of(lambda: backend.allreduce([torch.zeros(3, device="meta")])),
        "outputs": _error_of(lambda: dist.all_gather([torch.zeros(3)] * (size + 1), torch.zeros(3))),
        "gathered": _error_of(
            lambda: dist.gather(torch.zeros(3), [torch.zeros(3)] * (size + 1), dst=dist.get_rank())
        ),
        "root": _error_of(lambda: backend.broadcast([torch.zeros(3)], _rooted(size))),
        "flat": _error_of(lambda: dist.all_gather_into_tensor(torch.zeros(3 * size + 1), torch.zeros(3))),
        "send": _error_of(lambda: dist.send(torch.zeros(3), size)),
        "recv": _error_of(lambda: dist.recv(torch.zeros(3), size)),
    }


def late_ranks_are_named() -> Any:
    impatient = dist.new_group(timeout=timedelta(milliseconds=200))
    errors = []
    if dist.get_rank() == 0:
        errors.append(_error_of(lambda: dist.all_reduce(torch.zeros(3), group=impatient)))
        errors.append(_error_of(lambda: dist.barrier(group=impatient)))
        errors.append(_error_of(lambda: dist.recv(torch.zeros(3), 1, group=impatient)))
    dist.barrier()
    dist.destroy_process_group(impatient)
    return errors


def messages_that_do_not_fit_are_refused() -> Any:
    errors: list[Any] = []
    if dist.get_rank() == 0:
        dist.send(torch.zeros(3), 1)
        dist.send(torch.zeros(3), 1)
        dist.send(torch.ones(3), 1)
    elif dist.get_rank() == 1:
        errors.append(_error_of(lambda: dist.recv(torch.zeros(4), 0)))
        errors.append(_error_of(lambda: dist.recv(torch.zeros(3, dtype=torch.int32), 0)))
        after = torch.zeros(3)
        dist.recv(after, 0)
        errors.append(after.tolist())
    return errors


def a_rank_leaves_its_group() -> Any:
    group = dist.new_group()
    errors = []
    if dist.get_rank() == 0:
        started = time.monotonic()
        errors = _error_of(lambda: dist.all_reduce(torch.zeros(3), group=group))
        assert time.monotonic() - started < PROMPT_S
    dist.destroy_process_group(group)
    dist.barrier()
    return errors


def ddp_in_a_group_that_a_rank_leaves() -> Any:
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    if dist.get_rank() == 0:
        loss = model(torch.zeros(4, 3)).sum()
        errors = _error_of(loss.backward)
    del model
    dist.destroy_process_group(group)
    dist.barrier()
    return errors if dist.get_rank() == 0 else []


def works_that_take_too_long_or_come_too_late() -> Any:
    group = dist.new_group()
    errors = []
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(3), group=group, async_op=True)
        errors.append(_error_of(lambda: work.wait(timedelta(milliseconds=200))))
    dist.barrier()
    if dist.get_rank() != 0:
        dist.all_reduce(torch.zeros(3), group=group)
    dist.barrier()
    group._get_backend(torch.device("cpu")).shutdown()
    errors.append(_error_of(lambda: group.allreduce([torch.zeros(3)]).wait()))
    dist.destroy_process_group(group)
    return errors


def rank_1_leaves_its_group() -> Any:
    group = dist.new_group()
    errors = []
    if dist.get_rank() != 1:
        errors = _error_of(lambda: dist.all_reduce(torch.zeros(3), group=group))
    else:
        dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() != 1:
        dist.destroy_process_group(group)
    return errors


def a_group_is_destroyed_while_a_thread_waits_in_it() -> Any:
    group = dist.new_group()
    errors: list[Any] = []
    if dist.get_rank() == 0:
        backend = group._get_backend(torch.device("cpu"))
        before = backend._get_sequence_number_for_group()
        options = dist.AllreduceOptions()
        options.asyncOp = False

        def wait_in_vain() -> None:
            errors.extend(_error_of(lambda: backend.allreduce([torch.zeros(3)], options).wait()))

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        started = time.monotonic()
        while backend._get_sequence_number_for_group() == before:
            assert time.monotonic() - started < PROMPT_S
        dist.destroy_process_group(group)  # lets what was issued take some seconds before it ends that
        waiting.join()
        dist.barrier()
    else:
        dist.barrier()
        dist.destroy_process_group(group)
    return errors


def forks_take_no_part() -> Any:
    """In a fork whatever would take part is refused, and its end is nobody else's."""
    reading, writing = os.pipe()
    tensor = torch.ones(3)
    kept = dist.distributed_c10d._get_default_store()  # a file that torch removes when all have let go of it
    child = os.fork()
    if child == 0:
        calls = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "without waiting": lambda: dist.all_reduce(tensor, async_op=True).wait(),
            "send": lambda: dist.send(tensor, 1 - dist.get_rank()),
        }
        told = {name: _error_of(call) for name, call in calls.items()}
        told["destroy"] = _error_of(dist.destroy_process_group)
        gc.collect()
        assert kept is not None
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        errors = json.loads(told.read())
    code = os.waitpid(child, 0)[1]
    dist.all_reduce(tensor)
    return [errors, code, tensor.tolist()]


def a_group_is_destroyed_while_a_receive_waits_in_it() -> Any:
    """The thread that waits tells Python that it gives up, and the end of the group waits for that thread."""
    group = dist.new_group()
    errors: list[Any] = []
    if dist.get_rank() == 0:
        received = dist.irecv(torch.zeros(3), 1, group=group)
        told = received.get_future().then(lambda future: errors.extend(_error_of(future.value)))
        dist.destroy_process_group(group)
        told.wait()
        dist.barrier()
    else:
        dist.barrier()
        dist.destroy_process_group(group)
    return errors


def a_rank_dies() -> Any:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    received = dist.irecv(torch.zeros(3), 1)
    errors = [_error_of(lambda: dist.all_reduce(torch.zeros(3))), _error_of(received.wait)]
    assert time.monotonic() - started < PROMPT_S
    return [*errors, _error_of(lambda: dist.all_reduce(torch.zeros(3)))]


ERRORS: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        mismatches_are_told_and_survived,
        wrong_arguments_are_refused,
        forks_take_no_part,
        late_ranks_are_named,
        messages_that_do_not_fit_are_refused,
        a_rank_leaves_its_group,
        ddp_in_a_group_that_a_rank_leaves,
        works_that_take_too_long_or_come_too_late,
        rank_1_leaves_its_group,
        a_group_is_destroyed_while_a_thread_waits_in_it,
        a_group_is_destroyed_while_a_receive_waits_in_it,
        a_rank_dies,
    )
}
