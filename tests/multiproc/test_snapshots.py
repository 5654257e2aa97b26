"""Snapshots of an optimizer's data in the memory devices: started by a counter, consistent, harmless."""

from __future__ import annotations

import ctypes
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest

from coarse.checkpoint.catalogue import open_verified
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.source import SavedTensor
from coarse.checkpoint.writer import SaveDetails, WriteOptions
from coarse.client.tensor_group import UpdateKind
from coarse.client.update_settings import SETTINGS_DTYPE, Rule
from coarse.errors import (
    MemoryDeviceLostError,
    ProtocolError,
    SnapshotLostError,
    SnapshotsBusyError,
    WorkerLostError,
)
from coarse.schema import TensorSpec
from coarse.wire.snapshots import KeptTensor, SentTensor, SnapshotContents, write_request

needs_crc32c = pytest.mark.skipif(find_spec("crc32c") is None, reason="needs crc32c")

STATES = ("exp_avg", "exp_avg_sq")
LENGTHS = (70_001, 33, 5_000)  # several shards of 64 KiB, and two that are gathered
ARRAYS = 1 + len(STATES)
WHOLE_BYTES = 4 * sum(LENGTHS) * ARRAYS
POOL_BYTES = 8 << 20


def open_group(session):
    specs = [
        TensorSpec(name=str(i), dtype="float32", num_elements=n, op="mean") for i, n in enumerate(LENGTHS)
    ]
    return session.register_parameters("model", specs, state_names=STATES)


def take_step(group, rank, step):
    settings = np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)
    settings[:] = np.zeros((), dtype=SETTINGS_DTYPE)
    settings["rule"], settings["update_number"], settings["step_size"] = Rule.ADAM, step, 0.01
    settings["gradient_scale"] = settings["parameter_scale"] = 1
    settings["first_weight"], settings["second_decay"], settings["second_weight"] = 0.1, 0.99, 0.01
    settings["second_scale"], settings["epsilon"] = 0.5, 1e-8
    generator = np.random.default_rng((rank, step))
    for index, spec in enumerate(group.specs):
        np.frombuffer(group.buffer(index), dtype=np.float32)[:] = generator.normal(size=spec.num_elements)
        group.push(index, update=UpdateKind.UPDATE)
    group.pull_all()


def contents_now(group):
    """Present contents of every array of every tensor."""
    return [
        [bytes(group.parameter(index)), *(bytes(group.state(index, i)) for i in range(len(STATES)))]
        for index in range(len(LENGTHS))
    ]


def contents_of(snapshot):
    return [[bytes(snapshot.read(index, array)) for array in range(ARRAYS)] for index in range(len(LENGTHS))]


def settings_of(memory_devices=2, **settings):
    chosen = {"memory_devices": memory_devices, "shard_bytes": 64 << 10, "snapshot_pool_bytes": POOL_BYTES}
    return {**chosen, "profile": "off", **settings}


def write(snapshot, folder, step, *, sent=()):
    """Requests a checkpoint of everything, including the small tensors in `sent`."""
    kept = [
        KeptTensor(
            saved=SavedTensor(name=f"{array}.{index}", dtype="F32", shape=(length,)),
            tensor=index,
            array=array,
            order=(0,),
        )
        for array in range(ARRAYS)
        for index, length in enumerate(LENGTHS)
    ]
    small = [
        SentTensor(
            saved=SavedTensor(name=f"sent.{i}", dtype="U8", shape=(len(each),)),
            offset=sum(map(len, sent[:i])),
        )
        for i, each in enumerate(sent)
    ]
    what = SnapshotContents(step=step, kept=tuple(kept), sent=tuple(small)).to_message()
    request = write_request(str(folder), SaveDetails(world_size=2), WriteOptions(chunk_bytes=4096))
    return snapshot.write({**what, **request}, sent)


def load(folder, name):
    with Folder.open(folder) as parent, open_verified(parent, name) as checkpoint:
        found = {tensor: bytearray(tensor.nbytes) for tensor in checkpoint.tensors}
        checkpoint.load({tensor: memoryview(memory) for tensor, memory in found.items()})
    return {tensor.name: bytes(memory) for tensor, memory in found.items()}


@pytest.mark.parametrize("memory_devices", [1, 2])
def test_a_snapshot_holds_its_step_while_training_goes_on(job, memory_devices):
    def worker(me):
        with me.join(**settings_of(memory_devices)) as session:
            group = open_group(session)
            held = []
            for step in range(1, 9):
                take_step(group, me.rank, step)
                if me.rank == 0 and step in (3, 5):
                    held.append((contents_now(group), group.snapshot()))
            for expected, snapshot in held:
                assert contents_of(snapshot) == expected != contents_now(group)
            if me.rank == 0:
                assert group.snapshot_statistics().kept_bytes == 2 * WHOLE_BYTES
                for _, snapshot in held:
                    snapshot.release()
                assert group.snapshot_statistics().taken_bytes == 0
            session.barrier()

    job.run(2, worker)


def test_the_slowest_reader_sees_no_update(job):
    # Reads one array between steps: each one was copied before one of many updates, or never changed.
    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            places = [(tensor, array) for tensor in range(len(LENGTHS)) for array in range(ARRAYS)]
            take_step(group, me.rank, 1)
            expected = contents_now(group)
            snapshot = group.snapshot() if me.rank == 0 else None
            for step, (tensor, array) in enumerate(places, 2):
                if snapshot is not None:
                    assert bytes(snapshot.read(tensor, array)) == expected[tensor][array]
                take_step(group, me.rank, step)
            if snapshot is not None:
                assert contents_of(snapshot) == expected
            session.barrier()

    job.run(2, worker)


def test_training_with_snapshots_has_the_same_bits_as_training_without(job):
    def worker(me):
        ends = []
        for takes_snapshots in (False, True):
            with me.join(f"store{takes_snapshots}", **settings_of()) as session:
                group = open_group(session)
                chosen = np.random.default_rng(me.rank)
                for step in range(1, 13):
                    take_step(group, me.rank, step)
                    if takes_snapshots and chosen.random() < 0.5:
                        with group.snapshot() as snapshot:
                            snapshot.read(0)
                ends.append(contents_now(group))
                session.barrier()
        assert ends[0] == ends[1]

    job.run(2, worker)


@needs_crc32c
@pytest.mark.parametrize("pool_bytes", [POOL_BYTES, 1])
def test_a_checkpoint_is_written_from_a_snapshot_while_training_goes_on(job, tmp_path, pool_bytes):
    # With the smallest pool, updates of the next steps wait for the writer at each block.
    def worker(me):
        with me.join(**settings_of(snapshot_pool_bytes=pool_bytes)) as session:
            group = open_group(session)
            writes = []
            for step in range(1, 13):
                take_step(group, me.rank, step)
                if me.rank == 0 and step % 3 == 0:
                    writing = write(group.snapshot(), tmp_path, step, sent=[b"abc", b"de"])
                    writes.append((step, contents_now(group), writing))
            for step, expected, writing in writes:
                assert writing.wait() == (step, 0)
                writing.wait_until_verified()
                found = load(tmp_path, CheckpointName(step))
                assert (found.pop("sent.0"), found.pop("sent.1")) == (b"abc", b"de")
                assert found == {
                    f"{array}.{index}": expected[index][array]
                    for index in range(len(LENGTHS))
                    for array in range(ARRAYS)
                }
            if me.rank == 0:
                statistics = group.snapshot_statistics()
                assert statistics.taken_bytes == statistics.num_lost == 0
                assert statistics.peak_bytes <= statistics.limit_bytes
            session.barrier()

    job.run(2, worker)


def test_snapshots_in_memory_that_was_taken_ahead_are_true_to_their_step(job):
    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            if me.rank == 0:
                group.warm_snapshots()  # runs in the background: the first snapshots may find a part of the pool
            for step in range(1, 7):
                take_step(group, me.rank, step)
                expected = contents_now(group)
                snapshot = group.snapshot() if me.rank == 0 else None
                take_step(group, me.rank, step + 10)
                if snapshot is not None:
                    assert contents_of(snapshot) == expected
                    snapshot.release()
                session.barrier()

    job.run(2, worker)


@needs_crc32c
def test_a_disk_that_fails_costs_the_checkpoint_and_nothing_else(job, tmp_path):
    (tmp_path / "file").touch()

    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            if me.rank == 0:
                writing = write(group.snapshot(), tmp_path / "file" / "folder", 1)
                with pytest.raises(
                    NotADirectoryError, match=rf"^\[Errno 20\] Not a directory: '{tmp_path}/file"
                ):
                    writing.wait()
            take_step(group, me.rank, 2)
            if me.rank == 0:
                with closing(write(group.snapshot(), tmp_path / "folder", 2)) as writing:
                    assert writing.wait() == (2, 0)
                assert group.snapshot_statistics().taken_bytes == 0
            session.barrier()

    job.run(2, worker)


@needs_crc32c
def test_a_write_that_is_stopped_leaves_nothing_half_done(job, tmp_path):
    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            if me.rank == 0:
                write(group.snapshot(), tmp_path, 1).close()
                with closing(write(group.snapshot(), tmp_path, 2)) as writing:
                    assert writing.wait() == (2, 0)
            take_step(group, me.rank, 2)
            session.barrier()

    job.run(2, worker)
    with Folder.open(tmp_path) as parent:
        for name in CheckpointName(1), CheckpointName(2):
            if parent.has(str(name)):  # the first save may have finished before the stop request
                open_verified(parent, name).close()
        assert parent.has("step-2")


def test_only_so_many_snapshots_are_held_at_a_time(job):
    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            if me.rank == 0:
                held = [group.snapshot() for _ in range(4)]
                with pytest.raises(SnapshotsBusyError, match="4 snapshots are already held"):
                    group.snapshot()
                held[0].release()
                group.snapshot_statistics()  # answered after the release
                assert group.snapshot().number == 5
                with pytest.raises(SnapshotLostError, match="was released"):
                    held[0].read(0)
            session.barrier()

    job.run(2, worker)


def test_a_snapshot_that_nobody_reads_is_given_up_before_it_stops_training_for_long(job, capfd):
    def worker(me):
        with me.join(**settings_of(snapshot_pool_bytes=1, heartbeat_s=2)) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            snapshot = group.snapshot() if me.rank == 0 else None
            session.barrier()
            take_step(group, me.rank, 2)
            if snapshot is not None:
                with pytest.raises(SnapshotLostError, match="Raise COARSE_SNAPSHOT_POOL_BYTES"):
                    snapshot.read(0)
                statistics = group.snapshot_statistics()
                assert (statistics.num_lost, statistics.taken_bytes) == (1, 0)
                assert statistics.waited_s > 1
                snapshot.release()
                with group.snapshot() as another:
                    assert contents_of(another) == contents_now(group)
            session.barrier()

    job.run(2, worker)
    assert (
        "[md0] model: a snapshot of worker 0 was given up, after an update had waited"
        in capfd.readouterr().err
    )


def counter_of_snapshots():
    """The word with which this worker starts snapshots, located as a stray write might hit it."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:coarse-snapshot request" in line)
    return ctypes.c_uint32.from_address(int(line.split("-")[0], 16))


def test_a_worker_that_overwrites_the_counter_of_snapshots_stalls_nobody_and_is_named(job, capfd):
    """The pool holds one block: an update would wait 5 s for each apparent snapshot."""

    def worker(me):
        with me.join(**settings_of(snapshot_pool_bytes=1)) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            session.barrier()
            if me.rank == 1:
                counter_of_snapshots().value = 4_000_000_000
            session.barrier()
            take_step(group, me.rank, 2)
            if me.rank == 0:
                statistics = group.snapshot_statistics()
                assert (statistics.num_lost, statistics.num_waits) == (0, 0)
                with pytest.raises(ProtocolError, match="is 4000000000, an impossible value: worker 0 or 1"):
                    group.snapshot()
            session.barrier()

    job.run(2, worker)
    assert "[md0] model: the snapshot counter is 4000000000" in capfd.readouterr().err


def test_a_worker_may_write_itself_once_snapshots_are_kept(job):
    def worker(me):
        with me.join(**settings_of()) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            if me.rank == 0:
                expected, snapshot = contents_now(group), group.snapshot()
                group.keep_snapshots()
                np.frombuffer(group.parameter(0), dtype=np.float32)[:] = 7
                assert contents_of(snapshot) == expected != contents_now(group)
            session.barrier()

    job.run(2, worker)


def test_an_array_that_does_not_exist_is_no_request(job):
    def worker(me):
        group = open_group(me.join(**settings_of()))
        if me.rank == 0:
            with pytest.raises(WorkerLostError, match="no array 3 of a tensor 0"):
                group.snapshot().read(0, 3)
        else:
            take_step(group, me.rank, 1)

    told, lost = job.outcomes(2, worker)
    assert not told.error
    assert lost.error == "WorkerLostError"


def test_a_write_ends_with_its_memory_device(job, tmp_path):
    def worker(me):
        session = me.join(**settings_of())
        group = open_group(session)
        take_step(group, me.rank, 1)
        if me.rank == 0:
            me.tell(session.device_pids[0])
            me.hear()  # the device is stopped and accepts no request
            writing = write(group.snapshot(), tmp_path, 1)
            me.tell()
            with pytest.raises(MemoryDeviceLostError, match="nothing of the checkpoint remains"):
                writing.wait()

    first, second = job.start(2, worker)
    home = first.hear()
    job.stop_device(home)
    first.tell()
    first.hear()
    job.kill_device(home)
    assert not first.finish().error, first.finish().details
    second.finish()
    assert list(tmp_path.iterdir()) == []
