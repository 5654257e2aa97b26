"""Memory and time of a training run by the numbers, before anything is rented. All results are estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coarse.bench.models import NUM_PARAMETERS
from experiments.aws.instances import Gpu, Instance

SUSTAINED = 0.35
"""Share of a GPU's peak that training sustains: assumed."""

START_S = 60
"""Seconds from a run's start to its first step: processes, the model, measuring links. Assumed."""

SETUP_S = 20 * 60
"""Seconds of setup.sh with the driver, and of the reboot. Assumed."""

HOROVOD_S = 15 * 60
"""Seconds to build Horovod: as setup.sh says."""

CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that CUDA, its libraries and their work space need. Assumed."""

_FLOAT32_BYTES = 4
_ADAMW_COPIES = 4  # parameters, gradients and the two moments
_OFFLOADED_COPIES = 2  # parameters and gradients
_GBYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a sample costs.

    Args:
        flops: Floating-point operations of one sample, forward and backward.
        activation_bytes: Bytes that forward saves for backward, of one sample.
        has_tf32: Whether PyTorch's defaults use TF32: for convolutions, not for matrix products.
    """

    flops: float
    activation_bytes: int
    has_tf32: bool


COSTS: Mapping[str, ModelCost] = MappingProxyType(
    {
        # 4.1e9 multiply-adds forward (He et al., 2016), twice that backward.
        "resnet50": ModelCost(flops=3 * 2 * 4.1e9, activation_bytes=85_913_512, has_tf32=True),
        # 6 operations per parameter and token, 384 tokens.
        "bert-large": ModelCost(
            flops=6 * NUM_PARAMETERS["bert-large"] * 384, activation_bytes=1_363_829_776, has_tf32=False
        ),
    }
)
"""Of the models that train on GPUs. Activations are measured on a processor; a test measures them again."""


def memory_bytes(model: str, batch: int, system: str, num_workers: int) -> int:
    """Memory that a worker's GPU needs with AdamW in float32: parameters, state, gradients and activations.

    Args:
        model: One of COSTS.
        batch: Samples of each worker.
        system: As in experiments.aws.train.
        num_workers: Workers of the job, among which FSDP divides parameters and state.
    """
    parameter_bytes = _FLOAT32_BYTES * NUM_PARAMETERS[model]
    copies: float = _OFFLOADED_COPIES if system == "coarse-offload" else _ADAMW_COPIES
    if system == "fsdp":
        copies = _ADAMW_COPIES / num_workers
    return int(copies * parameter_bytes) + batch * COSTS[model].activation_bytes + CONTEXT_BYTES


def step_s(model: str, batch: int, system: str, instance: Instance, num_nodes: int) -> float:
    """Seconds of a step: computation, then communication without overlap, which is the worst case."""
    assert instance.gpu is not None
    computing_s = batch * COSTS[model].flops / (SUSTAINED * 1e12 * _tflops(instance.gpu, model))
    if system == "none":
        return computing_s
    return computing_s + _all_reduce_s(model, instance, num_nodes)


def _tflops(gpu: Gpu, model: str) -> float:
    if COSTS[model].has_tf32 and gpu.tf32_tflops is not None:
        return gpu.tf32_tflops
    return gpu.float32_tflops


def _all_reduce_s(model: str, instance: Instance, num_nodes: int) -> float:
    """A ring over the GPUs' links; with several nodes, over the network if that is slower."""
    assert instance.gpu is not None
    num_workers = num_nodes * instance.num_workers
    gbytes_per_s = instance.gpu.link_gbytes_per_s
    if num_nodes > 1:
        gbytes_per_s = min(gbytes_per_s, instance.network_gbits_per_s / 8)
    moved_bytes = 2 * (num_workers - 1) / num_workers * _FLOAT32_BYTES * NUM_PARAMETERS[model]
    return moved_bytes / (gbytes_per_s * _GBYTE)
