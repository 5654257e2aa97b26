"""Chapter 2.2 compared with the simulation: LeNet's speed-ups, NCCL's gains and overheads, and GPU 0's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from coarse.simulator.studies.dgx1 import figures
from coarse.simulator.studies.dgx1.figures import PASCAL
from coarse.simulator.studies.dgx1.networks import ITEM_BYTES, VOLTA, Network
from coarse.simulator.studies.dgx1.parameters import DATA_SETS, pascal_step_s, solve, volta
from coarse.simulator.studies.dgx1.training import Training, nccl_step, tree_step
from coarse.simulator.studies.study import Basis, Comparison

_FITTED_OVERHEAD = ("GoogLeNet", 16)
_ROOT_COPIES = 3  # MXNet's store: weights, sum of gradients, momentum (recalled)
_PAGE_BYTES = 2 << 20  # of a GPU's memory (recalled)


def network(name: str) -> Network:
    """A network of chapter 2.2 by its name."""
    return next(each for each in VOLTA if each.name == name)


@cache
def slow_down() -> float:
    """How much longer a step's host and computation take under NCCL, from GoogLeNet on one GPU, batch 16."""
    name, batch = _FITTED_OVERHEAD
    training = volta_training(name, 1, batch)
    return solve(
        lambda factor: _overhead_percent(training, factor), figures.NCCL_OVERHEADS[name][batch], 1.0, 2.0
    )


def compute_s(name: str, batch: int) -> float:
    """Computation of a V100: a P100's, by the rate of both; of Inception-v3, by its operations."""
    if name == "Inception-v3":
        return compute_s("GoogLeNet", batch) * network(name).work / network("GoogLeNet").work
    return pascal_step_s(name, batch) * figures.P100_TFLOPS / figures.V100_TFLOPS


def volta_training(name: str, num_gpus: int, batch: int = 16) -> Training:
    """Training on DGX-1 with V100."""
    bare = _bare(name, num_gpus, batch)
    if name == "LeNet":
        return replace(bare, compute_s=_lenet_compute_s(), issue_s=_lenet_issue_s())
    return replace(bare, compute_s=compute_s(name, batch) - bare.input_s())


def _bare(name: str, num_gpus: int, batch: int = 16) -> Training:
    return Training(machine=volta(), network=network(name), num_gpus=num_gpus, batch=batch, compute_s=0.0)


def nccl_s(training: Training) -> float:
    """A step under NCCL."""
    return _slowed_s(training, slow_down())


def _slowed_s(training: Training, factor: float) -> float:
    """A step under NCCL whose host and computation take `factor` times as long."""
    slowed = replace(training, compute_s=factor * training.compute_s, issue_s=factor * training.issue_s)
    return nccl_step(slowed).step_s


def _overhead_percent(training: Training, factor: float) -> float:
    return 100 * (_slowed_s(training, factor) / tree_step(training).step_s - 1)


def _lenet_issue_s() -> float:
    """The host's time for a step of LeNet, from the same host with P100 (Table 2.4, MNIST)."""
    one = figures.PROFILES["MNIST", "LeNet"][PASCAL][0]
    return 1e-3 * (one.run - one.communication - one.computation) / DATA_SETS["MNIST"].batches


@cache
def _lenet_compute_s() -> float:
    """LeNet's computation, from the speed-up of 2 GPUs; too small to fill a GPU, it takes as long for any batch."""

    def speed_up(compute_s: float) -> float:
        one, two = (
            replace(_bare("LeNet", num_gpus), compute_s=compute_s, issue_s=_lenet_issue_s())
            for num_gpus in (1, 2)
        )
        return 2 * tree_step(one).step_s / tree_step(two).step_s

    return solve(speed_up, figures.LENET_TREE[2], 1e-3, 1.0)


def lenet_speed_ups() -> Iterator[Comparison]:
    """LeNet by GPUs and by batch."""
    for way, document, seconds in (
        ("tree", figures.LENET_TREE, lambda training: tree_step(training).step_s),
        ("NCCL", figures.LENET_NCCL, nccl_s),
    ):
        one_s = seconds(volta_training("LeNet", 1))
        for num_gpus, gain in document.items():
            simulated = num_gpus * one_s / seconds(volta_training("LeNet", num_gpus))
            yield _ratio(
                f"LeNet, batch 16, {way}, {num_gpus} GPUs over 1",
                gain,
                simulated,
                Basis.FITTED if (way, num_gpus) == ("tree", 2) else Basis.PREDICTED,
            )
    few_s = tree_step(volta_training("LeNet", 4)).step_s
    for batch, gain in figures.LENET_BATCHES.items():
        simulated = batch / 16 * few_s / tree_step(volta_training("LeNet", 4, batch)).step_s
        yield _ratio(f"LeNet, 4 GPUs, tree, batch {batch} over 16", gain, simulated)


def _ratio(what: str, document: float, simulated: float, basis: Basis = Basis.PREDICTED) -> Comparison:
    return Comparison(what=what, document=document, simulated=simulated, source="2.2.2", basis=basis)


def nccl_gain(name: str, num_gpus: int) -> float:
    """How many times faster NCCL is than the tree, batch 16."""
    training = volta_training(name, num_gpus)
    return tree_step(training).step_s / nccl_s(training)


def nccl_gains() -> Iterator[Comparison]:
    """NCCL over the tree."""
    for name, gains in figures.NCCL_GAINS.items():
        for num_gpus, gain in gains.items():
            what = f"{name}, batch 16, {num_gpus} GPUs, NCCL over tree"
            yield _ratio(what, gain, nccl_gain(name, num_gpus))


def nccl_overheads() -> Iterator[Comparison]:
    """Table 2.8."""
    for name, batches in figures.NCCL_OVERHEADS.items():
        for batch, percent in batches.items():
            yield Comparison(
                what=f"{name}, batch {batch}, 1 GPU, NCCL's overhead",
                document=percent,
                simulated=_overhead_percent(volta_training(name, 1, batch), slow_down()),
                unit="%",
                source="Table 2.8",
                basis=Basis.FITTED if (name, batch) == _FITTED_OVERHEAD else Basis.PREDICTED,
            )


def allocated_bytes(network: Network) -> int:
    """Memory of a network's arrays: those above half a page have pages of their own, the others share pages."""
    sizes = [ITEM_BYTES * size for layer in network.layers for size in layer.sizes]
    large = [size for size in sizes if size > _PAGE_BYTES / 2]
    shared = sum(sizes) - sum(large)
    return _PAGE_BYTES * sum(math.ceil(each / _PAGE_BYTES) for each in (*large, shared))


def root_memory() -> Iterator[Comparison]:
    """Table 2.10: what GPU 0 has more than the others."""
    for name, batches in figures.MEMORY.items():
        for batch, (root, other) in batches.items():
            yield Comparison(
                what=f"{name}, batch {batch}, memory of GPU 0 beyond that of the others",
                document=root - other,
                simulated=_ROOT_COPIES * allocated_bytes(network(name)) / 2**30,
                unit="GiB",
                source="Table 2.10",
                basis=Basis.PREDICTED,
            )
