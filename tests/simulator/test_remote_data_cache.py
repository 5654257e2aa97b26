"""The parts of the study of CARVE: streams, page homes, caches, times; and the whole of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coarse.client.memory.parameter_cache import ParameterCache
from coarse.simulator.studies.catalogue import load_study
from coarse.simulator.studies.remote_data_cache import comparisons, kernel_boundary
from coarse.simulator.studies.remote_data_cache.accesses import placement
from coarse.simulator.studies.remote_data_cache.accesses.placement import Placement
from coarse.simulator.studies.remote_data_cache.accesses.sharing import Sharing, sharing_of
from coarse.simulator.studies.remote_data_cache.accesses.streams import Kernel, Stream
from coarse.simulator.studies.remote_data_cache.accesses.workloads import WORKLOADS, Layers, Mesh, Triad
from coarse.simulator.studies.remote_data_cache.caches import remote_cache, traces
from coarse.simulator.studies.remote_data_cache.caches.last_level_cache import CacheOutcome, last_level_hits
from coarse.simulator.studies.remote_data_cache.caches.protocol import System
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import (
    Coherence,
    with_cache,
    without_cache,
)
from coarse.simulator.studies.remote_data_cache.claims import all_claims
from coarse.simulator.studies.remote_data_cache.host_memory import waiting_seconds
from coarse.simulator.studies.remote_data_cache.kernel_times import kernel_seconds, traffic_of
from coarse.simulator.studies.remote_data_cache.parameter_updates import update_table
from coarse.simulator.studies.remote_data_cache.parameters import SOURCES, Machine
from coarse.simulator.studies.remote_data_cache.results import (
    LINK_SYSTEMS,
    LINKS_GBYTES_PER_S,
    Results,
    WorkloadResult,
    simulate_workload,
)
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    MIGRATION,
    NO_COHERENCE,
    NUMA,
    REPLICATION,
    SIZES_GIB,
    SOFTWARE,
    WRITES_BACK,
    SimulatedWorkload,
    sized,
)
from coarse.simulator.studies.study import Basis

NUM_GPUS, NUM_LINES = 3, 7


def stream_of(accesses, num_gpus=NUM_GPUS):
    """A stream of (kernel, gpu, line, is_write)."""
    columns = [np.array(column) for column in zip(*accesses, strict=True)]
    return Stream(
        num_gpus=num_gpus,
        num_kernels=int(columns[0].max()) + 1,
        kernel=columns[0],
        gpu=columns[1],
        line=columns[2],
        is_write=columns[3].astype(bool),
    )


accesses = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, NUM_GPUS - 1), st.integers(0, NUM_LINES - 1), st.booleans()),
    min_size=1,
    max_size=60,
).map(lambda each: sorted(each, key=lambda access: access[0]))


# ---- the fast model of remote data caches, and the protocol step by step ----


def hits_of_protocol(stream, coherence, cache_lines, private_probability):
    """Hits and broadcasts per access, when every message arrives before the next access."""
    system = System(
        num_nodes=stream.num_gpus,
        cache_lines=cache_lines,
        coherence=coherence,
        private_probability=private_probability,
    )
    is_hit, is_broadcast, kernel = [], [], 0
    for now, gpu, line, is_write in zip(stream.kernel, stream.gpu, stream.line, stream.is_write, strict=True):
        while kernel < now:
            system.end_kernel()
            kernel += 1
        hits, invalidations = system.num_hits, system.num_invalidations
        (system.write if is_write else system.read)(int(gpu), int(line))
        system.deliver_all()
        is_hit.append(system.num_hits > hits)
        is_broadcast.append(system.num_invalidations > invalidations)
    return is_hit, is_broadcast


def hits_of_model(stream, coherence, cache_lines, private_probability):
    outcome = with_cache(
        stream,
        stream.line % stream.num_gpus != stream.gpu,
        np.zeros(len(stream.line), dtype=bool),
        num_lines=cache_lines,
        coherence=coherence,
        private_probability=private_probability,
    )
    return outcome.is_hit.tolist(), outcome.is_broadcast.tolist()


@settings(max_examples=200, deadline=None)
@given(accesses, st.sampled_from(Coherence), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 1.0]))
def test_the_fast_model_is_the_protocol(program, coherence, cache_lines, private_probability):
    case = (stream_of(program), coherence, cache_lines, private_probability)
    assert hits_of_model(*case) == hits_of_protocol(*case)


def forgets_writes(monkeypatch):
    monkeypatch.setattr(remote_cache, "_writes_between", lambda stream, before, place: np.zeros(len(place)))


def forgets_the_set(monkeypatch):
    previous = remote_cache._previous_of_set
    monkeypatch.setattr(
        remote_cache, "_previous_of_set", lambda stream, place, num: previous(stream, place, 8 * num)
    )


def forgets_who_had_a_line_last(monkeypatch):
    monkeypatch.setattr(
        remote_cache, "_last_before", lambda line, is_event: np.where(is_event, np.arange(len(line)), -1)
    )


@pytest.mark.parametrize("plant", [forgets_writes, forgets_the_set, forgets_who_had_a_line_last])
def test_an_error_planted_in_the_fast_model_is_found(plant, monkeypatch):
    rng = np.random.default_rng(1)
    program = [(0, *rng.integers(0, (NUM_GPUS, NUM_LINES)), rng.random() < 0.3) for _ in range(200)]
    case = (stream_of(program), Coherence.HARDWARE, 2, 1.0)
    assert hits_of_model(*case) == hits_of_protocol(*case)
    plant(monkeypatch)
    assert hits_of_model(*case) != hits_of_protocol(*case)


def test_a_cache_that_writes_back_sends_the_last_write_of_each_stay():
    program = [
        (0, 0, 1, True),
        (0, 0, 1, True),  # sent when line 3 evicts line 1
        (0, 0, 3, False),
        (0, 0, 1, True),  # sent at the end of the kernel
        (1, 0, 1, False),
        (1, 0, 1, True),  # sent at the end
    ]
    stream = stream_of(program, num_gpus=2)
    outcome = with_cache(
        stream,
        np.ones(6, dtype=bool),
        np.zeros(6, dtype=bool),
        num_lines=2,
        coherence=Coherence.SOFTWARE,
        private_probability=0.01,
        writes_back=True,
    )
    assert np.flatnonzero(outcome.is_sent).tolist() == [1, 3, 5]


# ---- streams and homes ----


def test_gpus_take_contiguous_batches_and_keep_their_order():
    kernel = Kernel(block=np.arange(40) / 40, line=np.arange(40), is_write=np.arange(40) % 2 == 1)
    stream = Stream.of([kernel, kernel], 4)
    assert stream.kernel.tolist() == [0] * 40 + [1] * 40
    for gpu in range(4):
        expected = [*range(10 * gpu, 10 * gpu + 10)] * 2
        assert stream.line[stream.gpu == gpu].tolist() == expected
    assert (stream.is_write == (stream.line % 2 == 1)).all()
    rounds = stream.gpu[:40].reshape(10, 4)
    assert (np.sort(rounds, axis=1) == np.arange(4)).all()  # all GPUs run at one pace
    assert len(np.unique(rounds[:, 0])) > 1  # and none is always the first


def test_a_page_is_at_the_gpu_that_touches_it_first():
    stream = stream_of([(0, 2, 5, False), (0, 0, 4, True), (0, 1, 0, False), (0, 2, 1, False)])
    placed = placement.first_touch(stream, page_lines=2)
    assert placed.home.tolist() == [2, 2, 1, 1]
    assert placed.is_remote.tolist() == [False, True, False, True]


def test_replicas_serve_reads_until_the_page_is_written():
    stream = stream_of(
        [
            (0, 0, 0, False),
            (0, 1, 0, False),
            (0, 1, 1, False),
            (1, 0, 0, True),
            (1, 1, 1, False),
            (1, 2, 1, False),
        ]
    )
    placed = placement.replicated(stream, page_lines=2)
    assert placed.is_remote.tolist() == [False, False, False, False, True, True]
    assert placed.copied_pages.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_page_migrates_after_a_kernel_to_the_gpu_with_most_of_its_accesses():
    stream = stream_of(
        [
            (0, 0, 0, False),
            (0, 1, 0, False),
            (0, 1, 1, False),
            (1, 1, 0, False),
            (1, 0, 0, False),
            (2, 1, 0, True),
        ]
    )
    placed = placement.migrated(stream, page_lines=2)
    assert placed.is_remote.tolist() == [False, True, True, False, True, False]
    assert placed.copied_pages.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_blocks_count_as_shared_and_written_if_another_gpu_uses_them():
    stream = stream_of(
        [(0, 0, 0, True), (0, 1, 1, False), (0, 1, 2, True), (0, 0, 4, False), (0, 1, 4, False)]
    )
    counted = np.ones(5, dtype=bool)
    assert sharing_of(stream, counted, 2).read_write_share == pytest.approx(2 / 5)
    assert sharing_of(stream, counted, 2).copies == pytest.approx((2 + 1 + 2) / 3)
    assert sharing_of(stream, counted, 1).read_write_share == 0


# ---- the last-level cache ----


def hits_by_list(stream, is_remote, ways):
    """One set per GPU, the least recently used line first."""
    caches, found, kernel = defaultdict(list), [], 0
    for now, gpu, line in zip(stream.kernel, stream.gpu, stream.line, strict=True):
        if now != kernel:
            kernel = now
            for cache in caches.values():
                cache[:] = [each for each in cache if not is_remote_line(stream, is_remote, each)]
        cache = caches[gpu]
        found.append(line in cache)
        if line in cache:
            cache.remove(line)
        elif len(cache) == ways:
            cache.pop(0)
        cache.append(line)
    return found


def is_remote_line(stream, is_remote, line):
    return bool(is_remote[stream.line == line][0])


@settings(max_examples=100, deadline=None)
@given(accesses)
def test_the_last_level_cache_drops_the_least_recently_used_line_and_remote_ones_after_each_kernel(program):
    stream = stream_of(program)
    is_remote = stream.line % 2 == 1
    outcome = last_level_hits(stream, is_remote, sets=1, ways=3)
    assert outcome.is_hit.tolist() == hits_by_list(stream, is_remote, ways=3)


def test_dirty_local_lines_are_written_back_when_they_leave():
    program = [(0, 0, 1, True), (0, 0, 2, False), (1, 0, 3, True), (1, 0, 4, True), (1, 0, 5, False)]
    stream = stream_of(program, num_gpus=1)
    local = last_level_hits(stream, np.zeros(5, dtype=bool), sets=1, ways=2)
    assert local.written_back.tolist() == [[0], [2]]  # lines 1 and 3
    remote = last_level_hits(stream, np.ones(5, dtype=bool), sets=1, ways=2)
    assert remote.written_back.tolist() == [[0], [0]]


# ---- times ----


def seconds_of(stream, placed, remote, machine, instructions=1e-9, outstanding_lines=10**9):
    cache = CacheOutcome(
        is_hit=np.zeros(len(stream.line), dtype=bool),
        written_back=np.zeros((stream.num_kernels, stream.num_gpus), dtype=np.int64),
    )
    traffic = traffic_of(stream, placed, cache, remote, machine)
    return kernel_seconds(
        traffic, machine, instructions=instructions, outstanding_lines=outstanding_lines
    ).tolist()


def reads(num, num_gpus=2, home=0):
    """GPU 0 reads lines of GPU `home`."""
    stream = stream_of([(0, 0, line, False) for line in range(num)], num_gpus=num_gpus)
    homes = np.full(num, home)
    copies = np.zeros((1, num_gpus), dtype=np.int64)
    return stream, Placement(home=homes, is_remote=homes != stream.gpu, copied_pages=copies)


def test_each_resource_can_be_the_one_that_limits():
    machine = Machine()
    stream, placed = reads(1000)
    remote = without_cache(stream, placed.is_remote)
    assert seconds_of(stream, placed, remote, machine) == pytest.approx([1000 * 128 / 1e12])
    assert seconds_of(stream, placed, remote, machine, instructions=640) == pytest.approx([1000 * 640 / 64e9])
    waits = seconds_of(stream, placed, remote, machine, outstanding_lines=1)
    assert waits == pytest.approx([1000 * (200 + 200) / 64 / 1e9])
    stream, placed = reads(1000, home=1)
    remote = without_cache(stream, placed.is_remote)
    assert seconds_of(stream, placed, remote, machine) == pytest.approx([1000 * (128 + 16) / 64e9])
    waits = seconds_of(stream, placed, remote, machine, outstanding_lines=1)
    assert waits == pytest.approx([1000 * (200 + 200 + 400) / 64 / 1e9])


def test_a_miss_in_the_remote_data_cache_waits_for_its_look_up_too():
    machine = Machine()
    stream, placed = reads(1000, home=1)
    cached = with_cache(
        stream,
        placed.is_remote,
        np.zeros(1000, dtype=bool),
        num_lines=4096,
        coherence=Coherence.HARDWARE,
        private_probability=0.01,
    )
    waits = seconds_of(stream, placed, cached, machine, outstanding_lines=1)
    assert waits == pytest.approx([1000 * (200 + 200 + 400 + 200) / 64 / 1e9])


def test_an_invalidation_and_its_answer_cross_the_links_of_the_home():
    machine = replace(Machine(), header_bytes=10**6)  # much more than a line
    stream = stream_of([(0, 1, 0, False), (1, 0, 0, True)])
    homes = np.zeros(2, dtype=np.int64)
    placed = Placement(
        home=homes, is_remote=homes != stream.gpu, copied_pages=np.zeros((2, 3), dtype=np.int64)
    )
    cached = with_cache(
        stream,
        placed.is_remote,
        np.zeros(2, dtype=bool),
        num_lines=4,
        coherence=Coherence.HARDWARE,
        private_probability=0.01,
    )
    fetch_s, write_s = seconds_of(stream, placed, cached, machine)
    assert fetch_s == pytest.approx(1e6 / 64e9, rel=1e-3)
    assert write_s == pytest.approx(2e6 / 64e9, rel=1e-3)  # two GPUs are told


def test_cold_pages_come_over_the_hosts_link_once_in_each_kernel_that_touches_them():
    machine = replace(Machine(), page_bytes=256 * 128 * 4)  # pages of four lines
    touched = [(kernel, 0, line, False) for kernel in (0, 2) for line in range(16)]
    stream = stream_of([*touched[:16], (1, 1, 0, False), *touched[16:]])
    # Page 0 has one access more than the other three.
    waits = waiting_seconds(stream, machine, share=0.75)
    page_s = 4 * 128 / 32e9
    assert waits.tolist() == pytest.approx([3 * page_s, 0, 3 * page_s])


# ---- Table IV, parameters, traces ----


def test_table_four_is_exact():
    rows = list(comparisons.table_four())
    assert len(rows) == 8
    assert [each.what for each in rows if not each.agrees] == []


def test_epochs_cost_a_reset_when_the_counter_starts_again():
    machine = replace(Machine(), epoch_bits=4)
    assert kernel_boundary.epoch_invalidation_s(machine, 15) == 0
    assert kernel_boundary.epoch_invalidation_s(machine, 32) / kernel_boundary.MILLISECOND == pytest.approx(
        2 * 2
    )


def test_every_parameter_has_a_source():
    assert set(SOURCES) == set(Machine.__dataclass_fields__)
    assert {kind for kind, _ in SOURCES.values()} == {"document", "fitted", "assumed"}


def test_traces_show_what_their_protocol_does():
    epochs, tracker = traces.epochs(), traces.tracker()
    assert [row[3] for row in epochs.rows] == ["0", "1", "1", "2", "2", "2", "2", "2"]
    assert [row[1] for row in tracker.rows] == [
        "private",
        "read-shared",
        "private",
        "private",
        "read-write shared",
        "read-write shared",
        "read-write shared",
    ]
    assert {len(row) for row in (*epochs.rows, *tracker.rows)} == {5, 4}


# ---- beside the runtime ----


@given(st.lists(st.booleans(), max_size=30))
def test_the_runtimes_parameter_cache_hits_as_epochs_do(steps):
    """True is a read of a parameter by node 0, False an update of it by node 1, its home."""
    cache, version = ParameterCache(staleness=0, num_bytes=1), 0
    system = System(num_nodes=2, cache_lines=1, coherence=Coherence.SOFTWARE)
    for is_read in steps:
        if is_read:
            hits = system.num_hits
            value = system.read(0, 1)
            system.deliver_all()
            is_hit = cache.is_hit(version)
            if not is_hit:
                cache.filled(version)
            assert is_hit == (system.num_hits > hits)
            assert value.value == version
        else:
            version += 1
            system.write(1, 1)
            system.deliver_all()
            system.end_kernel()


def test_a_tracker_saves_fetches_only_of_parameters_that_are_read_and_not_written():
    dense, frozen, table, _ = update_table().rows
    lines = 4096
    assert dense[1:] == (f"{3 * lines:,}", "3", f"{3 * lines:,}", f"{3 * lines:,}")
    assert frozen[1:] == (f"{3 * lines:,}", "3", "123", "123")  # three readers of 1% of the lines
    assert table[1] == table[3]


# ---- workloads ----


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_workloads_stay_within_their_footprint_and_count_some_kernels(workload):
    kernels = workload.kernels()
    lines = workload.footprint_bytes / 128 / 256
    assert len(kernels) > workload.warm_kernels
    assert min(kernel.line.min() for kernel in kernels) >= 0
    touched = np.unique(np.concatenate([kernel.line for kernel in kernels]))
    assert 0.6 * lines < len(touched) <= round(lines)
    padding = 14 * Machine().page_lines  # Euler has most arrays; each takes whole pages
    assert touched[-1] < lines + padding
    assert all((np.diff(kernel.block) >= 0).all() and kernel.block[-1] < 1 for kernel in kernels)


@pytest.mark.parametrize("pattern", [Mesh(), Layers(weight_share=0.3), Triad()])
def test_no_page_has_lines_of_two_arrays(pattern):
    """Writes of a kernel go to one array, whose lines no other kernel's array shares a page with."""
    page = Machine().page_lines
    written = {
        tuple(np.unique(kernel.line[kernel.is_write] // page)): np.unique(kernel.line[kernel.is_write])
        for kernel in pattern(1000, np.random.default_rng(0))
    }
    pages = [page for each in written for page in each]
    assert len(pages) == len(set(pages))
    assert all(lines[0] % page == 0 for lines in written.values())


def speedups_of(name, systems):
    workload = next(each for each in WORKLOADS if each.name == name)
    simulated = SimulatedWorkload(workload, Machine())
    return {system: simulated.speedup(system) for system in systems}


def test_a_mesh_with_shared_pages_needs_hardware_coherence():
    speeds = speedups_of("Lulesh", (NUMA, SOFTWARE, HARDWARE, NO_COHERENCE, IDEAL))
    assert speeds[SOFTWARE] < 1.1 * speeds[NUMA]
    assert speeds[HARDWARE] > 2 * speeds[NUMA]
    assert speeds[HARDWARE] <= speeds[NO_COHERENCE] <= speeds[IDEAL]


def test_replication_serves_a_table_that_is_only_read():
    speeds = speedups_of("Raytracing", (NUMA, REPLICATION, IDEAL))
    assert speeds[NUMA] < 0.6 * speeds[IDEAL]
    assert speeds[REPLICATION] > 0.95 * speeds[IDEAL]


def test_two_runs_are_equal():
    workload = next(each for each in WORKLOADS if each.name == "SSSP")
    assert simulate_workload(workload, Machine()) == simulate_workload(workload, Machine())


# ---- comparisons and claims ----


def wrong_results():
    """Results that contradict every statement of the document."""
    speeds = {
        NUMA: 2.0,
        MIGRATION: 3.0,
        REPLICATION: 5.0,
        IDEAL: 20.0,
        NO_COHERENCE: 5.0,
        SOFTWARE: 4.5,
        WRITES_BACK: 6.0,
        HARDWARE: 2.5,
        **dict(zip(map(sized, SIZES_GIB), (2.0, 2.1, 2.5, 6.0), strict=True)),
    }
    falling = dict(zip(LINKS_GBYTES_PER_S, (0.5, 1.0, 3.0, 3.0), strict=True))
    result = WorkloadResult(
        speedups=speeds,
        remote_shares={NUMA: 0.5, SOFTWARE: 0.5, HARDWARE: 0.5, NO_COHERENCE: 0.5},
        link_speedups={
            (system, rate): falling[rate] if system == HARDWARE else 3.7
            for system in LINK_SYSTEMS
            for rate in LINKS_GBYTES_PER_S
        },
        slowdowns=dict.fromkeys(SIZES_GIB, 0.3),
        pages=Sharing(read_write_share=0.5, copies=1.0),
        lines=Sharing(read_write_share=0.5, copies=1.0),
        link_bytes={NUMA: 100.0, NO_COHERENCE: 50.0, HARDWARE: 100.0},
        sent_writes={SOFTWARE: 10, WRITES_BACK: 5},
        broadcast_share=1.0,
    )
    by_name = {workload.name: result for workload in WORKLOADS}
    by_name["XSBench"] = replace(result, speedups={**speeds, SOFTWARE: 2.1})
    return Results(by_name=by_name)


def test_every_figure_can_differ():
    results = wrong_results()
    compared = [
        *comparisons.speedups(results),
        *comparisons.host_memory(results),
        *comparisons.sharing(results),
    ]
    assert len(compared) == 20
    assert [each.what for each in compared if each.agrees] == []


def test_every_claim_can_fail():
    holding = [each.what for each in all_claims(wrong_results()) if each.holds]
    assert holding == ["Tag, epoch, valid bit and tracker fit into the spare bits of a line"]
    wide = replace(Machine(), epoch_bits=48)
    assert kernel_boundary.metadata_bits(wide) > kernel_boundary.spare_bits()


@pytest.mark.slow
def test_most_predicted_figures_agree_and_deviations_are_explained():
    result = load_study("carve").run(lambda part: None)
    predicted = [each.agrees for each in result.comparisons if each.basis is Basis.PREDICTED]
    assert sum(predicted) >= 0.8 * len(predicted)
    assert all(each.agrees for each in result.comparisons if each.basis is not Basis.PREDICTED)
    assert [each.what for each in result.deviations() if not each.reason] == []
    assert set(result.pictures) == {"workloads", "sensitivity"}
