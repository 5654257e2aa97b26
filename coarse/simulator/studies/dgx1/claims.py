"""The document's statements without figures, and the simulated answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coarse.simulator.studies.dgx1.figures import EIGHT_GPUS, NCCL_GAINS, P100_TFLOPS, PASCAL
from coarse.simulator.studies.dgx1.networks import LARGE_IMAGE_SIDE, Network, resnet_50, resnet_110
from coarse.simulator.studies.dgx1.parameters import STEPS, eight_gpus_s, machine
from coarse.simulator.studies.dgx1.training import tree_step
from coarse.simulator.studies.dgx1.volta import nccl_gain, network, volta_training
from coarse.simulator.studies.study import Claim

_IMAGES = 256_000  # of an epoch on Volta


def claims() -> Iterator[Claim]:
    """All of them."""
    yield from _alexnet_falls()
    yield _far_gpu_waits()
    yield _two_links_are_faster()
    yield _copies_of_an_epoch()
    yield _resnet_has_110_layers()
    yield from _faster_way()


def _alexnet_falls() -> Iterator[Claim]:
    for batch in (32, 64):
        four_s, eight_s = (eight_gpus_s("AlexNet", batch, num_gpus, machine(PASCAL)) for num_gpus in (4, 8))
        yield Claim(
            what=f"AlexNet with a batch of {batch} is slower on 8 GPUs than on 4",
            source="Table 2.6",
            holds=eight_s > four_s,
            found=f"{eight_s:.1f} s on 8, {four_s:.1f} s on 4",
            reason=""
            if eight_s > four_s
            else "as its figure for 8 GPUs: the document's copies grow with the batch",
        )


def _far_gpu_waits() -> Claim:
    training = volta_training("AlexNet", 4)
    layers = training.network.layers
    largest = max(range(len(layers)), key=lambda number: layers[number].weights)
    times = tree_step(training).outcome.times
    copies = {gpu: times[f"copy weights {largest} 0 > {gpu} leg 0"] for gpu in (1, 2, 3)}
    took = {gpu: each.last_byte_s - each.first_byte_s for gpu, each in copies.items()}
    return Claim(
        what="GPU 3, whose link has half the rate, waits longer for weights than GPUs 1 and 2",
        source="2.2.2",
        holds=took[3] > 1.5 * max(took[1], took[2]) and copies[3].finished_s > copies[2].finished_s,
        found="AlexNet's largest layer: "
        + ", ".join(f"{took[gpu] * 1e3:.1f} ms to GPU {gpu}" for gpu in took),
    )


def _two_links_are_faster() -> Claim:
    training = volta_training("ResNet", 8)
    relayed_s = tree_step(training).step_s
    staged_s = tree_step(replace(training, machine=replace(training.machine, is_relaying=False))).step_s
    return Claim(
        what="copies to GPUs without a link are slower through the host than over two links",
        source="2.2.2",
        holds=staged_s > relayed_s,
        found=f"ResNet on 8 GPUs: {staged_s * 1e3:.0f} ms a step through the host, {relayed_s * 1e3:.0f} over links",
    )


def _copies_of_an_epoch() -> Claim:
    gbytes = {}
    for num_gpus in (4, 8):
        outcome = tree_step(volta_training("GoogLeNet", num_gpus)).outcome
        crossed = sum(nbytes for bucket, nbytes in outcome.bucket_bytes.items() if bucket.startswith("gpu"))
        gbytes[num_gpus] = crossed * _IMAGES / (16 * num_gpus) / 1e9
    return Claim(
        what="copies between GPUs are hundreds of GB of an epoch on 4 and 8 GPUs",
        source="2.2.3",
        holds=all(100 <= each < 1000 for each in gbytes.values()),
        found="GoogLeNet, batch 16: " + ", ".join(f"{each:.0f} GB on {num}" for num, each in gbytes.items()),
    )


def _resnet_has_110_layers() -> Claim:
    batch = 32
    images_per_s = batch / (EIGHT_GPUS["ResNet"][batch][0] / STEPS)

    def tflops(network: Network) -> float:
        """A multiplication and an addition each; the backward pass computes two products for one."""
        return 2 * 3 * network.work * images_per_s / 1e12

    deep, usual = tflops(resnet_110(LARGE_IMAGE_SIDE)), tflops(resnet_50())
    return Claim(
        what="ResNet has 110 layers for ImageNet",
        source="Tables 2.3 and 2.7",
        holds=deep <= P100_TFLOPS,
        found=f"{images_per_s:.0f} images/s on one P100 are {deep:.1f} of its {P100_TFLOPS:.1f} TFLOPS with the 110 "
        f"layers for Cifar10, {usual:.1f} with ResNet-50",
        reason="MXNet's example for ImageNet builds 50 layers by default, 110 only for Cifar10 (recalled)",
    )


def _faster_way() -> Iterator[Claim]:
    for name in ("LeNet", "AlexNet"):
        gains = {num_gpus: nccl_gain(name, num_gpus) for num_gpus in (2, 4, 8)}
        holds = max(gains.values()) < 1
        yield Claim(
            what=f"the tree is faster than NCCL for {name}, on 2 to 8 GPUs",
            source="2.2.2",
            holds=holds,
            found=_gains(gains),
            reason=""
            if holds
            else "copies of the tree follow each other, where NCCL's chain sends 240 MB once",
        )
    for name in NCCL_GAINS:
        gains = {num_gpus: nccl_gain(name, num_gpus) for num_gpus in (4, 8)}
        holds = min(gains.values()) > 1
        arrays = network(name).num_arrays
        yield Claim(
            what=f"NCCL is faster than the tree for {name}, on 4 and 8 GPUs",
            source="2.2.2",
            holds=holds,
            found=_gains(gains),
            reason=""
            if holds
            else f"the tree's copies of {arrays} arrays take less than NCCL's overhead on host and computation",
        )
    pairs = {name: nccl_gain(name, 2) for name in NCCL_GAINS}
    yield Claim(
        what="with 2 GPUs NCCL gains nothing",
        source="2.2.3",
        holds=max(pairs.values()) < 1,
        found=", ".join(f"{name} {gain:.2f}" for name, gain in pairs.items()),
    )


def _gains(gains: dict[int, float]) -> str:
    return "NCCL over tree: " + ", ".join(f"{gain:.2f} on {num_gpus}" for num_gpus, gain in gains.items())
