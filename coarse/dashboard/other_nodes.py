"""Other nodes of a job, by the metrics that they serve: shown with the node of the command."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, IncompleteRead

from coarse.dashboard.pace import Pace
from coarse.dashboard.readings import Counters, Reading
from coarse.dashboard.sampler import Sampler, figures_of_device, figures_of_worker, links_of, slowest_of
from coarse.dashboard.samples import FAULT, RUNS, TRAINS, Device, Event, Link, Sample, Worker

_TIMEOUT_S = 1.0
_LONGEST_ANSWER_S = 1.0
_MOST_BYTES = 16 << 20
_AT_ONCE = 32


class OtherNode:
    """The metrics that one node serves. Call read() about once a second, from one thread at a time.

    Args:
        address: HOST:PORT of its metrics.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.problem = ""
        """Why the last read() has found nothing; "" if it has."""
        self.workers: tuple[Worker, ...] = ()
        self.devices: tuple[Device, ...] = ()
        self.links: tuple[Link, ...] = ()
        self._pace = Pace()

    def read(self) -> None:
        """Asks the node for its metrics; waits two seconds at most."""
        try:
            self._follow(_fetch(self.address))
            self.problem = ""
        except (OSError, HTTPException, ValueError, KeyError) as error:
            self.problem = str(error) or type(error).__name__
            self.workers, self.devices, self.links = (), (), ()

    def _follow(self, text: str) -> None:
        counters = Counters(dict(_samples(text)))
        ranks = [int(labels["worker"]) for labels, _ in counters.series("coarse_world_size")]
        if not ranks:
            raise ValueError("no worker of COARSE counts there")
        taken_s, time_s = time.monotonic(), time.time()
        self._pace.follow(Reading(taken_s=taken_s, time_s=time_s, counters=counters, plan={}))
        numbers = [
            int(labels["device"].removeprefix("md")) for labels, _ in counters.series("coarse_sync_cores")
        ]
        self.workers = tuple(map(self._worker, sorted(ranks)))
        self.devices = tuple(map(self._device, sorted(numbers)))
        self.links = tuple(map(self._named, links_of(self._pace, {})))

    def _worker(self, rank: int) -> Worker:
        steps = int(self._pace.counters.total("coarse_step_seconds_count", worker=str(rank)))
        figures = figures_of_worker(self._pace, rank)
        return Worker(rank=rank, pid=0, state=TRAINS, doing=f"on {self.address}", step=steps, **figures)

    def _device(self, number: int) -> Device:
        return Device(
            number=number, pid=0, doing="", node=self.address, **figures_of_device(self._pace, number)
        )

    def _named(self, link: Link) -> Link:
        """A link whose memory device has the node's name, because each node has an md0."""
        source = f"{self.address} {link.source}" if link.source.startswith("md") else link.source
        target = f"{self.address} {link.target}" if link.target.startswith("md") else link.target
        return replace(link, source=source, target=target)


class WholeJob:
    """Samples a job on this node and on others. Call sample() about once a second, from one thread.

    Args:
        sampler: Takes samples of the job on this node.
        addresses: HOST:PORT of the other nodes' metrics.
    """

    def __init__(self, sampler: Sampler, addresses: Iterable[str] = ()) -> None:
        self._sampler = sampler
        self._nodes = [OtherNode(each) for each in dict.fromkeys(addresses)]

    def sample(self) -> Sample:
        """The job's state now; a node that can no longer be shown is an event.

        Raises:
            OSError: If the system does not list its sockets.
        """
        sample = self._sampler.sample()
        if sample.phase != RUNS:
            return sample
        events = (*sample.events, *_read(self._nodes))
        return replace(with_nodes(sample, self._nodes), events=events)


def _read(nodes: Sequence[OtherNode]) -> Iterator[Event]:
    """Asks all nodes at the same time; yields why one cannot be shown any more."""
    before = [node.problem for node in nodes]
    if nodes:
        with ThreadPoolExecutor(min(_AT_ONCE, len(nodes)), thread_name_prefix="coarse-nodes") as pool:
            list(pool.map(OtherNode.read, nodes))
    for node, problem in zip(nodes, before, strict=True):
        if node.problem and node.problem != problem:
            text = f"no metrics from {node.address}: {node.problem}"
            yield Event(time_s=time.time(), kind=FAULT, text=text)


def with_nodes(sample: Sample, nodes: Sequence[OtherNode]) -> Sample:
    """A sample with what other nodes serve; a node whose workers are there already adds nothing."""
    for node in nodes:
        sample = _with_node(sample, node)
    return sample


def _with_node(sample: Sample, node: OtherNode) -> Sample:
    here = {worker.rank for worker in sample.workers}
    if not here.isdisjoint(worker.rank for worker in node.workers):
        return sample
    workers = (*sample.workers, *node.workers)
    slowest, why_slow = slowest_of(workers)
    return replace(
        sample,
        workers=workers,
        devices=(*sample.devices, *node.devices),
        links=(*sample.links, *node.links),
        samples_per_s=sum(each.samples_per_s for each in workers),
        slowest=slowest,
        why_slow=why_slow,
    )


def _fetch(address: str) -> str:
    """The metrics of a node, as text. Proxies are for the Internet, and these nodes are near.

    Raises:
        OSError: If it does not answer in time.
        ValueError: If the answer is too long, or no metrics.
    """
    with closing(HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        connection.connect()
        with _at_most(_LONGEST_ANSWER_S, connection.sock):
            return _ask(connection)


@contextmanager
def _at_most(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Ends the context's reading from a socket at its deadline.

    Raises:
        TimeoutError: At the end, if it was.
    """
    is_over = threading.Event()
    limit = threading.Timer(seconds, _break_off, [connected, is_over])
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
        if is_over.is_set():
            raise TimeoutError(f"its answer takes longer than {seconds:g} s")


def _ask(connection: HTTPConnection) -> str:
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"it has answered with status {answer.status}")
    data = answer.read(_MOST_BYTES)
    if len(data) == _MOST_BYTES:
        raise ValueError(f"it has answered with {_MOST_BYTES >> 20} MiB or more")
    if answer.length:
        raise IncompleteRead(data, answer.length)
    return data.decode()


def _break_off(connected: socket.socket, is_over: threading.Event) -> None:
    """Ends the calls that read from a socket; sets the event first, so that they find it set."""
    is_over.set()
    with suppress(OSError):  # it has ended by itself
        connected.shutdown(socket.SHUT_RDWR)


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """The samples of an answer in Prometheus's notation, without the buckets of histograms."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if "le" not in labels:
                listed = ",".join(f'{label}="{each}"' for label, each in labels.items())
                yield f"{name}{{{listed}}}", value
