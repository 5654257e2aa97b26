"""Plans a job's synchronisation again while it trains (COARSE paper, III-E and III-F; docs/design/planning.md).

All replanning happens between two steps, at the same step on every worker, and all workers compute it from the same
numbers. It does not change results: the order of additions does not depend on routes and paths.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coarse.emulation.pacing import ServedTransfer
from coarse.profiler.direct_allreduce import ALL_TO_ALL, choose_collective
from coarse.profiler.dual_sync import OFF, DualSyncInputs, SyncCosts, parse_mode, plan_dual_sync
from coarse.profiler.linked import collectives_from_links, sync_costs_from_links
from coarse.profiler.profile import BOTH, ContradictoryFiguresError, PathId, Profile
from coarse.profiler.refresh import largest_change, refresh_profile
from coarse.profiler.routing import DEFAULT_MARGIN, RoutingTable, is_better, plan_routing
from coarse.tuning.first_steps import TIMED_STEPS, FirstSteps, shards_in_order
from coarse.tuning.measure import gather_bytes, time_paths
from coarse.tuning.step_clock import StepClock
from coarse.tuning.traffic import TrafficGauge, times_of_traffic
from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:
    from coarse.client.link_probes import LinkProbes
    from coarse.client.tensor_group import TensorGroup
    from coarse.profiler.link_plan import LinkPlan

logger = logging.getLogger(__name__)

COST_FRACTION = 0.01
"""Fraction of training time that probes may take."""

MOST_STEPS_APART = 10_000
_FEWEST_STEPS_APART = 10
_LATENCY_BYTES = 4096

_LEAST_GAIN_ON_HOST = 0.1
"""Least saving: on a host, the profile measures copies, but sync cores reduce in place, so estimates are rough."""


class Replanner:
    """Watches the steps of one tensor group and renews its plan.

    Args:
        session: The group's session.
        group: The group whose steps are counted.
        profile: The measured links; the same on every worker. None without measurements: then `dual_sync` must be not
            "auto", and links are not checked.
        plan: The plan made from the profile at the session's start.
        dual_sync: "off", "auto", or the number of bytes for the memory devices.
        allreduce_algorithm: For direct all-reduce; "auto" takes the fastest for each size
            (profiler/direct_allreduce.py).
        every_steps: Steps between two checks of the links; 0 disables them, -1 chooses an interval that costs
            COST_FRACTION of the time.

    Raises:
        ValueError: If `dual_sync` has another value.
    """

    def __init__(
        self,
        session: TunedSession,
        group: TensorGroup,
        *,
        profile: Profile | None,
        plan: LinkPlan,
        dual_sync: str,
        allreduce_algorithm: str,
        every_steps: int,
    ) -> None:
        self._session = session
        self._number = session.node_workers.index(session.identity.rank)
        self._is_first = session.identity.rank == 0
        self._probes: LinkProbes | None = None
        self._gauge = TrafficGauge()
        self._traffic_since_us = 0.0
        self._num_timed = (0, 0)
        self._group = group
        self._profile = profile
        self._planned_for = profile  # the links when routes were last planned
        self._tables = plan.tables
        self._shard_bytes = plan.shard_bytes
        self._dual_sync = parse_mode(dual_sync)
        self._allreduce_algorithm = allreduce_algorithm
        self._every_steps = every_steps
        self._is_learning = True
        self._num_steps = 0
        self._next_look = 0
        self._clock = StepClock()
        self._first_steps = FirstSteps(
            self._clock,
            group,
            is_first=self._is_first,
            time_dilation=1.0 if session.emulation is None else session.emulation.time_dilation,
        )
        self.decisions: list[str] = []
        """Decisions since the start, one line each."""
        group.open_node_barrier()
        group.watch(self._clock.pushed, self._step_done)

    def _step_done(self, contributors: Sequence[int]) -> None:
        """Called when every worker has pulled all tensors of a step."""
        self._num_steps += 1
        if self._is_learning:
            self._clock.pulled_all()
        if max(contributors) < self._group.num_workers:
            return  # a worker that has run out of inputs pulls late, and the others would wait for it here
        if self._is_learning:
            self._is_learning = self._clock.num_steps < TIMED_STEPS
            if not self._is_learning:
                self._plan_by_first_steps()
        elif 0 < self._next_look <= self._num_steps:
            self._look_at_links()

    def _plan_by_first_steps(self) -> None:
        self._group.watch(None, self._step_done)  # pushes no longer need a clock
        if self._dual_sync != OFF:
            self._plan_dual_sync()
        if self._every_steps != 0:
            self._look_at_links()

    # ---- dual synchronisation ----

    def _plan_dual_sync(self) -> None:
        if reason := self._group.cannot_use_direct_allreduce():
            self._decide(f"dual synchronisation: none in {self._group.name}: {reason}")
            return
        forward_s, backward_s, _ = self._first_steps.medians_s()
        order = self._first_steps.order()
        shard_bytes = self._group.shard_sizes()
        tensor_of = self._group.tensors_of_shards()
        pushed_shards = shards_in_order(order, tensor_of)
        is_emulated = self._session.emulation is not None
        ready_s = self._first_steps.ready_s(order, backward_s)
        plan = plan_dual_sync(
            DualSyncInputs(
                tensor_bytes=tuple(shard_bytes[shard] for shard in pushed_shards),
                forward_s=forward_s,
                backward_s=backward_s,
                costs=self._sync_costs(),
                ready_s=tuple(ready_s[tensor_of[shard]] for shard in pushed_shards) if is_emulated else None,
                workers_compute=not is_emulated,
            ),
            mode=self._dual_sync,
            least_gain=0.0 if is_emulated else _LEAST_GAIN_ON_HOST,
        )
        self._use_direct_allreduce(
            [shard for position, shard in enumerate(pushed_shards) if position not in plan.offloaded]
        )
        self._decide(
            f"dual synchronisation: {plan.num_offloaded} of {len(pushed_shards)} shards, {plan.m_bytes} of "
            f"{sum(shard_bytes)} bytes, go to the memory devices "
            f"(T_FP {forward_s * 1e3:.3g} ms, T_BP {backward_s * 1e3:.3g} ms): {plan.reason}"
        )

    def _use_direct_allreduce(self, shards: Sequence[int]) -> None:
        """Reduces `shards` by direct all-reduce, each in the best way for its size."""
        emulation = self._session.emulation
        if emulation is None:
            chosen = dict.fromkeys(shards, ALL_TO_ALL)
        else:
            collectives = collectives_from_links(emulation.links)
            sizes = self._group.shard_sizes()
            chosen = {
                shard: choose_collective(collectives, sizes[shard], self._allreduce_algorithm)
                for shard in shards
            }
        self._group.use_direct_allreduce(chosen)
        if chosen:
            ways = ", ".join(f"{count} by {name}" for name, count in sorted(Counter(chosen.values()).items()))
            self._decide(f"direct all-reduce: {ways}")
            self._session.metrics_writer.add("coarse_replans_total")

    def _sync_costs(self) -> SyncCosts:
        """Seconds per byte by either way: for all links at once if they are known, else for measured pairs."""
        emulation = self._session.emulation
        if emulation is not None:
            return sync_costs_from_links(
                emulation.links, self._tables, allreduce_algorithm=self._allreduce_algorithm
            )
        if self._profile is None:
            return SyncCosts(proxy_s_per_byte=0.0, worker_s_per_byte=0.0)  # the settings give a size
        return SyncCosts.of_profile(self._profile, self._tables, shard_bytes=self._shard_bytes)

    # ---- dynamic profiling ----

    def _look_at_links(self) -> None:
        """Times the current links, and changes routes if that saves time."""
        # One size dominated by latency, the size of most shards, and one dominated by bandwidth.
        sizes = sorted({_LATENCY_BYTES, self._shard_bytes, 4 * self._shard_bytes})
        assert self._profile is not None
        began = time.perf_counter()
        traffic = self._times_of_traffic(sizes)
        times = self._gauge.read(self._profile, traffic)
        self._probe_others(self._profile, times, sizes)
        (cost_s,) = self._first_steps.slowest([time.perf_counter() - began])
        self._next_look = self._num_steps + self._steps_until_next_look(cost_s)
        try:
            self._profile = refresh_profile(self._profile, times)
        except ContradictoryFiguresError as error:
            logger.info("the links are assumed unchanged: %s", error)
            return
        self._gauge.look_done(traffic)
        assert self._planned_for is not None
        if largest_change(self._planned_for, times) <= DEFAULT_MARGIN:
            return
        self._planned_for = self._profile
        tables = plan_routing(self._profile)
        histogram = self._shard_histogram()
        better = [
            is_better(new, old, self._profile.both_at_once(worker), histogram)
            for worker, (new, old) in enumerate(zip(tables, self._tables, strict=True))
        ]
        if not any(better):
            return
        before = self._tables
        self._tables = tuple(
            new if pays else old for new, old, pays in zip(tables, before, better, strict=True)
        )
        self._session.adopt_routing(self._tables[self._number])
        self._session.metrics_writer.add("coarse_replans_total")
        for worker, (old, new) in enumerate(zip(before, self._tables, strict=True)):
            if old != new:
                by_traffic, by_probes = self._num_timed
                self._decide(
                    f"step {self._num_steps}: w{worker} goes {_route(new)} instead of {_route(old)} "
                    f"({by_traffic} timings from traffic, {by_probes} from probes)"
                )

    def _times_of_traffic(self, sizes: Sequence[int]) -> dict[PathId, dict[int, float]]:
        """Times of gradients since the last check, as the first worker sees them; the same on every worker."""
        table = self._session.partition_table
        emulation = self._session.emulation
        if emulation is None or table is None:
            return {}  # in the host's memory no link carries a shard
        rows: list[ServedTransfer] = []
        if self._number == 0:
            _, rows = emulation.served_transfers(self._traffic_since_us)
        shared = gather_bytes(self._session, json.dumps(rows).encode())[self._session.node_workers[0]]
        served = [ServedTransfer(*row) for row in json.loads(shared)]
        return times_of_traffic(served, sizes, num_workers=table.num_workers, num_devices=table.num_devices)

    def _probe_others(
        self, profile: Profile, times: dict[PathId, dict[int, float]], sizes: Sequence[int]
    ) -> None:
        """Adds times of probes for paths and sizes without traffic."""
        paths = [path for path in profile.curves if path.kind == BOTH]
        cells = {path: [size for size in sizes if size not in times.get(path, {})] for path in paths}
        self._num_timed = (sum(map(len, times.values())), sum(map(len, cells.values())))
        probed = time_paths(self._session, self._open_probes(max(sizes)), cells)
        for path, found in probed.items():
            times.setdefault(path, {}).update(found)
        emulation = self._session.emulation
        if self._number == 0 and emulation is not None:  # probes are no traffic
            self._traffic_since_us, _ = emulation.served_transfers(math.inf)

    def _open_probes(self, largest_bytes: int) -> LinkProbes:
        if self._probes is None:
            self._probes = self._session.open_probes(largest_bytes)
        return self._probes

    def _steps_until_next_look(self, cost_s: float) -> int:
        if self._every_steps > 0:
            return self._every_steps
        (slowest_step_s,) = self._first_steps.slowest([self._clock.medians_s()[2]])
        wanted = math.ceil(cost_s / (COST_FRACTION * max(slowest_step_s, 1e-9)))
        return min(max(wanted, _FEWEST_STEPS_APART), MOST_STEPS_APART)

    def _shard_histogram(self) -> Mapping[int, int]:
        return Counter(self._group.shard_sizes())

    def _decide(self, text: str) -> None:
        self.decisions.append(text)
        if self._is_first:
            logger.info("[w0] %s", text)


def _route(table: RoutingTable) -> str:
    if table.lat_proxy == table.bw_proxy:
        return f"to md{table.bw_proxy}"
    return (
        f"to md{table.lat_proxy} below {table.threshold_bytes} bytes and to md{table.bw_proxy} from there on"
    )
