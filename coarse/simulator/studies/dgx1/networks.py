"""The networks that the document trains: weights and arrays of each layer, and its share of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ITEM_BYTES = 4
"""float32 throughout."""

IMAGE_SIDE, LARGE_IMAGE_SIDE = 224, 299
"""Pixels of ImageNet's images; ResNet and Inception-v3 take the large ones (2.2.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer with weights.

    Args:
        sizes: Weights of each of its arrays; each array is copied by itself.
        work: Its part of the computation, in any unit.
    """

    sizes: Sequence[float]
    work: float = 1.0

    @property
    def weights(self) -> float:
        """Of all arrays."""
        return sum(self.sizes)

    @property
    def num_arrays(self) -> int:
        """Arrays that hold its weights."""
        return len(self.sizes)

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
        return sum(layer.num_arrays for layer in self.layers)

    @property
    def work(self) -> float:
        """Of all layers."""
        return sum(layer.work for layer in self.layers)


def _image_bytes(side: int, channels: int = 3) -> int:
    return ITEM_BYTES * channels * side**2


def _dense(inputs: int, outputs: int) -> Layer:
    return Layer(sizes=(outputs * inputs, outputs), work=outputs * inputs)


def mlp(side: int, channels: int) -> Network:
    """Layers of 128, 64 and 10 neurons, as MXNet's example."""
    inputs = channels * side**2
    layers = [_dense(inputs, 128), _dense(128, 64), _dense(64, 10)]
    return Network(name="MLP", layers=layers, sample_bytes=ITEM_BYTES * inputs)


def synthetic_mlp(inputs: int) -> Network:
    """Three layers of 128, 64 and 1000 neurons without biases."""
    sizes = [(inputs, 128), (128, 64), (64, 1000)]
    layers = [Layer(sizes=(one * other,), work=one * other) for one, other in sizes]
    return Network(name="synthetic MLP", layers=layers, sample_bytes=ITEM_BYTES * inputs)


class Convolution(NamedTuple):
    """A convolution.

    Args:
        inputs, outputs: Channels.
        taps: Pixels of its filters, e.g. 9.
        side: Pixels of one side of its output.
    """

    inputs: int
    outputs: int
    taps: int
    side: int


def _block(convolutions: Iterable[Convolution], vectors: int = 1) -> Layer:
    """A layer of convolutions, each with `vectors` arrays of a value per output: 1 bias, or scale and shift."""
    each = list(convolutions)
    sizes = [
        size for one in each for size in (one.inputs * one.outputs * one.taps, *(one.outputs,) * vectors)
    ]
    work = sum(one.inputs * one.outputs * one.taps * one.side**2 for one in each)
    return Layer(sizes=sizes, work=work)


def lenet(side: int, channels: int, num_classes: int = 10) -> Network:
    """MXNet's example: 20 and 50 filters of 5 x 5, each pooled by 2, then 500 neurons.

    The first dense layer grows with the image, to 70 M weights for 224 x 224.
    """
    one = side - 4
    two = one // 2 - 4
    layers = [
        _block([Convolution(channels, 20, 25, one)]),
        _block([Convolution(20, 50, 25, two)]),
        _dense(50 * (two // 2) ** 2, 500),
        _dense(500, num_classes),
    ]
    return Network(name="LeNet", layers=layers, sample_bytes=_image_bytes(side, channels))


def lstm() -> Network:
    """MXNet's example: 10,000 words, 200 numbers for each, two cells of 200; 21 words in a sentence."""
    words, width = 10_000, 200
    products = 4 * width * width
    cell = Layer(sizes=(products, 4 * width) * 2, work=2 * products)
    layers = [Layer(sizes=(words * width,), work=0.0), cell, cell, _dense(width, words)]
    return Network(name="LSTM", layers=layers, sample_bytes=2 * 21 * ITEM_BYTES)


def alexnet() -> Network:
    """MXNet's example: the published layers, but not in two columns, and images without a border."""
    shapes = ((3, 96, 121, 54), (96, 256, 25, 26), (256, 384, 9, 12), (384, 384, 9, 12), (384, 256, 9, 12))
    layers = [
        *(_block([Convolution(*shape)]) for shape in shapes),
        _dense(256 * 5 * 5, 4096),
        _dense(4096, 4096),
        _dense(4096, 1000),
    ]
    return Network(name="AlexNet", layers=layers, sample_bytes=_image_bytes(IMAGE_SIDE))


def even(name: str, num_layers: int, weights: float, num_arrays: int, side: int) -> Network:
    """Layers of equal size and work; the first ones have the odd arrays."""
    most, more = divmod(num_arrays, num_layers)
    arrays = [most + (number < more) for number in range(num_layers)]
    layers = [Layer(sizes=(weights / num_layers / each,) * each) for each in arrays]
    return Network(name=name, layers=layers, sample_bytes=_image_bytes(side))


# Of an inception: side, inputs; filters of 1 x 1, of 1 x 1 before 3 x 3, of 3 x 3, the same for 5 x 5, behind a pool.
_GOOGLENET_INCEPTIONS = (
    (28, 192, 64, 96, 128, 16, 32, 32),
    (28, 256, 128, 128, 192, 32, 96, 64),
    (14, 480, 192, 96, 208, 16, 48, 64),
    (14, 512, 160, 112, 224, 24, 64, 64),
    (14, 512, 128, 128, 256, 24, 64, 64),
    (14, 512, 112, 144, 288, 32, 64, 64),
    (14, 528, 256, 160, 320, 32, 128, 128),
    (7, 832, 256, 160, 320, 32, 128, 128),
    (7, 832, 384, 192, 384, 48, 128, 128),
)


def googlenet() -> Network:
    """As published, without its auxiliary outputs."""
    stem = (Convolution(3, 64, 49, 112), Convolution(64, 64, 1, 56), Convolution(64, 192, 9, 56))
    inceptions = [
        _ways(side, inputs, [(a, 1)], [(b, 1), (c, 9)], [(d, 1), (e, 25)], [(f, 1)])
        for side, inputs, a, b, c, d, e, f in _GOOGLENET_INCEPTIONS
    ]
    layers = [*(_block([each]) for each in stem), *map(_block, inceptions), _dense(1024, 1000)]
    return Network(name="GoogLeNet", layers=layers, sample_bytes=_image_bytes(IMAGE_SIDE))


def _ways(side: int, inputs: int, *ways: Sequence[tuple[int, int]]) -> Iterator[Convolution]:
    """Ways from the same inputs; each has the outputs and taps of one convolution after the other."""
    for way in ways:
        channels = inputs
        for outputs, taps in way:
            yield Convolution(channels, outputs, taps, side)
            channels = outputs


def inception_v3() -> Network:
    """As published, without its auxiliary output; each convolution has scale and shift."""
    blocks = [*_inception_stem(), *_inceptions()]
    layers = [*(_block(each, vectors=2) for each in blocks), _dense(2048, 1000)]
    return Network(name="Inception-v3", layers=layers, sample_bytes=_image_bytes(LARGE_IMAGE_SIDE))


def _inception_stem() -> Iterator[Iterable[Convolution]]:
    shapes = ((3, 32, 9, 149), (32, 32, 9, 147), (32, 64, 9, 147), (64, 80, 1, 73), (80, 192, 9, 71))
    yield from ([Convolution(*shape)] for shape in shapes)


def _inceptions() -> Iterator[Iterable[Convolution]]:
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        yield _ways(35, inputs, [(64, 1)], [(48, 1), (64, 25)], [(64, 1), (96, 9), (96, 9)], [(pooled, 1)])
    yield (
        *_ways(17, 288, [(384, 9)]),
        *_ways(35, 288, [(64, 1), (96, 9)]),
        Convolution(96, 96, 9, 17),
    )
    for n in (128, 160, 160, 192):
        yield _ways(
            17,
            768,
            [(192, 1)],
            [(n, 1), (n, 7), (192, 7)],
            [(n, 1), (n, 7), (n, 7), (n, 7), (192, 7)],
            [(192, 1)],
        )
    yield (
        *_ways(17, 768, [(192, 1)], [(192, 1), (192, 7), (192, 7)]),
        Convolution(192, 320, 9, 8),
        Convolution(192, 192, 9, 8),
    )
    for inputs in (1280, 2048):
        ways = _ways(8, inputs, [(320, 1)], [(384, 1), (384, 3)], [(448, 1), (384, 9), (384, 3)], [(192, 1)])
        yield (*ways, *[Convolution(384, 384, 3, 8)] * 2)


def resnet_50() -> Network:
    """As published; each convolution has scale and shift."""
    blocks = [[Convolution(3, 64, 49, 150)], *_residual_units()]
    layers = [*(_block(each, vectors=2) for each in blocks), _dense(2048, 1000)]
    return Network(name="ResNet", layers=layers, sample_bytes=_image_bytes(LARGE_IMAGE_SIDE))


def _residual_units() -> Iterator[Sequence[Convolution]]:
    inputs = 64
    for units, width, side in ((3, 64, 75), (4, 128, 38), (6, 256, 19), (3, 512, 10)):
        for unit in range(units):
            shortcut = [(4 * width, 1)] if unit == 0 else []
            yield tuple(_ways(side, inputs, [(width, 1), (width, 9), (4 * width, 1)], shortcut))
            inputs = 4 * width


def resnet_110(side: int) -> Network:
    """As published for Cifar10: 54 units of two convolutions, whose shortcuts have no weights."""
    blocks = [[Convolution(3, 16, 9, side)], *_basic_units(side)]
    layers = [*(_block(each, vectors=2) for each in blocks), _dense(64, 10)]
    return Network(name="ResNet", layers=layers, sample_bytes=_image_bytes(side))


def _basic_units(side: int) -> Iterator[Sequence[Convolution]]:
    inputs = 16
    for width, stride in ((16, 1), (32, 2), (64, 4)):
        for _ in range(18):
            yield tuple(_ways(-(-side // stride), inputs, [(width, 9), (width, 9)]))
            inputs = width


EARLY = (lenet(IMAGE_SIDE, 3, 1000), alexnet(), googlenet(), resnet_50())
"""Networks for ImageNet before Volta."""

CIFAR_RESNET = resnet_110(28)

VOLTA = (even("LeNet", 4, 60e3, 8, 32), alexnet(), resnet_50(), googlenet(), inception_v3())
"""Networks on Volta. LeNet has the 60 K weights of Table 2.7, which it has for images of 32 x 32."""
