"""Pictures in folders, one for each class, in ImageNet's layout; can also draw a small data set of this layout.

<root>/train/<class>/*.JPEG    and    <root>/val/<class>/*.JPEG
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, UnidentifiedImageError
from torch.utils.data import Dataset, Sampler

from job import Job, broadcast_text

SUFFIXES = {".jpeg", ".jpg", ".png"}
CHANNEL_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # from ImageNet's training pictures
CHANNEL_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
SHAPES = ("disc", "square", "triangle")
COLOURS = {"red": (200, 40, 40), "blue": (40, 60, 200)}

Transform = Callable[[Image.Image], torch.Tensor]


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The pictures below `folder`, sorted by name. A class's label is the position of its folder, sorted by name.

    Raises:
        ValueError: If the folder does not exist or has no classes, or if a class has no picture. A file that
            is not a picture raises an error when it is read.
    """

    def __init__(self, folder: Path, transform: Transform) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; expected one folder of pictures for each class in it")
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if not self.classes:
            raise ValueError(f"{folder} holds no folders; expected one for each class")
        self._transform = transform
        self._samples = [
            (path, label) for label, name in enumerate(self.classes) for path in _pictures(folder / name)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        try:
            with Image.open(path) as image:
                return self._transform(image.convert("RGB")), label
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{path} cannot be read as a picture: {error}") from None


def _pictures(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} holds no picture ({', '.join(sorted(SUFFIXES))})")
    return paths


class Shard(Sampler[int]):
    """This worker's share of `length` samples, reshuffled in every epoch.

    Unlike DistributedSampler it repeats no samples to make the shares equal. Shares differ by up to one sample,
    so workers may differ by one step.
    """

    def __init__(self, job: Job, length: int, *, seed: int) -> None:
        self._job, self._length, self._seed = job, length, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(range(self._job.rank, self._length, self._job.world_size))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[self._job.rank :: self._job.world_size].tolist())


def random_crop(size: int) -> Transform:
    """A random part of a picture (8 to 100 % of it, 3:4 to 4:3), scaled to `size`, sometimes mirrored."""

    def transform(image: Image.Image) -> torch.Tensor:
        area = image.width * image.height * float(torch.empty(()).uniform_(0.08, 1.0))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        width = min(image.width, max(1, round(math.sqrt(area * ratio))))
        height = min(image.height, max(1, round(math.sqrt(area / ratio))))
        left = int(torch.randint(image.width - width + 1, ()))
        top = int(torch.randint(image.height - height + 1, ()))
        part = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        return to_tensor(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else part)

    return transform


def centre_crop(size: int) -> Transform:
    """The centre of the picture, after scaling its shorter side to 8/7 of `size` (256 for 224)."""

    def transform(image: Image.Image) -> torch.Tensor:
        side = min(image.width, image.height) * 7 / 8
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        return to_tensor(image.resize((size, size), Image.Resampling.BILINEAR, box))

    return transform


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB picture as a normalised float32 tensor [3, height, width]."""
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)) / 255
    return (pixels.permute(2, 0, 1) - CHANNEL_MEAN) / CHANNEL_STD


@contextmanager
def folder_of_pictures(given: Path | None, job: Job) -> Iterator[Path]:
    """The folder `given`, or a small one that worker 0 draws and removes at the end; only for one node."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="coarse-pictures-") if job.rank == 0 else _nothing() as drawn:
        if job.rank == 0:
            draw_folder(Path(drawn) / "train", pictures_per_class=40, seed=0)
            draw_folder(Path(drawn) / "val", pictures_per_class=10, seed=1)
        yield Path(broadcast_text(drawn))
        dist.barrier()  # all workers have finished reading


@contextmanager
def _nothing() -> Iterator[str]:
    yield ""


def draw_folder(folder: Path, *, pictures_per_class: int, seed: int, side: int = 72) -> None:
    """Draws shapes of two colours on noise, one class for each shape and colour; the same for the same seed."""
    generator = np.random.default_rng(seed)
    for shape in SHAPES:
        for colour, rgb in COLOURS.items():
            target = folder / f"{colour}-{shape}"
            target.mkdir(parents=True)
            for number in range(pictures_per_class):
                _draw(shape, rgb, side, generator).save(target / f"{number:04d}.JPEG", quality=90)


def _draw(shape: str, rgb: tuple[int, int, int], side: int, generator: np.random.Generator) -> Image.Image:
    image = Image.fromarray(generator.integers(90, 166, (side, side, 3), dtype=np.uint8))
    pen = ImageDraw.Draw(image)
    radius = float(generator.uniform(0.2, 0.4)) * side
    x, y = generator.uniform(radius, side - radius, 2).tolist()
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "disc":
        pen.ellipse(box, fill=rgb)
    elif shape == "square":
        pen.rectangle(box, fill=rgb)
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=rgb)
    return image
