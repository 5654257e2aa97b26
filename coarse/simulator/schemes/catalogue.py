"""Schemes by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coarse.machine.cci import FIGURE_3, LEAST_RATIO, READ, WRITE, LoadStore
from coarse.simulator import memory_devices
from coarse.simulator.schemes import all_reduce, offload
from coarse.simulator.schemes.sharded import fsdp_step, parameter_server_step
from coarse.simulator.schemes.step import Step
from coarse.simulator.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way of synchronising a step.

    Args:
        what: Description in words.
        build: Makes the step.
    """

    what: str
    build: Callable[[Setup], Step]


def _offload(algorithm: str, dual_sync: str | int = offload.OFF) -> Callable[[Setup], Step]:
    return lambda setup: offload.offload_step(setup.job(), algorithm=algorithm, dual_sync=dual_sync)


def _all_reduce(*ways: str) -> Callable[[Setup], Step]:
    return lambda setup: all_reduce.all_reduce_step(setup.job(), ways=ways or all_reduce.WAYS)


def _dense(reads: float, writes: float) -> Callable[[Setup], Step]:
    access = LoadStore(read_ratio=reads, write_ratio=writes)
    return lambda setup: offload.offload_step(setup.job(access))


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "coarse": Scheme(
            what="memory devices by exchange, and direct all-reduce: the planner's split",
            build=_offload(memory_devices.EXCHANGE, offload.AUTO),
        ),
        "offload": Scheme(what="all in memory devices, by exchange", build=_offload(memory_devices.EXCHANGE)),
        "offload-ring": Scheme(what="all in memory devices, by a ring", build=_offload(memory_devices.RING)),
        "offload-direct": Scheme(
            what="all in memory devices, each shard by one of them", build=_offload(memory_devices.DIRECT)
        ),
        "workers": Scheme(
            what="all by direct all-reduce, in shards, in the fastest way",
            build=_offload(memory_devices.EXCHANGE, offload.WORKERS),
        ),
        "dense": Scheme(
            what="DENSE: one memory device, by loads and stores through CCI",
            build=_dense(FIGURE_3[READ].value, FIGURE_3[WRITE].value),
        ),
        "dense-least": Scheme(
            what="DENSE with the smallest slow-down that the paper gives",
            build=_dense(LEAST_RATIO[READ].value, LEAST_RATIO[WRITE].value),
        ),
        "allreduce": Scheme(what="all-reduce, the fastest way for each bucket", build=_all_reduce()),
        "allreduce-ring": Scheme(what="all-reduce by a ring one way", build=_all_reduce(all_reduce.RING)),
        "allreduce-both-ways": Scheme(
            what="all-reduce by rings in both directions", build=_all_reduce(all_reduce.BOTH_WAYS)
        ),
        "allreduce-tree": Scheme(
            what="all-reduce by a double binary tree", build=_all_reduce(all_reduce.TREE)
        ),
        "allreduce-hierarchical": Scheme(
            what="all-reduce within groups and between them", build=_all_reduce(all_reduce.HIERARCHICAL)
        ),
        "parameter-server": Scheme(
            what="a parameter server, sharded over the memory devices",
            build=lambda setup: parameter_server_step(setup.job()),
        ),
        "fsdp": Scheme(
            what="parameters, gradients and states sharded over the workers",
            build=lambda setup: fsdp_step(setup.job()),
        ),
    }
)
"""Schemes by their names."""
