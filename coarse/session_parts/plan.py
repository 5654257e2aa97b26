"""A session's decisions about its links and its algorithm, at its start and during training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coarse.client.tensor_group import TensorGroup
from coarse.env import notes_pipe
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.link_plan import plan_links
from coarse.profiler.start import OFF, FoundProfile
from coarse.session_parts.session_client import SessionClient
from coarse.settings import Settings
from coarse.startup.device_connections import NodeDevices
from coarse.status.address import job_id
from coarse.status.launcher_notes import tell_launcher
from coarse.status.responder import Report
from coarse.tuning.step_planning import StepPlanning
from coarse.tuning.tuned_session import TunedSession
from coarse.wire.algorithms import describe_algorithm, describe_compression

if TYPE_CHECKING:  # slow to import
    from coarse.profiler.profile import Profile

logger = logging.getLogger("coarse.session")


class SessionPlan:
    """Without decisions until make(), and in a job of one worker.

    Args:
        settings: The session's settings.
        client, node: Its client and memory devices.
    """

    def __init__(self, settings: Settings, client: SessionClient, node: NodeDevices | None) -> None:
        self._settings = settings
        self._client = client
        self._node = node
        self._decisions: tuple[str, ...] = ()
        self._steps: StepPlanning | None = None
        self._profile: Profile | None = None

    def make(self, session: TunedSession, node: NodeDevices, found: FoundProfile) -> None:
        """Plans routes and shard sizes from the profile that was found, or measures one now.

        Args:
            session: The session of this plan.
            node: Its memory devices.
            found: By all workers of the node.
        """
        rank, client = session.identity.rank, self._client.linked()
        profile, note = found.profile, found.note
        if found.is_to_be_measured:
            profile, note = _measure_links(session, note)
        emulated = session.emulation
        measured = profile
        if profile is None and self._settings.profile != OFF:
            profile, note = _seed(node.table, node.local_devices, note)
        self._profile = profile
        plan = plan_links(
            profile,
            note,
            local_devices=node.local_devices,
            settings=self._settings,
            links=None if emulated is None else emulated.links,
        )
        client.adopt_plan(plan.tables[node.ranks.index(rank)], plan.shard_bytes)
        # Dual synchronisation also considers sync cores, which firmware data does not describe.
        self._steps = StepPlanning(session, client.table, profile=measured, plan=plan)
        algorithm = describe_algorithm(self._settings, node.table, num_nodes=node.nodes.num_nodes)
        compression = describe_compression(self._settings, num_nodes=node.nodes.num_nodes)
        choices = (each for each in (algorithm, compression) if each)
        self._decisions = (*plan.decisions, *choices, *self._steps.check())
        if rank == node.ranks[0]:
            for decision in self._decisions:
                logger.info("[w%d] %s", rank, decision)

    @property
    def may_reduce_on_host(self) -> bool:
        """Whether workers may use direct all-reduce for tensors whose slots they see."""
        return self._steps is not None and self._steps.may_reduce_on_host

    def watch(self, session: TunedSession, group: TensorGroup, gpu: str) -> None:
        """Plans again from the steps of a group, as StepPlanning.watch()."""
        if self._steps is not None:
            self._steps.watch(session, group, gpu)

    def decisions(self) -> list[str]:
        """Session.decisions()."""
        client = self._client.if_open
        chosen = None if client is None else client.algorithm_choice
        choices = () if chosen is None else chosen.describe()
        planned = [] if self._steps is None else self._steps.decisions()
        return [*self._decisions, *choices, *planned]

    def announce(self, job: str) -> None:
        """Tells `coarse run` in three lines what was decided at the start; the first worker of a job calls it."""
        if self._node is None:
            return
        nodes, table = self._node.nodes, self._node.table
        size = f"{sum(map(len, nodes.ranks)) - len(nodes.vacant)} workers on {nodes.num_nodes} node(s)"
        memories = ", ".join(f"md{device} in {memory}" for device, memory in enumerate(table.memories))
        links, *_ = self._decisions
        told = ("algorithm:", "compression between nodes:", "shards ")
        decided = [each for each in self._decisions if each.startswith(told)]
        lines = [
            f"job {job_id(job)}: {size}, {memories}",
            links,
            "; ".join(reversed(decided)),
        ]
        tell_launcher(notes_pipe(), {"decisions": lines})

    def describe(self) -> Report:
        """The decisions, for the dashboard; called in the responder's thread."""
        node = self._node
        return {
            "decisions": self.decisions(),
            "machine": self._settings.machine,
            "memories": [] if node is None else list(node.table.memories),
            "nodes": [] if node is None else list(map(list, node.nodes.ranks)),
            "links": [] if node is None or self._profile is None else self._link_limits(node, self._profile),
        }

    def _link_limits(self, node: NodeDevices, profile: Profile) -> list[Report]:
        """Capacity of the links of this node's workers, by the profile of the session's start."""
        from coarse.profiler.profile import PUSH

        dilation = self._settings.time_dilation if self._settings.machine else 1.0
        curves = {
            (path.source, path.target): curve for path, curve in profile.curves.items() if path.kind == PUSH
        }
        return [
            {
                "worker": node.ranks[client],
                "device": device,
                "bytes_per_s": curve.peak_gbytes_per_s * 1e9 / dilation,
                "kind": profile.kind,
            }
            for (client, device), curve in curves.items()
        ]


def _seed(table: PartitionTable, local_devices: Sequence[int], note: str) -> tuple[Profile | None, str]:
    """A profile from the firmware's memory data, used until one is measured; None if that data is insufficient."""
    if any(device.memory.kind != "numa" for device in table.devices):
        return None, note
    from coarse.machine.firmware_links import firmware_links
    from coarse.machine.host import read_numa_nodes
    from coarse.profiler.linked import profile_from_links

    links = firmware_links(table, read_numa_nodes())
    if links is None:
        return None, note
    return profile_from_links(links, local_devices), f"simulated from the firmware's figures (HMAT); {note}"


def _measure_links(session: TunedSession, note: str) -> tuple[Profile, str]:
    """Measures the links together with all workers; the node's first worker saves the result."""
    from coarse.profiler.profile import cache_path
    from coarse.tuning.measure import measure_profile

    profile = measure_profile(session)
    path = cache_path(profile.key)
    if session.identity.rank == session.node_workers[0]:
        try:
            profile.save(path)
        except OSError as error:
            logger.warning("the profile cannot be saved to %s: %s", path, error.strerror)
    return profile, f"{profile.kind} now ({note})"
