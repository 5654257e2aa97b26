"""The models of `coarse bench train-step`: published architectures, randomly initialised, on random batches.

Imports torch and transformers only when a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_NUM_BATCHES = 8
_NUM_CLASSES = 1000
_DIGIT_CLASSES = 10

NUM_PARAMETERS: Mapping[str, int] = MappingProxyType(
    {
        "bert-large": 334_094_338,
        "bert-base": 108_893_186,
        "bert-small": 28_502_018,
        "bert-tiny": 35_714,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "alexnet": 61_100_840,
        "vgg16": 138_357_544,
        "resnet50": 25_557_032,
        "resnet152": 60_192_808,
        "digits": 151_306,
    }
)
"""Number of parameters of each model, to check memory before one is built."""

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A module, its input batches, and its loss.

    Args:
        module: The torch module.
        batches: Batches, used in turn.
        loss: Runs `module`, or a wrapper of it, on a batch and returns the scalar loss.
    """

    module: Any
    batches: tuple[Batch, ...]
    loss: Callable[[Any, Batch], Any]


def build_workload(model: str, *, batch: int, sequence: int, rank: int) -> Workload:
    """Builds a model of MODELS; parameters and batches depend only on the rank.

    Args:
        batch: Samples in each batch.
        sequence: Tokens in each sample, for text models.

    Raises:
        ValueError: If `model` is not in MODELS.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    torch = importlib.import_module("torch")
    torch.manual_seed(rank)
    return MODELS[model](torch, batch, sequence)


def _bert(torch: Any, batch: int, sequence: int, **shape: int) -> Workload:
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(**shape, max_position_embeddings=max(512, sequence))

    def make_batch() -> Batch:
        return {
            "input_ids": torch.randint(config.vocab_size, (batch, sequence)),
            "start_positions": torch.randint(sequence, (batch,)),
            "end_positions": torch.randint(sequence, (batch,)),
        }

    return Workload(
        module=transformers.BertForQuestionAnswering(config),
        batches=_repeat(make_batch),
        loss=_loss_of_transformers,
    )


def _bert_base(torch: Any, batch: int, sequence: int) -> Workload:
    return _bert(torch, batch, sequence)


def _bert_large(torch: Any, batch: int, sequence: int) -> Workload:
    shape = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    return _bert(torch, batch, sequence, **shape)


def _bert_small(torch: Any, batch: int, sequence: int) -> Workload:
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    return _bert(torch, batch, sequence, **shape)


def _bert_tiny(torch: Any, batch: int, sequence: int) -> Workload:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return _bert(torch, batch, sequence, vocab_size=64, **shape)


def _gpt2(torch: Any, batch: int, sequence: int, **shape: int) -> Workload:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(**shape, n_positions=max(1024, sequence))

    def make_batch() -> Batch:
        tokens = torch.randint(config.vocab_size, (batch, sequence))
        return {"input_ids": tokens, "labels": tokens}

    return Workload(
        module=transformers.GPT2LMHeadModel(config), batches=_repeat(make_batch), loss=_loss_of_transformers
    )


def _gpt2_medium(torch: Any, batch: int, sequence: int) -> Workload:
    return _gpt2(torch, batch, sequence, n_embd=1024, n_layer=24, n_head=16)


def _gpt2_large(torch: Any, batch: int, sequence: int) -> Workload:
    return _gpt2(torch, batch, sequence, n_embd=1280, n_layer=36, n_head=20)


def _image_classifier(torch: Any, module: Any, loss: Callable[[Any, Batch], Any], batch: int) -> Workload:
    def make_batch() -> Batch:
        return {
            "pixel_values": torch.randn(batch, 3, 224, 224),
            "labels": torch.randint(_NUM_CLASSES, (batch,)),
        }

    return Workload(module=module, batches=_repeat(make_batch), loss=loss)


def _resnet(torch: Any, batch: int, **shape: Any) -> Workload:
    transformers = importlib.import_module("transformers")
    config = transformers.ResNetConfig(num_labels=_NUM_CLASSES, **shape)
    module = transformers.ResNetForImageClassification(config)
    return _image_classifier(torch, module, _loss_of_transformers, batch)


def _resnet50(torch: Any, batch: int, sequence: int) -> Workload:
    return _resnet(torch, batch)  # the defaults of ResNetConfig


def _resnet152(torch: Any, batch: int, sequence: int) -> Workload:
    return _resnet(torch, batch, depths=[3, 8, 36, 3])


def _alexnet(torch: Any, batch: int, sequence: int) -> Workload:
    """Krizhevsky's second version, of 2014: one tower."""
    channels = (64, 192, 384, 256, 256)
    kernels = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))  # size, stride, padding
    layers = _convolutions(torch, channels, kernels, pooled_after=(0, 1, 4), pool=(3, 2))
    return _dense_classifier(torch, layers, num_features=256 * 6 * 6, batch=batch)


def _vgg16(torch: Any, batch: int, sequence: int) -> Workload:
    """Configuration D of Simonyan and Zisserman."""
    channels = (64, 64, 128, 128, 256, 256, 256, *(512,) * 6)
    layers = _convolutions(
        torch, channels, ((3, 1, 1),) * len(channels), pooled_after=(1, 3, 6, 9, 12), pool=(2, 2)
    )
    return _dense_classifier(torch, layers, num_features=512 * 7 * 7, batch=batch)


def _convolutions(
    torch: Any,
    channels: Sequence[int],
    kernels: Sequence[tuple[int, int, int]],
    *,
    pooled_after: Collection[int],
    pool: tuple[int, int],
) -> list[Any]:
    nn, layers = torch.nn, list[Any]()
    for number, (size, stride, padding) in enumerate(kernels):
        before = channels[number - 1] if number else 3
        layers += [nn.Conv2d(before, channels[number], size, stride, padding), nn.ReLU()]
        if number in pooled_after:
            layers.append(nn.MaxPool2d(*pool))
    return layers


def _dense_classifier(torch: Any, layers: Sequence[Any], *, num_features: int, batch: int) -> Workload:
    nn = torch.nn
    module = nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(num_features, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, _NUM_CLASSES),
    )

    def loss(wrapped: Any, fed: Batch) -> Any:
        return nn.functional.cross_entropy(wrapped(fed["pixel_values"]), fed["labels"])

    return _image_classifier(torch, module, loss, batch)


def _digits(torch: Any, batch: int, sequence: int) -> Workload:
    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, _DIGIT_CLASSES),
    )

    def make_batch() -> Batch:
        return {"pixels": torch.randn(batch, 1, 8, 8), "labels": torch.randint(_DIGIT_CLASSES, (batch,))}

    def loss(wrapped: Any, fed: Batch) -> Any:
        return nn.functional.cross_entropy(wrapped(fed["pixels"]), fed["labels"])

    return Workload(module=module, batches=_repeat(make_batch), loss=loss)


def _repeat(make_batch: Callable[[], Batch]) -> tuple[Batch, ...]:
    return tuple(make_batch() for _ in range(_NUM_BATCHES))


def _loss_of_transformers(wrapped: Any, fed: Batch) -> Any:
    return wrapped(**fed).loss


MODELS: Mapping[str, Callable[[Any, int, int], Workload]] = MappingProxyType(
    {
        "bert-large": _bert_large,
        "bert-base": _bert_base,
        "bert-small": _bert_small,
        "bert-tiny": _bert_tiny,
        "gpt2-medium": _gpt2_medium,
        "gpt2-large": _gpt2_large,
        "alexnet": _alexnet,
        "vgg16": _vgg16,
        "resnet50": _resnet50,
        "resnet152": _resnet152,
        "digits": _digits,
    }
)
"""Builder of each model, by its name on the command line."""
