"""Chapter 2.1 compared with the simulation: Tables 2.4 to 2.6, and the prototype of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from coarse.simulator.studies.dgx1 import figures
from coarse.simulator.studies.dgx1.figures import KEPLER, PASCAL, Profile
from coarse.simulator.studies.dgx1.machines import GpuMachine
from coarse.simulator.studies.dgx1.networks import CIFAR_RESNET, Network, synthetic_mlp
from coarse.simulator.studies.dgx1.parameters import (
    DATA_SETS,
    early_network,
    eight_gpus_s,
    machine,
    pair_of_table_2_5,
    short_steps,
    training,
    weaker_gpu_factor,
)
from coarse.simulator.studies.dgx1.training import tree_step
from coarse.simulator.studies.dgx1.two_gpus import MEMCPY, PROTOTYPE, shared_step
from coarse.simulator.studies.study import Basis, Comparison

CIFAR_STEPS = 50_000 / 16

_FITTED_COMPUTATION = ("MNIST", "LeNet", KEPLER)
"""The figure by which `weaker_gpu_factor` was chosen."""

_FITTED_PAIR = ("LeNet", PASCAL)
"""The figure by which `pair_of_table_2_5` was chosen."""


def profiles() -> Iterator[Comparison]:
    """Table 2.4."""
    for (data, name), rows in figures.PROFILES.items():
        for on, (one, two) in rows.items():
            basis = Basis.FITTED if name == "MLP" else Basis.PREDICTED
            simulated = _profile(data, name, on, 1), _profile(data, name, on, 2)
            what = f"{data} {name}, {on}"
            yield _ms(f"{what}, 1 GPU, communication", one.communication, simulated[0].communication, basis)
            yield _ms(f"{what}, 2 GPUs, copies between GPUs", two.copies, simulated[1].copies, basis)
            yield _ms(f"{what}, 2 GPUs, communication", two.communication, simulated[1].communication, basis)
            yield _ms(
                f"{what}, 2 GPUs, computation",
                two.computation,
                simulated[1].computation,
                Basis.FITTED if (data, name, on) == _FITTED_COMPUTATION else Basis.PREDICTED,
            )
            yield _ms(f"{what}, 2 GPUs, run", two.run, simulated[1].run)


def _ms(what: str, document: float, simulated: float, basis: Basis = Basis.PREDICTED) -> Comparison:
    return Comparison(
        what=what, document=document, simulated=simulated, unit="ms", source="Table 2.4", basis=basis
    )


def _profile(data: str, name: str, on: str, num_gpus: int) -> Profile:
    """A profiler's sums of an epoch. Computation is that of GPU 0."""
    each, one = DATA_SETS[data], figures.PROFILES[data, name][on][0]
    issue_s = 1e-3 * (one.run - one.communication - one.computation) / each.batches
    network, steps = each.networks[name], each.batches / num_gpus
    compute_s = (
        1e-3 * one.computation / each.batches * (weaker_gpu_factor(data, name, on) if num_gpus > 1 else 1.0)
    )
    plain = training(machine(on), network, num_gpus, each.batch, 0.0)
    one_gpu_s = issue_s + plain.input_s() + compute_s
    step = tree_step(training(machine(on), network, num_gpus, each.batch, one_gpu_s, issue_s))
    ms = 1e3 * steps
    return Profile(
        run=ms * step.step_s,
        communication=ms * (step.input_s + step.exchange_s),
        computation=ms * (compute_s + step.sum_s),
        copies=ms * step.exchange_s,
    )


def two_gpus() -> Iterator[Comparison]:
    """Table 2.5."""
    for name, rows in figures.TWO_GPUS.items():
        for on, (one, two) in rows.items():
            what = f"ImageNet {name}, batch 16, {on}, 2 GPUs"
            basis = Basis.FITTED if (name, on) == _FITTED_PAIR else Basis.PREDICTED
            seconds = two_gpus_s(pair_of_table_2_5(on), early_network(name), one, short_steps())
            yield _seconds("Table 2.5", what, two, seconds, basis)
    for on, (one, two) in figures.CIFAR_RESNET.items():
        what = f"Cifar10 ResNet, batch 16, {on}, 2 GPUs"
        yield _seconds(
            "Table 2.5", what, two, two_gpus_s(pair_of_table_2_5(on), CIFAR_RESNET, one, CIFAR_STEPS)
        )


def two_gpus_s(pair: GpuMachine, network: Network, one_s: float, steps: float) -> float:
    """Seconds of an epoch with a batch of 16, which takes `one_s` and `steps` on one GPU."""
    return steps / 2 * tree_step(training(pair, network, 2, 16, one_s / steps)).step_s


def eight_gpus() -> Iterator[Comparison]:
    """Table 2.6."""
    fitted = {("GoogLeNet", 32, 4), ("AlexNet", 32, 2)}
    for name, batches in figures.EIGHT_GPUS.items():
        for batch, row in batches.items():
            for num_gpus, document in list(zip(figures.GPU_COUNTS, row, strict=True))[1:]:
                yield _seconds(
                    "Table 2.6",
                    f"ImageNet {name}, batch {batch}, {num_gpus} GPUs",
                    document,
                    eight_gpus_s(name, batch, num_gpus, machine(PASCAL)),
                    Basis.FITTED if (name, batch, num_gpus) in fitted else Basis.PREDICTED,
                )


def _seconds(
    source: str, what: str, document: float, simulated: float, basis: Basis = Basis.PREDICTED
) -> Comparison:
    return Comparison(what=what, document=document, simulated=simulated, unit="s", source=source, basis=basis)


def shared_memory() -> Iterator[Comparison]:
    """The prototype of shared memory over copies, and the sizes of the synthetic MLPs."""
    for on, document in figures.SHARED_MEMORY_GAINS.items():
        one = figures.PROFILES["MNIST", "MLP"][on][0]
        compute_s = (
            1e-3 * one.computation / DATA_SETS["MNIST"].batches * weaker_gpu_factor("MNIST", "MLP", on)
        )
        network = synthetic_mlp(20**2)
        times = [shared_step(each, machine(on), network, compute_s).step_s for each in (MEMCPY, PROTOTYPE)]
        yield Comparison(
            what=f"shared memory over copies, MLP like MNIST's, {on}",
            document=document,
            simulated=times[0] / times[1],
            source="2.3.2",
            basis=Basis.PREDICTED,
        )
    for data, inputs in (("MNIST", 28**2), ("Cifar10", 32**2)):
        yield Comparison(
            what=f"weights of the synthetic MLP for {data}",
            document=figures.SYNTHETIC_KB[data],
            simulated=synthetic_mlp(inputs).nbytes / 1024,
            unit="KB",
            source="2.3.1",
            basis=Basis.EXACT,
        )
