"""Nodes that are network namespaces of this machine, with cables of a given rate, delay and loss between them.

Each node has one interface, INTERFACE, and the address address_of(). The kernel limits the rate of each cable in both
directions (tc's token bucket). Delay and loss are netem's where the kernel has it, otherwise those of
`frame_delay.cpp`, a process that passes frames on. All of it takes root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coarse.errors import CoarseError

INTERFACE = "cable"
NONE, NETEM, PROCESS = "none", "netem", "process"
"""What delays frames: nothing, the kernel, or frame_delay."""

LEAST_DELAY_MS = 0.2
"""Shorter round trips are those of the machine itself, to which nothing is added."""

_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FORWARDER_SOURCE = Path(__file__).with_name("frame_delay.cpp")
_BURST_BYTES = 128 << 10
"""Above the longest frame, and little compared with the shortest message that is timed."""

_BURST_S = 0.25e-3
_QUEUE_S = 0.05
_NETEM_FRAMES = 100_000


class NetworkError(CoarseError):
    """The namespaces or their cables cannot be made here; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The cable of each node.

    Args:
        rate: In tc's notation, such as "1gbit"; in each direction.
        delay_ms: Round trip between two nodes; below LEAST_DELAY_MS nothing is added to the machine's own.
        loss_percent: Frames that are lost, in percent.

    Raises:
        ValueError: If a value is out of range.
    """

    rate: str
    delay_ms: float = 0.0
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        bits_per_s(self.rate)
        if not 0 <= self.delay_ms <= 1000 or not 0 <= self.loss_percent < 100:
            raise ValueError(
                f"a round trip of {self.delay_ms:g} ms with {self.loss_percent:g}% loss: "
                "0 to 1000 ms and less than 100% are possible"
            )

    @property
    def is_altered(self) -> bool:
        """Whether frames are delayed or lost."""
        return self.delay_ms >= LEAST_DELAY_MS or self.loss_percent > 0

    @property
    def one_way_us(self) -> float:
        """The delay that is added in one direction."""
        return self.delay_ms * 500 if self.delay_ms >= LEAST_DELAY_MS else 0.0

    @property
    def bucket(self) -> str:
        """tc's arguments for the rate."""
        burst_bytes = max(_BURST_BYTES, int(bits_per_s(self.rate) / 8 * _BURST_S))
        return f"tbf rate {self.rate} burst {burst_bytes} latency {_QUEUE_S * 1e3:g}ms"


def bits_per_s(rate: str) -> float:
    """Bits per second of a rate in tc's notation.

    Raises:
        ValueError: If it is none, or zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(f"rate {rate!r} is none such as 500mbit or 10gbit")
    return float(match[1]) * _BITS_PER_S[match[2]]


def address_of(node: int) -> str:
    """Address at which other nodes reach a node."""
    return f"10.77.0.{node + 1}"


def enter_namespace(name: str) -> None:
    """Moves this thread into a network namespace."""
    clone_new_net = 0x40000000
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_new_net) != 0:
            raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")


def mount_own_sysfs() -> None:
    """Shows this process its namespace's interfaces below /sys, where UCX looks for them, as `ip netns exec` does."""
    new_mounts, detached = 0x20000, 2
    only_from_others = (1 << 19) | (1 << 14)  # MS_SLAVE | MS_REC
    library = ctypes.CDLL(None, use_errno=True)
    for done in (
        library.unshare(new_mounts),
        library.mount(b"none", b"/", None, only_from_others, None),
        library.umount2(b"/sys", detached),
        library.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), "mounting /sys for a network namespace")


def require_tools() -> None:
    """Checks what namespaces and their cables take.

    Raises:
        NetworkError: If this process is not root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise NetworkError("network namespaces take root: run it with sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NetworkError(f"`{program}` is missing; install iproute2")


def compile_forwarder(folder: Path) -> Path:
    """Compiles frame_delay into `folder`.

    Raises:
        NetworkError: If there is no compiler, no TAP interface, or the compiler fails.
    """
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        raise NetworkError(
            f"this kernel has no netem, and without {compiler[0]} nothing else delays frames; install g++, "
            f"or ask only for round trips below {LEAST_DELAY_MS} ms without loss"
        )
    if not Path("/dev/net/tun").exists():
        raise NetworkError("frames are delayed by way of /dev/net/tun, which is missing: modprobe tun")
    program = folder / "frame_delay"
    _run(*compiler, "-std=c++17", "-O2", "-o", str(program), str(_FORWARDER_SOURCE))
    return program


def has_netem() -> bool:
    """Whether this kernel has netem."""
    with _namespace(f"coarse-{os.getpid()}-trial") as name:
        command = f"tc -n {name} qdisc add dev lo root netem delay 1ms"
        return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def connected_nodes(link: Link, num_nodes: int, *, forwarder: Path | None = None) -> Iterator[list[str]]:
    """The names of as many namespaces, all connected to one switch; at the end they are removed.

    Args:
        link: The cable of each.
        num_nodes: Number of nodes.
        forwarder: The result of compile_forwarder(), which delays frames if `link` wants it; None takes netem.

    Raises:
        NetworkError: If they cannot be made, or the forwarder has ended.
    """
    names = [f"coarse-{os.getpid()}-{node}" for node in range(num_nodes)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_namespace(name))
        if link.is_altered and forwarder is not None:
            stack.enter_context(_forwarder(forwarder, link, names))
        else:
            stack.enter_context(_bridge(link, names))
        for node, name in enumerate(names):
            _set_up(name, address_of(node), link, is_divided=bool(link.loss_percent) and forwarder is None)
        yield names


class Networks:
    """Connects nodes, with the delays that this machine offers.

    Args:
        links: All cables that are wanted.
        folder: For the forwarder, which is compiled if the kernel has no netem and a cable takes it.

    Raises:
        NetworkError: If this machine lacks what they take.
    """

    def __init__(self, links: Iterable[Link], folder: Path) -> None:
        require_tools()
        self._has_netem = has_netem()
        needs_process = any(link.is_altered for link in links) and not self._has_netem
        self._forwarder = compile_forwarder(folder) if needs_process else None

    def nodes(self, link: Link, num_nodes: int) -> contextlib.AbstractContextManager[list[str]]:
        """connected_nodes()."""
        return connected_nodes(link, num_nodes, forwarder=self._forwarder)

    def delay_of(self, link: Link) -> str:
        """NONE, NETEM or PROCESS."""
        if not link.is_altered:
            return NONE
        return NETEM if self._has_netem else PROCESS


def _set_up(name: str, address: str, link: Link, *, is_divided: bool) -> None:
    """A node's own end of its cable. TCP does not remember there what earlier connections have learned.

    With `is_divided` TCP leaves no long frames to the network card to divide, which netem would lose as a whole.
    """
    segments = "gso_max_segs 1 " if is_divided else ""
    _ip(f"-n {name} link set {INTERFACE} {segments}txqueuelen 10000 up")
    _ip(f"-n {name} link set lo up")
    _ip(f"-n {name} addr add {address}/24 dev {INTERFACE}")
    _tc(f"-n {name} qdisc add dev {INTERFACE} root {link.bucket}")
    _run(*f"ip netns exec {name} sh -c".split(), "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save")


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    try:
        _ip(f"netns add {name}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def _bridge(link: Link, names: Sequence[str]) -> Iterator[None]:
    """Connects the nodes by a bridge in a namespace of its own."""
    with _namespace(f"coarse-{os.getpid()}-switch") as switch:
        _ip(f"-n {switch} link add switch type bridge")
        _ip(f"-n {switch} link set switch up")
        for node, name in enumerate(names):
            port = f"port{node}"
            _ip(f"-n {name} link add {INTERFACE} type veth peer name {port} netns {switch}")
            _ip(f"-n {switch} link set {port} master switch txqueuelen 10000 up")
            for discipline in _port_disciplines(link):
                _tc(f"-n {switch} qdisc add dev {port} {discipline}")
        yield


def _port_disciplines(link: Link) -> list[str]:
    """What happens to frames that the switch sends to a node: delay and loss first, then the cable's rate."""
    if not link.is_altered:
        return [f"root {link.bucket}"]
    loss = f"loss {link.loss_percent}% " if link.loss_percent else ""
    return [
        f"root handle 1: netem delay {link.one_way_us:g}us {loss}limit {_NETEM_FRAMES}",
        f"parent 1:1 handle 2: {link.bucket}",
    ]


@contextlib.contextmanager
def _forwarder(program: Path, link: Link, names: Sequence[str]) -> Iterator[None]:
    """Connects the nodes by frame_delay, which is the switch and limits the rate of what it sends."""
    rate = bits_per_s(link.rate)
    figures = (rate, link.one_way_us, link.loss_percent / 100, rate / 8 * _QUEUE_S)
    process = subprocess.Popen(
        [str(program), *(repr(figure) for figure in figures), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which ends it
    )
    with process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise _ended(process)
            yield
            if process.poll() is not None:
                raise _ended(process)
        finally:
            process.terminate()


def _ended(process: subprocess.Popen[str]) -> NetworkError:
    said = process.communicate()[1].strip()
    return NetworkError(f"the process that delays frames ended with code {process.returncode}: {said}")


def _ip(words: str) -> None:
    _run("ip", *words.split())


def _tc(words: str) -> None:
    _run("tc", *words.split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
