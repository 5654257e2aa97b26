"""Settings and arguments that a session refuses, before it sends anything."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coarse.errors import RendezvousError
from coarse.rendezvous.workers import NodeMap
from coarse.schema import ITEM_BYTES, UPDATABLE_DTYPES, TensorSpec
from coarse.security.node_ports import NodePorts
from coarse.settings import Settings


def check_specs(name: str, specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError unless there are tensors to register, each of a name of its own."""
    if not specs:
        raise ValueError(f"{name}: no tensor to register")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError(f"{name}: two tensors share a name")


def check_single_worker(settings: Settings) -> None:
    """Raises RendezvousError for settings that need several workers, in a job of one."""
    if settings.machine:
        raise RendezvousError(
            f"a job of one worker has no links, so it cannot emulate those of {settings.machine}; start two or "
            "more workers, or unset COARSE_MACHINE"
        )
    if settings.max_workers > 1:
        raise RendezvousError(
            "a job of one worker has no memory devices, so no other worker can join it; start two or more, or unset "
            "COARSE_MAX_WORKERS"
        )


def check_nodes(settings: Settings, num_nodes: int) -> None:
    """Raises RendezvousError for settings that work within one node, in a job of several."""
    if num_nodes == 1:
        return
    if settings.keep_devices:
        raise RendezvousError(
            f"memory devices are kept within one node only, but this job has {num_nodes} nodes; unset "
            "COARSE_KEEP_DEVICES"
        )
    if settings.algorithm in ("ring", "exchange", "nccl"):
        choices = "auto or direct" if settings.machine else "auto, direct or gather"
        raise RendezvousError(
            f"the algorithm {settings.algorithm!r} works only within one node, but this job has {num_nodes} nodes; "
            f"set COARSE_ALGORITHM to {choices}"
        )
    if settings.dense:
        raise RendezvousError(
            f"DENSE has one memory device for all workers, but this job has {num_nodes} nodes; unset COARSE_DENSE"
        )
    if settings.machine:
        _check_network(settings.machine, num_nodes)


def _check_network(machine: str, num_nodes: int) -> None:
    from coarse.machine.catalogue import load_machine
    from coarse.machine.wiring import check_network

    try:
        check_network(load_machine(machine), num_nodes)
    except ValueError as error:
        raise RendezvousError(str(error)) from None


def check_ports(settings: Settings, nodes: NodeMap, node: int) -> None:
    """Raises RendezvousError if COARSE_NODE_PORTS has too few ports for this node, in a job of several nodes."""
    if nodes.num_nodes > 1:
        NodePorts.parse(settings.node_ports).check(len(nodes.ranks[node]))


def check_emulated_nodes(settings: Settings, nodes: NodeMap) -> None:
    """Raises RendezvousError unless the nodes of a job are such that links between them can be emulated."""
    if not settings.machine or nodes.num_nodes == 1:
        return
    if len(set(nodes.boots)) > 1:
        raise RendezvousError(
            f"the links of {settings.machine} are emulated within one machine, but the nodes of this job are on "
            "several; start all workers on one and divide them by COARSE_NODE, or unset COARSE_MACHINE"
        )
    if len(set(map(len, nodes.ranks))) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes.ranks)
        raise RendezvousError(
            f"emulated nodes are alike, but those of this job have {sizes} workers; give each the same number, or "
            "unset COARSE_MACHINE"
        )


def check_losses(settings: Settings, *, num_workers: int, num_nodes: int, is_of_torchrun: bool) -> None:
    """Raises RendezvousError unless this job can go on without lost workers, if the settings ask for that.

    Args:
        settings: The settings.
        num_workers, num_nodes: Size of the job.
        is_of_torchrun: Whether torchrun has started it.
    """
    if not settings.least_workers:
        return
    if settings.least_workers > num_workers:
        raise RendezvousError(
            f"COARSE_MIN_WORKERS={settings.min_workers}, but the job has {num_workers} worker(s); lower it, or start "
            "more"
        )
    if 0 < settings.max_workers < num_workers:
        raise RendezvousError(
            f"COARSE_MAX_WORKERS={settings.max_workers}, but the job starts with {num_workers} workers; raise it, or "
            "start fewer"
        )
    if num_nodes > 1 and settings.replaces_workers:
        raise RendezvousError(
            f"workers can join a job of one node only, but this one has {num_nodes} nodes; unset "
            "COARSE_MAX_WORKERS, and set COARSE_ON_LOSS=continue to go on without lost workers"
        )
    if num_nodes == num_workers > 1 and settings.node_compression != "none":
        raise RendezvousError(
            f"each of the {num_nodes} nodes has one worker, with which its memory devices end, and nodes that "
            "compress gradients cannot go on without another one; unset COARSE_NODE_COMPRESSION or "
            "COARSE_MIN_WORKERS, or start two or more workers on a node"
        )
    if is_of_torchrun:
        raise RendezvousError(
            "torchrun ends all workers when one ends, so a job cannot go on without lost workers; start it by "
            "`coarse run --min-workers`, or unset COARSE_MIN_WORKERS"
        )


def settings_for_losses(settings: Settings) -> Settings:
    """The settings without all that needs every worker, if the job goes on without lost ones."""
    if settings.least_workers:
        return replace(settings, dual_sync="off", replan_steps=0, gpu_transfers="off")
    return settings


def settings_for_nodes(settings: Settings, num_nodes: int) -> Settings:
    """The settings with the algorithm that works with this number of nodes, where it was left to COARSE."""
    if settings.machine and settings.algorithm == "auto" and num_nodes > 1:
        return replace(settings, algorithm="direct")  # whole shards: their pieces do not lead to other nodes
    return settings


@functools.cache  # numpy takes longer to name a dtype than the memory devices to reduce a few numbers
def reducible(dtype: np.dtype[Any], op: str) -> str:
    """Returns the name of an array's dtype; raises ValueError unless memory devices can reduce it by `op`."""
    if dtype.name not in ITEM_BYTES or not dtype.isnative:
        raise ValueError(
            f"an array of {dtype} cannot be reduced; supported are {', '.join(ITEM_BYTES)}, where bfloat16 is "
            "ml_dtypes.bfloat16"
        )
    TensorSpec(name="array", dtype=dtype.name, num_elements=1, op=op)
    return str(dtype.name)


def cannot_update_by(settings: Settings) -> str:
    """Why memory devices cannot run an optimizer with these settings; "" if nothing in them is in the way."""
    if settings.machine:
        return f"updates are not paced to the links of {settings.machine}"
    if settings.sync_algorithm not in ("auto", "direct", "gather"):
        return f"gradients are reduced by {settings.sync_algorithm}, as if memories were distinct"
    return ""


def check_updatable(specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError unless each gradient is a mean of a dtype whose parameters memory devices can update."""
    for spec in specs:
        if spec.dtype not in UPDATABLE_DTYPES or spec.op != "mean":
            raise ValueError(
                f"tensor {spec.name!r}: only means of {', '.join(UPDATABLE_DTYPES)} can update a parameter, not "
                f"the {spec.op} of {spec.dtype}"
            )
