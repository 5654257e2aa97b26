"""Checkpoints of PyTorch training: loading restores the saved state; mismatches are refused with their names."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_scenarios import (
    CHECKPOINT_SCENARIOS,
    HOLDS_A_FOLDER,
    OPTIMIZERS,
    OPTIONS,
    Position,
    equal,
    left_by,
    with_buffers,
)
from comparison import assert_same
from parity_pool import WorkerPool
from safetensors.torch import load_file
from tiers import slow_but_for
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from coarse.cli.main import main
from coarse.errors import CheckpointError
from coarse.torch.checkpoint import Checkpointer, DataPosition, RandomState, host_copies, load_state_dicts
from coarse.torch.checkpoint.export import export_torch
from coarse.torch.checkpoint.host_copies import CopiedState
from coarse.torch.checkpoint.training_state import training_state
from coarse.torch.gradients.layout import as_bytes


@pytest.mark.parametrize(
    "name", [name for name in CHECKPOINT_SCENARIOS if not name.startswith("two_workers")]
)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        ["adamw_resumed_in_memory_devices"],
        [name for name in CHECKPOINT_SCENARIOS if not name.startswith("two_workers")],
    ),
)
def test_holds_across_two_nodes(name: str, two_node_pool: WorkerPool) -> None:
    two_node_pool.submit(name)
    two_node_pool.collect()


def take_steps(model, optimizer, *, steps=2, checkpointer=None):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        if checkpointer is not None:
            checkpointer.step()


def test_tables_that_forward_writes_to_are_not_taken_for_the_optimizers_alone():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2))
    taken = training_state(model, make_adamw(model))
    apart = taken.tensors.keys() - taken.only_optimizer_changes
    assert apart == {"model.0.weight"}


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def states_of(model, optimizer):
    return model.state_dict(), optimizer.state_dict()["state"]


@pytest.fixture
def left(coarse_pool):
    """A checkpoint of two workers and two memory devices, after three steps."""
    folder = left_by()
    try:
        run(coarse_pool, "two_workers_leave_a_checkpoint")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(pool, scenario):
    pool.submit(scenario)
    return pool.collect()


def test_another_number_of_memory_devices_goes_on_bitwise_alike(left, coarse_pool, monkeypatch):
    expected = run(coarse_pool, "two_workers_go_on_from_what_was_left")
    monkeypatch.setenv("COARSE_MEMORY_DEVICES", "3")
    other_pool = WorkerPool("coarse")
    try:
        actual = run(other_pool, "two_workers_go_on_from_what_was_left")
    finally:
        other_pool.close()
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours, theirs, 0.0, "result")


def test_one_worker_goes_on_from_what_two_have_left(left, caplog):
    model = with_buffers()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler, position = Recorder(), Recorder()
    state = {"random": RandomState(), "scheduler": scheduler, "position": position}
    with Checkpointer(left, model, optimizer, state=state) as checkpointer:
        assert checkpointer.restore() == 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert scheduler.loaded["last_epoch"] == 3
    assert position.loaded == {"next": 3}
    assert "saved by 2 workers, but this job has 1" in caplog.text


class Recorder:
    """Takes any state."""

    loaded = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded = state


class Counting(torch.optim.SGD):
    """Has an entry in its state dict that torch's own optimizers lack."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]
        super().load_state_dict(state_dict)


def test_what_stands_beside_an_optimizers_state_comes_back(tmp_path):
    model = with_buffers()
    optimizer = Counting(model.parameters(), lr=0.1)
    take_steps(model, optimizer, steps=2)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save()
    restored = Counting(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, restored) as checkpointer:
        checkpointer.restore()
    assert restored.calls == 2


def test_states_without_a_name_are_refused(tmp_path):
    model = with_buffers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight][0] = torch.zeros(1)
    with (
        Checkpointer(tmp_path, model, optimizer) as checkpointer,
        pytest.raises(
            CheckpointError, match=r"state of 0\.weight has an entry 0, whose name is not a string"
        ),
    ):
        checkpointer.save()


@pytest.mark.parametrize(
    "make",
    [
        make_adamw,
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.Adagrad(model.parameters()),
        lambda model: torch.optim.RMSprop(model.parameters(), centered=True),
        lambda model: torch.optim.Adafactor(model.parameters()),
        lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
        lambda model: torch.optim.AdamW(
            [
                {"params": [p for n, p in model.named_parameters() if n.endswith(kind)]}
                for kind in ("weight", "bias")
            ]
        ),
    ],
)
def test_any_optimizer_comes_back(tmp_path, make):
    model = with_buffers()
    optimizer = make(model)
    take_steps(model, optimizer)
    with Checkpointer(tmp_path, model, optimizer, options=OPTIONS) as checkpointer:
        checkpointer.save()
    other = with_buffers()
    restored = make(other)
    with Checkpointer(tmp_path, other, restored) as checkpointer:
        checkpointer.restore()
    assert equal(states_of(other, restored)[0], states_of(model, optimizer)[0])
    assert equal(states_of(other, restored)[1], states_of(model, optimizer)[1])
    for one, two in zip(optimizer.param_groups, restored.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {
            k: v for k, v in two.items() if k != "params"
        }
    for each in ((model, optimizer), (other, restored)):
        torch.manual_seed(3)
        take_steps(*each)
    assert equal(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int8, torch.uint8],
)
def test_every_dtype_and_layout_comes_back(tmp_path, dtype):
    def module(seed):
        holder = nn.Module()
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-100, 100, (2, 3, 4, 5), generator=generator)
        holder.register_buffer("values", values.to(dtype).to(memory_format=torch.channels_last))
        holder.register_buffer("nothing", torch.empty(0, 3, dtype=dtype))
        holder.register_buffer("scalar", values[0, 0, 0, 0].to(dtype))
        return holder

    with Checkpointer(tmp_path, module(1)) as checkpointer:
        checkpointer.save()
    restored = module(2)
    with Checkpointer(tmp_path, restored) as checkpointer:
        checkpointer.restore()
    assert equal(restored.state_dict(), module(1).state_dict())
    assert restored.values.is_contiguous(memory_format=torch.channels_last)


def test_what_training_changes_while_a_save_runs_is_not_in_it(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    take_steps(model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reading, changed = threading.Event(), threading.Event()
    with Checkpointer(tmp_path, model, optimizer, options=OPTIONS) as checkpointer:
        checkpointer._parent._observe = lambda operation, name: (reading.set(), changed.wait(20))
        checkpointer.save(wait=False)
        assert reading.wait(20)
        take_steps(model, optimizer)
        changed.set()
    assert not equal(model.state_dict(), before)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
    assert equal(model.state_dict(), before)


def test_the_optimizer_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    take_steps(model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stepping = threading.Event()
    optimizer.register_step_pre_hook(lambda *_: stepping.set())
    with Checkpointer(tmp_path, model, optimizer, options=OPTIONS) as checkpointer:
        block = checkpointer._copies._block
        checkpointer._copies._block = lambda num_bytes: (stepping.wait(20), block(num_bytes))[1]
        checkpointer.save(wait=False)
        optimizer.step()  # returns only because the copy was made meanwhile
        checkpointer.wait()
        assert not equal(model.state_dict(), before)
        checkpointer.restore()
    assert equal(model.state_dict(), before)


def test_what_else_changes_a_parameter_while_it_is_copied_is_named():
    weight = torch.zeros(3)

    def change(num_bytes):
        weight.add_(1)
        return torch.empty(num_bytes, dtype=torch.uint8)

    state = CopiedState(1, {"model.weight": weight}, {"model.weight"}, change)
    state.copy(state.order())
    with pytest.raises(CheckpointError, match=r"model\.weight was changed outside of the optimizer's step"):
        list(state.tensors)


def test_what_is_written_to_data_while_it_is_copied_is_named(monkeypatch):
    average = torch.zeros(3)

    def look(tensor):
        average.data.fill_(1)  # the copy is older
        return as_bytes(tensor)

    monkeypatch.setattr(host_copies, "as_bytes", look)
    state = CopiedState(
        1, {"model.average": average}, {"model.average"}, lambda n: torch.empty(n, dtype=torch.uint8)
    )
    state.copy(state.order())
    assert average._version == 0
    with pytest.raises(CheckpointError, match=r"model\.average was changed outside of the optimizer's step"):
        list(state.tensors)


class Derived(nn.Module):
    """Has extra state that is a tensor, a value that is derived from loaded weights, and an expanded buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.register_buffer("expanded", torch.full((1,), value).expand(4))
        self.scale, self.double = value, torch.zeros(3)
        self.register_load_state_dict_post_hook(Derived.derive)

    def derive(self, _: object = None) -> None:
        self.double = 2 * self.weight.detach()

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.scale], dtype=torch.float64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = float(state)


def test_a_model_hears_of_what_is_restored(tmp_path):
    with Checkpointer(tmp_path, Derived(7.0)) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    restored = Derived(1.0)
    with Checkpointer(tmp_path, restored) as checkpointer:
        assert checkpointer.restore() == 1
    assert restored.weight.tolist() == [7.0] * 3
    assert restored.expanded.tolist() == [7.0] * 4
    assert restored.double.tolist() == [14.0] * 3
    assert restored.scale == 7.0


def test_states_lie_in_memory_as_their_parameters_do(tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    restored, its_optimizer = make()
    with Checkpointer(tmp_path, restored, its_optimizer) as checkpointer:
        checkpointer.restore()
    momentum = its_optimizer.state[restored.weight]["momentum_buffer"]
    assert momentum.stride() == restored.weight.stride() == (27, 1, 9, 3)
    assert torch.equal(momentum, optimizer.state[model.weight]["momentum_buffer"])


def test_a_save_that_is_due_while_another_is_written_waits_for_its_turn(tmp_path, caplog):
    model = with_buffers()
    optimizer = make_adamw(model)
    may_go_on = threading.Event()
    with Checkpointer(tmp_path, model, optimizer, every=2, options=OPTIONS) as checkpointer:
        checkpointer._parent._observe = lambda operation, name: may_go_on.wait(20)
        take_steps(model, optimizer, steps=5, checkpointer=checkpointer)  # the save of step 4 waits
        may_go_on.set()
        checkpointer.wait()
        assert list_of_steps(tmp_path) == [2]
        take_steps(model, optimizer, steps=1, checkpointer=checkpointer)
        checkpointer.wait()
        assert list_of_steps(tmp_path) == [2, 6]
        assert checkpointer.counts.num_skipped == 1
    assert list_of_steps(tmp_path) == [2, 6]
    (warning,) = (record.message for record in caplog.records if "skipped" in record.message)
    assert "due at step 4 was skipped: the save of step 2 took 4 steps, with every=2" in warning
    assert "With every=4 or more" in warning


def test_closing_writes_the_save_that_is_due(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    may_go_on = threading.Event()
    with Checkpointer(tmp_path, model, optimizer, every=3, options=OPTIONS) as checkpointer:
        checkpointer._parent._observe = lambda operation, name: may_go_on.wait(20)
        take_steps(model, optimizer, steps=7, checkpointer=checkpointer)
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        may_go_on.set()
    assert list_of_steps(tmp_path) == [3, 7]
    assert checkpointer.counts.num_skipped == 0
    restored = with_buffers()
    with Checkpointer(tmp_path, restored, make_adamw(restored)) as checkpointer:
        assert checkpointer.restore() == 7
    assert equal(restored.state_dict(), trained)


def test_closing_writes_what_a_signal_has_asked_for(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    with Checkpointer(tmp_path, model, optimizer, options=OPTIONS) as checkpointer:
        take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert list_of_steps(tmp_path) == [2]


def test_what_ends_by_an_exception_saves_nothing_more(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    may_go_on = threading.Event()

    def train_and_fail():
        with Checkpointer(tmp_path, model, optimizer, every=1, options=OPTIONS) as checkpointer:
            checkpointer._parent._observe = lambda operation, name: may_go_on.wait(20)
            take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
            may_go_on.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert list_of_steps(tmp_path) == [1]


def list_of_steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_folder_is_saved_to_by_one_job(tmp_path, capsys):
    command = [sys.executable, "-c", HOLDS_A_FOLDER, str(tmp_path)]
    unfinished = tmp_path / "step-1.tmp"
    unfinished.mkdir()
    model = with_buffers()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "taken\n"
        with Checkpointer(tmp_path, model) as checkpointer:
            assert checkpointer.restore() == 0
            checkpointer.step()
            with pytest.raises(CheckpointError, match="another job saves to"):
                checkpointer.save()
            assert unfinished.exists()
            assert main(["checkpoint", "prune", "--keep", "1", "--unfinished", str(tmp_path)]) == 1
            assert "a job saves to" in capsys.readouterr().err
            other.kill()
            other.wait()
            checkpointer.save()
    assert Checkpointer(tmp_path, model).restore() == 1
    assert not unfinished.exists()


@pytest.mark.parametrize("name", ["step-50 (copy).tmp", "step-3.tmp/by hand"])
def test_what_somebody_else_has_put_there_stops_nobody(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    with Checkpointer(tmp_path, with_buffers()) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    assert (tmp_path / "step-1").exists()


def test_who_only_restores_takes_no_folder_from_who_saves(tmp_path):
    model = with_buffers()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save()
        with Checkpointer(tmp_path, with_buffers()) as other:
            other.restore()
        command = [sys.executable, "-c", HOLDS_A_FOLDER, str(tmp_path)]
        beside = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert beside.returncode == 1
        assert "AssertionError" in beside.stderr
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)


def test_a_signal_saves(tmp_path):
    model = with_buffers()
    heard = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with Checkpointer(tmp_path, model) as checkpointer:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.step()
            assert not checkpointer.step()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert (tmp_path / "step-1").is_dir()


def test_random_numbers_go_on(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, model, state={"random": RandomState()}) as checkpointer:
        checkpointer.save()
        drawn = draw()
        checkpointer.restore()
        assert draw() == drawn


@pytest.mark.parametrize("stop", [5, 8, 11], ids=["in an epoch", "at its end", "in the next one"])
def test_a_loader_that_shuffles_goes_on_where_it_was(tmp_path, stop):
    def life(until: int) -> list[list[int]]:
        model, position, seen = nn.Linear(1, 1), DataPosition(), []
        loader = torch.utils.data.DataLoader(torch.arange(16.0).unsqueeze(1), batch_size=2, shuffle=True)
        state = {"random": RandomState(), "position": position}
        with Checkpointer(tmp_path, model, state=state) as checkpointer:
            checkpointer.restore()
            for _ in position.epochs(2):
                for batch in position.batches(loader):
                    seen.append([*batch.flatten().tolist(), float(torch.rand(1))])
                    checkpointer.step()
                    if checkpointer.num_steps == until:
                        checkpointer.save()
                        return seen
        return seen

    torch.manual_seed(3)
    undisturbed = life(16)
    shutil.rmtree(tmp_path)
    torch.manual_seed(3)
    first = life(stop)
    torch.manual_seed(99)
    assert first + life(16) == undisturbed


def test_an_epoch_is_not_skipped_that_was_saved_before_its_first_batch(tmp_path):
    def life(*, until: int) -> list[float]:
        position, seen = DataPosition(), []
        loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2)
        with Checkpointer(tmp_path, nn.Linear(1, 1), state={"position": position}) as checkpointer:
            checkpointer.restore()
            for epoch in position.epochs(3):
                if epoch == until:
                    checkpointer.save()
                    return seen
                for batch in position.batches(loader):
                    seen += batch.tolist()
                    checkpointer.step()
        return seen

    assert life(until=1) + life(until=3) == 3 * [float(number) for number in range(8)]


@pytest.mark.parametrize("values", [[], [1.5, 2.5]])
def test_tensors_of_other_state_come_back_on_the_host_whatever_the_default_device(tmp_path, values):
    model, position = nn.Linear(1, 1), Position(torch.tensor(values))
    with torch.device("meta"), Checkpointer(tmp_path, model, state={"position": position}) as checkpointer:
        checkpointer.save()
        checkpointer.restore()
    assert position.next.tolist() == values


def test_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(
        TypeError, match=r"state\['order'\] is a list, which has no state_dict\(\) and no load_state"
    ):
        Checkpointer(tmp_path / "never", nn.Linear(1, 1), state={"random": RandomState(), "order": [1, 2]})
    assert not (tmp_path / "never").exists()


# Strict loading.


def saved(tmp_path, model=None):
    model = model or with_buffers()
    optimizer = make_adamw(model)
    take_steps(model, optimizer)
    with Checkpointer(tmp_path, model, optimizer, state={"random": RandomState()}) as checkpointer:
        checkpointer.save()
    return model, optimizer


def refused(tmp_path, model, optimizer=None, state=None):
    """The reason why a checkpoint does not load into an object, which stays unchanged."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with (
        Checkpointer(tmp_path, model, optimizer, state=state or {"random": RandomState()}) as checkpointer,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpointer.restore()
    assert equal(model.state_dict(), before)
    return str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    saved(tmp_path)
    model = with_buffers()
    model[0] = nn.Linear(8, 200, bias=False)
    model[4] = nn.Linear(200, 50)
    model.append(nn.Linear(2, 2))
    message = refused(tmp_path, model, make_adamw(model))
    assert "missing: model.6.weight, model.6.bias" in message
    assert "unexpected: model.0.bias" in message
    assert "model.4.weight is F32 [100, 200], expected F32 [50, 200]" in message


def test_another_dtype_is_listed(tmp_path):
    saved(tmp_path)
    assert "model.0.weight is F32 [200, 8], expected BF16" in refused(tmp_path, with_buffers().bfloat16())


def test_another_optimizer_is_named(tmp_path):
    saved(tmp_path)
    model = with_buffers()
    message = refused(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "was saved from the optimizer AdamW, but this one is SGD" in message


def test_other_parameter_groups_are_named(tmp_path):
    saved(tmp_path)
    model = with_buffers()
    assert "has 1 parameter groups" in refused(
        tmp_path, model, torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    )
    assert "other members than the optimizer's: 0.bias" in refused(
        tmp_path, model, torch.optim.AdamW([p for n, p in model.named_parameters() if n != "0.bias"])
    )


def test_a_checkpoint_without_an_optimizer_is_no_start_for_one(tmp_path):
    model = with_buffers()
    with Checkpointer(tmp_path, model, state={"random": RandomState()}) as checkpointer:
        checkpointer.save()
    assert "contains no optimizer" in refused(tmp_path, model, make_adamw(model))


def test_other_state_of_workers_is_named(tmp_path):
    model, optimizer = saved(tmp_path)
    with torch.no_grad():
        model[0].weight += 1
    message = refused(tmp_path, model, optimizer, {"sampler": RandomState()})
    assert "['random'], but ['sampler'] is requested" in message


def test_the_model_alone_can_be_restored_for_evaluation(tmp_path):
    model, _ = saved(tmp_path)
    other = with_buffers()
    with Checkpointer(tmp_path, other, state={"random": RandomState()}) as checkpointer:
        checkpointer.restore()
    assert equal(other.state_dict(), model.state_dict())


def test_a_certain_step_can_be_restored(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    with Checkpointer(tmp_path, model, optimizer, options=OPTIONS) as checkpointer:
        take_steps(model, optimizer, steps=1, checkpointer=checkpointer)
        checkpointer.save()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        take_steps(model, optimizer, steps=1, checkpointer=checkpointer)
        checkpointer.save()
        assert checkpointer.restore(step=1) == 1
        assert equal(model.state_dict(), before)
        with pytest.raises(CheckpointError, match="step-7: is missing"):
            checkpointer.restore(step=7)


def test_a_folder_holds_one_training(tmp_path, caplog):
    """New checkpoints of a training that resumed from an older one would be pruned first, and never be found."""
    model = with_buffers()
    optimizer = make_adamw(model)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for _ in range(2):
            take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
            checkpointer.save()
        checkpointer.restore(step=2)
        assert "checkpoints newer than that of step 2, up to step 4" in caplog.text
        take_steps(model, optimizer, steps=1, checkpointer=checkpointer)
        with pytest.raises(
            CheckpointError, match="of step 4, but this is step 3 of a training that did not resume"
        ):
            checkpointer.save()
        checkpointer.restore(step=4)
        take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
        checkpointer.save()
    assert (tmp_path / "step-6").is_dir()


def test_a_training_that_was_not_restored_does_not_save_beside_newer_checkpoints(tmp_path):
    model = with_buffers()
    optimizer = make_adamw(model)
    with Checkpointer(tmp_path, model, optimizer, every=2) as checkpointer:
        take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
    with Checkpointer(tmp_path, model, optimizer, every=2) as checkpointer:
        with pytest.raises(
            CheckpointError,
            match=r"of step 2, but this is step 2 of a training that did not resume.*restore\(\) first",
        ):
            take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
        checkpointer.restore()
        take_steps(model, optimizer, steps=2, checkpointer=checkpointer)
    assert (tmp_path / "step-4").is_dir()


def test_what_no_checkpoint_can_hold_is_named(tmp_path):
    model = with_buffers()
    stranger = nn.Parameter(torch.zeros(2))
    for arguments, reason in (
        ({"optimizer": torch.optim.SGD([stranger], lr=1)}, r"has 1 parameter\(s\) that are not in the model"),
        ({"state": {"loader": Unsaveable()}}, r"state/loader/file is a _io\."),
    ):
        with (
            Checkpointer(tmp_path, model, **arguments) as checkpointer,
            pytest.raises(CheckpointError, match=reason),
        ):
            checkpointer.save()


class Unsaveable(Recorder):
    def state_dict(self):
        return {"file": open(os.devnull)}


# To and from plain PyTorch.


@pytest.mark.parametrize("prefix", ["", "module."])
def test_plain_pytorch_checkpoints_load(tmp_path, prefix):
    model = with_buffers()
    optimizer = make_adamw(model)
    take_steps(model, optimizer)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    other = with_buffers()
    restored = make_adamw(other)
    load_state_dicts(tmp_path / "plain.pt", other, restored)
    assert equal(states_of(other, restored)[0], states_of(model, optimizer)[0])
    assert equal(states_of(other, restored)[1], states_of(model, optimizer)[1])
    torch.save(state, tmp_path / "bare.pt")
    load_state_dicts(tmp_path / "bare.pt", with_buffers())
    child = nn.ModuleDict({"module": nn.Linear(2, 1)})
    torch.save(child.state_dict(), tmp_path / "child.pt")
    load_state_dicts(tmp_path / "child.pt", child)
    with pytest.raises(CheckpointError, match="has no 'optimizer'"):
        load_state_dicts(tmp_path / "bare.pt", other, restored)
    with pytest.raises(RuntimeError, match=r"Missing key.*7\.weight"):
        load_state_dicts(tmp_path / "bare.pt", with_buffers().append(nn.Linear(1, 1)).append(nn.Linear(1, 1)))


def test_plain_checkpoints_run_no_code(tmp_path):
    torch.save({"model": Unsaveable}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match="weights_only"):
        load_state_dicts(tmp_path / "evil.pt", with_buffers())


def export(folder, output, kind):
    assert main(["checkpoint", "export", str(folder), "-o", str(output), "--format", kind]) == 0


def test_export_loads_in_plain_pytorch(tmp_path):
    model, optimizer = saved(tmp_path / "job")
    export(tmp_path / "job", tmp_path / "model.safetensors", "safetensors")
    other = with_buffers()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert equal(other.state_dict(), model.state_dict())
    export(tmp_path / "job", tmp_path / "all.pt", "torch")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    other, restored = with_buffers(), None
    other.load_state_dict(plain["model"])
    restored = make_adamw(other)
    restored.load_state_dict(plain["optimizer"])
    for each in ((model, optimizer), (other, restored)):
        torch.manual_seed(3)
        take_steps(*each)
    assert equal(other.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="not overwritten"):
        export_torch(None, tmp_path / "all.pt")


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_an_export_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path, monkeypatch, format):
    saved(tmp_path / "job")

    def cut_off(state, file=None, **options):
        path = Path(file or options["checkpoint_id"])
        if format == "dcp":
            path.mkdir()
            path /= "part"
        path.write_bytes(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((torch, "save") if format == "torch" else (dcp, "save")), cut_off)
        command = ["checkpoint", "export", tmp_path / "job", "-o", tmp_path / "all", "--format", format]
        assert main(list(map(str, command))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]
    export(tmp_path / "job", tmp_path / "all", format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "job"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_export_loads_with_torch_distributed_checkpoint(tmp_path):
    model, optimizer = saved(tmp_path / "job")
    export(tmp_path / "job", tmp_path / "dcp", "dcp")
    other = with_buffers()
    restored = make_adamw(other)
    take_steps(other, restored, steps=1)
    theirs, of_optimizer = get_state_dict(other, restored)
    state = {"model": theirs, "optimizer": of_optimizer, "step": -1}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, restored, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["step"] == 0
    assert equal(other.state_dict(), model.state_dict())
    assert equal(restored.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_the_files_themselves(tmp_path):
    reader = getattr(dcp, "HuggingFaceStorageReader", None)
    if reader is None:
        pytest.skip("this PyTorch has no reader of safetensors files")
    model, _ = saved(tmp_path)
    state = {f"model.{key}": torch.zeros_like(value) for key, value in model.state_dict().items()}
    dcp.load(state, storage_reader=reader(str(tmp_path / "step-0")), no_dist=True)
    assert equal(state, {f"model.{key}": value for key, value in model.state_dict().items()})
