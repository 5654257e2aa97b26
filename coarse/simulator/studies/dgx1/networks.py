"""The networks that the document trains: weights and arrays of each layer, and its share of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = 4
"""float32 throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer with weights.

    Args:
        weights: Their number.
        arrays: Arrays that hold them, each of which is copied by itself.
        work: Its part of the computation, in any unit.
    """

    weights: float
    arrays: int = 2
    work: float = 1.0

    @property
    def nbytes(self) -> float:
        """Bytes of its weights, and of their gradients."""
        return ITEM_BYTES * self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network.

    Args:
        name: As in the document.
        layers: In the order of the forward pass.
        sample_bytes: Bytes of one sample of the training data.
    """

    name: str
    layers: Sequence[Layer]
    sample_bytes: float

    @property
    def nbytes(self) -> float:
        """Bytes of all weights."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def num_arrays(self) -> int:
        """Arrays of all layers."""
        return sum(layer.arrays for layer in self.layers)


def _image_bytes(side: int, channels: int = 3) -> int:
    return ITEM_BYTES * channels * side**2


def _dense(inputs: float, outputs: float) -> Layer:
    return Layer(weights=outputs * (inputs + 1), work=outputs * inputs)


def mlp(side: int, channels: int) -> Network:
    """Layers of 128, 64 and 10 neurons, as MXNet's example."""
    inputs = channels * side**2
    layers = [_dense(inputs, 128), _dense(128, 64), _dense(64, 10)]
    return Network(name="MLP", layers=layers, sample_bytes=ITEM_BYTES * inputs)


def synthetic_mlp(inputs: int) -> Network:
    """Three layers of 128, 64 and 1000 neurons without biases."""
    sizes = [(inputs, 128), (128, 64), (64, 1000)]
    layers = [Layer(weights=one * other, arrays=1, work=one * other) for one, other in sizes]
    return Network(name="synthetic MLP", layers=layers, sample_bytes=ITEM_BYTES * inputs)


def lenet(side: int, channels: int, num_classes: int = 10) -> Network:
    """MXNet's example: 20 and 50 filters of 5 x 5, each pooled by 2, then 500 neurons.

    The first dense layer grows with the image, to 70 M weights for 224 x 224.
    """
    one = side - 4
    two = one // 2 - 4
    layers = [
        Layer(weights=20 * (25 * channels + 1), work=20 * 25 * channels * one**2),
        Layer(weights=50 * (25 * 20 + 1), work=50 * 25 * 20 * two**2),
        _dense(50 * (two // 2) ** 2, 500),
        _dense(500, num_classes),
    ]
    return Network(name="LeNet", layers=layers, sample_bytes=_image_bytes(side, channels))


def lstm() -> Network:
    """MXNet's example: 10,000 words, 200 numbers for each, two cells of 200; 21 words in a sentence."""
    words, width = 10_000, 200
    cell = Layer(weights=2 * (width + 1) * 4 * width, arrays=4, work=2 * width * 4 * width)
    layers = [Layer(weights=words * width, arrays=1, work=0.0), cell, cell, _dense(width, words)]
    return Network(name="LSTM", layers=layers, sample_bytes=2 * 21 * ITEM_BYTES)


_ALEXNET_WEIGHTS = (34_944, 307_456, 885_120, 663_936, 442_624, 37_752_832, 16_781_312, 4_097_000)
_ALEXNET_MACS = (105.4, 223.9, 149.5, 112.1, 74.8, 37.7, 16.8, 4.1)  # million, for an image


def alexnet(weights: float) -> Network:
    """The published layers, scaled to `weights`."""
    scale = weights / sum(_ALEXNET_WEIGHTS)
    layers = [
        Layer(weights=scale * each, work=macs)
        for each, macs in zip(_ALEXNET_WEIGHTS, _ALEXNET_MACS, strict=True)
    ]
    return Network(name="AlexNet", layers=layers, sample_bytes=_image_bytes(224))


def _even(name: str, num_layers: int, weights: float, num_arrays: int, side: int) -> Network:
    """Layers of equal size and work; the first ones have the odd arrays."""
    most, more = divmod(num_arrays, num_layers)
    layers = [
        Layer(weights=weights / num_layers, arrays=most + (number < more)) for number in range(num_layers)
    ]
    return Network(name=name, layers=layers, sample_bytes=_image_bytes(side))


_GOOGLENET_ARRAYS = 2 * (3 + 9 * 6) + 2  # convolutions, 6 in each inception, with biases
_INCEPTION_ARRAYS = 3 * 94 + 2  # 94 convolutions, each with a batch norm's scale and shift


def googlenet(weights: float) -> Network:
    """22 layers."""
    return _even("GoogLeNet", 22, weights, _GOOGLENET_ARRAYS, 224)


def inception_v3(weights: float) -> Network:
    """48 layers."""
    return _even("Inception-v3", 48, weights, _INCEPTION_ARRAYS, 299)


def resnet(weights: float, convolutions: int, side: int = 299) -> Network:
    """110 layers; each convolution has weights and a batch norm's scale and shift."""
    return _even("ResNet", 110, weights, 3 * convolutions + 2, side)


EARLY = (lenet(224, 3, 1000), alexnet(61e6), googlenet(7e6), resnet(1.7e6, 109))
"""Networks for ImageNet before Volta: weights of Table 2.3, but LeNet's as in MXNet's example for such images."""

CIFAR_RESNET = resnet(1.7e6, 109, side=28)

VOLTA = (
    _even("LeNet", 4, 60e3, 8, 32),
    alexnet(60e6),
    resnet(55e6, 107),
    googlenet(4e6),
    inception_v3(24e6),
)
"""Networks on Volta: Table 2.7, which has other weights than Table 2.3. 60 K are LeNet's for images of 32 x 32."""
