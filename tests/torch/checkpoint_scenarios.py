"""Scenarios of checkpoints with several workers: interrupted training ends like uninterrupted training."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from optimizer_scenarios import Make, WithEmptyParameters, offload
from scenario import Context, Scenario, raises, scenario
from torch import nn

from coarse.checkpoint.catalogue import open_verified
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.writer import WriteOptions

CHECKPOINT_SCENARIOS: dict[str, Scenario] = {}

checkpoint_scenario = functools.partial(scenario, compare=False, registry=CHECKPOINT_SCENARIOS)

# Several files and chunks.
OPTIONS = WriteOptions(file_bytes=20_000, chunk_bytes=4096)


def with_buffers() -> nn.Sequential:
    """Parameters of several shards, buffers, and a layer that draws random numbers."""
    return nn.Sequential(
        nn.Linear(8, 200),
        nn.BatchNorm1d(200),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(200, 100),
        nn.Linear(100, 4),
    )


@contextmanager
def shared_folder(context: Context) -> Iterator[str]:
    """A folder of all workers."""
    place = [tempfile.mkdtemp(prefix="coarse-test-") if context.rank == 0 else None]
    dist.broadcast_object_list(place)
    assert place[0] is not None
    try:
        yield place[0]
        dist.barrier()
    finally:
        if context.rank == 0:
            shutil.rmtree(place[0])


HOLDS_A_FOLDER = """
import sys
from coarse.checkpoint.claim import Claim
from coarse.checkpoint.folder import Folder
assert Claim(Folder.open(sys.argv[1])).take()
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job(folder: str) -> Iterator[None]:
    """Saves to the folder meanwhile."""
    command = [sys.executable, "-c", HOLDS_A_FOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        try:
            yield
        finally:
            other.kill()


class Position:
    """The part of a data loader that a checkpoint uses: different on each worker."""

    def __init__(self, start: Any) -> None:
        self.next = start

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Training:
    """One attempt of a job: from wrapping the model to the end or to the interruption."""

    def __init__(
        self,
        context: Context,
        folder: str | Path,
        make: Make,
        *,
        offloads: bool,
        overlap: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from coarse.torch.checkpoint import Checkpointer, RandomState

        with torch.device("cpu"):
            self.module = with_buffers().to(dtype)
        self.model = context.wrap(self.module)
        optimizer = make(self.model.parameters())
        self.optimizer = offload(context, optimizer, self.model, overlap=overlap) if offloads else optimizer
        self.dtype = dtype
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.position = Position(100 * context.rank)
        self.context = context
        self.checkpointer = Checkpointer(
            folder,
            self.model,
            self.optimizer,
            every=3,
            options=OPTIONS,
            state={"random": RandomState(), "scheduler": self.scheduler, "position": self.position},
        )
        assert (self.checkpointer._snapshots is not None) == offloads

    def run(self, until: int) -> None:
        while self.checkpointer.num_steps < until:
            noise = float(torch.rand(1, device="cpu")) + random.random() + np.random.rand()
            inputs = (self.context.inputs(self.position.next, 16, 8) + noise).to(self.dtype)
            self.position.next += 1
            self.optimizer.zero_grad()
            (self.model(inputs) - inputs[:, :4]).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.checkpointer.step()
            # What the next step changes must not get into the checkpoint; so it is not waited for here, but the next
            # save would be skipped if this one were still under way.
            if self.checkpointer.num_steps % 3 == 2:
                self.checkpointer.wait()
                dist.barrier()

    def end(self) -> dict[str, Any]:
        saved = self.optimizer.state_dict()
        result = {
            "model": {key: value.clone() for key, value in self.module.state_dict().items()},
            "state": {str(key): dict(value) for key, value in saved["state"].items()},
            "rate": [group["lr"] for group in saved["param_groups"]],
            "position": self.position.next,
            "random": torch.rand(2, device="cpu"),
        }
        self.checkpointer.close()
        close = getattr(self.model, "close", None)
        if close:
            close()
        return result


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):  # wherever they lie: states may be in the host's memory alone
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def interrupt_and_go_on(
    context: Context, *, make: Make, offloads: bool, overlap: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    start = functools.partial(Training, context, make=make, offloads=offloads, overlap=overlap, dtype=dtype)
    seed = 10 + context.rank

    def begin(folder: str) -> Training:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return start(folder)

    with shared_folder(context) as undisturbed, shared_folder(context) as interrupted:
        training = begin(undisturbed)
        assert training.checkpointer.restore() == 0
        training.run(8)
        expected = training.end()

        training = begin(interrupted)
        assert training.checkpointer.restore() == 0
        training.run(5)
        assert training.checkpointer.counts.num_failed == 0
        training.end()

        torch.manual_seed(99)  # what begins anew has other parameters, and its generators stand elsewhere
        training = start(interrupted)
        assert training.checkpointer.restore() == 3
        training.run(8)
        assert equal(training.end(), expected)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}

for _name, _make in OPTIMIZERS.items():
    for _where in ("on_workers", "in_memory_devices", "overlapped"):
        CHECKPOINT_SCENARIOS[f"{_name}_resumed_{_where}"] = Scenario(
            functools.partial(
                interrupt_and_go_on,
                make=_make,
                offloads=_where != "on_workers",
                overlap=_where == "overlapped",
            ),
            False,
            0.0,
        )


@checkpoint_scenario
def master_weights_come_back(context: Context) -> None:
    interrupt_and_go_on(context, make=OPTIMIZERS["adamw"], offloads=True, dtype=torch.bfloat16)


@checkpoint_scenario
def what_is_made_on_the_host_is_there_whatever_the_default_device(context: Context) -> None:
    """As under torch.set_default_device("cuda"); "meta" has no memory, and refuses what only the host can do."""
    with torch.device("meta"):
        interrupt_and_go_on(context, make=OPTIMIZERS["adamw"], offloads=True)
        interrupt_and_go_on(context, make=OPTIMIZERS["sgd"], offloads=False)


def steps(context: Context, model: nn.Module, optimizer: Any, first: int, end: int) -> None:
    for step in range(first, end):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()


@checkpoint_scenario
def parameters_that_may_be_stale_go_on_from_what_was_restored(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    def begin(seed: int) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(seed)
        module = nn.Linear(8, 4)
        model = context.wrap(module)
        return (
            module,
            model,
            offload(context, OPTIMIZERS["adamw"](model.parameters()), model, staleness=1),
        )

    with shared_folder(context) as folder:
        module, model, optimizer = begin(0)
        with Checkpointer(folder, model, optimizer, first_step=3) as checkpointer:
            steps(context, model, optimizer, 0, 3)
            checkpointer.save()
        restored, other, its_optimizer = begin(1)
        with Checkpointer(folder, other, its_optimizer) as checkpointer:
            assert checkpointer.restore() == 3
        for each, its in ((model, optimizer), (other, its_optimizer)):
            its.pull()
            steps(context, each, its, 3, 6)
            its.pull()
        assert equal(module.state_dict(), restored.state_dict())
        model.close()
        other.close()


@checkpoint_scenario
def the_optimizer_that_was_given_has_the_state_in_the_memory_devices(context: Context) -> None:
    """Including its own state dicts, which scripts and libraries save."""
    from coarse.torch.checkpoint import Checkpointer

    def begin(seed: int) -> tuple[nn.Module, Any, Any, Any]:
        torch.manual_seed(seed)
        module = nn.Linear(8, 4)
        model = context.wrap(module)
        given = OPTIMIZERS["adamw"](model.parameters())
        return module, model, given, offload(context, given, model)

    with shared_folder(context) as folder:
        module, model, given, optimizer = begin(0)
        steps(context, model, optimizer, 0, 3)
        saved, weights = given.state_dict(), {k: v.clone() for k, v in module.state_dict().items()}
        assert sorted(saved["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
        assert not given.state
        with Checkpointer(folder, model, given) as checkpointer:
            checkpointer.step()
            checkpointer.save()
        steps(context, model, optimizer, 3, 6)
        lives = [begin(1), begin(2)]
        lives[0][2].load_state_dict(saved)
        lives[0][0].load_state_dict(weights)
        with Checkpointer(folder, lives[1][1], lives[1][2]) as checkpointer:
            assert checkpointer.restore() == 1
        for its_module, its_model, _, its_optimizer in lives:
            steps(context, its_model, its_optimizer, 3, 6)
            assert equal(its_module.state_dict(), module.state_dict())
            its_model.close()
        model.close()


@checkpoint_scenario
def buffers_that_each_worker_has_of_its_own_come_back_to_it(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    def begin() -> tuple[nn.Module, Any]:
        module = nn.BatchNorm1d(8)
        return module, context.wrap(module, broadcast_buffers=False)

    with shared_folder(context) as folder:
        module, model = begin()
        with Checkpointer(folder, model) as checkpointer:
            model(context.inputs(context.rank, 16, 8))
            checkpointer.step()
            checkpointer.save()
        means = [torch.empty(8) for _ in range(context.world_size)]
        dist.all_gather(means, module.running_mean.cpu())
        assert not torch.equal(means[0], means[1])
        restored, other = begin()
        with Checkpointer(folder, other) as checkpointer:
            assert checkpointer.restore() == 1
        assert equal(restored.state_dict(), module.state_dict())
        model.close()
        other.close()


class Odd(nn.Module):
    """Kernels that are not row-major, one of several shards, a frozen parameter, an unused one, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, (3, 2)).to(memory_format=torch.channels_last)
        self.large = nn.Conv2d(4, 1 << 14, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(4, 2)
        self.tied = nn.Linear(4, 4)
        self.tied_too = nn.Linear(4, 4)
        self.tied_too.weight = self.tied.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        features = self.large(self.convolution(inputs)).mean(dim=(2, 3)).reshape(-1, 4)
        return self.tied_too(self.tied(features))


@checkpoint_scenario
def snapshots_hold_what_a_copy_would_hold(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer
    from coarse.torch.checkpoint.training_state import load_training_state

    module = Odd()
    model = context.wrap(module, find_unused_parameters=True)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(context.inputs(number, 2, 3, 6, 6)).square().sum().backward()
        optimizer.step()

    with (
        shared_folder(context) as folder,
        Checkpointer(folder, model, optimizer, options=OPTIONS) as checkpointer,
    ):
        step(1)
        expected = {key: value.clone() for key, value in module.state_dict().items()}
        states = optimizer.state_dict()
        checkpointer.save(wait=False)
        step(2)
        checkpointer.wait()
        assert checkpointer.counts.num_failed == 0, checkpointer.counts.last_error
        assert not equal(module.state_dict(), expected)
        dist.barrier()
        plain = Odd()
        bare_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        with Folder.open(folder) as parent, open_verified(parent, CheckpointName(0)) as checkpoint:
            load_training_state(checkpoint, plain, bare_optimizer)
    assert equal(plain.state_dict(), expected)
    found = bare_optimizer.state_dict()["state"]
    assert equal({str(k): v for k, v in found.items()}, {str(k): v for k, v in states["state"].items()})
    assert len(found) == 7  # of the nine that are trained, one pair is tied and two are never used


@checkpoint_scenario
def what_is_loaded_does_not_get_into_a_snapshot(context: Context) -> None:
    module = with_buffers()
    model = context.wrap(module)
    optimizer = offload(context, OPTIMIZERS["adamw"](model.parameters()), model)
    model(context.inputs(1, 16, 8)).square().mean().backward()
    optimizer.step()
    remote = optimizer.remote_parameters
    assert remote is not None
    states = remote.state()
    expected = [
        (tensor, array, (states[parameter][state] if state else parameter.detach()).cpu().numpy().tobytes())
        for parameter, state, tensor, array in remote.places()
    ]
    with remote.snapshot() if context.rank == 0 else nullcontext() as snapshot:
        dist.barrier()
        module.load_state_dict({key: torch.ones_like(value) for key, value in module.state_dict().items()})
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        dist.barrier()
        assert all(bool((parameter == 1).all()) for parameter in module.parameters())
        if snapshot is not None:
            assert all(bytes(snapshot.read(tensor, array)) == data for tensor, array, data in expected)
        dist.barrier()
    model.close()
    module.load_state_dict(module.state_dict())  # which nothing hears of any more


@checkpoint_scenario
def what_was_loaded_is_saved_before_the_next_step(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    module = with_buffers()
    model = context.wrap(module)
    optimizer = offload(context, OPTIMIZERS["adamw"](model.parameters()), model)
    model(context.inputs(1, 16, 8)).square().mean().backward()
    optimizer.step()
    with shared_folder(context) as folder, Checkpointer(folder, model, optimizer) as checkpointer:
        module.load_state_dict({key: torch.ones_like(value) for key, value in module.state_dict().items()})
        checkpointer.save()
        assert all(bool((parameter == 1).all()) for parameter in module.parameters())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        checkpointer.restore()
        assert all(bool((parameter == 1).all()) for parameter in module.parameters())


@checkpoint_scenario
def what_is_restored_does_not_get_into_a_snapshot(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(with_buffers())
    optimizer = offload(context, OPTIMIZERS["adamw"](model.parameters()), model)
    with shared_folder(context) as folder, Checkpointer(folder, model, optimizer) as checkpointer:
        checkpointer.save()
        checkpointer.step()
        model(context.inputs(1, 16, 8)).square().mean().backward()
        optimizer.step()
        remote = optimizer.remote_parameters
        assert remote is not None
        expected = [
            (tensor, array, parameter.detach().cpu().numpy().tobytes())
            for parameter, state, tensor, array in remote.places()
            if not state
        ]
        with remote.snapshot() if context.rank == 0 else nullcontext() as snapshot:
            dist.barrier()
            checkpointer.restore()
            dist.barrier()
            if snapshot is not None:
                assert all(bytes(snapshot.read(tensor, array)) == data for tensor, array, data in expected)
            dist.barrier()


@checkpoint_scenario
def empty_parameters_come_back_with_their_state(context: Context) -> None:
    """Memory devices store no data for them; a checkpoint contains their number of updates."""
    from coarse.torch.checkpoint import Checkpointer

    def make() -> tuple[Any, Any]:
        model = context.wrap(WithEmptyParameters(), find_unused_parameters=True)
        return model, offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)

    with shared_folder(context) as folder:
        model, optimizer = make()
        steps(context, model, optimizer, 0, 2)
        with Checkpointer(folder, model, optimizer, first_step=2) as checkpointer:
            checkpointer.save()
        resumed, other = make()
        with Checkpointer(folder, resumed, other) as checkpointer:
            assert checkpointer.restore() == 2
        saved, loaded = optimizer.state_dict()["state"], other.state_dict()["state"]
        assert saved.keys() == loaded.keys() == {0, 2, 3}  # the parameter that is left out has none
        assert equal(saved, loaded), (saved, loaded)


@checkpoint_scenario
def workers_write_nothing_where_another_job_saves(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    with shared_folder(context) as folder:
        with Checkpointer(folder, model, state={"position": Position(0)}) as checkpointer:
            checkpointer.step()
            with another_job(folder) if context.rank == 0 else nullcontext():
                dist.barrier()
                with raises(
                    "CheckpointError", "another job saves" if context.rank == 0 else "error of another worker"
                ):
                    checkpointer.save()
                dist.barrier()
                assert os.listdir(folder) == ["saving.lock"]
                dist.barrier()
            checkpointer.save()
        assert sorted(os.listdir(folder)) == ["latest", "saving.lock", "step-1"]


@checkpoint_scenario
def a_signal_to_any_worker_saves_the_same_step(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    previous = signal.getsignal(signal.SIGUSR1)
    with shared_folder(context) as folder:
        with Checkpointer(folder, model, state={"position": Position(0)}) as checkpointer:
            began = []
            for step in range(4):
                if step == 1 and context.rank == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                model(torch.ones(1, 3)).sum().backward()
                began.append(checkpointer.step())
            assert began == [False, False, True, False]
            checkpointer.wait()
            assert checkpointer.counts.num_failed == 0, checkpointer.counts.last_error
        dist.barrier()
        assert sorted(os.listdir(folder)) == ["latest", "saving.lock", "step-3"]
    assert signal.getsignal(signal.SIGUSR1) is previous


@checkpoint_scenario
def a_signal_that_comes_during_a_save_saves_behind_it(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    goes_on = threading.Event()
    with shared_folder(context) as folder, Checkpointer(folder, model) as checkpointer:

        def hold(operation: str, name: str) -> None:
            assert context.rank != 0 or operation != "write" or goes_on.wait(60)

        checkpointer._parent._observe = hold

        def train(signal_at: int, num_steps: int) -> list[bool]:
            began = []
            for step in range(num_steps):
                if step == signal_at and context.rank == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                model(torch.ones(1, 3)).sum().backward()
                began.append(checkpointer.step())
            return began

        assert train(0, 2) == [False, True]
        assert not any(train(0, 4))  # the save is still under way
        assert checkpointer.counts.num_skipped == 0
        goes_on.set()
        checkpointer.wait()
        dist.barrier()
        assert sum(train(-1, 4)) == 1
        checkpointer.wait()
        dist.barrier()
        assert len([name for name in os.listdir(folder) if name.startswith("step-")]) == 2


@checkpoint_scenario
def closing_writes_the_save_that_is_due_with_every_workers_state(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    position = Position(100 * context.rank)
    goes_on = threading.Event()
    with shared_folder(context) as folder:
        with Checkpointer(folder, model, every=2, state={"position": position}) as checkpointer:

            def hold(operation: str, name: str) -> None:
                assert context.rank != 0 or operation != "write" or goes_on.wait(60)

            checkpointer._parent._observe = hold
            for _ in range(5):
                model(torch.ones(1, 3)).sum().backward()
                position.next += 1
                checkpointer.step()
            goes_on.set()
        dist.barrier()
        restored = Position(0)
        with Checkpointer(folder, model, state={"position": restored}) as checkpointer:
            assert checkpointer.restore() == 5
        assert restored.next == 100 * context.rank + 5
        assert sorted(name for name in os.listdir(folder) if name.startswith("step-")) == ["step-2", "step-5"]


@checkpoint_scenario
def all_workers_hear_that_a_save_which_they_wait_for_failed(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    with shared_folder(context) as folder, Checkpointer(folder, model) as checkpointer:

        def fail(operation: str, name: str) -> None:
            if context.rank == 0 and operation == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpointer._parent._observe = fail
        with raises("CheckpointError", "No space left" if context.rank == 0 else "error of another worker"):
            checkpointer.save()
        checkpointer._parent._observe = lambda operation, name: None
        checkpointer.save()
        assert os.path.exists(f"{folder}/step-0/manifest.json")


@checkpoint_scenario
def the_optimizer_that_was_given_saves_what_backward_updates(context: Context) -> None:
    """A copy would not suffice: parameters change before step() is called."""
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(with_buffers())
    given = OPTIMIZERS["adamw"](model.parameters())
    optimizer = offload(context, given, model, overlap=True)
    with shared_folder(context) as folder, Checkpointer(folder, model, given) as checkpointer:
        assert checkpointer._snapshots is not None
        steps(context, model, optimizer, 0, 3)
        checkpointer.save(wait=False)
        steps(context, model, optimizer, 3, 6)
        checkpointer.wait()
        assert checkpointer.counts.num_failed == 0
    model.close()


@checkpoint_scenario
def all_workers_hear_that_too_many_saves_failed(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    with (
        shared_folder(context) as folder,
        Checkpointer(folder, model, every=1, most_failures=2) as checkpointer,
    ):

        def fail(operation: str, name: str) -> None:
            if context.rank == 0 and operation == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpointer._parent._observe = fail

        def train() -> None:
            while True:
                model(torch.ones(1, 3)).sum().backward()
                checkpointer.step()
                checkpointer.wait()

        with raises("CheckpointError", "No space left" if context.rank == 0 else "error of worker 0"):
            train()
        assert 3 <= checkpointer.num_steps <= 5


@checkpoint_scenario
def all_workers_hear_of_a_checkpoint_that_does_not_load(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    with shared_folder(context) as folder, Checkpointer(folder, model) as checkpointer:
        checkpointer.save()
        dist.barrier()
        if context.rank == 0:
            os.truncate(f"{folder}/step-0/manifest.json", 10)
        dist.barrier()
        reason = "none of the checkpoints" if context.rank == 0 else "error of worker 0"
        with raises("CheckpointError", reason):
            checkpointer.restore()


@checkpoint_scenario
def all_workers_hear_of_a_folder_that_they_do_not_share(context: Context) -> None:
    """As on nodes with separate disks."""
    from coarse.torch.checkpoint import Checkpointer

    model = context.wrap(nn.Linear(3, 2))
    with shared_folder(context) as folder, Checkpointer(f"{folder}/{context.rank}", model) as checkpointer:
        checkpointer.save()
        dist.barrier()
        with raises("CheckpointError", "on a file system that all nodes share"):
            checkpointer.restore()


os.environ.setdefault("PID_OF_COARSE_TESTS", str(os.getpid()))  # which workers inherit, also from a template


def left_by() -> Path:
    """Place of a checkpoint that workers of a test process leave for other workers of the same process."""
    return Path(tempfile.gettempdir()) / f"coarse-test-left-{os.environ['PID_OF_COARSE_TESTS']}"


@checkpoint_scenario
def two_workers_leave_a_checkpoint(context: Context) -> None:
    training = Training(context, left_by(), OPTIMIZERS["adamw"], offloads=True)
    training.run(3)
    training.end()


@checkpoint_scenario
def two_workers_go_on_from_what_was_left(context: Context) -> Any:
    training = Training(context, left_by(), OPTIMIZERS["adamw"], offloads=True)
    assert training.checkpointer.restore() == 3
    training.run(5)
    return training.end()
