"""The systems of `coarse bench checkpoint`: one training loop with each method of saving."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coarse.bench.harness.commands import Commands, MakeCommands, WorkerJob, commands_of
from coarse.bench.train_step.systems import TrainCommands, offload_optimizer, wrap_coarse, wrap_ddp

_FIRST_STEPS = 3
_WAIT_S = 120.0


class Saves(Protocol):
    """One method of saving a training job; all workers make the same calls."""

    def begin(self) -> None:
        """Waits for the previous save and saves, or begins to save; returns when training may continue."""

    def is_done(self) -> bool:
        """Whether this worker's part of the save is complete."""

    def to_disk_s(self) -> float:
        """Seconds from the last save's beginning until it was on the disk."""

    def load(self) -> dict[str, Any]:
        """The model's state dict from the last save. Only on worker 0."""

    def close(self) -> None:
        """Ends background work."""


class CheckpointCommands(TrainCommands):
    """The commands of `coarse bench checkpoint` for one system.

    Args:
        job: Its options are those of TrainCommands, and `folder`, which only this system uses.
        wrap: As for TrainCommands.
        saves: Creates the method of saving from folder, wrapped model, optimizer and rank.
        offload: As for TrainCommands.
    """

    def __init__(
        self,
        job: WorkerJob,
        wrap: Callable[[WorkerJob], Callable[[Any], Any]],
        saves: Callable[[Path, Any, Any, int], Saves],
        offload: Callable[[Any, Any], Any] = lambda optimizer, _: optimizer,
    ) -> None:
        super().__init__(job, wrap, offload)
        self._make_saves = saves
        self._saves: Saves | None = None

    def save(self, saves: int, every: int) -> dict[str, list[float]]:
        """Trains in a plain loop that saves after every `every` steps, and for `every` steps after the last save.

        Returns:
            Seconds: `step` of each step with a save that follows it, `stop` for which each save paused the training
            thread, and `to_disk` of the last save. `steps_to_disk` is the number of steps until each save was
            complete, the step that it followed included.
        """
        if self._job.rank == 0:
            os.sync()  # flushes writes of other systems
        self._barrier()
        for _ in range(_FIRST_STEPS):
            self._timed_step()
        seconds: dict[str, list[float]] = {"step": [], "stop": [], "to_disk": [], "steps_to_disk": []}
        folder = Path(self._job.options["folder"])
        # Created within the loop, because its setup may continue in the background.
        self._saves = self._make_saves(folder, self._model, self._optimizer, self._job.rank)
        is_saving = False
        for step in range(1, every * (saves + 1) + 1):
            began_s = time.perf_counter()
            self._timed_step()
            if step % every == 0 and step <= every * saves:
                stopped_s = time.perf_counter()
                self._saves.begin()
                seconds["stop"].append(time.perf_counter() - stopped_s)
                seconds["steps_to_disk"].append(1)
                is_saving = True
            elif is_saving := is_saving and not self._saves.is_done():
                seconds["steps_to_disk"][-1] += 1
            seconds["step"].append(time.perf_counter() - began_s)
        self._wait_until_done()
        seconds["to_disk"].append(self._saves.to_disk_s())
        return seconds

    def check(self) -> bool:
        """Saves once more and compares the saved data with the model."""
        assert self._saves is not None
        self._saves.begin()
        self._wait_until_done()
        is_right = True
        if self._job.rank == 0:
            saved, torch = self._saves.load(), self._torch
            mine = self._bare().state_dict()
            is_right = saved.keys() == mine.keys() and all(torch.equal(saved[key], mine[key]) for key in mine)
        self._barrier()
        return is_right

    def close(self) -> None:
        if self._saves is not None:
            self._saves.close()
        super().close()

    def _bare(self) -> Any:
        assert self._workload is not None
        return self._workload.module

    def _timed_step(self) -> float:
        times: list[float] = []
        self._step(times)
        return times[-1] - times[0]

    def _wait_until_done(self) -> None:
        assert self._saves is not None
        deadline_s = time.monotonic() + _WAIT_S
        while not self._all_agree(self._saves.is_done()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a save is not done after {_WAIT_S:.0f} s")

    def _all_agree(self, mine: bool) -> bool:
        vote = self._torch.tensor([int(mine)])
        self._torch.distributed.all_reduce(vote, op=self._torch.distributed.ReduceOp.MIN)
        return bool(vote.item())

    def _barrier(self) -> None:
        self._all_agree(True)


class CoarseSaves:
    """coarse.torch.checkpoint."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, rank: int) -> None:
        module = importlib.import_module("coarse.torch.checkpoint")
        self._checkpointer = module.Checkpointer(folder, model, optimizer, keep=1, on_signal=False)
        self._folder = folder
        self._stop_s = 0.0

    def begin(self) -> None:
        began_s = time.perf_counter()
        self._checkpointer.save(wait=False)
        self._stop_s = time.perf_counter() - began_s

    def is_done(self) -> bool:
        if self._checkpointer.counts.last_error:
            raise RuntimeError(self._checkpointer.counts.last_error)
        return not self._checkpointer.is_saving

    def to_disk_s(self) -> float:
        return self._stop_s + float(self._checkpointer.counts.last_save_s)

    def load(self) -> dict[str, Any]:
        from coarse.checkpoint.catalogue import find_newest
        from coarse.checkpoint.folder import Folder

        export = importlib.import_module("coarse.torch.checkpoint.export")
        with Folder.open(self._folder) as parent:
            checkpoint = find_newest(parent)
            assert checkpoint is not None
            with checkpoint:
                model: dict[str, Any] = export.state_dicts(checkpoint)["model"]
        return model

    def close(self) -> None:
        self._checkpointer.close()


class TorchSaves:
    """torch.save by worker 0, synced to the disk and renamed, as COARSE does; training waits for it."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, rank: int) -> None:
        self._torch = importlib.import_module("torch")
        self._path = folder / "checkpoint.pt"
        self._module, self._optimizer, self._rank = model.module, optimizer, rank
        self._to_disk_s = 0.0

    def begin(self) -> None:
        began_s = time.perf_counter()
        if self._rank == 0:
            state = {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
            unfinished = self._path.with_suffix(".tmp")
            with unfinished.open("wb") as file:
                self._torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self._path)
        self._torch.distributed.barrier()
        self._to_disk_s = time.perf_counter() - began_s

    def is_done(self) -> bool:
        return True

    def to_disk_s(self) -> float:
        return self._to_disk_s

    def load(self) -> dict[str, Any]:
        loaded: dict[str, Any] = self._torch.load(self._path, weights_only=True)["model"]
        return loaded

    def close(self) -> None:
        pass


class DcpSaves:
    """torch.distributed.checkpoint.async_save; it distributes the writing of equal data over the workers."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, rank: int) -> None:
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        self._state = importlib.import_module("torch.distributed.checkpoint.state_dict")
        self._group = importlib.import_module("torch.distributed").new_group(backend="gloo")
        self._folder, self._rank, self._number = folder, rank, 0
        self._model, self._optimizer = model, optimizer
        self._future: Any = None
        self._began_s = self._ended_s = 0.0
        self._has_ended = threading.Event()

    def begin(self) -> None:
        if self._future is not None:
            self._future.result()
        self._began_s = time.perf_counter()
        model, optimizer = self._state.get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        self._future = self._dcp.async_save(
            state, checkpoint_id=self._place(self._number), process_group=self._group
        )
        self._has_ended.clear()
        self._future.add_done_callback(self._note_end)
        self._number += 1

    def is_done(self) -> bool:
        if not self._has_ended.is_set():
            return False
        self._future.result()
        return True

    def to_disk_s(self) -> float:
        return self._ended_s - self._began_s

    def load(self) -> dict[str, Any]:
        torch = importlib.import_module("torch")
        mine = self._model.module.state_dict()
        loaded = {"model": {key: torch.zeros_like(value) for key, value in mine.items()}}
        self._dcp.load(loaded, checkpoint_id=self._place(self._number - 1), no_dist=True)
        return loaded["model"]

    def close(self) -> None:
        if self._future is not None:
            self._future.result()

    def _place(self, number: int) -> Path:
        return self._folder / f"save-{number}"

    def _note_end(self, _: Any) -> None:
        """Runs in a thread of torch, where removing the old checkpoint may take time."""
        self._ended_s = time.perf_counter()
        if self._rank == 0:
            shutil.rmtree(self._place(self._number - 2), ignore_errors=True)
        self._has_ended.set()


_SYSTEMS: dict[str, MakeCommands] = {
    "coarse": partial(
        CheckpointCommands, wrap=wrap_coarse, saves=CoarseSaves, offload=offload_optimizer(overlap=False)
    ),
    "coarse-workers": partial(CheckpointCommands, wrap=wrap_coarse, saves=CoarseSaves),
    "torch": partial(CheckpointCommands, wrap=wrap_ddp, saves=TorchSaves),
    "dcp": partial(CheckpointCommands, wrap=wrap_ddp, saves=DcpSaves),
}
"""Commands of each system, by its name on the command line."""


def checkpoint_commands(job: WorkerJob) -> Commands:
    """The commands of one system, in its worker process."""
    return commands_of(job, _SYSTEMS)
