"""Parameters of the machines, each fitted to figures of the document; `results` has their predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from coarse.simulator.studies.dgx1 import figures
from coarse.simulator.studies.dgx1.figures import KEPLER, PASCAL, TITAN
from coarse.simulator.studies.dgx1.machines import GpuMachine, dgx1_pascal, dgx1_volta, pair
from coarse.simulator.studies.dgx1.networks import EARLY, Network, lenet, lstm, mlp
from coarse.simulator.studies.dgx1.training import Training, tree_step

STEPS = 500
"""Steps of an epoch in Table 2.6: MXNet's synthetic data ends after 500 batches. G GPUs do 1/G of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set of Table 2.4.

    Args:
        samples: Of an epoch.
        batch: Of each GPU.
        networks: Trained with it, by name.
    """

    samples: int
    batch: int
    networks: dict[str, Network]

    @property
    def batches(self) -> float:
        """Batches of an epoch, of all GPUs together."""
        return self.samples / self.batch


# MXNet's example crops Cifar10's images to 28 x 28; with 32 x 32, links would exceed their nominal rates.
DATA_SETS = {
    "MNIST": DataSet(samples=60_000, batch=64, networks={"MLP": mlp(28, 1), "LeNet": lenet(28, 1)}),
    "Cifar10": DataSet(samples=50_000, batch=64, networks={"MLP": mlp(28, 3), "LeNet": lenet(28, 3)}),
    "PTB": DataSet(samples=42_068, batch=128, networks={"LSTM": lstm()}),
}


@cache
def machine(name: str) -> GpuMachine:
    """Kepler, Titan, or DGX-1 with P100, with all parameters.

    The links are fitted to Table 2.4's two MLPs on the same machine, the dispatch to one run of Table 2.6.
    """
    return replace(_links(name), dispatch_s=dispatch_s())


@cache
def volta() -> GpuMachine:
    """DGX-1 with V100: nominal links, all else from DGX-1 with P100."""
    return dgx1_volta(machine(PASCAL))


def pair_of_table_2_5(name: str) -> GpuMachine:
    """The two GPUs of Table 2.5: with P100 a pair without a direct link, as some are in a cube mesh.

    The table does not say which two it took. LeNet's figure decides: 10.3 s by way of the host, 6.5 s over a link.
    """
    if name != PASCAL:
        return machine(name)
    return replace(machine(name), links={}, switches=((0,), (1,)))


def weaker_gpu_factor(data: str, network: str, name: str) -> float:
    """Computation of two GPUs over that of one in Table 2.4, for each of the two.

    Two Kepler GPUs wait for the weaker K20c (2.1.3). With MNIST, one GPU is the K40c: LeNet's figure decides. LeNet
    takes as much longer as cores and clock are fewer; the MLP, whose kernels do not fill a GPU (2.1.3), as the clock
    is slower.
    """
    if (data, name) != ("MNIST", KEPLER):
        return 1.0
    (cores, mhz), (fewer_cores, fewer_mhz) = figures.K40C, figures.K20C
    return mhz / fewer_mhz * (1.0 if network == "MLP" else cores / fewer_cores)


def _links(name: str) -> GpuMachine:
    copy_s, gbytes_per_s = _line(name, between_gpus=True)
    host_copy_s, host_gbytes_per_s = _line(name, between_gpus=False)
    if name == PASCAL:
        built = dgx1_pascal(gbytes_per_s=gbytes_per_s, host_gbytes_per_s=host_gbytes_per_s)
    else:  # the GPUs of Titan Z share a card
        built = pair(
            name,
            gbytes_per_s=gbytes_per_s,
            host_gbytes_per_s=host_gbytes_per_s,
            is_shared=name == TITAN,
        )
    return replace(
        built,
        copy_s=copy_s,
        host_copy_s=host_copy_s,
        memory_gbytes_per_s=figures.DRAM_GBYTES_PER_S[name],
    )


def _line(name: str, *, between_gpus: bool) -> tuple[float, float]:
    """Seconds of a copy without bytes, and GB/s, that give the copies of both MLPs."""
    points = []
    for data in ("MNIST", "Cifar10"):
        one, two = figures.PROFILES[data, "MLP"][name]
        each, network = DATA_SETS[data], DATA_SETS[data].networks["MLP"]
        if between_gpus:  # gradients there, weights back
            points.append((2 * network.num_arrays, 2 * network.nbytes, 2e-3 * two.copies / each.batches))
        else:
            points.append((1, each.batch * network.sample_bytes, 1e-3 * one.communication / each.batches))
    (count, few, short_s), (_, many, long_s) = points
    bytes_per_s = (many - few) / (long_s - short_s)
    return (short_s - few / bytes_per_s) / count, bytes_per_s / 1e9


@cache
def dispatch_s() -> float:
    """Time between two copies of a GPU: with it GoogLeNet takes as long as in Table 2.6 (batch 32, 4 GPUs)."""
    document = figures.EIGHT_GPUS["GoogLeNet"][32][2]

    def seconds(dispatch: float) -> float:
        return eight_gpus_s("GoogLeNet", 32, 4, replace(_links(PASCAL), dispatch_s=dispatch))

    return solve(seconds, document, 0.0, 100e-6)


def solve(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a rising function has a value, by bisection.

    Raises:
        ValueError: If it has not, between `low` and `high`.
    """
    if not function(low) <= value <= function(high):
        raise ValueError(f"{value} is outside of [{function(low)}, {function(high)}]")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return (low + high) / 2


def early_network(name: str) -> Network:
    """A network of Table 2.3 by its name."""
    return next(network for network in EARLY if network.name == name)


def eight_gpus_s(name: str, batch: int, num_gpus: int, on: GpuMachine) -> float:
    """Seconds of Table 2.6. Computation is one GPU's time without its input."""
    one_s = figures.EIGHT_GPUS[name][batch][0] / STEPS
    return STEPS / num_gpus * tree_step(training(on, early_network(name), num_gpus, batch, one_s)).step_s


def training(
    on: GpuMachine, network: Network, num_gpus: int, batch: int, one_gpu_s: float, issue_s: float = 0.0
) -> Training:
    """Training with the computation that makes a step of one GPU take `one_gpu_s`."""
    plain = Training(
        machine=on, network=network, num_gpus=num_gpus, batch=batch, compute_s=0.0, issue_s=issue_s
    )
    return replace(plain, compute_s=one_gpu_s - issue_s - plain.input_s())


def pascal_step_s(name: str, batch: float) -> float:
    """A step of one P100, on the line through both batches of Table 2.6."""
    small, large = (figures.EIGHT_GPUS[name][each][0] / STEPS for each in (32, 64))
    return small + (large - small) * (batch - 32) / 32


@cache
def short_steps() -> float:
    """Steps of an epoch in Table 2.5, from GoogLeNet and ResNet on one P100."""
    names = ("GoogLeNet", "ResNet")
    return sum(figures.TWO_GPUS[name][PASCAL][0] / pascal_step_s(name, 16) for name in names) / len(names)


MACHINES = (KEPLER, TITAN, PASCAL)
