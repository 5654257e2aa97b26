"""The study of Oden's communication methods for distributed GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.switchover import predict_all_to_all_crossing, predict_crossing
from coarse.simulator.studies.distributed_gpus import collectives, put_get, stencil, transfers
from coarse.simulator.studies.distributed_gpus.coalescing import read_requests, write_requests
from coarse.simulator.studies.distributed_gpus.last_block import Gpu
from coarse.simulator.studies.distributed_gpus.machines import (
    BLOCKING_EVENT_US,
    DEVICE_SYNC_US,
    EVENT_US,
    IVY_BRIDGE,
    PARAMETERS,
    PUT_US,
    RMA_PUT_US,
    SANDY_BRIDGE,
    STAGING_US,
    STREAM_SYNC_US,
)
from coarse.simulator.studies.distributed_gpus.notifications import Queues, Segment
from coarse.simulator.studies.distributed_gpus.published import (
    TABLE_3_1,
    TABLE_5_4,
    TABLE_6_1,
    TABLE_6_1_VALUES,
)
from coarse.simulator.studies.distributed_gpus.put_get import GPU_QUEUES, HOST_QUEUES
from coarse.simulator.studies.distributed_gpus.transfers import KIB, Memory
from coarse.simulator.studies.sourced import parameter_table
from coarse.simulator.studies.study import (
    Basis,
    Claim,
    Comparison,
    Progress,
    StateTable,
    Study,
    StudyResult,
)

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

_FITTED, _PREDICTED, _EXACT = Basis.FITTED, Basis.PREDICTED, Basis.EXACT
_GPUS = 8
_SMALL, _LARGE = 64, 1 << 20
_LARGE_WORK = 2560 / 280  # Table 5.6: MFLOP of 640 x 640 x 386 by those of 256 x 256 x 256


def _row(
    what: str,
    document: float,
    simulated: float,
    source: str,
    basis: Basis,
    unit: str = "",
    *,
    reason: str = "",
) -> Comparison:
    return Comparison(
        what=what,
        document=document,
        simulated=simulated,
        unit=unit,
        source=source,
        basis=basis,
        reason=reason,
    )


# ---- chapters 3 and 4: transfers ----


def _transfers() -> Iterator[Comparison]:
    for source, machine, table in TABLE_3_1:
        for (one, other), document in table.items():
            yield _row(
                f"{machine.name}, {one.value} to {other.value}",
                document,
                transfers.bandwidth_mbytes_per_s(machine, one, other),
                source,
                _FITTED if other is Memory.HOST else _PREDICTED,
                "MB/s",
            )
    yield _row(
        "Sandy Bridge: direct is faster up to",
        8,
        transfers.switch_bytes(SANDY_BRIDGE) / 1000,
        "section 4.3.8",
        _FITTED,
        "kB",
    )
    yield _row(
        "Ivy Bridge: direct is faster up to",
        32,
        transfers.switch_bytes(IVY_BRIDGE) / 1000,
        "section 4.3.8",
        _PREDICTED,
        "kB",
        reason="sizes are powers of two there, and section 4.4.1 sees the switch between 16 and 32 kB, where it is "
        "here; the FDR link's rate is not printed",
    )
    for gpus, document in ((2, 8), (16, 2)):
        yield _row(
            f"GASPI all-reduce of {gpus} GPUs, GPU buffers to host buffers",
            document,
            collectives.gaspi_us(gpus, has_gpu_buffers=True)
            / collectives.gaspi_us(gpus, has_gpu_buffers=False),
            "section 4.4.3",
            _PREDICTED,
            reason="four processes share each node's interface, so all-reduces of host buffers take longer than "
            "rounds of 3 us; the text prints no time from which to take it",
        )


def _transfer_claims() -> Iterator[Claim]:
    switch = transfers.switch_bytes(IVY_BRIDGE)
    yield Claim(
        what="on Ivy Bridge the switch from direct to staged lies between 16 and 32 kB",
        source="section 4.4.1",
        holds=16_000 <= switch <= 32 * KIB,
        found=f"at {switch} bytes",
    )
    chunks = [transfers.best_chunk_bytes(machine, 4 << 20) // KIB for machine in (SANDY_BRIDGE, IVY_BRIDGE)]
    yield Claim(
        what="the best chunk of a staged write is between 256 and 512 kB",
        source="section 4.3.8",
        holds=all(256 <= chunk <= 512 for chunk in chunks),
        found=f"{chunks[0]} KiB on Sandy Bridge, {chunks[1]} KiB on Ivy Bridge, for 4 MiB",
        reason="here a chunk costs 4.77 us on the copy engine, which hides behind the link from 32 KiB on; the "
        "document's larger optimum needs a cost per chunk on the link, of which the text says nothing",
    )
    direct, staged = (transfers.direct_us(SANDY_BRIDGE, 1 << 20), transfers.staged_us(SANDY_BRIDGE, 1 << 20))
    yield Claim(
        what="for large messages even staged copies outperform GPUDirect RDMA",
        source="section 3.4.1",
        holds=staged < direct,
        found=f"1 MiB on Sandy Bridge: {staged:.0f} us staged, {direct:.0f} us direct",
    )
    for gpus, least in ((2, 20), (16, 30)):
        us = collectives.gaspi_us(gpus, has_gpu_buffers=True)
        yield Claim(
            what=f"GASPI's all-reduce of GPU buffers takes more than {least} us on {gpus} GPUs",
            source="section 4.4.3",
            holds=us > least,
            found=f"{us:.1f} us",
        )


# ---- chapter 5: put and get by the GPU ----


def _put_get() -> Iterator[Comparison]:
    gpu, host = (put_get.half_round_us(control) for control in (GPU_QUEUES, HOST_QUEUES))
    yield _row("Infiniband put by a GPU, queues on the GPU", 12.7, gpu, "section 5.5.4", _PREDICTED, "us")
    yield _row("Infiniband put by a GPU, queues on the host", 13.6, host, "section 5.5.4", _PREDICTED, "us")
    yield _row(
        "what queues on the host add",
        1,
        host - gpu,
        "section 5.5.4",
        _PREDICTED,
        "us",
        reason="Table 5.4 has 1.8 us between the two posts; some of its posted writes must overlap with the flight",
    )
    yield _row(
        "Infiniband put by the host for a GPU, with Extoll's flag",
        12.2,
        put_get.host_assisted_us(PUT_US.value),
        "section 5.5.4",
        _PREDICTED,
        "us",
        reason="on Extoll a flag costs 1.5 us; here the helper also completes each put and answers the GPU, for "
        "which the text has no times",
    )
    yield _row(
        "Extoll put by a GPU without notification",
        5.1,
        put_get.rma_half_round_us(has_notifications=False),
        "section 5.6.3",
        _PREDICTED,
        "us",
    )
    yield _row(
        "Extoll put by a GPU with notifications",
        15.9,
        put_get.rma_half_round_us(has_notifications=True),
        "section 5.6.3",
        _FITTED,
        "us",
    )
    yield _row(
        "Extoll put by the host for a GPU",
        6.4,
        put_get.host_assisted_us(RMA_PUT_US.value),
        "section 5.6.3",
        _FITTED,
        "us",
    )
    yield from _rates()
    yield from _optimisations()


def _rates() -> Iterator[Comparison]:
    rate = {
        (control, number): put_get.message_rate_per_s(control, number) / 1000
        for control in (GPU_QUEUES, HOST_QUEUES)
        for number in (1, 16, 32)
    }
    yield _row(
        "messages per second, 1 connection",
        93.8,
        rate[GPU_QUEUES, 1],
        "1 / 10.66 us, Table 5.4",
        _EXACT,
        "1000/s",
    )
    yield _row(
        "messages per second, 16 connections",
        1500,
        rate[GPU_QUEUES, 16],
        "16 / 10.66 us, Table 5.4",
        _EXACT,
        "1000/s",
    )
    yield _row(
        "rate of 16 connections by that of 1",
        15,
        rate[GPU_QUEUES, 16] / rate[GPU_QUEUES, 1],
        "section 5.5.4",
        _PREDICTED,
    )
    for number, document, basis in ((1, 0.8, _PREDICTED), (32, 0.4, _FITTED)):
        yield _row(
            f"rate with queues on the host by that with queues on the GPU, {number} connections",
            document,
            rate[HOST_QUEUES, number] / rate[GPU_QUEUES, number],
            "section 5.5.4, Figure 5.15",
            basis,
        )
    for control in (GPU_QUEUES, HOST_QUEUES):
        yield _row(
            f"size from which puts reach the peak bandwidth, {control.name}",
            32,
            put_get.size_of_peak(control) / KIB,
            "section 5.5.4",
            _EXACT,
            "kB",
        )


def _optimisations() -> Iterator[Comparison]:
    """Fewer instructions save as much wherever the queues lie; coalescing helps queues on the host alone."""
    steps = ((1, "shared memory"), (2, "static calculation"), (4, "no handling"))
    for function in ("post", "poll"):
        host, gpu = (TABLE_5_4[f"{function}, queues on the {place}"] for place in ("host", "GPU"))
        for step, name in steps:
            saved_us = host[step - 1] - host[step] if step > 1 else 0.0
            yield _row(
                f"{function} with queues on the GPU after '{name}', by the saving on the host",
                gpu[step],
                gpu[step - 1] - saved_us,
                "Table 5.4",
                _PREDICTED,
                "us",
            )


# ---- chapter 6: global address space ----


def _requests(pattern: str, values: int) -> int:
    stride = 1 if pattern.startswith("consecutive") else 2
    addresses = range(0, values * stride * collectives.VALUE_BYTES, stride * collectives.VALUE_BYTES)
    is_write = pattern.endswith("writes")
    return len(write_requests(addresses, collectives.VALUE_BYTES) if is_write else read_requests(addresses))


def _global_address_space() -> Iterator[Comparison]:
    for pattern, counts in TABLE_6_1.items():
        for values, count in zip(TABLE_6_1_VALUES, counts, strict=True):
            yield _row(
                f"requests of {values} {pattern}", count, _requests(pattern, values), "Table 6.1", _EXACT
            )
    stores = {stride: collectives.store_mbytes_per_s(stride) for stride in (1, 2)}
    loads = {stride: collectives.load_mbytes_per_s(stride) for stride in (1, 2)}
    yield _row("stores, peak", 800, stores[1], "section 6.6.2", _FITTED, "MB/s")
    yield _row(
        "consecutive stores by every second value", 7, stores[1] / stores[2], "section 6.6.3", _PREDICTED
    )
    yield _row("consecutive loads by every second value", 2, loads[1] / loads[2], "section 6.6.3", _PREDICTED)
    yield _row(
        "loads, 25 of 64 B in flight for 5.6 us each",
        600,
        collectives.loads_in_flight_mbytes_per_s(),
        "section 6.6.2",
        _PREDICTED,
        "MB/s",
        reason="either the 25 requests are of 128 B, a cache line of the GPU, which gives 571 MB/s, or a load's "
        "latency without the benchmark's fence and local store is 2.7 us",
    )
    for gpus, document, basis in ((2, 9, _FITTED), (8, 11, _PREDICTED)):
        yield _row(
            f"barrier of {gpus} GPUs", document, collectives.barrier_us(gpus), "section 6.7.2", basis, "us"
        )
    for gpus, document in ((2, 18), (8, 22)):
        yield _row(
            f"barrier kernel of {gpus} GPUs",
            document,
            collectives.barrier_us(gpus, is_kernel=True),
            "section 6.7.2",
            _PREDICTED,
            "us",
        )


def _reduction_claims() -> Iterator[Claim]:
    methods = tuple(collectives.METHODS)
    for is_all, best in (
        (True, {_SMALL: "all-gather", _LARGE: "all-to-all"}),
        (False, {_SMALL: "gather", _LARGE: "all-to-all"}),
    ):
        names = methods if is_all else collectives.REDUCE_METHODS
        for nbytes, method in best.items():
            times = {name: collectives.reduction_us(name, nbytes=nbytes, is_all=is_all) for name in names}
            yield Claim(
                what=f"{'all-reduce' if is_all else 'reduce'} of {'few' if nbytes == _SMALL else 'many'} values: "
                f"{method} is best",
                source="section 6.8.4",
                holds=min(times, key=times.__getitem__) == method,
                found=f"{nbytes} B: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()),
            )
    reads = [
        nbytes
        for nbytes in (1 << power for power in range(5, 22))
        if collectives.fastest(methods, nbytes=nbytes) == "remote read"
    ]
    yield Claim(
        what="remote reads do not perform well for any problem size",
        source="section 6.8.4",
        holds=not reads,
        found="never the best of 32 B to 2 MiB" if not reads else f"best for {reads}",
    )
    tree, exchange = (
        collectives.reduction_us(name, nbytes=_LARGE, is_all=False) for name in ("tree", "all-to-all")
    )
    yield Claim(
        what="for large messages a tree is only slightly worse than all-to-all in a reduce",
        source="section 6.8.4",
        holds=tree < 1.25 * exchange,
        found=f"{tree / exchange:.2f} times as long for 1 MiB",
        reason="the root's link takes three vectors from a tree and 1.75 from all-to-all; the figure's largest size "
        "is not printed, and for 4 KiB the two are within a tenth",
    )
    sizes = [1 << power for power in range(5, 22, 2)]
    slower = [
        nbytes
        for nbytes in sizes
        if min(collectives.reduction_us(name, nbytes=nbytes) for name in ("all-gather", "all-to-all"))
        >= collectives.mpi_us(nbytes=nbytes)
    ]
    yield Claim(
        what="GGAS outperforms MPI for all vector sizes",
        source="section 6.8.5",
        holds=not slower,
        found="faster from 32 B to 2 MiB" if not slower else f"slower for {slower} B",
    )


# ---- applications and energy ----


def _applications() -> Iterator[Comparison]:
    figures = (
        (stencil.SIZE_M, False, 7.3, _FITTED),
        (stencil.SIZE_M, True, 5, _FITTED),
        (stencil.SIZE_L, False, 16, _PREDICTED),
        (stencil.SIZE_L, True, 13, _PREDICTED),
    )
    for grid, has_mpi, document, basis in figures:
        yield _row(
            f"Himeno {grid.name} on 16 GPUs by {'MPI' if has_mpi else 'GASPI'}, speed-up",
            document,
            stencil.strong_speedup(grid, 16, has_mpi=has_mpi),
            "section 4.5.2",
            basis,
        )
    performance = stencil.stream_performance(_LARGE_WORK)
    yield _row(
        "Himeno 256 x 256 x 256, GPU-controlled to hybrid",
        0.96,
        stencil.stream_performance(1),
        "section 5.8.4",
        _FITTED,
    )
    yield _row(
        "energy efficiency of stream synchronisation over the hybrid, 640 x 640 x 386",
        10,
        100 * stencil.efficiency_gain(performance),
        "section 5.8.5",
        _PREDICTED,
        "%",
    )
    for gpus, document in (("2", 10), ("4 and 8", 15)):
        yield _row(
            f"energy efficiency of put/get over MPI at equal speed, {gpus} GPUs",
            document,
            100 * stencil.efficiency_gain(1.0),
            "section 6.10.1",
            _PREDICTED,
            "%",
            reason="put/get is also faster than MPI there (Figure 6.20), by figures that the text does not print",
        )


def _application_claims() -> Iterator[Claim]:
    performance = stencil.stream_performance(_LARGE_WORK)
    yield Claim(
        what="GPU-controlled communication reaches over 99 % of the hybrid for 640 x 640 x 386",
        source="section 5.8.4",
        holds=performance > 0.99,
        found=f"{performance:.2%}, from 96 % for 256 x 256 x 256 by the FLOP of both",
    )
    two = {has_mpi: stencil.strong_speedup(stencil.SIZE_M, 2, has_mpi=has_mpi) for has_mpi in (False, True)}
    yield Claim(
        what="on two GPUs GASPI and MPI are equal",
        source="section 4.5.2",
        holds=abs(two[True] / two[False] - 1) < 0.02,
        found=f"speed-ups of {two[False]:.2f} and {two[True]:.2f} for size M",
    )


# ---- state tables ----


def notification_trace() -> StateTable:
    """Data and flag on one queue, and on two."""
    rows: list[tuple[str, ...]] = []
    for what, flag_queue in (("one queue", 0), ("two queues", 1)):
        segment = Segment()
        queues = Queues(segment)
        queues.write(0, "gradient", queue=0)
        queues.notify(7, 1, queue=flag_queue)
        while queues.deliver(1):
            rows.append((what, str(segment.data.get(0, "nothing")), str(segment.flags.get(7, 0))))
    return StateTable(
        title="Put and notify: what the target sees",
        columns=("flag on", "data", "flag"),
        rows=rows,
    )


def last_block_trace() -> StateTable:
    """Two blocks of a GPU: the last one sends."""
    one, other = Gpu(num_blocks=2), Gpu(num_blocks=2)
    rows: list[tuple[str, ...]] = []
    for block in range(2):
        for step in one.block(0, other):
            rows.append((f"block {block}", step, str(one.counter), str(other.boundaries), str(other.flags)))
    return StateTable(
        title="The last block that arrives sends",
        columns=("who", "step", "counter", "neighbour's boundaries", "neighbour's flags"),
        rows=rows,
    )


def _synchronisation_table() -> StateTable:
    methods = {
        "device": DEVICE_SYNC_US,
        "stream": STREAM_SYNC_US,
        "event": EVENT_US,
        "blocking event": BLOCKING_EVENT_US,
    }
    return StateTable(
        title="Himeno on 16 GPUs by GASPI: speed-up by the way in which the host waits",
        columns=("synchronisation", "us (Table 4.1)", "M", "L"),
        rows=[
            (
                name,
                f"{each.value:g}",
                *(
                    f"{stencil.strong_speedup(grid, 16, synchronisation_us=each.value):.2f}"
                    for grid in (stencil.SIZE_M, stencil.SIZE_L)
                ),
            )
            for name, each in methods.items()
        ],
    )


def _switch_table() -> StateTable:
    """Beside the runtime's own formula, with latency and bandwidth of one path."""
    rows: list[tuple[str, ...]] = []
    for machine in (SANDY_BRIDGE, IVY_BRIDGE):
        direct = AlphaBeta(alpha_us=PUT_US.value, beta_gbytes_per_s=machine.peer_read.value / 1000)
        staged = AlphaBeta(
            alpha_us=PUT_US.value + STAGING_US.value,
            beta_gbytes_per_s=1e-3 / (1 / machine.link.value + 1 / machine.copy.value),
        )
        formula = predict_crossing(direct, staged)
        what = f"write from GPU to GPU, {machine.name}"
        rows.append((what, "direct", "staged", str(transfers.switch_bytes(machine)), f"{formula:.0f}"))
        what = f"all-to-all of {_GPUS} GPUs, {machine.name}"
        rows.append((what, "direct", "staged", str(transfers.all_to_all_switch_bytes(machine, _GPUS)), ""))
    for gpus in (4, 8, 16):
        path = AlphaBeta(
            alpha_us=collectives.barrier_us(gpus), beta_gbytes_per_s=collectives.store_mbytes_per_s(1) / 1000
        )
        formula = predict_all_to_all_crossing(path, gpus)
        what = f"all-reduce of {gpus} GPUs"
        rows.append((what, "all-gather", "all-to-all", str(collectives.switch_bytes(gpus)), f"{formula:.0f}"))
    return StateTable(
        title="Sizes at which the faster way changes, and coarse/profiler/switchover.py",
        columns=("what", "below", "above", "simulated, bytes", "formula, bytes"),
        rows=rows,
    )


def _pictures() -> Mapping[str, Figure]:
    if find_spec("matplotlib") is None:
        return {}
    from coarse.simulator.studies.distributed_gpus import pictures

    return {
        "transfers": pictures.transfers_figure(),
        "all-reduce": pictures.all_reduce_figure(),
        "message-rate": pictures.message_rate_figure(),
    }


def _run(progress: Progress) -> StudyResult:
    progress("direct, staged and hybrid writes")
    comparisons, claims = list(_transfers()), list(_transfer_claims())
    progress("puts by the GPU")
    comparisons += _put_get()
    progress("global address space")
    comparisons += _global_address_space()
    claims += _reduction_claims()
    progress("applications and energy")
    comparisons += _applications()
    claims += _application_claims()
    progress("tables and pictures")
    return StudyResult(
        comparisons=comparisons,
        claims=claims,
        tables=[
            _switch_table(),
            _synchronisation_table(),
            notification_trace(),
            last_block_trace(),
            parameter_table("Parameters of distributed-gpus", PARAMETERS),
        ],
        pictures=_pictures(),
    )


STUDY = Study(
    name="distributed-gpus",
    title="Direct communication methods for distributed GPUs",
    document="Oden, Direct Communication Methods for Distributed GPUs, dissertation, 2014",
    run=_run,
    traces={"notifications": notification_trace, "last-block": last_block_trace},
)
