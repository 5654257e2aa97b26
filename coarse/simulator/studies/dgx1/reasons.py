"""Why figures do not agree, by the words of their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from coarse.simulator.studies.study import Comparison

_REASONS: dict[tuple[str, ...], str] = {
    ("Titan, 2 GPUs, computation",): (
        "the work of both GPUs is 31 % (LeNet) and 45 % (MLP) more than that of one, on Titan with Cifar10 alone"
    ),
    ("Cifar10 LeNet, Kepler, 2 GPUs, run",): (
        "run time without copies and computation grows from 1083 to 1604 ms with the second GPU; here it stays"
    ),
    ("MNIST", "P100, 2 GPUs, run"): (
        "one P100 takes 0.9 or 1.4 ms a batch beside copies and computation, two take 0.8 or 0.6; here every "
        "batch takes as long"
    ),
    ("MNIST LeNet, Titan",): (
        "the same 3.4 MB take 297 us here and 381 us with Cifar10; the MLPs, and so the fit, ask for 355"
    ),
    ("Cifar10 MLP, Titan, 2 GPUs, communication",): (
        "copies from the host take longer when both GPUs of the card copy; here the host issues them one by one"
    ),
    ("PTB LSTM", "1 GPU, communication"): (
        "a batch of sentences is 22 KB; the document's 42 to 53 us a step do not depend on the machine's lane"
    ),
    ("ImageNet LeNet", "Kepler"): (
        "17.6 s if the copies of gradients did not overlap with the backward pass"
    ),
    ("ImageNet AlexNet, batch 64, 8 GPUs",): (
        "weights do not depend on the batch, but the document's time beyond computation grows from 177 to 298 ms a "
        "step"
    ),
    ("shared memory over copies", "P100"): (
        "the step is 0.2 ms of computation and two copies here; the document does not say what else its step does"
    ),
    ("synthetic MLP for MNIST",): "482 KB are weights for 20 x 20 pixels; MNIST has 28 x 28",
    ("LeNet, batch 16", "NCCL's overhead"): (
        "2.2.4 names 21.8 % for LeNet with a batch of 16, where Table 2.8 has 16.4 %"
    ),
    ("LeNet", "NCCL's overhead"): (
        "grows with the batch, as the document says for small networks; here its kernels take as long with any batch"
    ),
    ("AlexNet", "NCCL's overhead"): "as for LeNet, but only from 32 to 64",
    ("ResNet", "NCCL's overhead"): "the document's 20.1, 22.9 and 19.3 vary more than 15 % themselves",
    ("LeNet", "memory"): (
        "0.80 GB are three copies of 70 M weights, which MXNet's LeNet has for 224 x 224, not of Table 2.7's 60 K"
    ),
    (
        "Inception-v3",
        "memory",
    ): "the document's 0.29, 0.64 and 0.23 GB have no order, though weights stay the same",
}


def explained(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The comparisons; those that do not agree get the first reason whose words their name has."""
    for each in comparisons:
        if each.agrees:
            yield each
        else:
            reasons = [why for words, why in _REASONS.items() if all(word in each.what for word in words)]
            yield replace(each, reason=(reasons or [""])[0])
