"""Parameter storage: any worker loads the newest value completely; an older loaded value stays valid."""

import mmap

import numpy as np
import pytest

from coarse.errors import OutOfDeviceMemoryError, SnapshotLostError, SnapshotsBusyError

_MAP_NORESERVE = 0x4000  # Linux's value; not every Python's module defines it


@pytest.mark.parametrize("memory_devices", [1, 3])
def test_every_worker_loads_what_one_has_stored(job, memory_devices):
    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            for key in ("a", "layer.0.weight", "ü"):
                if me.rank == 1:
                    assert session.store(key, np.arange(1000.0) + len(key)) == 1
                session.barrier()
                stored = session.load(key)
                assert stored.version == 1
                assert np.array_equal(np.frombuffer(stored.value), np.arange(1000.0) + len(key))
            assert session.load("never stored").version == 0

    job.run(2, worker)


def test_a_new_version_leaves_those_that_hold_the_old_one_alone(job):
    def worker(me):
        with me.join(memory_devices=2) as session:
            if me.rank == 0:
                session.store("w", np.full(5, 1.0))
            session.barrier()
            first = session.load("w")
            session.barrier()
            if me.rank == 1:
                assert session.store("w", np.full(9, 2.0)) == 2
            session.barrier()
            second = session.load("w")
            assert np.frombuffer(first.value).tolist() == [1.0] * 5
            assert (second.version, np.frombuffer(second.value).tolist()) == (2, [2.0] * 9)

    job.run(2, worker)


def test_a_value_that_does_not_fit_leaves_the_one_before(job):
    def worker(me):
        with me.join(memory_devices=1) as session:
            if me.rank == 0:
                session.store("w", np.ones(3))
                # Address space without memory: the call is refused before it reads a byte.
                unbacked = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                huge = np.frombuffer(mmap.mmap(-1, 1 << 42, flags=unbacked), dtype=np.uint8)
                with pytest.raises(
                    OutOfDeviceMemoryError, match=r"needs .* MiB of host memory, .* are available"
                ):
                    session.store("w", huge)
                assert session.load("w").version == 1

    job.run(2, worker)


@pytest.mark.parametrize("memory_devices", [1, 3])
def test_a_snapshot_has_all_values_as_they_were(job, memory_devices):
    keys = [f"layer {number}" for number in range(12)]  # spread over all memory devices

    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            if me.rank == 0:
                for number, key in enumerate(keys):
                    session.store(key, np.full(3, float(number)))
            session.barrier()
            with session.snapshot_stored() as snapshot:
                session.barrier()
                if me.rank == 1:
                    for key in (*keys, "new"):
                        session.store(key, np.full(5, -1.0))
                session.barrier()
                for number, key in enumerate(keys):
                    kept = snapshot.load(key)
                    assert (kept.version, np.frombuffer(kept.value).tolist()) == (1, [float(number)] * 3)
                    assert session.load(key).version == 2
                assert snapshot.load("new").version == 0
            with pytest.raises(SnapshotLostError, match="was released"):
                snapshot.load(keys[0])
            with session.snapshot_stored() as later:
                assert later.load(keys[0]).version == 2

    job.run(2, worker)


def test_snapshots_of_stored_values_are_so_many_and_free_their_places(job):
    def worker(me):
        with me.join(memory_devices=1) as session:
            held = [session.snapshot_stored() for _ in range(16)]
            with pytest.raises(SnapshotsBusyError, match="holds 16 snapshots"):
                session.snapshot_stored()
            held.pop().release()
            held.append(session.snapshot_stored())
            for snapshot in held:
                snapshot.release()

    job.run(2, worker)
