"""Timelines: valid trace events with every byte of every link, within the step."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest
from small_jobs import small_setup
from trace_events import read_rows

from coarse.cli.main import main
from coarse.simulator.events import timeline as module
from coarse.simulator.events.timeline import Span, timeline, trace_document
from coarse.simulator.faults.disturbances import Disturbances
from coarse.simulator.job import DEFAULT_RATES, SyncCores
from coarse.simulator.schemes.catalogue import SCHEMES
from coarse.simulator.training_step import simulate_step

CORES = SyncCores(num_cores=2, gbytes_per_s=DEFAULT_RATES)


def timeline_of(scheme, **changes):
    setup, found = small_setup(**changes), []
    simulate_step(setup, scheme, record=lambda *step: found.append(timeline(setup, *step)))
    return found[0]


def rows_of(*timelines):
    document = json.loads(json.dumps(trace_document(timelines), allow_nan=False))
    return list(read_rows(document).values())


def bytes_of_links(rows):
    """By link; a row's name is that of its link, how many it stands for, and its lane."""
    found = defaultdict(float)
    for name, events in rows.items():
        link = name.split(" (one of")[0].split(",")[0]
        found[link] += sum(event["args"].get("bytes", 0) for event in events)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_byte_of_every_link_is_shown_within_the_step(scheme):
    shown = timeline_of(scheme)
    (rows,) = rows_of(shown)
    found = bytes_of_links(rows)
    for name, load in shown.result.links.items():
        assert found[name] == pytest.approx(load.nbytes, rel=1e-6), name
    ends_us = [event["ts"] + event["dur"] for events in rows.values() for event in events]
    assert max(ends_us) <= shown.result.step_s * 1e6 + 1e-3
    assert next(iter(rows)) == "computation"
    assert sum(event["dur"] for event in rows["computation"]) == pytest.approx(3000, rel=1e-3)


def test_sync_cores_have_rows():
    (rows,) = rows_of(timeline_of("offload", sync_cores=CORES))
    assert any(name.startswith("md0 sync cores") for name in rows)


def test_folded_links_say_how_many_they_stand_for():
    (rows,) = rows_of(timeline_of("offload"))
    assert "each worker up (one of 8)" in rows


def test_each_straggler_has_its_own_computation():
    slow = Disturbances(slow_workers={3: 2.0})
    (rows,) = rows_of(timeline_of("offload", disturbances=slow))
    assert [event["dur"] for event in rows["computation of worker 3"]] == [2000, 4000]


def test_each_scheme_is_a_process():
    first, second = rows_of(timeline_of("allreduce-ring"), timeline_of("fsdp"))
    assert any(event["name"].startswith("bucket 0") for event in first["worker 0 up"])
    assert [event["name"] for event in second["computation"]][:1] == ["forward 1"]


def test_only_the_busiest_links_are_shown(monkeypatch):
    monkeypatch.setattr(module, "MOST_LINKS", 3)
    shown = timeline_of("allreduce-tree")
    assert shown.num_links > 3
    assert len(shown.rows) == 4


def test_overlapping_transfers_take_as_few_rows_as_possible():
    spans = [Span(0, 4, "a"), Span(1, 2, "b"), Span(2, 5, "c"), Span(4, 6, "d")]
    lanes = module._lanes(spans[::-1])
    assert [[span.name for span in lane] for lane in lanes] == [["a", "d"], ["b", "c"]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.pop("ts"),
        lambda event: event.update(ts=math.inf),
        lambda event: event.update(dur=-1.0),
        lambda event: event.update(ph="Q"),
        lambda event: event.update(tid=999),
        lambda event: event.update(unit="ms"),
        lambda event: event.update(name=""),
        lambda event: event.update(dur=1e9),
    ],
)
def test_the_reader_refuses_what_is_not_a_trace(spoil):
    document = trace_document([timeline_of("offload")])
    event = next(each for each in document["traceEvents"] if each["ph"] == "X")
    spoil(event)
    with pytest.raises(ValueError, match=r"phase|fields|times|name|row|overlap"):
        read_rows(document)


def test_the_command_writes_a_process_for_each_scheme(tmp_path, capsys):
    path = tmp_path / "step.json"
    question = ("--machine", "aws-p3", "--model", "bert-base", "--scheme", "offload,allreduce")
    assert main(["simulate", *question, "--timeline", str(path)]) == 0
    processes = read_rows(json.loads(path.read_text()))
    assert list(processes) == [
        f"{scheme}: bert-base on aws-p3, 4 workers (simulated)" for scheme in ("offload", "allreduce")
    ]
    assert "busiest of" not in capsys.readouterr().err
