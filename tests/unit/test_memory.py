"""Device memory: sealed, complete from the start, shared only by descriptor; never exceeds available memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.proxy.memory import HostMemory
from coarse.wire.host_memory import refused, reserve

NUM_BYTES = 3 * mmap.PAGESIZE + 1
TERABYTES = 1 << 50


@pytest.fixture
def segment():
    taken = HostMemory().allocate("test", NUM_BYTES)
    yield taken
    taken.close()


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("num_bytes", [0, 1, NUM_BYTES - 1, NUM_BYTES + 1, 1 << 30])
def test_nobody_can_change_its_size(segment, num_bytes):
    with pytest.raises(PermissionError) as caught:
        os.ftruncate(segment.fd, num_bytes)
    assert caught.value.errno == errno.EPERM
    assert os.fstat(segment.fd).st_size == NUM_BYTES


def test_nobody_can_change_its_seals(segment):
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_its_pages_are_there_from_the_start(segment):
    assert os.fstat(segment.fd).st_blocks * 512 >= NUM_BYTES


def test_it_is_zero_and_shared_by_all_who_map_it(segment):
    with mmap.mmap(segment.fd, NUM_BYTES) as one, mmap.mmap(segment.fd, NUM_BYTES) as two:
        assert bytes(one[:]) == bytes(NUM_BYTES)
        one[NUM_BYTES - 1] = 7
        assert two[NUM_BYTES - 1] == 7


def test_pieces_are_written_one_after_the_other(segment):
    segment.write([memoryview(b"one"), memoryview(b""), memoryview(b"two" * 10)])
    with segment.map(read_only=True) as written:
        assert bytes(written[:34]) == b"one" + b"two" * 10 + b"\0"


def test_it_does_not_pass_to_programs_that_are_started(segment):
    read_only = segment.to_read()
    assert not os.get_inheritable(segment.fd)
    assert not os.get_inheritable(read_only.fd)
    read_only.close()


def test_a_read_only_descriptor_cannot_write(segment):
    fd = segment.to_read().fd
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ) as view:
            assert view[0] == 0
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor|Operation not permitted"):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_its_size_is_known_from_the_descriptor(segment):
    assert _native.sealed_bytes(segment.fd) == NUM_BYTES


def test_memory_whose_size_could_change_is_refused():
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    pipe = os.pipe()
    try:
        os.ftruncate(unsealed, NUM_BYTES)
        for fd in (unsealed, pipe[0]):
            with pytest.raises(ValueError, match="no sealed memory"):
                _native.sealed_bytes(fd)
        fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(ValueError, match="no sealed memory"):
            _native.sealed_bytes(unsealed)
    finally:
        for fd in (unsealed, *pipe):
            os.close(fd)


def test_closing_is_idempotent():
    before = open_descriptors()
    segment = HostMemory().allocate("test", 1)
    segment.close()
    segment.close()
    assert open_descriptors() == before


def test_a_shortage_gives_both_numbers_and_takes_nothing():
    before = open_descriptors()
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        HostMemory().allocate("gradients of model", TERABYTES)
    assert f"gradients of model needs {TERABYTES / 2**20:.1f} MiB of host memory, " in str(caught.value)
    assert " MiB are available. Use fewer workers" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("limit", "most", "told"),
    [
        (resource.RLIMIT_FSIZE, NUM_BYTES - 1, r"^test needs .* MiB in one piece\. .* a file .* `ulimit -f"),
        (resource.RLIMIT_NOFILE, 0, r"for coarse-test: Too many open files$"),
    ],
)
@pytest.mark.parametrize("allocate", [HostMemory.allocate, HostMemory.allocate_sparse])
def test_a_limit_of_the_process_is_told_as_such(allocate, limit, most, told):
    soft, hard = resource.getrlimit(limit)
    before = open_descriptors()
    memory = HostMemory()
    memory.available_bytes = lambda: NUM_BYTES  # reads files
    resource.setrlimit(limit, (most, hard))
    try:
        with pytest.raises(OutOfDeviceMemoryError, match=told):
            allocate(memory, "test", NUM_BYTES)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_was_gone_when_it_was_taken_is_a_shortage_too(number):
    error = refused(OSError(number, ""), "test", NUM_BYTES, "too little")
    assert str(error) == "too little"


def test_what_is_available_is_less_than_the_machine_has():
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert 0 <= HostMemory().available_bytes() < total


@pytest.mark.parametrize("label", ["x" * 1000, "größe", "a/b", "\ud800", ""])
def test_any_label_will_do(label):
    HostMemory().allocate(label, 1).close()


def test_pages_of_sparse_memory_are_reserved_before_they_are_written():
    segment = HostMemory().allocate_sparse("test", 10 * mmap.PAGESIZE)
    assert os.fstat(segment.fd).st_blocks == 0
    reserve("test", segment, mmap.PAGESIZE, 3 * mmap.PAGESIZE)
    assert os.fstat(segment.fd).st_blocks * 512 == 2 * mmap.PAGESIZE
    segment.close()


def test_a_reservation_that_cannot_be_had_takes_nothing():
    segment = HostMemory().allocate_sparse("test", TERABYTES)
    with pytest.raises(OutOfDeviceMemoryError, match=r"states of model needs .* MiB of host memory"):
        reserve("states of model", segment, 0, TERABYTES)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.close()
