"""Figure 15: the routing table of each machine, local against remote memory devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from matplotlib.figure import Figure

from coarse.profiler.figures import draw_normalised, format_size
from coarse.profiler.profile import Profile
from coarse.profiler.routing import RoutingTable
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import CategoryCheck
from experiments.profiles import (
    HOST,
    curves_as_json,
    get_profile,
    get_sessions,
    pacing_as_json,
    plan_tables,
)

ALWAYS_LOCAL = "always local"
LOCAL_THEN_REMOTE = "local for small, remote for large"
ALWAYS_REMOTE = "always remote"
REMOTE_THEN_LOCAL = "remote for small, local for large"

PAPER_ROUTES = {"aws-g4dn": ALWAYS_LOCAL, "aws-p3": LOCAL_THEN_REMOTE, "sdsc-p100": ALWAYS_LOCAL}
"""Section V-C, by machine: T4, V100, P100."""


def name_route(table: RoutingTable, local_device: int) -> str:
    """A routing table in the paper's terms."""
    is_small_local, is_large_local = table.lat_proxy == local_device, table.bw_proxy == local_device
    if is_small_local:
        return ALWAYS_LOCAL if is_large_local else LOCAL_THEN_REMOTE
    return REMOTE_THEN_LOCAL if is_large_local else ALWAYS_REMOTE


def compare(
    profile: Profile, tables: Sequence[RoutingTable], of_sessions: Sequence[RoutingTable] = ()
) -> Finding:
    """Routes of all workers, compared with the paper's for the machine.

    Args:
        profile: Of all sessions together.
        tables: Its table of each worker.
        of_sessions: The tables by the profile of each session, whose thresholds are told too.
    """
    routes = [
        name_route(table, device) for table, device in zip(tables, profile.key.local_devices, strict=True)
    ]
    expected = PAPER_ROUTES.get(profile.key.machine)
    sizes = sorted(table.threshold_bytes for table in (*tables, *of_sessions) if table.threshold_bytes)
    thresholds = list(dict.fromkeys(format_size(nbytes) for nbytes in sizes))
    note = f"threshold {' to '.join(_ends(thresholds))}" if thresholds else ""
    if expected is None:
        note = "; ".join(filter(None, (*dict.fromkeys(routes), note)))
        return Finding(ran=f"routing tables, {profile.key.machine}", note=note, kind=profile.kind)
    return Finding(
        ran=f"routing tables, {profile.key.machine}",
        checks=(CategoryCheck(category=expected, categories=tuple(routes), source="V-C, Fig 15"),),
        note=note,
        kind=profile.kind,
    )


def run(options: Options) -> Outcome:
    """Profiles each machine and plans its routes."""
    profiles = [get_profile(machine, is_quick=options.is_quick) for machine in options.machines]
    tables = [plan_tables(profile) for profile in profiles]
    of_sessions = [
        [table for each in sessions.profiles for table in plan_tables(each)]
        for sessions in (get_sessions(machine, is_quick=options.is_quick) for machine in options.machines)
    ]
    return Outcome(
        findings=[compare(*each) for each in zip(profiles, tables, of_sessions, strict=True)],
        data=[
            {
                **curves_as_json(profile),
                **pacing_as_json(machine, is_quick=options.is_quick),
                "routing_tables": [asdict(table) for table in of_machine],
            }
            for machine, profile, of_machine in zip(options.machines, profiles, tables, strict=True)
        ],
        pictures=_draw(profiles, [of_machine[0] for of_machine in tables]),
    )


def _draw(profiles: Sequence[Profile], tables: Sequence[RoutingTable]) -> dict[str, Figure]:
    """The paper's machines in one picture, and the host in another because its scale differs."""
    pictures = {}
    for name, is_host in (("routing", False), ("routing-host", True)):
        chosen = [i for i, profile in enumerate(profiles) if (profile.key.machine == HOST) == is_host]
        if chosen:
            pictures[name] = draw_normalised([profiles[i] for i in chosen], [tables[i] for i in chosen])
    return pictures


def _ends(texts: Sequence[str]) -> Sequence[str]:
    return texts if len(texts) < 2 else (texts[0], texts[-1])


EXPERIMENT = Experiment(
    name="fig15_routing",
    figure="Fig 15",
    machines=("aws-g4dn", "aws-p3", "sdsc-p100", "host"),
    assumption="latencies of the machine files: the paper gives their order alone",
    minutes=0.1,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
