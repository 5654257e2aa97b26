"""Memory on a DAX device: extents stay reserved while any process maps them; a device has only one owner.

A file stands for the device. Differences: its bytes are in the page cache and on a disk, its size can change, it may
be mapped at any page, and sysfs has no entry for it.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from coarse.errors import DeviceMemoryBusyError, OutOfDeviceMemoryError, ProtocolError
from coarse.kernels import _native
from coarse.proxy.memory import available_bytes, dax, open_memory, try_memory
from coarse.proxy.memory.dax import DaxMemory
from coarse.wire.segments import Extent, Segment

UNIT = 2 << 20
DEVICE_BYTES = 8 * UNIT


@pytest.fixture
def path(tmp_path):
    """A device that somebody has used before."""
    device = tmp_path / "dax0.0"
    device.write_bytes(b"\xff" * DEVICE_BYTES)
    return str(device)


@pytest.fixture
def memory(path):
    taken = DaxMemory(path)
    yield taken
    taken.close()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(dax, "_PATIENCE_S", 0.0)


def test_extents_are_aligned_zeroed_and_apart(memory):
    segments = [memory.allocate("test", num_bytes) for num_bytes in (1, UNIT + 1, 3 * UNIT)]
    assert [segment.extent for segment in segments] == [
        Extent(0, UNIT),
        Extent(UNIT, 2 * UNIT),
        Extent(3 * UNIT, 3 * UNIT),
    ]
    assert [segment.num_bytes for segment in segments] == [1, UNIT + 1, 3 * UNIT]
    for number, segment in enumerate(segments):
        with segment.map() as view:
            assert view.nbytes == segment.num_bytes
            assert bytes(view) == bytes(segment.num_bytes)
            view[:] = bytes([number + 1]) * view.nbytes
    for number, segment in enumerate(segments):
        with segment.map(read_only=True) as view:
            assert view.readonly
            assert set(bytes(view)) == {number + 1}
        segment.close()


def test_what_is_closed_is_given_out_again_and_zeroed(memory):
    whole = memory.allocate("test", DEVICE_BYTES)
    assert memory.available_bytes() == 0
    whole.map()[:4] = b"used"
    whole.close()
    assert memory.available_bytes() == DEVICE_BYTES
    again = memory.allocate("test", UNIT)
    assert bytes(again.map()[:4]) == bytes(4)
    again.close()


def test_gaps_between_extents_are_filled_first(memory):
    segments = [memory.allocate("test", 2 * UNIT) for _ in range(4)]
    segments[1].close()
    segments[3].close()
    assert memory.available_bytes() == 4 * UNIT
    small = memory.allocate("test", UNIT)
    large = memory.allocate("test", 2 * UNIT)
    assert (small.extent.offset, large.extent.offset) == (2 * UNIT, 6 * UNIT)
    for segment in (segments[0], segments[2], small, large):
        segment.close()


def test_a_mapping_keeps_its_extent_when_every_descriptor_is_closed(memory):
    segment = memory.allocate("test", DEVICE_BYTES)
    view = segment.map()
    segment.close()
    assert memory.available_bytes() == 0
    with pytest.raises(OutOfDeviceMemoryError):
        memory.allocate("test", 1)
    view.release()
    assert memory.available_bytes() == DEVICE_BYTES


@pytest.mark.parametrize("copy", [Segment.duplicate, Segment.to_read])
def test_a_copy_keeps_the_extent_too(memory, copy):
    segment = memory.allocate("test", UNIT)
    kept = copy(segment)
    segment.close()
    assert memory.available_bytes() == DEVICE_BYTES - UNIT
    assert (kept.extent, kept.num_bytes) == (Extent(0, UNIT), UNIT)
    kept.close()
    assert memory.available_bytes() == DEVICE_BYTES


def test_an_extent_is_free_when_the_process_that_mapped_it_is_killed(memory):
    """The process gets the descriptor over a socket, as workers do, and maps it; the one before has let go."""
    segment = memory.allocate("test", UNIT)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            segment.close()
            memory.close()
            _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
            received = Segment.received(fds[0], [0, UNIT, ""])
            view = received.map()
            received.close()
            view[:4] = b"here"
            theirs.send(b"m")
            signal.pause()
        finally:
            os._exit(1)
    theirs.close()
    socket.send_fds(ours, [b"s"], [segment.fd])
    assert ours.recv(1) == b"m"
    with segment.map() as view:
        assert bytes(view[:4]) == b"here"
    segment.close()
    assert memory.available_bytes() == DEVICE_BYTES - UNIT
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ours.close()
    assert memory.available_bytes() == DEVICE_BYTES


def test_what_somebody_still_maps_is_not_given_to_the_next_memory_device(path):
    first = DaxMemory(path)
    segment = first.allocate("test", UNIT)
    view = segment.map()
    view[:4] = b"mine"
    segment.close()
    first.close()
    second = DaxMemory(path)
    other = second.allocate("test", UNIT)
    assert other.extent.offset == UNIT
    assert bytes(view[:4]) == b"mine"
    other.close()
    second.close()


def test_control_words_lie_in_sealed_memory_of_the_host(memory):
    for segment in (memory.allocate_host("test", 100), memory.allocate_sparse("test", 100)):
        assert segment.extent is None
        assert _native.sealed_bytes(segment.fd) == 100
        segment.close()
    assert memory.available_bytes() == DEVICE_BYTES


def test_a_shortage_says_what_is_free_and_in_how_large_pieces(memory, path):
    segments = [memory.allocate("test", 2 * UNIT) for _ in range(4)]
    segments[0].close()
    segments[2].close()
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        memory.allocate("gradients of model", 3 * UNIT)
    assert (
        f"gradients of model needs 6.0 MiB of {path} in one piece; of 16.0 MiB 8.0 are free, 4.0 in one"
        in str(caught.value)
    )
    for segment in (segments[1], segments[3]):
        segment.close()


def test_a_device_is_for_one_alone_and_who_has_it_is_said(memory, path):
    with pytest.raises(
        DeviceMemoryBusyError, match=rf"{path} is for one memory device alone, and process {os.getpid()} \("
    ):
        DaxMemory(path)
    memory.close()
    DaxMemory(path).close()


def test_a_memory_device_that_is_killed_leaves_the_device_free(path):
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            segment = DaxMemory(path).allocate("test", UNIT)
            os.write(ready[1], b"r")
            signal.pause()
            segment.close()
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    with pytest.raises(DeviceMemoryBusyError, match=f"process {child} "):
        try_memory(f"dax:{path}")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try_memory(f"dax:{path}")
    for fd in ready:
        os.close(fd)


def test_a_trial_leaves_nothing(path):
    before = len(os.listdir("/proc/self/fd"))
    try_memory(f"dax:{path}")
    assert len(os.listdir("/proc/self/fd")) == before
    assert available_bytes(f"dax:{path}") == DEVICE_BYTES


def test_a_path_that_is_missing_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(
        ValueError, match=r"dax9\.0: No such file or directory; this machine has .*system-ram"
    ):
        open_memory(f"dax:{tmp_path / 'dax9.0'}")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/null", "is a character device, but no DAX device"),
        ("/tmp", "is neither a DAX device nor a file"),
    ],
)
def test_a_path_to_something_else_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        open_memory(f"dax:{path}")


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "has 0 bytes, which is too small"),
        (UNIT - 1, "which is too small: segments take 2 MiB at least"),
        (UNIT + 4096, f"is not aligned: its {UNIT + 4096} bytes are no multiple of {UNIT}"),
    ],
)
def test_a_size_that_no_segment_fits_into_is_refused(tmp_path, num_bytes, message):
    device = tmp_path / "dax0.0"
    device.write_bytes(bytes(num_bytes))
    with pytest.raises(ValueError, match=message):
        open_memory(f"dax:{device}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_of_somebody_else_is_refused(path):
    os.chmod(path, 0o400)
    with pytest.raises(ValueError, match="cannot be opened: Permission denied; as root: chgrp"):
        open_memory(f"dax:{path}")


def test_sysfs_tells_size_alignment_and_node_of_a_device(tmp_path, monkeypatch):
    folder = tmp_path / "sys" / "dev" / "char" / "252:3"
    folder.mkdir(parents=True)
    for name, text in (("size", "4294967296"), ("align", "1073741824"), ("numa_node", "1")):
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(dax, "_SYSFS", tmp_path / "sys")
    found = dax._geometry_of_device("/dev/dax0.3", os.makedev(252, 3))
    assert (found.num_bytes, found.alignment_bytes, found.node) == (4 << 30, 1 << 30, 1)
    (folder / "target_node").write_text("3\n")
    (folder / "driver").symlink_to(tmp_path / "sys" / "bus" / "dax" / "drivers" / "kmem")
    with pytest.raises(ValueError, match="memory of the system now, of NUMA node 3: use numa:3"):
        dax._geometry_of_device("/dev/dax0.3", os.makedev(252, 3))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device files")
def test_a_device_file_that_others_have_not_is_told(tmp_path, monkeypatch, caplog):
    """As `docker run --device` makes one: locks are of the file. /dev/null stands for the device."""
    theirs, own = "/dev/null", str(tmp_path / "dax0.0")
    number = os.stat(theirs).st_rdev
    os.mknod(own, stat.S_IFCHR | 0o600, number)
    sizes = tmp_path / "sys" / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
    sizes.mkdir(parents=True)
    (sizes / "size").write_text(f"{DEVICE_BYTES}\n")
    monkeypatch.setattr(dax, "_SYSFS", tmp_path / "sys")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "".join(
            f"{number} 1 {os.major(device)}:{os.minor(device)} / {place} rw - {kind} {kind} rw\n"
            for number, (device, place, kind) in enumerate(
                [
                    (os.stat(theirs).st_dev, "/dev", "devtmpfs"),
                    (os.stat(own).st_dev, "/", "overlay"),
                ]
            )
        )
    )
    monkeypatch.setattr(dax, "_MOUNTS", mounts)
    DaxMemory(theirs).close()
    assert not caplog.messages
    DaxMemory(own).close()
    assert "dax0.0 was made for this container" in caplog.text


@pytest.mark.parametrize("offset", [0, UNIT])
def test_a_device_that_has_shrunk_is_not_mapped(memory, path, offset):
    segments = [memory.allocate("test", UNIT) for _ in range(2)]
    os.truncate(path, offset + 4096)
    with pytest.raises(ValueError, match=f"needs {UNIT} bytes, the descriptor has 0"):
        segments[offset // UNIT].map()
    for segment in segments:
        segment.close()


@pytest.mark.parametrize("extent", [[1], ["a", "b", ""], 7, [0, True, ""], [0, 1, 2], {}])
def test_an_extent_that_is_none_is_refused(extent):
    with pytest.raises(ProtocolError, match="does not say where memory lies"):
        Segment.received(-1, extent)


def test_a_range_without_bytes_is_refused():
    with pytest.raises(ValueError, match="has no bytes"):
        _native.Region(0, 0, 0)


_ALLOCATE = """
import subprocess, sys
from coarse.errors import OutOfDeviceMemoryError
from coarse.proxy.memory.dax import DaxMemory

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M", "none", folder], check=True)
with open(f"{folder}/dax0.0", "wb") as file:
    file.truncate(16 << 20)
memory = DaxMemory(f"{folder}/dax0.0")
memory.allocate("fits", 1)
try:
    memory.allocate("the second", 1)
except OutOfDeviceMemoryError as error:
    print(error)
"""


def test_a_file_with_holes_that_its_file_system_cannot_fill_is_refused(tmp_path):
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this user may not have file systems of his own (unshare)")
    told = subprocess.run(
        [*apart, sys.executable, "-c", _ALLOCATE, tmp_path], capture_output=True, text=True, check=True
    ).stdout
    assert f"the second needs 2.0 MiB of {tmp_path}/dax0.0, a file with holes" in told
    assert "No space left on device" in told
