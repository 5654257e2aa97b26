"""One rank of a RankPool: runs scenarios by name and returns their results. Imports nothing from COARSE."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    backend, store, pipe = sys.argv[1:]
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    from collective_scenarios import COLLECTIVES
    from error_scenarios import ERRORS
    from training_scenarios import TRAINING

    scenarios = {**COLLECTIVES, **TRAINING, **ERRORS}
    connection = Connection(int(pipe))
    connection.send(("result", "ready"))
    while (request := connection.recv()) is not None:
        name, is_on_one_node = request
        torch.manual_seed(1234 + dist.get_rank())
        try:
            with on_one_node() if is_on_one_node else contextlib.nullcontext():
                result = plain(scenarios[name]())
            connection.send(("result", result))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    connection.close()
    # A DDP Reducer that is freed after its process group can hang a process at exit.
    gc.collect()
    dist.destroy_process_group()


@contextlib.contextmanager
def on_one_node() -> Iterator[None]:
    """Has a group as the world whose ranks are on one node, whatever the nodes of this one."""
    node = os.environ.pop("COARSE_NODE")
    world, group = dist.group.WORLD, dist.new_group()
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(world)
        os.environ["COARSE_NODE"] = node
        dist.destroy_process_group(group)


def plain(value: Any) -> Any:
    """`value` without tensors, so that results of different processes can be compared bit for bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return (
            str(value.dtype),
            tuple(value.shape),
            bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"",
        )
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    main()
