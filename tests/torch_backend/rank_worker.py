"""One rank of a RankPool: runs scenarios by name and sends back what they return. Imports nothing of COARSE."""

from __future__ import annotations

import gc
import os
import sys
import traceback
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
    while (name := connection.recv()) is not None:
        torch.manual_seed(1234 + dist.get_rank())
        try:
            connection.send(("result", plain(scenarios[name]())))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    connection.close()
    # A DDP Reducer that is freed after its process group can hang a process at exit.
    gc.collect()
    dist.destroy_process_group()


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
