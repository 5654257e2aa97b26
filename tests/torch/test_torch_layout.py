"""Copies of tensors between GPUs, checked through the calls to torch, without these GPUs."""

from __future__ import annotations

import torch

from coarse.torch.gradients.layout import copy_all


class Placed(torch.Tensor):
    """A tensor of the host that says it is on another device, and refuses copies from a third one."""

    where = torch.device("cpu")

    @classmethod
    def on(cls, where: str, values: list[float]) -> Placed:
        tensor = torch.tensor(values).as_subclass(cls)
        tensor.where = torch.device(where)
        return tensor

    @property
    def device(self):
        return self.where

    @property
    def is_cpu(self):
        return self.where.type == "cpu"

    def detach(self):
        return self

    def cpu(self):
        return Placed.on("cpu", self.tolist())

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in (torch._foreach_copy_, torch.Tensor.copy_):
            destinations, sources = (each if isinstance(each, list) else [each] for each in arguments[:2])
            for destination, source in zip(destinations, sources, strict=True):
                places = {destination.device, source.device} - {torch.device("cpu")}
                assert len(places) < 2, "torch may not copy between these"
        return super().__torch_function__(function, types, arguments, options or {})


def test_between_gpus_copies_go_through_the_host():
    ends = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cuda:0"), ("cpu", "cpu")]
    destinations = [Placed.on(end, [0.0, 0.0]) for end, _ in ends]
    sources = [Placed.on(begin, [1.0 + number, 2.0]) for number, (_, begin) in enumerate(ends)]
    copy_all(destinations, sources)
    assert [tensor.tolist() for tensor in destinations] == [
        [1.0 + number, 2.0] for number in range(len(ends))
    ]


def test_only_between_gpus():
    destinations, sources = [Placed.on("cuda:0", [0.0])], [Placed.on("cuda:1", [1.0])]
    copy_all(destinations, sources)
    assert destinations[0].tolist() == [1.0]
    copy_all([], [])
