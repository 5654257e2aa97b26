"""Plots of the study. Needs matplotlib (`coarse[plot]`). Lines and bars are simulated, crosses the document's."""

from __future__ import annotations

from matplotlib.figure import Figure

from coarse.profiler.figures import COLOURS
from coarse.simulator.studies.distributed_gpus.collectives import METHODS, reduction_us
from coarse.simulator.studies.distributed_gpus.machines import IVY_BRIDGE, SANDY_BRIDGE
from coarse.simulator.studies.distributed_gpus.put_get import GPU_QUEUES, HOST_QUEUES, message_rate_per_s
from coarse.simulator.studies.distributed_gpus.transfers import direct_us, hybrid_us, staged_us, switch_bytes

_TRANSFER_BYTES = tuple(1 << power for power in range(9, 25))
_REDUCTION_BYTES = tuple(1 << power for power in range(5, 21))
_CONNECTIONS = (1, 2, 4, 8, 16, 32)


def transfers_figure() -> Figure:
    """Bandwidth by size on two machines, direct, staged and hybrid."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, machine in zip(figure.subplots(1, 2), (SANDY_BRIDGE, IVY_BRIDGE), strict=True):
        switch = switch_bytes(machine)
        ways = {
            "direct": [direct_us(machine, nbytes) for nbytes in _TRANSFER_BYTES],
            "staged": [staged_us(machine, nbytes) for nbytes in _TRANSFER_BYTES],
            "hybrid": [hybrid_us(machine, nbytes, switch_bytes=switch) for nbytes in _TRANSFER_BYTES],
        }
        for (way, times_us), colour, style in zip(ways.items(), COLOURS, ("-", "-", ":"), strict=False):
            rates = [nbytes / us for nbytes, us in zip(_TRANSFER_BYTES, times_us, strict=True)]
            axes.plot(
                _TRANSFER_BYTES, rates, style, color=colour, label=way, linewidth=3 if style == ":" else 1.5
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes")
        axes.set_ylabel("MB/s")
        axes.set_title(f"GPU to GPU, {machine.name}, simulated")
        if machine is SANDY_BRIDGE:
            axes.plot([_TRANSFER_BYTES[-1]], [969], "kx", label="Table 3.1a, GPU to GPU")
            axes.axvspan(4096, 8192, color="0.85", label="direct is best up to here (4.3.8)")
        else:
            axes.axvspan(16384, 32768, color="0.85", label="bend of both libraries (4.4.1)")
        axes.legend(fontsize="small")
    return figure


def all_reduce_figure() -> Figure:
    """The variants of section 6.8 by size."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for method, colour, marker in zip(METHODS, COLOURS, "osv^D", strict=False):
        times = [reduction_us(method, nbytes=nbytes) for nbytes in _REDUCTION_BYTES]
        axes.plot(_REDUCTION_BYTES, times, color=colour, marker=marker, label=method)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(11, color="black", linestyle=":", label="barrier of 8 GPUs, section 6.7.2")
    axes.set_xlabel("bytes of each GPU")
    axes.set_ylabel("time, us")
    axes.set_title("All-reduce of 8 GPUs in a global address space, simulated")
    axes.legend(fontsize="small")
    return figure


def message_rate_figure() -> Figure:
    """Messages per second by connections."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for control, colour, marker in zip((GPU_QUEUES, HOST_QUEUES), COLOURS, "os", strict=False):
        rates = [message_rate_per_s(control, number) for number in _CONNECTIONS]
        axes.plot(_CONNECTIONS, rates, color=colour, marker=marker, label=control.name)
    axes.plot([1, 16], [1e5, 1.5e6], "kx", markersize=9, label="section 5.5.4, queues on the GPU")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("connections")
    axes.set_ylabel("messages per second")
    axes.set_title("Small puts posted by a GPU, simulated")
    axes.legend(fontsize="small")
    return figure
