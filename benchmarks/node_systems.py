"""The systems that `nodes.py` compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from node_network import INTERFACE

from coarse.bench.harness.launchers import find_program

STEP, ALL_REDUCE = "step", "all_reduce"
"""Operations."""

COMPUTATION = "compute"
"""A worker's step alone, without communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system under measurement.

    Args:
        title: Its column; systems with the same title share one, which shows the fastest.
        processes: Kind of its processes in node_workers.POOLS, which may serve other systems, too.
        operations: What it does.
        tolerance: Largest difference of a gradient from the mean, in parts of the largest gradient.
        wrapper: In node_step.WRAPPERS; "" for a system without steps.
        environment: Variables of its processes, which are not those of other systems then.
    """

    title: str
    processes: str
    operations: tuple[str, ...] = (STEP,)
    tolerance: float = 1e-6
    wrapper: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


SYSTEMS = {
    "coarse": System(title="COARSE", processes="coarse", operations=(STEP, ALL_REDUCE), wrapper="coarse"),
    "gloo": System(title="gloo", processes="gloo", operations=(STEP, ALL_REDUCE), wrapper="gloo"),
    "gloo-one-bucket": System(title="gloo", processes="gloo", wrapper="gloo-one-bucket"),
    "mpich": System(
        title="MPICH",
        processes="mpich",
        operations=(ALL_REDUCE,),
        environment={"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": INTERFACE},
    ),
    "mpich-ucx": System(
        title="MPICH",
        processes="mpich",
        operations=(ALL_REDUCE,),
        environment={"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE},
    ),
    COMPUTATION: System(title="computation", processes="gloo", wrapper=COMPUTATION),
    "coarse-int8": System(
        title="COARSE, int8",
        processes="coarse",
        tolerance=0.03,
        wrapper="coarse",
        environment={"COARSE_NODE_COMPRESSION": "int8"},
    ),
    "coarse-fp16": System(title="COARSE, float16", processes="coarse", tolerance=2e-3, wrapper="coarse-fp16"),
    "coarse-bf16": System(
        title="COARSE, bfloat16", processes="coarse", tolerance=2e-2, wrapper="coarse-bf16"
    ),
    "gloo-fp16": System(title="gloo, float16", processes="gloo", tolerance=2e-3, wrapper="gloo-fp16"),
}
"""By their names on the command line. gloo is torch's DistributedDataParallel over it, or its all_reduce."""

DEFAULT = ("coarse", "gloo", "gloo-one-bucket", "mpich", "mpich-ucx", COMPUTATION, "coarse-int8")
GLOO = ("gloo", "gloo-one-bucket")
"""DDP with buckets of 25 MiB and with one bucket: the faster one counts."""

MPICH = ("mpich", "mpich-ucx")
"""MPICH over libfabric's TCP and over UCX's: the faster one counts."""


def missing(system: str) -> str:
    """Why a system cannot run here; "" if it can."""
    if system in MPICH and find_program("mpiexec.hydra") is None:
        return f"{system}: not installed, left out. To get it: pip install mpich"
    return ""
