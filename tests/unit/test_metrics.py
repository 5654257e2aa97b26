"""Metrics: names follow Prometheus's conventions, values are those counted, and the endpoint serves them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import socket
import struct
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coarse.kernels import _native
from coarse.metrics.declarations import BUCKET_BOUNDS_S, DECLARATIONS, label_values
from coarse.metrics.endpoint import MetricsEndpoint, try_endpoint
from coarse.metrics.reader import MetricsReader
from coarse.metrics.reporter import MetricsReporter, scalars
from coarse.metrics.values import Metrics
from coarse.metrics.writer import MetricsWriter
from coarse.profiler.partition import ALGORITHMS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def segment():
    """The memory of two devices and of workers 4 and 5, with its reader."""
    fd = _native.create_sealed_memory("metrics", _native.metrics_bytes(2, 2))
    try:
        yield _native.MetricsSegment(fd, 2, 2), MetricsReader.of_segment(fd, 2, (4, 5))
    finally:
        os.close(fd)


# ---- conventions ----

METRIC_NAME = re.compile(r"coarse_[a-z][a-z0-9]*(_[a-z0-9]+)*")
LABEL_NAME = re.compile(r"[a-z][a-z0-9_]*")
RESERVED_LABELS = {"le", "quantile", "job", "instance"}
OTHER_UNITS = {
    *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "ms", "us", "ns"),
    *("kilobytes", "megabytes", "gigabytes", "kib", "mib", "gib", "kb", "mb", "gb", "bits", "percent"),
}
KIND_WORDS = {"counter", "gauge", "histogram", "summary"}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_names_follow_prometheus_conventions(name):
    """The rules of promtool check metrics, and those of prometheus.io/docs/practices/naming."""
    declared = DECLARATIONS[name]
    words = name.split("_")
    assert METRIC_NAME.fullmatch(name)
    assert declared.help, "no help text"
    assert not declared.help.endswith(".")
    assert name.endswith("_total") == (declared.kind == "counter"), "counters alone end in _total"
    assert not OTHER_UNITS & set(words), "base units are seconds and bytes"
    assert not KIND_WORDS & set(words), "a name does not say its type"
    assert words[-1] not in ("count", "sum", "bucket", "info"), "suffixes of histograms and infos"
    for label in (declared.owner, *declared.labels):
        assert LABEL_NAME.fullmatch(label)
        assert label not in RESERVED_LABELS
        assert label not in words or label == declared.owner, "a name does not repeat its labels"
    unit = words[:-1] if declared.kind == "counter" else words
    if declared.scale != 1.0 or declared.kind == "histogram":
        assert unit[-1] == "seconds", "durations end in their unit"


def test_labels_do_not_name_what_they_distinguish_twice():
    for declared in DECLARATIONS.values():
        labels = (declared.owner, *declared.labels)
        assert len(set(labels)) == len(labels), declared.name


def test_algorithms_have_the_names_of_the_planner():
    assert tuple(label_values("algorithm", 0)) == (*ALGORITHMS, "workers", "update")


def test_buckets_rise():
    assert list(BUCKET_BOUNDS_S) == sorted(set(BUCKET_BOUNDS_S))
    assert BUCKET_BOUNDS_S[0] == pytest.approx(1e-5)
    assert BUCKET_BOUNDS_S[-1] == pytest.approx(100)


# ---- documents ----


def documented_rows(owner):
    """The cells of the table of docs/metrics.md with the metrics of workers or of memory devices."""
    lines = DOCUMENT.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if f"labels besides `{owner}`" in line) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("owner", ["worker", "device"])
def test_the_document_lists_what_is_declared(owner):
    assert documented_rows(owner) == [
        [f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help]
        for each in DECLARATIONS.values()
        if each.owner == owner
    ]


@pytest.mark.parametrize("label", ["algorithm", "cause", "outcome", "failure"])
def test_the_document_explains_the_values_of_labels(label):
    (row,) = re.findall(rf"^\| `{label}` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(label_values(label, 0))


def served_names():
    """Names of samples at the endpoint."""
    for declared in DECLARATIONS.values():
        parts = ("_bucket", "_count", "_sum") if declared.kind == "histogram" else ("",)
        yield from (f"{declared.name}{part}" for part in parts)


def test_the_dashboard_shows_metrics_that_exist_and_all_of_them():
    dashboard = json.loads((DOCUMENT.parent / "grafana" / "coarse.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for expression in expressions for name in re.findall(r"coarse_\w+", expression)}
    assert named <= set(served_names())
    assert {name for name in DECLARATIONS if not any(each.startswith(name) for each in named)} == set()
    for expression in expressions:
        for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert name.endswith(("_total", "_bucket", "_count", "_sum")), "only counters have rates"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_document_names_metrics_that_exist():
    tags = {
        f"{name.removesuffix('_total')}{suffix}"
        for name in DECLARATIONS
        for suffix in ("_mean", "_per_second")
    }
    known = {*served_names(), *DECLARATIONS, *tags}
    assert set(re.findall(r"coarse_\w+", DOCUMENT.read_text())) <= known


# ---- values ----


def test_values_are_read_with_their_labels_and_units(segment):
    native, reader = segment
    worker, device = MetricsWriter(native.client(1)), MetricsWriter(native.device(1))
    worker.add("coarse_samples_total", 7)
    worker.add("coarse_samples_total", 8)
    worker.add("coarse_checkpoint_saves_total", label="failed")
    worker.observe("coarse_step_seconds", 0.02)
    worker.observe("coarse_step_seconds", 0.03)
    device.set("coarse_sync_cores", 3)
    device.set("coarse_snapshot_wait_seconds_total", 2_500_000_000)
    metrics = reader.read()
    assert metrics['coarse_samples_total{worker="5"}'] == 15
    assert metrics['coarse_samples_total{worker="4"}'] == 0
    assert metrics['coarse_checkpoint_saves_total{worker="5",outcome="failed"}'] == 1
    assert 'coarse_checkpoint_saves_total{worker="5",outcome="saved"}' not in metrics
    assert metrics['coarse_step_seconds_count{worker="5"}'] == 2
    assert metrics['coarse_step_seconds_sum{worker="5"}'] == pytest.approx(0.05)
    assert metrics['coarse_sync_cores{device="md1"}'] == 3
    assert metrics['coarse_snapshot_wait_seconds_total{device="md1"}'] == pytest.approx(2.5)


def test_totals_are_sums_over_labels(segment):
    native, reader = segment
    pushed = DECLARATIONS["coarse_pushed_bytes_total"]
    every = pushed.series(2)
    for number, labels in enumerate(every):
        native.client(0).set(pushed.number, 2**number, number)
        assert reader.read().total(pushed.name, **labels) == 2**number
    metrics = reader.read()
    assert metrics.total(pushed.name) == 2 ** len(every) - 1
    of_second = [2**number for number, labels in enumerate(every) if labels["device"] == "md1"]
    assert metrics.total(pushed.name, device="md1") == sum(of_second)
    assert metrics.total(pushed.name, worker="9") == 0


def test_queues_hold_what_was_pushed_and_not_taken(segment):
    native, reader = segment
    pushed, taken = DECLARATIONS["coarse_pushed_shards_total"], DECLARATIONS["coarse_taken_shards_total"]
    to_second = next(number for number, labels in enumerate(pushed.series(2)) if labels["device"] == "md1")
    native.client(0).add(pushed.number, 5, to_second)
    native.client(1).add(pushed.number, 4, to_second)
    native.device(1).add(taken.number, 6)
    native.device(0).add(taken.number, 1)  # read before the push that it belongs to
    metrics = reader.read()
    assert metrics['coarse_queue_shards{device="md1"}'] == 3
    assert metrics['coarse_queue_shards{device="md0"}'] == 0


def test_a_writer_without_memory_counts_nothing():
    writer = MetricsWriter()
    writer.add("coarse_samples_total", 3)
    assert writer.native.cells(DECLARATIONS["coarse_samples_total"].number) == [0]


def test_what_does_not_exist_is_refused(segment):
    native, _ = segment
    with pytest.raises(KeyError):
        MetricsWriter(native.client(0)).add("coarse_nothing_total")
    with pytest.raises(IndexError, match="no such series"):
        native.client(0).add(0, 1, 10**6)
    with pytest.raises(IndexError, match="no metric"):
        native.client(0).add(10**6)
    with pytest.raises(ValueError, match="no histogram"):
        native.client(0).observe_ns(0, 1)


def test_waits_for_answers_are_timed(segment):
    native, reader = segment
    with pytest.raises(TimeoutError), MetricsWriter(native.client(0)).waiting_for_answer():
        raise TimeoutError
    assert reader.read()['coarse_wait_seconds_count{worker="4",cause="request"}'] == 1


# ---- the endpoint ----


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_the_endpoint_serves_the_same_values(segment):
    native, reader = segment
    MetricsWriter(native.client(0)).observe("coarse_step_seconds", 0.02)
    MetricsWriter(native.client(0)).add("coarse_samples_total", 32)
    endpoint = MetricsEndpoint(reader.read, "127.0.0.1", 0)
    try:
        families = scrape(endpoint.port)
    finally:
        endpoint.close()
    served = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    read = {}
    for name, value in reader.read().items():
        labels = re.findall(r'(\w+)="([^"]*)"', name)
        read[name.partition("{")[0], frozenset(labels)] = value
    assert served == read
    kinds = {name: family.type for name, family in families.items()}
    assert kinds == {
        name.removesuffix("_total"): declared.kind
        for name, declared in DECLARATIONS.items()
        if name.removesuffix("_total") in kinds
    }
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["coarse_step_seconds"].samples
        if sample.name == "coarse_step_seconds_bucket" and sample.labels["worker"] == "4"
    }
    assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 1, 1)


def test_a_silent_connection_does_not_block_the_endpoint_for_long(segment, monkeypatch):
    monkeypatch.setattr("coarse.metrics.endpoint._Handler.timeout", 0.2)
    endpoint = MetricsEndpoint(segment[1].read, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port)):
            assert "coarse_world_size" in scrape(endpoint.port)
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.port)


def test_an_occupied_endpoint_closes_in_time(segment, monkeypatch):
    """Whoever sends a byte now and then keeps it busy, and must not keep a memory device from ending."""
    monkeypatch.setattr("coarse.metrics.endpoint._Handler.timeout", 60)
    endpoint = MetricsEndpoint(segment[1].read, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as slow:
        slow.sendall(b"GET /metr")
        began_s = time.monotonic()
        endpoint.close()
        assert time.monotonic() - began_s < 30


def test_a_request_that_breaks_off_leaves_the_endpoint_alone(segment, capfd):
    endpoint = MetricsEndpoint(segment[1].read, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port)) as hasty:
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
            hasty.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert "coarse_world_size" in scrape(endpoint.port)
    finally:
        endpoint.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_taken_port_is_a_warning_that_names_it(segment, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            assert try_endpoint(segment[1].read, "127.0.0.1", port, "md0") is None
    (message,) = caplog.messages
    assert f"127.0.0.1 port {port}: Address already in use" in message
    assert "COARSE_METRICS_PORT" in message


def test_an_unknown_address_is_a_warning(segment, caplog):
    with caplog.at_level(logging.WARNING):
        assert try_endpoint(segment[1].read, "no.such.host.invalid", 0, "md0") is None
    assert "no.such.host.invalid" in caplog.text


# ---- reports ----


def test_a_report_has_rates_means_and_gauges(segment):
    native, reader = segment
    worker, device = MetricsWriter(native.client(0)), MetricsWriter(native.device(1))
    worker.add("coarse_samples_total", 100)
    worker.observe("coarse_step_seconds", 50.0)
    before = reader.read()
    worker.add("coarse_samples_total", 30)
    worker.observe("coarse_step_seconds", 1.0)
    worker.observe("coarse_step_seconds", 2.0)
    worker.add("coarse_checkpoint_saves_total", label="saved")  # a series that was not there before
    device.set("coarse_sync_cores", 3)
    after = Metrics(reader.read().families(), before.taken_s + 2.0)
    told = dict(scalars(before, after))
    assert told["coarse_samples_per_second/worker4"] == pytest.approx(15)
    assert told["coarse_samples_per_second/worker5"] == 0
    assert told["coarse_step_seconds_mean/worker4"] == pytest.approx(1.5)
    assert "coarse_step_seconds_mean/worker5" not in told
    assert told["coarse_checkpoint_saves_per_second/worker4/saved"] == pytest.approx(0.5)
    assert told["coarse_sync_cores/md1"] == 3


def test_reports_come_every_few_steps_and_each_from_the_last(segment):
    native, reader = segment
    told = []
    reporter = MetricsReporter(reader.read, lambda *scalar: told.append(scalar), every=3)
    for step in range(1, 8):
        MetricsWriter(native.client(0)).observe("coarse_step_seconds", float(step))
        reporter.step()
    means = [(value, step) for tag, value, step in told if tag == "coarse_step_seconds_mean/worker4"]
    assert means == [(pytest.approx(2.0), 3), (pytest.approx(5.0), 6)]


def test_reports_need_a_step_between_them(segment):
    with pytest.raises(ValueError, match="every=0 must be at least 1 step"):
        MetricsReporter(segment[1].read, print, every=0)
