"""All workers of a node agree on one profile of its links while its memory devices start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coarse.errors import RendezvousError
from coarse.profiler.start import OFF, FoundProfile, find_profile, share_profile
from coarse.startup.device_checks import cannot_profile
from coarse.startup.device_connections import Joining, NodeDevices, told_by_leader

if TYPE_CHECKING:  # slow to import, and only needed with a profile
    from coarse.profiler.profile import ProfileKey


def agree_on_profile(joining: Joining, node: NodeDevices) -> FoundProfile:
    """The profile of this node's links that its first worker finds while memory devices start.

    If none is found or to be measured, emulated links give a simulated one.

    Raises:
        ProfileError: If the file that COARSE_PROFILE names is not a profile of these links.
        RendezvousError: If the first worker publishes none in time.
    """
    found = _agree_on_stored_profile(joining, node)
    is_given = found.profile is not None or found.is_to_be_measured or joining.settings.profile == OFF
    if is_given or node.emulation is None:
        return found
    from coarse.profiler.linked import profile_from_links

    profile = profile_from_links(node.emulation.links, node.local_devices)
    note = f"simulated from the links of {node.emulation.machine}; {found.note}"
    return FoundProfile(profile=profile, note=note)


def _agree_on_stored_profile(joining: Joining, node: NodeDevices) -> FoundProfile:
    store, settings = joining.store, joining.settings
    reason = cannot_profile(
        settings, node.table, num_nodes=node.nodes.num_nodes, num_vacant=len(node.nodes.vacant)
    )
    if settings.profile == OFF or reason:
        return FoundProfile(note=f"not profiled: {reason or 'COARSE_PROFILE=off'}")
    key = f"profile/{node.node}"
    if joining.identity.rank == joining.leader:
        return share_profile(
            lambda text: store.set(key, text), lambda: find_profile(settings, lambda: _profile_key(node))
        )
    try:
        return FoundProfile.from_json(
            told_by_leader(joining, key, "measure or read the profile of the links")
        )
    except TimeoutError:
        raise RendezvousError(
            f"worker {joining.identity.rank}: worker {joining.leader} has published no profile within "
            f"{settings.timeout_s:.1f} s"
        ) from None


def _profile_key(node: NodeDevices) -> ProfileKey:
    from coarse.machine.host import read_host
    from coarse.profiler.profile import host_key, profile_key

    return profile_key(node.table, host_key(read_host()), node.emulation)
