"""Copies tensors of a delayed stream through the process group and a checkpoint; run by `coarse run`."""

from __future__ import annotations

import torch
import torch.distributed as dist

import coarse.torch  # noqa: F401 (the process group)
from coarse.torch.checkpoint.host_copies import HostCopies

CYCLES = 500_000_000
NUM_ELEMENTS = 1 << 20


def broadcast_over_what_is_still_read(rank: int) -> None:
    values = torch.full((NUM_ELEMENTS,), float(rank), device="cuda:0")
    torch.cuda._sleep(CYCLES)
    seen = values.clone()
    dist.broadcast(values, src=0)
    assert bool((values == 0).all()), "the root's values have not come"
    assert bool((seen == rank).all()), "they came before the old ones had been read"


def copy_what_is_still_written() -> None:
    values = torch.zeros(NUM_ELEMENTS, device="cuda:0")
    copies = HostCopies(waits_for_step=True)
    torch.cuda._sleep(CYCLES)
    values += 1
    state = copies.take(1, {"values": values}, only_optimizer_changes=["values"])
    copies.begin()
    copies.finish()
    (tensor,) = state.tensors
    copied = torch.frombuffer(bytearray().join(state.read(tensor)), dtype=torch.float32)
    assert bool((copied == 1).all()), "copied before it was written"
    copies.close()


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("coarse")
    with torch.cuda.stream(torch.cuda.Stream()):
        broadcast_over_what_is_still_read(dist.get_rank())
        copy_what_is_still_written()
    print("streams: in order", flush=True)


if __name__ == "__main__":
    main()
