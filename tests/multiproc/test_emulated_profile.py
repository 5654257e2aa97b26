"""On paced links the profiler measures the configured figures, and routes match the paper's Figure 15."""

from __future__ import annotations

import pytest
from attempts import best_of

from coarse.cli.main import main
from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import EMULATED, Profile, as_json, from_json
from coarse.profiler.routing import plan_routing
from coarse.profiler.shard_size import plan_shard_size
from coarse.tuning.measure import MeasurePlan, measure_profile


def measured(job, name, machine, table, dilation, plan):
    """The common profile of all workers of an emulated session."""

    def worker(me):
        settings = {
            "partition_table": machine,
            "machine": machine,
            "time_dilation": dilation,
            "profile": "off",
        }
        with me.join(name, **settings) as session:
            return as_json(measure_profile(session, plan))

    documents = job.run(table.num_workers, worker)
    assert all(document == documents[0] for document in documents)
    return from_json(documents[0])


def paced(machine, table, sizes):
    links = link_table(load_machine(machine), table)
    return profile_from_links(
        links, [table.local_device(worker) for worker in range(table.num_workers)], sizes
    )


def test_what_was_paced_is_found_within_a_tenth(job):
    """A latency takes milliseconds here, so the scheduler's delays have little weight."""
    table = PartitionTable.load("sdsc-p100")
    plan = MeasurePlan(sizes=(4096, 262144, 1 << 20), budget_s=4.0)
    best_of(lambda attempt: _check_what_was_found(job, str(attempt), table, plan))


def _check_what_was_found(job, name, table, plan):
    found = measured(job, name, "sdsc-p100", table, 300.0, plan)
    expected = paced("sdsc-p100", table, plan.sizes)
    assert found.kind == EMULATED
    assert found.key.machine == "sdsc-p100"
    assert found.paths_share_links == expected.paths_share_links
    for path, curve in found.curves.items():
        for point, truth in zip(curve.points, expected.curves[path].points, strict=True):
            assert point.time_us == pytest.approx(truth.time_us, rel=0.1), f"{path}, {point.nbytes} bytes"
        fit, true_fit = curve.fit(), expected.curves[path].fit()
        assert fit.beta_gbytes_per_s == pytest.approx(true_fit.beta_gbytes_per_s, rel=0.1), path


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param("aws-g4dn", [(0, 0), (1, 1), (2, 2), (3, 3)], marks=pytest.mark.slow),
        pytest.param("aws-p3", [(0, 1), (1, 0), (2, 3), (3, 2)], marks=pytest.mark.slow),
        ("sdsc-p100", [(0, 0), (1, 1)]),
    ],
)
def test_routes_come_out_as_in_the_paper(job, machine, expected):
    table = PartitionTable.load(machine)
    plan = MeasurePlan(sizes=(4096, 65536, 1 << 20), budget_s=3.0)

    best_of(lambda attempt: _check_routes(job, str(attempt), machine, table, plan, expected))


def _check_routes(job, name, machine, table, plan, expected):
    tables = plan_routing(measured(job, name, machine, table, 100.0, plan))
    assert [(made.lat_proxy, made.bw_proxy) for made in tables] == expected
    for made, simulated in zip(tables, plan_routing(paced(machine, table, plan.sizes)), strict=True):
        assert made.threshold_bytes == pytest.approx(simulated.threshold_bytes, rel=0.3)


def test_a_session_adopts_routes_and_shards_of_the_machine(job, tmp_path):
    """The session uses a profile of emulated links from a file; the sums do not change."""
    import numpy as np

    from coarse.schema import TensorSpec

    settings = {"partition_table": "aws-p3", "machine": "aws-p3", "time_dilation": 20.0}
    table = PartitionTable.load("aws-p3")
    sizes = tuple(4096 << power for power in range(15))
    simulated = paced("aws-p3", table, sizes)
    path = tmp_path / "profile.json"

    def worker(me):
        with me.join("first", **settings, profile="off") as session:
            key = measure_profile(session, MeasurePlan(sizes=(4096,), budget_s=0.0)).key
        if me.rank == 0:
            Profile(
                kind=EMULATED, key=key, time_budget_s=1.0, paths_share_links=False, curves=simulated.curves
            ).save(path)
        me.tell()
        me.hear()
        with me.join("second", **settings, profile=str(path)) as session:
            group = session.register(
                "tensors", [TensorSpec(name="t", dtype="float32", num_elements=1 << 20, op="sum")]
            )
            values = np.frombuffer(group.buffer(0), dtype=np.float32)
            values[:] = 2.0**me.rank
            group.push(0)
            group.pull(0)
            assert (values == 15).all()
            return session.decisions()

    workers = job.start(4, worker)
    for one in workers:
        one.hear()
    for one in workers:
        one.tell()
    told = [one.finish() for one in workers]
    assert [outcome.details for outcome in told] == [""] * 4
    decisions = told[0].value
    assert all(outcome.value == decisions for outcome in told)
    assert "w0: md0 below" in decisions[2]
    shard_bytes = plan_shard_size(simulated, plan_routing(simulated)).nbytes
    assert decisions[-2].startswith(f"shards of at least {shard_bytes} bytes: smallest tested size")
    assert decisions[-1] == "algorithm: exchange, the default on emulated machines"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--time-dilation", "20"], "needs --machine"),
        (["--machine", "aws-p4"], "aws-p3"),
        (["--machine", "aws-p3", "--time-dilation", "-1"], "time dilation of -1.0"),
    ],
)
def test_machines_that_cannot_be_are_refused_in_one_line(arguments, expected, capsys):
    assert main(["profile", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
