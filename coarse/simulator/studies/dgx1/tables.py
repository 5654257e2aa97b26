"""Parameters, and the order of copies, as tables."""

from __future__ import annotations

from coarse.simulator.studies.dgx1.figures import KEPLER, PASCAL
from coarse.simulator.studies.dgx1.parameters import (
    MACHINES,
    machine,
    pair_of_table_2_5,
    short_steps,
    volta,
    weaker_gpu_factor,
)
from coarse.simulator.studies.dgx1.training import tree_step
from coarse.simulator.studies.dgx1.two_gpus import ALGORITHMS, shared_step
from coarse.simulator.studies.dgx1.volta import slow_down, volta_training
from coarse.simulator.studies.study import StateTable

_MLPS = "both MLPs of Table 2.4 on that machine"


def parameter_table() -> StateTable:
    """Every fitted number, and the figures that it is fitted to."""
    rows = []
    for name in MACHINES:
        each = machine(name)
        rows += [
            (f"{name}: link between GPUs", f"{each.gbytes_per_s(0, 1):.2f} GB/s", f"copies of {_MLPS}"),
            (f"{name}: a copy without bytes", f"{each.copy_s * 1e6:.1f} us", f"copies of {_MLPS}"),
            (f"{name}: lane to the host", f"{each.host_gbytes_per_s:.2f} GB/s", f"1 GPU, {_MLPS}"),
            (
                f"{name}: a copy from the host without bytes",
                f"{each.host_copy_s * 1e6:.1f} us",
                f"1 GPU, {_MLPS}",
            ),
        ]
    rows += [
        (
            "all: between two copies of a GPU",
            f"{machine(PASCAL).dispatch_s * 1e6:.1f} us",
            "Table 2.6, GoogLeNet, batch 32, 4 GPUs",
        ),
        (
            "Table 2.5: steps of an epoch",
            f"{short_steps():.1f}",
            "GoogLeNet and ResNet, 1 P100, Tables 2.5 and 2.6",
        ),
        (
            "Table 2.5: the two P100",
            "without a direct link" if not pair_of_table_2_5(PASCAL).links else "with a direct link",
            "LeNet, 2 P100, Table 2.5",
        ),
        (
            "Table 2.4, MNIST: two Kepler GPUs compute",
            " and ".join(
                f"{weaker_gpu_factor('MNIST', name, KEPLER):.3f} times ({name})" for name in ("MLP", "LeNet")
            ),
            "LeNet, 2 Kepler GPUs, Table 2.4: the ratio of cores and clock, or of clocks",
        ),
        (
            "Volta: LeNet's computation",
            f"{volta_training('LeNet', 1).compute_s * 1e3:.2f} ms",
            "speed-up of 2 GPUs, 2.2.2",
        ),
        (
            "NCCL: host and computation take",
            f"{slow_down():.3f} times as long",
            "Table 2.8, GoogLeNet, batch 16",
        ),
    ]
    return StateTable(title="Fitted parameters", columns=("parameter", "value", "fitted to"), rows=rows)


def tree_table() -> StateTable:
    """Copies of LeNet's first dense layer on 8 GPUs of DGX-1 with V100, as they leave."""
    layer = 2
    times = tree_step(volta_training("LeNet", 8)).outcome.times
    copies = [
        (each, name.split())
        for name, each in times.items()
        if name.startswith("copy") and name.split()[2] == str(layer)
    ]
    rows = [
        (f"{each.served_s * 1e6:.0f}", f"{each.finished_s * 1e6:.0f}", what, f"{source} > {target}", leg)
        for each, (_, what, _, source, _, target, _, leg) in sorted(copies)
    ]
    return StateTable(
        title="LeNet on 8 GPUs: copies of its third layer",
        columns=("served, us", "arrived, us", "data", "GPUs", "leg"),
        rows=rows,
    )


def algorithm_table() -> StateTable:
    """Algorithms 1 to 3 for AlexNet on two linked V100."""
    training = volta_training("AlexNet", 2)
    rows = []
    for name in ALGORITHMS:
        step = shared_step(name, volta(), training.network, training.compute_s)
        rows.append(
            (
                name,
                f"{step.step_s * 1e3:.1f}",
                f"{step.to_root / 1e6:.0f}",
                f"{step.from_root / 1e6:.0f}",
                str(step.weight_copies),
                str(step.gradient_copies),
            )
        )
    return StateTable(
        title="AlexNet on two V100 by Algorithms 1 to 3",
        columns=(
            "algorithm",
            "step, ms",
            "MB to GPU 0",
            "MB from GPU 0",
            "copies of weights",
            "of gradients",
        ),
        rows=rows,
    )
