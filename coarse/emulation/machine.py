"""The machine that a session emulates: its links and its time dilation (docs/design/emulation.md)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.machine.cci import LoadStore, dense_links
from coarse.machine.links import LinkTable
from coarse.machine.wiring import link_table

if TYPE_CHECKING:
    from coarse.machine.partition_table import PartitionTable

MOST_BUCKETS_PER_PATH = 8
"""Capacity of the native link table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Links to which the real runtime is paced. Immutable; the same on every process of a job.

    Args:
        links: Links between the workers and memory devices of the node.
        time_dilation: Factor by which all transfers take longer than on the machine; positive.
        num_logged: Number of first transfers to log.
        links_of_nodes: With several nodes, the links of all of them, as of coarse.machine.wiring; None with one.

    Raises:
        ValueError: If the dilation is not positive and finite, or a path has too many buckets.
    """

    links: LinkTable
    time_dilation: float = 1.0
    num_logged: int = 0
    links_of_nodes: LinkTable | None = None

    def __post_init__(self) -> None:
        if not (self.time_dilation > 0 and math.isfinite(self.time_dilation)):
            raise ValueError(f"a time dilation of {self.time_dilation} is not positive and finite")
        for row in self.job_links.paths:
            for path in row:
                if path is not None and len(path.buckets) > MOST_BUCKETS_PER_PATH:
                    raise ValueError(
                        f"machine {self.links.machine}: a path takes {len(path.buckets)} buckets, but at most "
                        f"{MOST_BUCKETS_PER_PATH} can be emulated"
                    )

    @property
    def machine(self) -> str:
        """Name of the machine."""
        return self.links.machine

    @property
    def job_links(self) -> LinkTable:
        """Links between all workers and memory devices of the job."""
        return self.links if self.links_of_nodes is None else self.links_of_nodes

    def bucket_number(self, name: str) -> int:
        """Position of a bucket in `job_links`.

        Raises:
            ValueError: If no bucket has that name; suggests the nearest ones.
        """
        from coarse.machine.named_files import suggestion

        names = [bucket.name for bucket in self.job_links.buckets]
        if name not in names:
            raise ValueError(f"machine {self.machine} has no bucket {name!r}; {suggestion(name, names)}")
        return names.index(name)

    def to_json(self) -> str:
        """The JSON form for other processes."""
        return json.dumps(
            {
                "links": self.links.to_json(),
                "time_dilation": self.time_dilation,
                "num_logged": self.num_logged,
                "links_of_nodes": None if self.links_of_nodes is None else self.links_of_nodes.to_json(),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Emulation:
        """Reads the output of `to_json`.

        Raises:
            ValueError: If it is anything else.
        """
        try:
            values = json.loads(text)
            of_nodes = values["links_of_nodes"]
            return cls(
                links=LinkTable.from_json(values["links"]),
                time_dilation=values["time_dilation"],
                num_logged=values["num_logged"],
                links_of_nodes=None if of_nodes is None else LinkTable.from_json(of_nodes),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an emulation: {error!r}") from None


def choose_emulation(
    machine: str,
    table: PartitionTable,
    *,
    time_dilation: float,
    num_logged: int = 0,
    dense: str = "",
    num_nodes: int = 1,
) -> Emulation | None:
    """The emulation of a machine for the workers and memory devices of `table`; None if no machine is named.

    Args:
        machine: Name of a machine, or a TOML file; "" for none.
        table: The workers that each memory device of a node serves.
        time_dilation, num_logged: As in Emulation.
        dense: Ratios of DENSE's loads and stores, as in LoadStore.parse(); "" for the links as they are.
        num_nodes: Number of nodes, which are all such machines.

    Raises:
        ValueError: If the machine does not exist, its file is wrong, or the table does not fit it; if there are
            several nodes and the machine has no network.
    """
    if not machine:
        return None
    from coarse.machine.catalogue import load_machine

    loaded = load_machine(machine)
    links = link_table(loaded, table)
    if dense:
        links = dense_links(links, LoadStore.parse(dense))
    of_nodes = link_table(loaded, table, num_nodes=num_nodes) if num_nodes > 1 else None
    return Emulation(links=links, time_dilation=time_dilation, num_logged=num_logged, links_of_nodes=of_nodes)
