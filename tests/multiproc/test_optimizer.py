"""Groups with an optimizer: one copy of parameters and states for all updaters, and rejected uses."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from written_pages import tells_written_pages

from coarse.client.tensor_group import UpdateKind
from coarse.client.update_settings import SETTINGS_DTYPE, Rule
from coarse.errors import CoarseError, OutOfDeviceMemoryError, SchemaMismatchError
from coarse.schema import TensorSpec
from coarse.wire.registration import WorkerMemory

ADAM_STATES = ("exp_avg", "exp_avg_sq")
LENGTHS = (70_001, 33, 5)  # several shards of 64 KiB, and two that are gathered


def means(*lengths, dtype="float32"):
    return [TensorSpec(name=str(i), dtype=dtype, num_elements=n) for i, n in enumerate(lengths)]


def write_settings(group, update_number, *, learning_rate=0.01):
    settings = np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)
    settings[:] = np.zeros((), dtype=SETTINGS_DTYPE)
    settings["rule"] = Rule.ADAM
    settings["gradient_scale"] = settings["parameter_scale"] = 1
    settings["step_size"] = learning_rate
    settings["first_weight"], settings["second_decay"], settings["second_weight"] = 0.1, 0.99, 0.01
    settings["second_scale"], settings["epsilon"] = 0.5, 1e-8
    settings["update_number"] = update_number


def descriptors(*labels):
    """New descriptors of the memory that this process can still reserve, valid after its own ones are closed."""
    found = {
        os.readlink(link): int(link.name) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    }
    return [os.dup(found[f"/memfd:coarse-{label} of model (deleted)"]) for label in labels]


def taken_bytes(fds):
    return [os.fstat(fd).st_blocks * 512 for fd in fds]


def array(memory):
    return np.frombuffer(memory, dtype=np.float32)


def take_steps(group, rank, steps=3):
    generator = np.random.default_rng(rank)
    for step in range(1, steps + 1):
        write_settings(group, step)
        for index, spec in enumerate(group.specs):
            array(group.buffer(index))[:] = generator.normal(size=spec.num_elements).astype(np.float32)
            group.push(index, update=UpdateKind.UPDATE)
        group.pull_all()


def digest(group):
    found = hashlib.sha256()
    for index in range(len(group.specs)):
        found.update(group.parameter(index))
        for number in range(len(ADAM_STATES)):
            found.update(group.state(index, number))
    return found.hexdigest()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_results_have_the_same_bits_however_many_memory_devices_there_are(job, num_workers):
    def worker(me):
        digests = []
        for devices, cores in ((1, 1), (1, 2), (num_workers, 1)):
            settings = {
                "memory_devices": devices,
                "sync_cores": cores,
                "shard_bytes": 64 << 10,
                "profile": "off",
            }
            with me.join(f"store{devices}{cores}", **settings) as session:
                group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
                take_steps(group, me.rank)
                digests.append(digest(group))
                session.barrier()
        return digests

    found = job.run(num_workers, worker)
    assert len({each for digests in found for each in digests}) == 1


def test_norms_have_the_same_bits_however_many_memory_devices_there_are(job):
    def worker(me):
        found = []
        for devices, cores in ((1, 1), (1, 2), (2, 1)):
            settings = {
                "memory_devices": devices,
                "sync_cores": cores,
                "shard_bytes": 64 << 10,
                "profile": "off",
            }
            with me.join(f"store{devices}{cores}", **settings) as session:
                group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
                generator = np.random.default_rng(me.rank)
                for index, spec in enumerate(group.specs):
                    array(group.buffer(index))[:] = generator.normal(size=spec.num_elements)
                    group.push(index, update=UpdateKind.MEASURE)
                group.pull_all()
                measures = group.measures()
                for index, measure in enumerate(measures):
                    squares = np.square(array(group.buffer(index)), dtype=np.float64).sum()
                    assert measure.sum_of_squares == pytest.approx(squares, rel=1e-12)
                    assert measure.first_nonfinite is None
                found.append(tuple(measure.sum_of_squares for measure in measures))
                session.barrier()
        return found

    found = job.run(2, worker)
    assert len({tuple(each) for squares in found for each in squares}) == 1


def test_tensors_that_share_a_slot_by_turns_keep_parameters_of_their_own(job):
    lengths = (1000, 500, 500, 900)

    def worker(me):
        with me.join() as session:
            group = session.register_parameters(
                "model", means(*lengths), state_names=ADAM_STATES, window_bytes=4 * 1000
            )
            assert max(group.slot(index)[1] for index in range(4)) == 4 * 1000
            write_settings(group, 1)
            session.barrier()
            for index in reversed(range(4)):  # every slot is free again before the next tensor
                array(group.buffer(index))[:] = (index + 1) * (-1 if index % 2 else 1)
                group.push(index, update=UpdateKind.UPDATE)
                group.pull(index)
            for index in range(4):
                # Adam's first step is the gradient's sign, times a factor from this test's settings.
                parameter = array(group.parameter(index))
                assert (np.sign(parameter) == (1 if index % 2 else -1)).all()
                assert len(set(parameter.tolist())) == 1
            session.barrier()

    job.run(2, worker)


def test_workers_share_parameters_and_keep_slots_to_themselves(job):
    def worker(me):
        with me.join() as session:
            group = session.register_parameters("model", means(100), state_names=())
            parameter, slot = array(group.parameter(0)), array(group.buffer(0))
            slot[:] = me.rank
            if me.rank == 1:
                parameter[:] = 7
            session.barrier()
            assert (parameter == 7).all()
            assert (slot == me.rank).all()
            with pytest.raises(ValueError, match="keeps no state"):
                group.state(0, 0)
            session.barrier()

    job.run(2, worker)


def test_another_learning_rate_on_one_worker_is_an_error_that_says_so(job):
    def worker(me):
        session = me.join()
        group = session.register_parameters("model", means(100), state_names=ADAM_STATES)
        write_settings(group, 1, learning_rate=(0.5, 0.25)[me.rank])
        group.push(0, update=UpdateKind.UPDATE)
        with pytest.raises(
            CoarseError, match=r"disagree on the optimizer's settings: step size 0\.5 and 0\.25"
        ):
            group.pull_all()

    job.run(2, worker)


def test_memory_that_workers_reserve_is_not_taken_before(job):
    num_elements = 64 * mmap.PAGESIZE

    def worker(me):
        with me.join() as session:
            memory = WorkerMemory(reserves=True)
            group = session.register_parameters(
                "model", means(num_elements), state_names=ADAM_STATES, memory=memory
            )
            fds = descriptors("gradients", "parameters", "states")
            taken = [taken_bytes(fds)]
            session.barrier()
            group.reserve_slots()
            if me.rank == 0:
                group.reserve_parameter(0)
                group.reserve_states()
            session.barrier()
            taken.append(taken_bytes(fds))
            take_steps(group, me.rank)
            taken.append(taken_bytes(fds))
        return taken

    whole = [4 * num_elements, 4 * num_elements, 8 * num_elements]
    assert job.run(2, worker) == [[[0, 0, 0], whole, whole]] * 2


def test_what_workers_free_as_parameters_move_counts_as_available(job, monkeypatch):
    """The device holds 4 MB of slots, 2 MB of parameters and 4 MB of states; 2 MB replace a worker's own memory."""

    def worker(me):
        paths = [str(small_memory), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the memory devices
        with me.join() as session:
            for moved_bytes in (0, 2_000_000):
                memory = WorkerMemory(reserves=True, moved_bytes=moved_bytes if me.rank == 0 else 0)
                try:
                    session.register_parameters(
                        f"model {moved_bytes}", means(500_000), state_names=ADAM_STATES, memory=memory
                    )
                except OutOfDeviceMemoryError as error:
                    refusal = str(error)
        return refusal

    small_memory = job.directory / "small"
    small_memory.mkdir()
    (small_memory / "sitecustomize.py").write_text(
        "from coarse.proxy.memory import HostMemory\nHostMemory.available_bytes = lambda self: 9_000_000\n"
    )
    assert all(each.startswith("model 0: 2 workers need 9.5 MiB") for each in job.run(2, worker))


def test_workers_must_register_the_same_optimizer(job):
    def worker(me):
        with me.join() as session:
            names = (ADAM_STATES, ("momentum_buffer",))[me.rank]
            with pytest.raises(SchemaMismatchError, match="momentum_buffer"):
                session.register_parameters("model", means(100), state_names=names)

    job.run(2, worker)


def test_what_cannot_be_updated_is_refused(job):
    def worker(me):
        with me.join() as session:
            with pytest.raises(ValueError, match="only means of float32"):
                session.register_parameters("model", means(100, dtype="float64"), state_names=())
            with pytest.raises(OutOfDeviceMemoryError, match="MiB of device memory"):
                session.register_parameters("model", means(1 << 40), state_names=ADAM_STATES)
            group = session.register("plain", means(100))
            with pytest.raises(ValueError, match="registered without an optimizer"):
                group.parameter(0)

    job.run(2, worker)


@pytest.mark.parametrize("algorithm", ["ring", "exchange"])
def test_distinct_memories_refuse_optimizers(job, algorithm):
    def worker(me):
        with (
            me.join(algorithm=algorithm) as session,
            pytest.raises(ValueError, match=f"gradients are reduced by {algorithm}"),
        ):
            session.register_parameters("model", means(100), state_names=())

    job.run(2, worker)


def test_a_job_of_one_has_no_memory_devices(job):
    def worker(me):
        with me.join() as session, pytest.raises(ValueError, match="a job of one worker"):
            session.register_parameters("model", means(100), state_names=())

    job.run(1, worker)


needs_written_pages = pytest.mark.skipif(
    not tells_written_pages(), reason="this kernel does not tell which pages a process has written"
)


@needs_written_pages
@pytest.mark.parametrize("writers", [(1,), (0, 1)])
def test_unlike_values_that_workers_write_to_a_parameter_end_the_session(job, writers):
    def worker(me):
        with me.join(profile="off") as session:
            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            assert group.map_own_parameters() == ""
            own = group.open_own_parameters(publishes=me.rank == 0)
            take_steps(group, me.rank, steps=1)
            shared = bytes(group.parameter(1))
            if me.rank in writers:
                array(own.parameter(1))[7] = 5 + me.rank
            write_settings(group, 2)
            digests, is_alike = own.take_over(group.keep_snapshots)
            assert digests.astype(bool).tolist() == [False, me.rank in writers, False]
            assert is_alike == (me.rank not in writers)
            assert bytes(group.parameter(1)) == shared
            np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)["written"] = digests
            for index in range(len(LENGTHS)):
                group.push(index, update=UpdateKind.UPDATE)
            with pytest.raises(
                CoarseError, match="tensor '1' of model: workers 0 and 1 have written unlike values"
            ):
                group.pull_all()

    job.run(2, worker)


@needs_written_pages
def test_what_a_worker_writes_is_its_own_until_all_take_it_over(job):
    def worker(me):
        with me.join(profile="off") as session:
            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            assert group.map_own_parameters() == ""
            own = group.open_own_parameters(publishes=me.rank == 0)
            take_steps(group, me.rank, steps=1)
            shared = [array(group.parameter(index)).copy() for index in range(len(LENGTHS))]
            session.barrier()
            array(own.parameter(0))[:] = me.rank
            array(own.parameter(2))[:] = 3
            session.barrier()
            assert (array(own.parameter(0)) == me.rank).all()
            array(own.parameter(0))[:] = shared[0]
            digests, is_alike = own.take_over(group.keep_snapshots)
            assert digests.astype(bool).tolist() == [False, False, True]
            assert is_alike
            session.barrier()
            for index, expected in enumerate([*shared[:2], np.full(LENGTHS[2], 3, dtype=np.float32)]):
                assert (array(group.parameter(index)) == expected).all()
            session.barrier()
            take_steps(group, me.rank, steps=1)  # no private page of this worker hides the results
            for index in range(len(LENGTHS)):
                assert own.parameter(index) == group.parameter(index)
                assert not (array(group.parameter(index)) == shared[index]).all()
            session.barrier()

    job.run(2, worker)
