"""Schemes: bytes in closed form, bounds that every step keeps, and the runtime's own plans."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from small_jobs import ELEMENTS, as_link_network, small_setup, small_trace

from coarse.bench.replay.trace import load_trace, place_trace
from coarse.cli.plan import plan_machine, plan_model
from coarse.machine.cci import LoadStore, dense_links
from coarse.simulator.collectives import double_tree, hierarchical
from coarse.simulator.events.engine import simulate
from coarse.simulator.job import DEFAULT_RATES, Job, SyncCores
from coarse.simulator.machines.generated import GeneratedMachine
from coarse.simulator.machines.network import LinkNetwork
from coarse.simulator.schemes.catalogue import SCHEMES
from coarse.simulator.schemes.offload import offload_step
from coarse.simulator.schemes.sharded import fsdp_step
from coarse.simulator.training_step import simulate_step

NBYTES = 4 * sum(ELEMENTS)


def end_s(network, trace=None, **options):
    step = offload_step(Job(network=network, trace=trace or small_trace()), **options)
    return simulate(step.tasks, network.capacities, channels=step.channels).end_s


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("machine", ["cxl-switch", "cxl-pool", "fat-tree"])
def test_a_step_takes_its_computation_and_the_time_of_its_busiest_link(scheme, machine):
    result = simulate_step(small_setup(machine, oversubscription=2), scheme)
    assert result.step_s > result.compute_s == pytest.approx(3e-3)
    assert all(load.busy <= 1 for load in result.links.values())
    assert result.links[result.busiest_link].busy > 0.05


@pytest.mark.parametrize("scheme", ["offload", "offload-ring", "offload-direct", "parameter-server"])
def test_each_worker_pushes_and_pulls_every_byte_once(scheme):
    links = simulate_step(small_setup(), scheme).links
    for way in ("up", "down"):
        assert links[f"each worker {way}"].nbytes == pytest.approx(NBYTES)
        assert links[f"each worker {way}"].copies == 8


@pytest.mark.parametrize("scheme", ["offload", "offload-ring"])
def test_memory_devices_exchange_as_many_bytes_as_a_ring(scheme):
    """A memory device with one client each takes a push, sends a pull, and exchanges 2 (p-1)/p of the bytes."""
    links = simulate_step(small_setup(), scheme).links
    for way in ("up", "down"):
        assert links[f"each md {way}"].nbytes == pytest.approx(NBYTES * (1 + 2 * 7 / 8))


@pytest.mark.parametrize("scheme", ["allreduce-ring", "allreduce-both-ways"])
def test_a_ring_sends_the_papers_bytes(scheme):
    links = simulate_step(small_setup(), scheme).links
    for worker in range(8):
        assert links[f"worker {worker} up"].nbytes == pytest.approx(NBYTES * 2 * 7 / 8)


def test_fsdp_gathers_twice_and_scatters_once():
    links = simulate_step(small_setup(), "fsdp").links
    assert links["each worker up"].nbytes == pytest.approx(3 * NBYTES * 7 / 8)


def test_fsdp_computes_every_unit_twice_and_waits_for_its_parameters():
    setup = small_setup("fat-tree")
    step = fsdp_step(setup.job())
    times = simulate(step.tasks, step.network.capacities).times
    seconds = {"forward": 0.0, "backward": 0.0}
    for name, each in times.items():
        kind, unit = name.split()[0], name.split()[-1]
        if kind in seconds:
            seconds[kind] += each.finished_s - each.served_s
            assert each.served_s >= times[f"gather {kind} {unit}"].finished_s
    assert seconds == pytest.approx({"forward": 1e-3, "backward": 2e-3})


def test_a_hierarchical_all_reduce_crosses_switches_with_a_share_of_the_bytes():
    network = GeneratedMachine(kind="fat-tree", num_workers=16, workers_per_switch=4)
    within, between, _ = hierarchical(network)
    assert "each switch up" not in dict(within.usage)
    assert dict(between.usage)["each switch up"] == pytest.approx(2 * 3 / 4)  # 4 workers with a quarter each


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 12])
def test_both_trees_together_use_each_lane_at_most_twice(p):
    network = GeneratedMachine(kind="fat-tree", num_workers=p, workers_per_switch=p, is_folded=False)
    usage = dict(double_tree(network).usage)
    lanes = [weight for name, weight in usage.items() if name.startswith("worker")]
    assert len(lanes) == 2 * p
    assert max(lanes) <= 2
    assert sum(lanes) == pytest.approx(2 * 2 * (p - 1))  # two trees, p-1 edges, halves up and down, two lanes


def test_one_worker_needs_no_all_reduce():
    result = simulate_step(small_setup(num_workers=1), "allreduce")
    assert result.step_s == result.compute_s


def test_the_best_all_reduce_is_no_slower_than_any_way_where_one_bucket_follows_all_others():
    trace = small_trace((1_000_000,))
    times = {
        scheme: simulate_step(small_setup(trace=trace), scheme).step_s
        for scheme in SCHEMES
        if scheme.startswith("allreduce")
    }
    assert times["allreduce"] == min(times.values())


def test_a_generated_machine_is_its_link_table():
    network = GeneratedMachine(kind="cxl-switch", num_workers=8, workers_per_switch=4, is_folded=False)
    assert end_s(network) == pytest.approx(end_s(as_link_network(network)), rel=1e-9)


def test_dense_on_a_generated_machine_is_dense_links_on_its_table():
    setup = small_setup(num_workers=4, is_folded=False)
    access = LoadStore(read_ratio=17, write_ratio=4)
    ours = setup.job(access).network
    plain = as_link_network(ours.base)
    theirs = LinkNetwork(links=dense_links(plain.links, access), local_devices=plain.local_devices)
    trace = small_trace((1000,))  # one shard, whatever the planner's shard size
    assert end_s(ours, trace) == pytest.approx(end_s(theirs, trace), rel=1e-9)


def test_the_split_is_that_of_coarse_plan():
    trace = place_trace(load_trace("bert-base"), gpu="V100")
    split = plan_model(plan_machine("aws-p3"), trace, "auto")
    decisions = simulate_step(small_setup("aws-p3", num_workers=4, trace=trace), "coarse").decisions
    assert decisions[1] == f"{split.m_bytes} of {trace.nbytes} bytes through the memory devices"


def test_slow_sync_cores_limit_the_step():
    slow = SyncCores(num_cores=1, gbytes_per_s={("mean", "float32"): 0.5})
    fast = SyncCores(num_cores=8, gbytes_per_s=DEFAULT_RATES)
    free, quick, limited = (
        simulate_step(small_setup(sync_cores=cores), "offload").step_s for cores in (None, fast, slow)
    )
    assert free <= quick < limited
    assert limited > NBYTES / 0.5e9  # each memory device reads a contribution's worth of bytes


def test_a_missing_rate_of_a_sync_core_is_named():
    cores = SyncCores(num_cores=1, gbytes_per_s={("sum", "float32"): 1.0})
    with pytest.raises(ValueError, match="rate of a sync core for mean of float32 is unknown"):
        simulate_step(small_setup(sync_cores=cores), "offload")


def test_messages_cost_the_host_time():
    free, costly = (
        simulate_step(small_setup(host_overhead_us=overhead), "offload").step_s for overhead in (0, 50)
    )
    assert costly > free


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 9}, "9 workers do not fill switches of 4"),
        ({"workers_per_device": 3}, "8 workers cannot be divided among memory devices of 3"),
        ({"workers_per_device": 8}, "memory devices of 8 workers do not fit switches of 4"),
        ({"oversubscription": 0.5}, "an over-subscription of 0.5 is below 1"),
        ({"machine": "aws-p4"}, "no machine is named 'aws-p4'"),
    ],
)
def test_wrong_setups_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate_step(small_setup(**changes), "offload")


TEN_THOUSAND = """
import resource, time
from coarse.bench.replay.trace import load_trace
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import simulate_step
setup = Setup(machine="cxl-switch", trace=load_trace("bert-large"), num_workers=10_000)
started = time.process_time()
assert simulate_step(setup, "{scheme}").step_s > 0
print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("scheme", ["coarse", "allreduce"])
def test_ten_thousand_workers_take_under_a_minute_and_4_gib(scheme):
    limit = 4 << 30
    done = subprocess.run(
        [sys.executable, "-c", TEN_THOUSAND.format(scheme=scheme)],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    seconds, nbytes = map(float, done.stdout.split())
    assert seconds < 60
    assert nbytes < limit
