"""The ring, the trigger list and the indices step by step, and the schemes in one table."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from coarse.simulator.studies.gpu_networking.active_messages import Kernel, Put, Target
from coarse.simulator.studies.gpu_networking.all_reduce import all_reduce_us
from coarse.simulator.studies.gpu_networking.control_paths import PATHS, ControlPath
from coarse.simulator.studies.gpu_networking.memory import SharedMemory
from coarse.simulator.studies.gpu_networking.ring import READ_INDEX, Consumer, Producer, status_word
from coarse.simulator.studies.gpu_networking.triggers import TriggerList
from coarse.simulator.studies.study import StateTable

_CAPACITY = 2
_KIB, _MIB = 1 << 10, 1 << 20
WORKLOADS = ((64 * _KIB, 8), (_MIB, 8), (64 * _MIB, 8), (64 * _MIB, 32))
"""Bytes and nodes of the ring all-reduces in which all schemes are compared."""


def ring_trace() -> StateTable:
    """Three requests through a ring of two entries: the third one waits for the consumer."""
    memory = SharedMemory()
    performed: list[object] = []
    producer = Producer(memory, _CAPACITY)
    consumer = Consumer(memory, _CAPACITY, performed.append)
    rows: list[tuple[str, ...]] = []

    def note(who: str, step: str) -> None:
        statuses = ", ".join(
            str(memory.visible.get(status_word(slot, _CAPACITY), 0)) for slot in range(_CAPACITY)
        )
        read = memory.visible.get(READ_INDEX, 0)
        rows.append(
            (who, step, statuses, str(producer.write_index), str(producer.local_read_index), str(read))
        )

    def run(number: str) -> None:
        for step in producer.post(number):
            note("work-group", f"{number}: {step}")

    run("a")
    run("b")
    waiting = producer.post("c")
    note("work-group", f"c: {next(waiting)}")
    for step in consumer.serve():
        note("command processor", step)
    for step in waiting:
        note("work-group", f"c: {step}")
    return StateTable(
        title="ComP-Net's ring with two entries",
        columns=("who", "step", "statuses", "write index", "local read index", "read index"),
        rows=rows,
    )


def trigger_trace() -> StateTable:
    """Two triggers before their registration, and one after."""
    interface = TriggerList()
    rows: list[tuple[str, ...]] = []

    def note(call: str, has_fired: bool) -> None:
        entry = interface.entries[7]
        threshold = "none" if entry.threshold is None else str(entry.threshold)
        rows.append(
            (call, entry.operation or "null entry", str(entry.counter), threshold, "yes" if has_fired else "")
        )

    for _ in range(2):
        note("GPU: trigger(7)", interface.trigger(7))
    note("CPU: register(put, tag 7, threshold 3)", interface.register("put", tag=7, threshold=3))
    for _ in range(2):
        note("GPU: trigger(7)", interface.trigger(7))
    return StateTable(
        title="A triggered operation whose triggers come first",
        columns=("call", "operation", "counter", "threshold", "starts"),
        rows=rows,
    )


def index_trace() -> StateTable:
    """An XTQ put from indices to addresses."""
    target = Target()
    queue, kernel = target.register_queue(0xF100), target.register_kernel(Kernel(0xA000, 0xB000, 1))
    packet = target.receive(Put(payload=b"gradient", queue_index=queue, kernel_index=kernel, arguments=(64,)))
    return StateTable(
        title="XTQ: what the target's interface does with a put",
        columns=("step", "result"),
        rows=[
            ("the put names", f"queue {queue}, kernel {kernel}, arguments (64,)"),
            ("kernel table", f"kernel at {packet.kernel_address:#x}, buffer at {packet.buffer_address:#x}"),
            ("payload", f"{len(target.memory[packet.buffer_address])} bytes at {packet.buffer_address:#x}"),
            ("queue table", f"command packet into the queue at {target.doorbells[0]:#x}"),
            ("doorbell", f"rings for the queue at {target.doorbells[0]:#x}"),
        ],
    )


@cache
def best_us(path: ControlPath, nbytes: int, nodes: int) -> float:
    """With the best of three numbers of pieces, where work-groups send on their own."""
    if path.pieces == 1 or path.threshold > 1:
        return all_reduce_us(path, nodes=nodes, nbytes=nbytes)
    return min(
        all_reduce_us(replace(path, pieces=pieces), nodes=nodes, nbytes=nbytes)
        for pieces in (1, 4, path.pieces)
    )


def schemes_table() -> StateTable:
    """Who does what under each scheme, and a ring all-reduce's time."""
    return StateTable(
        title="Ring all-reduce, us, equal nodes and links",
        columns=("scheme", "prepares", "triggers", "completes", *(_workload(*each) for each in WORKLOADS)),
        rows=[
            (
                *path.who,
                *(f"{best_us(path, nbytes, nodes):.1f}" for nbytes, nodes in WORKLOADS),
            )
            for path in PATHS
        ],
    )


def _workload(nbytes: int, nodes: int) -> str:
    size = f"{nbytes // _MIB} MiB" if nbytes >= _MIB else f"{nbytes // _KIB} KiB"
    return f"{size}, {nodes} nodes"
