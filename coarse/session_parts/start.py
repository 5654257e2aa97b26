"""How a worker comes into a session: alone, together with all others, or in the place of a lost one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from coarse.client.client import Client
from coarse.client.single_worker import SingleWorkerClient
from coarse.env import Attempt, WorkerIdentity, is_of_torchrun, notes_pipe
from coarse.process.failpoints import Failpoints, parse_failpoints
from coarse.profiler.start import FoundProfile
from coarse.rendezvous.workers import NodeMap, PeerWatch, gather_workers
from coarse.security.node_ports import NodePorts
from coarse.session_parts.checks import (
    check_emulated_nodes,
    check_losses,
    check_nodes,
    check_ports,
    check_single_worker,
    settings_for_losses,
    settings_for_nodes,
)
from coarse.session_parts.services import WorkerServices
from coarse.session_parts.session_client import AnyClient
from coarse.settings import Settings
from coarse.startup.device_connections import Joining, NodeDevices, connect, provide_devices
from coarse.startup.newcomer import Invitation, enter_session
from coarse.startup.node_address import try_address_of_this_node
from coarse.startup.persistent_devices import Keeping
from coarse.startup.profile_agreement import agree_on_profile
from coarse.status.launcher_notes import tell_launcher
from coarse.store import Store
from coarse.timeline import recorder
from coarse.timeline.part_files import WORKER, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A worker that is to come into a session, in one of three ways.

    Args:
        identity, settings, attempt: As for Session.join(), all given.
        services: Answers about this worker during the start.
    """

    identity: WorkerIdentity
    settings: Settings
    attempt: Attempt
    services: WorkerServices

    def alone(self) -> Started:
        """Starts the only worker of a job, which serves its metrics itself.

        Raises:
            RendezvousError: If the settings need several workers.
        """
        check_single_worker(self.settings)
        self._record_timeline()
        client = SingleWorkerClient()
        self.services.serve_metrics(client.read_metrics, self.settings)
        return Started(start=self, client=client, node=None)

    def enter(self, invitation: Invitation) -> Started:
        """Enters a running job in the place of a lost worker; Session.enter() describes the errors."""
        start = replace(self, settings=settings_for_losses(self.settings))
        start._record_timeline()
        client, node = enter_session(start.identity, start.settings, invitation)
        client.adopt_plan(client.routing, invitation.shard_bytes)
        client.open_boundary(invitation.next_group)
        client.on_entry(lambda: tell_launcher(notes_pipe(), {"entered": start.identity.rank}))
        return Started(start=start, client=client, node=node)

    @contextlib.contextmanager
    def together(self, store: Store, name: str) -> Iterator[StartedTogether]:
        """Starts together with all workers of the job, which are watched until the block ends.

        Args:
            store, name: As for Session.join(), which describes the errors.
        """
        with self._watch(store) as watch:
            joining = self._gather(store, name, watch)
            client, node, found = _come_together(joining)
            start = replace(self, settings=joining.settings)
            started = Started(start=start, client=client, node=node)
            yield StartedTogether(started=started, client=client, node=node, watch=watch, found=found)

    def _watch(self, store: Store) -> PeerWatch:
        identity, settings = self.identity, self.settings
        has_other_nodes = identity.local_world_size < identity.world_size or bool(settings.node)
        reached_at = try_address_of_this_node(settings) if has_other_nodes else ""
        ports = NodePorts.parse(settings.node_ports)
        return PeerWatch(identity, settings.node, store=store, reached_at=reached_at, ports=ports)

    def _gather(self, store: Store, name: str, watch: PeerWatch) -> Joining:
        """Finds all workers; checks that the settings allow a job on their nodes."""
        identity, settings = self.identity, self.settings
        addresses = gather_workers(
            identity, store, timeout_s=settings.timeout_s, watch=watch, node=settings.node
        )
        nodes = NodeMap.of_addresses(addresses)
        with watch.telling():
            check_nodes(settings, nodes.num_nodes)
            check_ports(settings, nodes, nodes.node_of(identity.rank))
            watch.require_liveness()
            check_emulated_nodes(settings, nodes)
            check_losses(
                settings,
                num_workers=identity.world_size,
                num_nodes=nodes.num_nodes,
                is_of_torchrun=is_of_torchrun(),
            )
            settings = settings_for_losses(settings_for_nodes(settings, nodes.num_nodes))
            if settings.max_workers:
                nodes = nodes.with_places(settings.max_workers)
            joining = Joining(
                identity=identity,
                store=store,
                settings=settings,
                nodes=nodes,
                watch=watch,
                keeping=Keeping(session=name, attempt=self.attempt) if settings.keep_devices else None,
            )
            # First, so that a full disk ends the start of all workers, while they wait for this one.
            self._record_timeline(node=joining.node)
        return joining

    def _record_timeline(self, *, node: int = 0) -> None:
        process = Process(
            role=WORKER,
            number=self.identity.rank,
            node=node,
            attempt=self.attempt.number,
            num_clients=self.identity.local_world_size,
        )
        recorder.start(self.settings.timeline, process, num_events=self.settings.timeline_events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker in its session.

    Args:
        start: How it has started, with the settings that fit its job.
        client: Its client.
        node: Its memory devices; None in a job of one worker.
    """

    start: Start
    client: AnyClient
    node: NodeDevices | None

    def failpoints(self) -> Failpoints:
        """The failpoints of this worker."""
        return Failpoints(
            parse_failpoints(self.start.settings.failpoints),
            rank=self.start.identity.rank,
            attempt=self.start.attempt.number,
            device_pid=self.client.device_pid if isinstance(self.client, Client) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedTogether:
    """A worker that has just started together with the others.

    Args:
        started: For the session.
        client, node: The same as there.
        watch: Notices workers that are lost until all have finished their start.
        found: The profile that all workers of the node have found.
    """

    started: Started
    client: Client
    node: NodeDevices
    watch: PeerWatch
    found: FoundProfile

    def invite_newcomers(self) -> Invitation | None:
        """Lets newcomers take places of lost workers, if the settings say so; returns how they find the session.

        Opens the boundary of steps, at which they come; worker 0 tells the launcher the invitation.
        """
        if not self.started.start.settings.replaces_workers:
            return None
        next_group = self.client.next_group
        self.client.open_boundary()
        invitation = Invitation.of_session(
            self.node, shard_bytes=self.client.shard_bytes, next_group=next_group
        )
        if self.started.start.identity.rank == 0:
            tell_launcher(notes_pipe(), {"invitation": invitation.to_fields()})
        return invitation


@contextlib.contextmanager
def starting(identity: WorkerIdentity, settings: Settings | None, attempt: Attempt | None) -> Iterator[Start]:
    """Answers about a worker from now on, and no longer if an error leaves the block.

    Args:
        identity, settings, attempt: As for Session.join().
    """
    settings = settings or Settings.from_environment()
    attempt = attempt or Attempt.from_environment()
    services = WorkerServices(identity, attempt)
    try:
        yield Start(identity=identity, settings=settings, attempt=attempt, services=services)
    except BaseException:
        services.close()
        raise


def _come_together(joining: Joining) -> tuple[Client, NodeDevices, FoundProfile]:
    with joining.watch.telling():
        node = provide_devices(joining)
    try:
        with (
            joining.watch.telling()
        ):  # the reason, before the others notice that their memory devices are gone
            found = agree_on_profile(joining, node)
            client = connect(joining, node)
    except BaseException:
        if node.processes is not None:
            node.processes.kill()
        raise
    if node.processes is not None and joining.keeping is None and not joining.settings.replaces_workers:
        node.processes.hide()
    return client, node, found
