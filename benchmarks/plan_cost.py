"""Cost of planning: BERT-large's tensors on a machine of four workers and four memory devices, one JSON record.

    python benchmarks/plan_cost.py [--json FILE]

Registration cuts and routes tensors once. After the first steps, dual synchronisation splits them once. A step only
reads routes and paths, in native code. So a step's share is these times divided by the number of following steps. The
record contains the whole times, as for one step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coarse.bench.provenance import MEASURED, Provenance, append_records
from coarse.bench.replay.trace import load_trace
from coarse.bench.timing import Timing, timed
from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.dual_sync import DualSyncInputs, plan_dual_sync
from coarse.profiler.linked import profile_from_links, sync_costs_from_links
from coarse.profiler.partition import PartitionPlan, plan_partition
from coarse.profiler.routing import RoutingTable, plan_routing, route_shards
from coarse.profiler.shard_size import plan_shard_size
from coarse.schema import TensorSpec

MODEL = "bert-large"
MACHINE = "aws-p3"
GATHER_BYTES = 64 << 10
REPEATS = 50
LIMIT_US = 1000.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the record to FILE")
    arguments = parser.parse_args()
    record, provenance = measure(), Provenance.here()
    print(json.dumps({**record, "kind": MEASURED, **asdict(provenance)}))
    if arguments.json is not None:
        append_records(arguments.json, [record], provenance)
    return 0


def measure() -> dict[str, Any]:
    """Verifies the plan, then times its parts."""
    trace = load_trace(MODEL)
    specs = trace.specs()
    partition_table = PartitionTable.load(MACHINE)
    links = link_table(load_machine(MACHINE), partition_table)
    local_devices = [partition_table.local_device(worker) for worker in range(partition_table.num_workers)]
    profile = profile_from_links(links, local_devices)
    tables = plan_routing(profile)
    shard_bytes = plan_shard_size(profile, tables).nbytes
    plan, routes = plan_tensors(specs, shard_bytes, tables[0])
    verify(plan, routes, specs, shard_bytes, tables[0])
    inputs = DualSyncInputs(
        tensor_bytes=tuple(4 * shard.num_elements for shard in plan.shards),
        forward_s=trace.forward_s,
        backward_s=trace.backward_s,
        costs=sync_costs_from_links(links, tables),
    )
    ready_s = tuple(trace.events[shard.tensor].ready * trace.backward_s for shard in plan.shards)
    by_timeline = replace(inputs, ready_s=ready_s)
    planned = time_us(lambda: plan_tensors(specs, shard_bytes, tables[0]))
    return {
        "bench": "plan-cost",
        "model": MODEL,
        "machine_planned_for": MACHINE,
        "num_tensors": len(specs),
        "num_shards": len(plan.shards),
        "shard_bytes": shard_bytes,
        **asdict(planned),
        "limit_us": LIMIT_US,
        "p50_us_per_tensor": planned.p50_us / len(specs),
        "routing_tables_p50_us": time_us(lambda: plan_routing(profile)).p50_us,
        "dual_sync_p50_us": time_us(lambda: plan_dual_sync(inputs)).p50_us,
        "dual_sync_with_ready_times_p50_us": time_us(lambda: plan_dual_sync(by_timeline)).p50_us,
    }


def plan_tensors(
    specs: Sequence[TensorSpec], shard_bytes: int, table: RoutingTable
) -> tuple[PartitionPlan, list[int]]:
    """The client's work when tensors are registered."""
    plan = plan_partition(specs, shard_bytes=shard_bytes, gather_bytes=GATHER_BYTES)
    return plan, route_shards(table, plan, specs)


def verify(
    plan: PartitionPlan,
    routes: Sequence[int],
    specs: Sequence[TensorSpec],
    shard_bytes: int,
    table: RoutingTable,
) -> None:
    """Raises AssertionError unless every element is in one shard, and each shard is large enough and well routed."""
    covered = [0] * len(specs)
    for shard, route in zip(plan.shards, routes, strict=True):
        nbytes = 4 * shard.num_elements
        assert shard.offset == plan.tensor_offsets[shard.tensor] + 4 * covered[shard.tensor]
        assert nbytes >= min(shard_bytes, specs[shard.tensor].nbytes)
        assert route == (table.lat_proxy if nbytes < table.threshold_bytes else table.bw_proxy)
        covered[shard.tensor] += shard.num_elements
    assert covered == [spec.num_elements for spec in specs]


def time_us(work: Callable[[], object]) -> Timing:
    """Distribution of the time of `work` over REPEATS calls after a warm-up."""
    return Timing.from_seconds(timed(work, REPEATS))


if __name__ == "__main__":
    raise SystemExit(main())
