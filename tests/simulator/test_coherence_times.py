"""Run times and transactions of small kernels, in closed form; the studies' own parts."""

from __future__ import annotations

import pytest

from coarse.simulator.studies.coherence import kernels, machines, mgcc_study, parameter_caching, tsm_study
from coarse.simulator.studies.coherence.kernels import WORKLOADS, workload
from coarse.simulator.studies.coherence.machines import SHAPE, run_benchmark, simulate, simulate_tracker
from coarse.simulator.studies.coherence.operations import Kind, Shape
from coarse.simulator.studies.coherence.protocols.mgcc import Mgcc
from coarse.simulator.studies.coherence.protocols.uncoherent import Uncoherent
from coarse.simulator.studies.coherence.timing import Instruction, KernelRun, Speeds
from coarse.simulator.studies.coherence.xtreme import XTREME_SHAPE, Vectors, xtreme1, xtreme2, xtreme3

FREE = {"L2 up": (0, 5), "L2 down": (0, 5), "channel": (0, 0), "memory": (0, 100)}
ONE_CU = Shape(cus_per_gpu=1)


def speeds(gbytes_per_s=8.0, *, lines_in_flight=16):
    link = dict.fromkeys(("memory up", "memory down"), (gbytes_per_s, 10))
    return Speeds(parts=FREE | link, resident=1, lines_in_flight=lines_in_flight)


def time_of(program, protocol=None, **options):
    protocol = protocol or Uncoherent(ONE_CU, writes_back=False)
    return KernelRun(protocol, speeds(**options)).run([[program]]).ns


def test_a_read_takes_the_latencies_and_transfers_of_its_way():
    assert time_of([Instruction((0,))]) == 1 + 5 + (12 / 8 + 10) + 100 + (80 / 8 + 10) + 5


def test_timestamps_lengthen_messages():
    longer = time_of([Instruction((0,))], Mgcc(ONE_CU)) - time_of([Instruction((0,))])
    assert longer == pytest.approx((2 + 4) / 8)


def test_relaxed_reads_share_the_latency_and_sequential_ones_do_not():
    reads = [Instruction((line,)) for line in (0, 1)]
    one = time_of(reads[:1])
    assert time_of(reads) == pytest.approx(one + 80 / 8)
    assert time_of(reads, lines_in_flight=0) == pytest.approx(2 * one)


def test_a_write_that_needs_a_read_waits_for_it():
    read, write = Instruction((0,)), Instruction((1,), is_write=True)
    waiting = Instruction((1,), is_write=True, waits=True)
    assert time_of([read, waiting]) > time_of([read, write]) + 100


def test_requests_to_one_line_are_served_one_after_the_other():
    program = [Instruction((0,), is_write=True), Instruction((1,), is_write=True)]
    same = [Instruction((0,), is_write=True), Instruction((0,), is_write=True)]
    assert time_of(same) > time_of(program) + 100


def test_a_deadlock_is_an_error():
    protocol = Uncoherent(ONE_CU, writes_back=False)
    protocol.l1[0].locks.hold(0)
    with pytest.raises(RuntimeError, match="deadlock: 1 operations"):
        KernelRun(protocol, speeds()).run([[[Instruction((0,))]]])


@pytest.mark.parametrize("name", ["mt", "relu"])
def test_streaming_kernels_have_the_transactions_of_the_document(name):
    """Three of four lines are another GPU's; each line is copied in, read, written, copied out."""
    load = workload(name)
    remote, dram = tsm_study.counted(load, run_benchmark("RDMA", load))
    lines = (load.input_lines + load.output_lines) * load.scale
    assert remote == 0.75 * lines
    assert dram == 2 * lines


def test_products_with_a_row_for_each_lane_miss_for_each_element():
    """16 lines of A for each one, x for each column, sums of each column, and A and the sums once more."""
    load = workload("atax")
    remote, _ = tsm_study.counted(load, run_benchmark("RDMA", load))
    assert remote == pytest.approx(0.75 * 19.25 * 2**20, rel=0.05)


def test_every_benchmark_writes_and_no_wavefront_is_empty():
    for name in WORKLOADS:
        load = workload(name)
        instructions = [each for kernel in load.kernels for wavefront in kernel for each in wavefront]
        assert all(each.lines for each in instructions)
        assert any(each.is_write for each in instructions)
        assert load.input_lines
        assert load.output_lines


def test_memory_has_the_lines_of_a_search_that_a_level_reaches_first():
    writes = [
        line
        for kernel in kernels.bfs(nodes=256).kernels
        for wavefront in kernel
        for each in wavefront
        if each.is_write
        for line in each.lines
    ]
    assert set(writes) <= set(range(256 // 16))


def test_private_rewrites_share_no_line_and_the_others_do():
    def sharers(kernel_list):
        order = [gpu * 4 + cu for cu in range(4) for gpu in range(4)] * 8  # wavefronts of a CU
        found = {}
        for kernel in kernel_list:
            for cu, wavefront in zip(order, kernel, strict=True):
                for instruction in wavefront:
                    for line in instruction.lines:
                        found.setdefault(line, set()).add(cu)
        return found.values()

    assert all(len(cus) == 1 for cus in sharers(xtreme1(384, 1)))
    inside = [cus for cus in sharers(xtreme2(384, 1)) if len(cus) > 1]
    across = [cus for cus in sharers(xtreme3(384, 1)) if len(cus) > 1]
    assert inside
    assert all(len({SHAPE.gpu_of(cu) for cu in cus}) == 1 for cus in inside)
    assert across
    assert all(len({SHAPE.gpu_of(cu) for cu in cus}) == 2 for cus in across)


def test_a_fenced_instruction_waits_for_the_writes_before_it():
    write, read = Instruction((0,), is_write=True), Instruction((1,))
    fenced = Instruction((1,), is_fenced=True)
    assert time_of([write, fenced]) == pytest.approx(time_of([write]) + time_of([fenced]))
    assert time_of([write, read]) < time_of([write, fenced]) - 100


def test_xtreme_waits_for_its_step_before_only_where_cus_share_data():
    def fences(kernels):
        return sum(each.is_fenced for kernel in kernels for wavefront in kernel for each in wavefront)

    assert fences(xtreme1(384, 1)) == 0
    assert fences(xtreme2(384, 1)) == fences(xtreme3(384, 1)) > 0


def test_a_read_waits_for_its_cus_write_to_the_same_line_without_a_fence():
    write, read = Instruction((0,), is_write=True), Instruction((0,))
    needs_it = Instruction((2,), is_write=True, waits=True)
    assert time_of([write, read, needs_it]) > time_of([write, needs_it]) + 100


def test_xtremes_vectors_fit_into_the_caches_that_the_document_names():
    """768 KB into the L1 caches of a GPU, 1,536 KB into its L2 banks, 24,576 KB into neither (section 4.4.2)."""
    l1, l2 = (
        ways * sets * caches
        for ways, sets, caches in (
            (XTREME_SHAPE.l1_ways, XTREME_SHAPE.l1_sets, XTREME_SHAPE.cus_per_gpu),
            (XTREME_SHAPE.l2_ways, XTREME_SHAPE.l2_sets, XTREME_SHAPE.banks),
        )
    )
    lines = {
        kbytes: 3 * Vectors(kbytes).slice_lines * XTREME_SHAPE.cus_per_gpu for kbytes in (768, 1536, 24576)
    }
    assert lines[768] <= l1 < lines[1536] <= l2 < lines[24576]
    with pytest.raises(ValueError, match="100 KB are no whole number of wavefronts"):
        Vectors(100)


def test_an_unknown_configuration_is_named():
    with pytest.raises(ValueError, match="no configuration 'C-TSO'"):
        simulate("C-TSO", [])


def test_one_controller_with_four_slots_serves_four_lines_each_latency():
    assert simulate_tracker(holds_slots_to_the_end=True) == pytest.approx(4 * 64 / 101, rel=0.1)
    assert simulate_tracker(holds_slots_to_the_end=False) > 10 * simulate_tracker(holds_slots_to_the_end=True)


def test_traffic_overheads_are_exact():
    outcome = simulate("C-RC", workload("relu").kernels)
    comparisons = list(mgcc_study._traffic(outcome))
    assert [each.document for each in comparisons] == [5.0, 5.26, 16.7, 2.63]
    assert all(each.agrees for each in comparisons)
    assert outcome.traffic["memory up", Kind.READ_REQUEST] == workload("relu").input_lines


def test_leases_return_old_parameters_and_a_counter_does_not():
    dense, sparse = parameter_caching.lease_reads(1.0), parameter_caching.lease_reads(0.02)
    assert dense.fetched < parameter_caching.SHARDS
    assert dense.stale == pytest.approx(1 - dense.fetched / parameter_caching.SHARDS, abs=0.02)
    assert sparse.largest_lag > 10 * dense.largest_lag
    assert len(parameter_caching.table().rows) == len(parameter_caching.SHARES)


def test_every_figure_of_the_worked_example_is_exact():
    assert all(each.agrees for each in mgcc_study._figure_4_2())


def test_copies_of_the_processor_cost_rdma_their_bytes():
    load = workload("relu")
    lines = load.input_lines + load.output_lines
    copies = run_benchmark("RDMA", load).ns - simulate("RDMA", load.kernels).ns
    assert copies == pytest.approx(lines * 76 / (machines.GBYTES_PER_S / machines.SHARE))


def test_two_runs_give_the_same_figures():
    one, other = (run_benchmark("C-RC", workload("bfs")) for _ in range(2))
    assert one == other
