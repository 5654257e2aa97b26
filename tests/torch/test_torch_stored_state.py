"""A worker's own state in the parameter storage: another worker that loads it has the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coarse.env import WorkerIdentity
from coarse.errors import CheckpointError, CoarseError, OutOfDeviceMemoryError
from coarse.session import Session
from coarse.store import DirectoryStore
from coarse.torch.ddp.state import stored_state
from coarse.torch.ddp.state.state_transfer import StateTransfer
from coarse.torch.ddp.state.stored_state import OwnState, free_parts, load_state, store_refusal, store_state


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    identity = WorkerIdentity(rank=0, world_size=1, local_rank=0, local_world_size=1)
    with Session.join(identity=identity, store=DirectoryStore(tmp_path)) as alone:
        yield alone


def transferred(session: Session, values: Any) -> Any:
    store_state(session, OwnState(tensors=[], values=values), place=0)
    return load_state(session, [])


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4, 5)], ids=str)
def test_a_tensor_keeps_its_bits(session: Session, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    (taken,) = transferred(session, [tensor])
    assert taken.dtype is dtype
    assert taken.shape == tensor.shape
    assert torch.equal(taken, tensor)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.randn(4, 6).t(), (1, 6)),
        (torch.randn(4, 6)[:, 1:3], (2, 1)),
        (torch.randn(1).expand(3), (1,)),
    ],
    ids=["channels last", "transposed", "with holes", "expanded"],
)
def test_a_tensor_without_holes_keeps_its_order_in_memory(
    session: Session, tensor: torch.Tensor, strides: tuple[int, ...]
) -> None:
    (taken,) = transferred(session, [tensor])
    assert torch.equal(taken, tensor)
    assert taken.stride() == strides


def test_the_other_worker_may_write_to_its_copies(session: Session) -> None:
    tensor = torch.zeros(4)
    (taken,) = transferred(session, [tensor])
    taken += 1
    assert tensor.tolist() == [0, 0, 0, 0]
    assert transferred(session, [tensor])[0].tolist() == [0, 0, 0, 0]


def test_plain_values_come_between_tensors(session: Session) -> None:
    values = {
        "state": {0: {"step": torch.tensor(3.0), "none": None}},
        "milestones": Counter([2, 2]),
        "x": (1, "b"),
    }
    taken = transferred(session, values)
    assert taken["state"][0]["step"].item() == 3.0
    assert {**taken, "state": 0} == {**values, "state": 0}
    assert taken["state"][0]["none"] is None


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
def test_tensors_of_the_model_are_overwritten_in_place(
    session: Session, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(stored_state, "_PART_BYTES", part_bytes)
    theirs = [torch.randn(3, 5), torch.empty(0), torch.randn(7), torch.randn(2, 4).t(), torch.randn(2)]
    ours = [torch.zeros(3, 5), torch.empty(0), torch.zeros(14)[::2], torch.zeros(4, 2), torch.zeros(2)]
    kept = list(map(torch.Tensor.data_ptr, ours))
    parts = store_state(session, OwnState(tensors=theirs, values=[torch.ones(3)]), place=0)
    assert len(parts) == {1: 5, 100: 2, 1 << 20: 1}[part_bytes]
    values = load_state(session, ours)
    assert all(map(torch.equal, ours, theirs))
    assert list(map(torch.Tensor.data_ptr, ours)) == kept
    assert values[0].tolist() == [1, 1, 1]
    free_parts(session, parts)
    assert sum(session.load(key).value.nbytes for key in parts) == len(parts)


def test_another_model_is_an_error_that_names_the_first_difference(session: Session) -> None:
    store_state(session, OwnState(tensors=[torch.zeros(2), torch.zeros(3)], values={}), place=0)
    with pytest.raises(
        CoarseError, match=r"it holds float32 \[4\] of its model itself, and the others hold float32 \[3\]"
    ):
        load_state(session, [torch.zeros(2), torch.zeros(4)])
    with pytest.raises(
        CoarseError, match="it holds 1 tensors of its model itself, and the others hold 2 tensors"
    ):
        load_state(session, [torch.zeros(2)])


@pytest.mark.parametrize(
    ("value", "said"),
    [(object(), "is a builtins.object"), (torch.eye(2).to_sparse(), r"convert it by to_dense\(\)")],
)
def test_what_cannot_be_stored_is_an_error(session: Session, value: Any, said: str) -> None:
    state = OwnState(tensors=[], values={"odd": value})
    with pytest.raises(CheckpointError, match=said):
        state.check()
    with pytest.raises(CheckpointError, match=said):
        store_state(session, state, place=0)


def test_objects_without_a_state_are_refused_at_once(session: Session) -> None:
    with pytest.raises(TypeError, match=r"state\['rate'\] is a float, which has no state_dict\(\)"):
        session.join_training(state={"rate": 0.1})  # type: ignore[dict-item]


def test_a_refusal_in_place_of_a_state_is_an_error_of_the_other_worker(session: Session) -> None:
    store_refusal(session, "worker 0 cannot give its state to new workers: no room")
    with pytest.raises(CoarseError, match="no room"):
        load_state(session, [])


def test_a_state_that_cannot_be_stored_is_an_error_of_the_newcomers_alone(session: Session) -> None:
    StateTransfer(session).give(lambda: OwnState(tensors=[], values=object()), frozenset(), step=4)
    with pytest.raises(
        CoarseError, match="worker 0 cannot give its state to new workers: join_training is a"
    ):
        load_state(session, [])


@pytest.mark.parametrize("step", [4, 5])
def test_a_member_frees_what_it_has_stored(session: Session, step: int) -> None:
    transfer = StateTransfer(session)
    transfer.give(lambda: OwnState(tensors=[torch.ones(100)], values={}), frozenset(), step=step)
    key = f"coarse/state of a member/{step % 2}/0"
    assert session.load(key).value.nbytes == 400
    transfer.free()
    assert session.load(key).value.nbytes == 1
    transfer.free()
    assert session.load(key).version == 2


def test_memory_devices_that_cannot_hold_all_parts_hold_none(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_state, "_PART_BYTES", 1)
    store = session.store

    def store_or_refuse(key: str, *arrays: Any) -> int:
        if key.endswith("/2"):
            raise OutOfDeviceMemoryError("no room")
        return store(key, *arrays)

    monkeypatch.setattr(session, "store", store_or_refuse)
    with pytest.raises(OutOfDeviceMemoryError):
        store_state(session, OwnState(tensors=[torch.ones(9)] * 3, values={}), place=0)
    assert [session.load(f"coarse/state of a member/0/{part}").value.nbytes for part in range(3)] == [1, 1, 0]
