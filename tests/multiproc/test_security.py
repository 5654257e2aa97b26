"""No input from outside crashes or overruns a memory device: its sender is disconnected, others are served."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import random
import resource
import select
import signal
import socket
import struct

import numpy as np
import pytest
from harness import LIMIT_S, open_descriptors
from test_start import joining

from coarse.proxy.workers import _HELLO_TIMEOUT_S
from coarse.schema import TensorSpec
from coarse.store import DirectoryStore

HEADER = struct.Struct(
    "<4sHHII"
)  # docs/design/control-protocol.md: magic, version, descriptors, length, offset


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


def frame(payload, *, magic=b"COAR", version=1, num_fds=0, total=None, offset=0):
    return HEADER.pack(magic, version, num_fds, len(payload) if total is None else total, offset) + payload


def hello(token, client):
    return frame(json.dumps({"type": "hello", "token": token, "client": client}).encode())


@pytest.fixture
def device_socket(job):
    """Path of a memory device's socket, and the token, while workers join; afterwards the workers continue."""
    workers = [job.start_worker(rank, 2, joining({0: "set devices/0"}, memory_devices=1)) for rank in (0, 1)]
    assert workers[0].hear() == "set devices/0"
    (directory,) = job.temporary.iterdir()
    yield directory / "md0.sock", (directory / "token").read_text()
    workers[0].tell()
    assert [running.finish().details for running in workers] == ["", ""]


def connect(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(LIMIT_S)
    connection.connect(str(path))
    return connection


def is_dropped(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


STRANGERS = {
    "noise": random.Random(1).randbytes(1000),
    "less than a header": b"COAR",
    "another protocol": frame(b"{}", magic=b"HTTP"),
    "another version": frame(b"{}", version=2),
    "no message": frame(b""),
    "a length beyond all": frame(b"{}", total=(1 << 32) - 1),
    "a length that lies": frame(b"{}", total=1),
    "a fragment from the middle": frame(b"{}", total=100, offset=50),
    "descriptors that are not there": frame(b"{}", num_fds=3),
    "more than a frame holds": frame(b" " * 100_000),
    "no JSON": frame(b"{]"),
    "no text": frame(b"\xff\xfe"),
    "no object": frame(b"[1]"),
    "too deep": frame(b"[" * 40_000),
    "no type": frame(b"{}"),
    "a type that is no text": frame(b'{"type": 1}'),
    "something before hello": frame(b'{"type": "register"}'),
    "a wrong token": hello("0" * 64, 0),
    "an empty token": hello("", 0),
    "a token that is no text": hello(None, 0),
    "a token that is no character": hello("\ud800", 0),
}


def test_each_stranger_is_dropped_and_workers_are_served(device_socket):
    path, _ = device_socket
    for name, sent in STRANGERS.items():
        with connect(path) as stranger:
            stranger.send(sent)
            assert is_dropped(stranger), name


def test_workers_that_cannot_be_are_dropped(device_socket):
    path, token = device_socket
    for client in (-1, 2, 1 << 70, 0.5, True, "0", None):
        with connect(path) as stranger:
            stranger.send(hello(token, client))
            assert is_dropped(stranger), client


def test_half_a_message_and_silence_hold_nobody_up(device_socket):
    path, token = device_socket
    with contextlib.ExitStack() as stack:
        for sent in (b"", hello(token, 0)[:-10], frame(b"{", total=1000)):
            stranger = stack.enter_context(connect(path))
            if sent:
                stranger.send(sent)
        with connect(path) as last:
            last.send(b"noise")
            assert is_dropped(last), "the device is still at work"


def test_descriptors_of_strangers_are_closed(job, device_socket):
    path, _ = device_socket
    (pid,) = job.device_pids()
    with connect(path) as first:
        first.send(b"noise")
        assert is_dropped(first)
    before = open_descriptors(pid)
    for payload in (b'{"type": "hello"}', b"{]", b"{"):
        with connect(path) as stranger, open("/dev/null") as null:
            attached = array.array("i", [null.fileno()] * 200)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, attached)]
            total = 100 if payload == b"{" else None
            stranger.sendmsg([frame(payload, num_fds=200, total=total)], ancillary)
            if total:
                # Sent again, although only the first fragment may have descriptors.
                stranger.sendmsg([frame(payload, num_fds=200, total=total, offset=1)], ancillary)
            assert is_dropped(stranger)
    assert open_descriptors(pid) == before


def test_strangers_who_flood_a_device_with_descriptors_end_nothing(device_socket):
    """The device's limit of open files is a thousand: a hundred messages of 200 would exceed it."""
    path, _ = device_socket
    with open("/dev/null") as null:
        attached = array.array("i", [null.fileno()] * 200)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, attached)]
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(connect(path)) for _ in range(101)]
            for stranger in strangers:
                with contextlib.suppress(
                    ConnectionResetError, BrokenPipeError
                ):  # the first connections are dropped
                    stranger.sendmsg([frame(b"{", num_fds=200, total=100)], ancillary)
            assert all(map(is_dropped, strangers))


def test_of_many_who_say_nothing_the_first_are_dropped_and_those_who_say_much(device_socket):
    path, _ = device_socket
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(path)) for _ in range(70)]
        assert all(map(is_dropped, silent[:6]))  # at most 64 may wait
        talker = stack.enter_context(connect(path))
        talker.send(frame(b" " * 1000, total=(64 << 10) + 1))
        assert is_dropped(talker)


def test_out_of_descriptors_a_device_turns_connections_away(job, device_socket):
    path, _ = device_socket
    (pid,) = job.device_pids()
    with connect(path) as first:  # answered by a device that has set its own limit and opened all it needs
        first.send(STRANGERS["noise"])
        assert is_dropped(first)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(numbers) + 1, before[1]))
    num_free = max(numbers) + 1 - len(numbers)
    try:
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(connect(path)) for _ in range(num_free + 10)]
            poll = select.poll()
            for stranger in strangers:
                poll.register(stranger, select.POLLIN)
            assert poll.poll(1000 * _HELLO_TIMEOUT_S / 2), "none was turned away; later, silent ones are"
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@needs_root
def test_another_user_is_refused(device_socket):
    path, token = device_socket
    path.parent.parent.parent.chmod(0o755)
    path.parent.parent.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setuid(65534)
            try:
                connect(path)
            except PermissionError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0) == (child, 0), "the directory keeps others out"
    path.parent.chmod(0o755)
    path.chmod(0o777)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setuid(65534)
            with connect(path) as stranger:
                # It may be refused before it has sent anything.
                with contextlib.suppress(BrokenPipeError):
                    stranger.send(hello(token, 0))
                code = 0 if is_dropped(stranger) else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0) == (child, 0), "and if it does not, the device does"
    path.parent.chmod(0o700)  # otherwise the workers refuse it


# ---- the server's user ----


@contextlib.contextmanager
def another_user(prepare):
    """A process of another user that listens on the socket from `prepare`; `prepare` runs as this user."""
    listener = prepare()
    ready, at_work = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            listener.listen()  # from now on its peers get that user's id
            os.write(at_work, b"1")
            signal.pause()
        finally:
            os._exit(0)
    os.close(at_work)
    try:
        assert os.read(ready, 1) == b"1"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        listener.close()


def bound_to(path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    return listener


def announce(job, directory):
    """Starts two workers; the second one finds memory devices in `directory`. Returns how they end."""
    workers = [job.start_worker(rank, 2, joining({1: "get devices/0"}, memory_devices=1)) for rank in (0, 1)]
    assert workers[1].hear() == "get devices/0"
    store = DirectoryStore(job.directory / "store")
    announced = json.loads(store.get("devices/0", LIMIT_S))
    store.set("devices/0", json.dumps({**announced, "directory": str(directory)}).encode())
    workers[1].tell()
    return [running.finish() for running in workers]


@needs_root
def test_a_directory_of_another_user_in_the_store_is_refused(job):
    """Another user writes `devices/0` and serves a memory device in their own directory."""
    theirs = job.directory / "theirs"
    theirs.mkdir(mode=0o700)
    with another_user(lambda: bound_to(theirs / "md0.sock")):
        (theirs / "token").write_text("0" * 64)
        os.chown(theirs, NOBODY, NOBODY)
        first, second = announce(job, theirs)
    assert second.error == "RendezvousError", second
    assert f"{theirs} is a directory of user {NOBODY} with mode 700" in second.message
    assert "another user has written to the store" in second.message
    reason = second.message.removeprefix("worker 1: ").rstrip(".")
    assert first.message.startswith(f"worker 0: worker 1 failed at the start: {reason}. This follows"), first


@needs_root
def test_a_socket_that_another_user_serves_is_refused(job):
    """Even if the directory belongs to this user."""
    own = job.directory / "own"
    own.mkdir(mode=0o700)
    (own / "token").write_text("0" * 64)
    with another_user(lambda: bound_to(own / "md0.sock")) as stranger:
        _, second = announce(job, own)
    assert second.error == "RendezvousError", second
    assert f"process {stranger} of user {NOBODY} listens there, not a process of user 0" in second.message


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_memory_devices_are_looked_for_in_private_directories_only(job, kind):
    place = job.directory / "place"
    if kind == "a link":
        place.symlink_to(job.temporary)
    elif kind == "a file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o711)
    _, second = announce(job, place)
    assert second.error == "RendezvousError", second
    reason = "with mode 711" if kind == "open to others" else "is a symbolic link or a file"
    assert f"refused to join memory devices: {place} " in second.message
    assert reason in second.message


# ---- an accepted worker ----

MISBEHAVIOURS = {
    "an unknown message": {"type": "format"},
    "another hello": {"type": "hello", "token": "", "client": 0},
    "no group": {"type": "register"},
    "a negative group": {"type": "register", "group": -1},
    "a group beyond all": {"type": "unregister", "group": 1 << 64},
    "no tensors": {"type": "register", "group": 7, "name": "x", "specs": []},
    "silence of who hears it": {"type": "lost", "device": 0, "is_silent": True},
    "loss of who hears it": {"type": "lost", "device": 0, "is_silent": False},
    "loss of nobody": {"type": "lost", "device": 2, "is_silent": False},
}


def registration(**changes):
    specs = [["a", "float32", 1, "sum", 0]]
    sizes = {"shard_bytes": 1, "gather_bytes": 1, "window_bytes": 0}
    usual = {"name": "x", "specs": specs, **sizes, "algorithm": "auto", "large_algorithm": "direct"}
    return {"type": "register", "group": 7, **usual, **changes}


MISBEHAVIOURS |= {
    f"{field}={value!r:.20}": registration(**{field: value})
    for field, value in (
        ("specs", [1]),
        ("specs", [["a", "float32", 1]]),
        ("specs", [["a", "float32", float("inf"), "sum", 0]]),
        ("specs", [["a", "float32", 0, "sum", 0]]),
        ("specs", [["a", "float8", 1, "sum", 0]]),
        ("specs", [["a", "float32", 1, "xor", 0]]),
        ("specs", [["a", "float32", 6, "mean", 4]]),
        ("specs", [["a", "float32", 6, "mean", -3]]),
        ("specs", {"a": 1}),
        ("shard_bytes", 0),
        ("shard_bytes", "1"),
        ("gather_bytes", -1),
        ("window_bytes", -1),
    )
}


@pytest.mark.parametrize("message", MISBEHAVIOURS.values(), ids=MISBEHAVIOURS.keys())
def test_a_worker_that_breaks_the_protocol_is_evicted_and_named(job, message):
    def worker(me):
        with me.join(memory_devices=2) as session:
            session.barrier()
            if me.rank == 1:
                session._client.linked()._connections[0].send(message)
            # Data may arrive before control messages.
            while True:
                session.barrier()

    workers = job.start(3, worker)
    for running in workers:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert (
            f"worker 1 (pid {workers[1].pid}) was evicted because it broke the control protocol"
            in outcome.message
        )


PLAN_ERRORS = {
    "algorithm": registration(algorithm="magic"),
    "large algorithm": registration(large_algorithm="auto"),
    "staging": registration(is_staging=True, shard_bytes=64),
}


@pytest.mark.parametrize("message", PLAN_ERRORS.values(), ids=PLAN_ERRORS.keys())
def test_a_registration_that_all_agree_on_but_nobody_can_do_harms_nobody(job, message):
    def worker(me):
        with me.join(memory_devices=2) as session:
            for connection in session._client.linked()._connections:
                connection.send({**message, "group": 1000})
            session.barrier()

    job.run(2, worker)


# ---- shared memory ----

DESCRIPTOR = struct.Struct(
    "<IIIIBBBBIQ"
)  # docs/design/queue-protocol.md: group, shard, step, length, flags, ..., commit
PRESENT = 1
NUM_CELLS = 4096
QUEUE_OFFSET = 64  # after the inbox
CELLS_OFFSET = QUEUE_OFFSET + 64


def client_segment():
    """The memory that this worker shares with the memory devices, found as an attacker would find it."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:coarse-client" in line)
    start, end = (int(address, 16) for address in line.split()[0].split("-"))
    return (ctypes.c_ubyte * (end - start)).from_address(start)


def write_descriptor(position, *, group=0, shard=0, step=1, num_elements=0, dtype=0, op=0):
    """Publishes a descriptor to memory device 0."""
    cell = DESCRIPTOR.pack(group, shard, step, num_elements, PRESENT, dtype, op, 0, 0, position + 1)
    offset = CELLS_OFFSET + position * DESCRIPTOR.size
    client_segment()[offset : offset + len(cell)] = list(cell)


DESCRIPTORS = {
    "an unknown group": ({"group": 99}, "tensor group 99 is not registered"),
    "a shard beyond the last": ({"shard": 1}, "shard 1 of 1"),
    "the largest shard": ({"shard": (1 << 32) - 1}, "shard 4294967295 of 1"),
    "a step that was": ({"step": 0}, "step 0 of shard 0"),
    "a step that is not yet": ({"step": 2}, "step 2 of shard 0"),
    "the last step": ({"step": (1 << 32) - 1}, "step 4294967295 of shard 0"),
    "a buffer beyond its slot": (
        {"group": 1, "shard": 1, "num_elements": 1 << 30},
        "bytes in a slot of fewer",
    ),
    "a buffer of overflowing length": (
        {"group": 1, "shard": 1, "num_elements": (1 << 32) - 1, "dtype": 1},
        "bytes in a slot",
    ),
    "an unknown dtype": ({"group": 1, "shard": 1, "num_elements": 1, "dtype": 7}, "unknown dtype or op"),
    "an unknown op": ({"group": 1, "shard": 1, "num_elements": 1, "op": 255}, "unknown dtype or op"),
}


@pytest.mark.parametrize(("descriptor", "reason"), DESCRIPTORS.values(), ids=DESCRIPTORS.keys())
def test_a_corrupt_descriptor_evicts_who_wrote_it(job, descriptor, reason):
    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register(
                "weights", [TensorSpec(name="a", dtype="float32", num_elements=10, op="sum")]
            )
            staging = session._client.linked()._staging_group()
            assert (group.id, staging.id) == (0, 1)
            if me.rank == 0:
                write_descriptor(1, **descriptor)
                session.barrier()  # its descriptor is at position 0: the device continues to read
            group.push(0)
            group.pull(0)

    workers = job.start(3, worker)
    for running in workers:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker 0 (pid {workers[0].pid}) was evicted because it sent a descriptor that cannot be" in (
            outcome.message
        )
        assert reason in outcome.message


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_scribbles_over_its_queues_harms_only_the_session(job, seed):
    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register(
                "weights", [TensorSpec(name="a", dtype="float32", num_elements=10, op="sum")]
            )
            session.barrier()
            if me.rank == 0:
                me.tell()
                noise = random.Random(seed)
                segment = client_segment()
                # Spares the inbox, on which this worker sleeps. Marks every cell as committed.
                scribbles = bytearray(noise.randbytes(len(segment) - QUEUE_OFFSET))
                for position in range(NUM_CELLS):
                    end = CELLS_OFFSET - QUEUE_OFFSET + (position + 1) * DESCRIPTOR.size
                    scribbles[end - 8 : end] = (position + 1).to_bytes(8, "little")
                ctypes.memmove(ctypes.addressof(segment) + QUEUE_OFFSET, bytes(scribbles), len(scribbles))
                session.barrier()
            group.push(0)
            group.pull(0)

    workers = job.start(3, worker)
    workers[0].hear()
    for running in workers[1:]:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker 0 (pid {workers[0].pid}) was evicted" in outcome.message


def test_workers_cannot_write_what_memory_devices_share_with_them(job):
    """A worker's memory of a group: its own slots, and the devices' data read-only."""

    def worker(me):
        with me.join() as session:
            group = session.register(
                "weights", [TensorSpec(name="a", dtype="float32", num_elements=10, op="sum")]
            )
            with open("/proc/self/maps") as maps:
                lines = [line.split() for line in maps if "memfd:coarse-" in line]
            permissions = {line[5].removeprefix("/memfd:coarse-"): line[1] for line in lines}
            slots = [line for line in lines if "gradients" in line[5]]
            group.close()
        return permissions, len(slots)

    for permissions, num_slots in job.run(3, worker):
        assert num_slots == 1
        assert permissions["control"] == "r--s"
        assert permissions["gradients"] == "rw-s"
        assert set(permissions) == {"control", "gradients", "client", "doorbells", "metrics"}


def test_values_are_never_interpreted(job):
    """Bit patterns in a tensor are data."""

    def worker(me):
        with me.join(memory_devices=2) as session:
            specs = [TensorSpec(name="a", dtype="uint8", num_elements=100_000, op="max")]
            group = session.register("bytes", specs)
            values = np.frombuffer(group.buffer(0), dtype=np.uint8)
            values[:] = np.frombuffer(random.Random(0).randbytes(100_000), dtype=np.uint8)
            expected = values.copy()
            group.push(0)
            group.pull(0)
            assert np.array_equal(values, expected)

    job.run(2, worker)
