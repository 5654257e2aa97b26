"""Limits of transfers between workers and memory devices of a machine: latencies and shared capacities.

G is 1e9, B is a byte. docs/design/machines.md explains how a machine's buckets are derived.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A capacity that transfers share: one direction of a link, both together, an uplink of a switch, a host bridge.

    Args:
        name: Name for messages, unique in a table.
        gbytes_per_s: Bandwidth of all transfers through it together.

    Raises:
        ValueError: If the name is empty, or the capacity is not positive and finite.
    """

    name: str
    gbytes_per_s: float

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a bucket needs a name")
        if not (self.gbytes_per_s > 0 and math.isfinite(self.gbytes_per_s)):
            raise ValueError(f"bucket {self.name}: {self.gbytes_per_s} GB/s is not positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The path from one endpoint to another.

    Args:
        latency_us: Time of a transfer of no bytes.
        buckets: Positions in LinkTable.buckets, without duplicates; a transfer takes its bytes from all of them.

    Raises:
        ValueError: If the latency is negative or not finite, or `buckets` is empty or contains a duplicate.
    """

    latency_us: float
    buckets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and math.isfinite(self.latency_us)):
            raise ValueError(f"a latency of {self.latency_us} us is negative or not finite")
        if not self.buckets or len(set(self.buckets)) < len(self.buckets):
            raise ValueError(f"buckets {list(self.buckets)} must be distinct and not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """Paths between all endpoints of a node. Immutable; the same on every process of a job.

    Workers 0..num_workers-1 are the endpoints of these numbers; memory device d is endpoint num_workers + d.

    Args:
        machine: Name of the links' machine.
        num_workers: Workers of the node, at least 1.
        num_devices: Memory devices of the node, at least 1.
        buckets: All capacities.
        paths: Paths by source and target endpoint; None on the diagonal.

    Raises:
        ValueError: If the parts do not fit together; the message names the path or bucket.
    """

    machine: str
    num_workers: int
    num_devices: int
    buckets: tuple[Bucket, ...]
    paths: tuple[tuple[Path | None, ...], ...]

    def __post_init__(self) -> None:
        if min(self.num_workers, self.num_devices) < 1:
            raise ValueError(
                f"{self.num_workers} workers and {self.num_devices} memory devices: at least one of each is needed"
            )
        names = [bucket.name for bucket in self.buckets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two buckets are named {twice[0]!r}")
        endpoints = self.num_endpoints
        if len(self.paths) != endpoints or any(len(row) != endpoints for row in self.paths):
            raise ValueError(f"paths must be a square matrix for {endpoints} endpoints")
        for source, row in enumerate(self.paths):
            for target, path in enumerate(row):
                self._check_path(source, target, path)

    def _check_path(self, source: int, target: int, path: Path | None) -> None:
        where = f"path from {self.endpoint_name(source)} to {self.endpoint_name(target)}"
        if (path is None) != (source == target):
            raise ValueError(f"{where}: each endpoint needs a path to every other one, and none to itself")
        if path is not None and not all(0 <= index < len(self.buckets) for index in path.buckets):
            raise ValueError(
                f"{where}: buckets {list(path.buckets)} are not all among the {len(self.buckets)} buckets of "
                "the table"
            )

    @property
    def num_endpoints(self) -> int:
        """Workers and memory devices together."""
        return self.num_workers + self.num_devices

    def worker(self, worker: int) -> int:
        """The endpoint of a worker.

        Raises:
            ValueError: If the worker does not exist.
        """
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker {worker} is not one of the {self.num_workers} workers")
        return worker

    def device(self, device: int) -> int:
        """The endpoint of a memory device.

        Raises:
            ValueError: If the memory device does not exist.
        """
        if not 0 <= device < self.num_devices:
            raise ValueError(f"memory device {device} is not one of the {self.num_devices} memory devices")
        return self.num_workers + device

    def endpoint_name(self, endpoint: int) -> str:
        """ "worker 3" or "md2", for messages."""
        return f"worker {endpoint}" if endpoint < self.num_workers else f"md{endpoint - self.num_workers}"

    def path(self, source: int, target: int) -> Path:
        """The path from one endpoint to another.

        Raises:
            ValueError: If an endpoint does not exist, or both are the same.
        """
        if not (0 <= source < self.num_endpoints and 0 <= target < self.num_endpoints):
            raise ValueError(
                f"no path from endpoint {source} to {target}: the table has {self.num_endpoints} endpoints"
            )
        path = self.paths[source][target]
        if path is None:
            raise ValueError(f"no path from {self.endpoint_name(source)} to itself")
        return path

    def bandwidth_gbytes_per_s(self, source: int, target: int) -> float:
        """Bandwidth of one transfer alone: the smallest bucket of its path."""
        return min(self.buckets[index].gbytes_per_s for index in self.path(source, target).buckets)

    def duplex_gbytes_per_s(self, one: int, other: int) -> float:
        """Total bandwidth of two simultaneous transfers, one each way, without others (COARSE paper, Figure 8)."""
        shared = set(self.path(one, other).buckets) & set(self.path(other, one).buckets)
        both = self.bandwidth_gbytes_per_s(one, other) + self.bandwidth_gbytes_per_s(other, one)
        return min([both, *(self.buckets[index].gbytes_per_s for index in shared)])

    def to_json(self) -> str:
        """The JSON form for other processes."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> LinkTable:
        """Reads the output of `to_json`.

        Raises:
            ValueError: If it is anything else.
        """
        try:
            values = json.loads(text)
            return cls(
                machine=values["machine"],
                num_workers=values["num_workers"],
                num_devices=values["num_devices"],
                buckets=tuple(Bucket(**bucket) for bucket in values["buckets"]),
                paths=tuple(tuple(_path(path) for path in row) for row in values["paths"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a link table: {error!r}") from None


def _path(values: dict[str, Any] | None) -> Path | None:
    if values is None:
        return None
    return Path(latency_us=values["latency_us"], buckets=tuple(values["buckets"]))
