"""ImageFolder: classes by name, pictures as tensors, complete shares, errors that name the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from image_folder import (
    ImageFolder,
    Shard,
    centre_crop,
    draw_folder,
    folder_of_pictures,
    random_crop,
    to_tensor,
)
from job import Job
from PIL import Image


def test_classes_are_the_folders_by_name(tmp_path: Path) -> None:
    draw_folder(tmp_path / "train", pictures_per_class=2, seed=0)
    folder = ImageFolder(tmp_path / "train", centre_crop(32))
    assert folder.classes == sorted(folder.classes)
    assert len(folder.classes) == 6
    assert [label for _, label in (folder[i] for i in range(len(folder)))] == [i // 2 for i in range(12)]


def test_drawing_is_the_same_for_a_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        draw_folder(tmp_path / name, pictures_per_class=1, seed=seed)
    a, b, c = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.JPEG")}
        for name in "abc"
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize("make", [random_crop, centre_crop])
@pytest.mark.parametrize("shape", [(1, 200), (200, 1), (40, 60)])
def test_transforms_give_the_size_asked_for(make, shape: tuple[int, int]) -> None:
    assert make(24)(Image.new("RGB", shape)).shape == (3, 24, 24)


def test_to_tensor_is_normalised_channels_first() -> None:
    pixels = to_tensor(Image.fromarray(np.full((1, 2, 3), [255, 0, 0], dtype=np.uint8)))
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    torch.testing.assert_close(pixels, torch.tensor(expected).view(3, 1, 1).expand(3, 1, 2))


def test_grey_and_transparent_pictures_are_read(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    Image.new("L", (9, 9)).save(tmp_path / "one" / "a.png")
    Image.new("RGBA", (9, 9)).save(tmp_path / "one" / "b.png")
    folder = ImageFolder(tmp_path, centre_crop(8))
    assert [folder[i][0].shape for i in range(2)] == [(3, 8, 8)] * 2


def test_errors_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is no folder"):
        ImageFolder(tmp_path / "nothing", to_tensor)
    with pytest.raises(ValueError, match="holds no folders"):
        ImageFolder(tmp_path, to_tensor)
    (tmp_path / "owls").mkdir()
    with pytest.raises(ValueError, match=r"owls holds no picture \(.jpeg, .jpg, .png\)"):
        ImageFolder(tmp_path, to_tensor)
    (tmp_path / "owls" / "a.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"owls/a.jpg cannot be read as a picture"):
        ImageFolder(tmp_path, to_tensor)[0]


@pytest.mark.parametrize(("length", "world_size"), [(10, 1), (10, 3), (2, 4)])
def test_shards_are_a_partition_in_every_epoch(length: int, world_size: int) -> None:
    shards = [Shard(Job(rank=rank, world_size=world_size), length, seed=3) for rank in range(world_size)]
    orders = []
    for epoch in range(2):
        for shard in shards:
            shard.epoch = epoch
        parts = [list(shard) for shard in shards]
        assert sorted(index for part in parts for index in part) == list(range(length))
        assert [len(part) for part in parts] == [len(shard) for shard in shards]
        orders.append(parts)
    assert length < 4 or orders[0] != orders[1]


def test_drawn_folder_is_gone_afterwards(alone: Job) -> None:
    with folder_of_pictures(None, alone) as folder:
        assert (folder / "train").is_dir()
        assert (folder / "val").is_dir()
    assert not folder.exists()
    with pytest.raises(KeyError), folder_of_pictures(None, alone) as folder:
        raise KeyError
    assert not folder.exists()
