"""What `coarse top` shows: it fits a small terminal, and large jobs lose no row that matters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coarse.cli.display.top_view import format_rate, format_time, view
from coarse.cli.top import _most_rows
from coarse.dashboard.samples import (
    FAULT,
    RUNS,
    SILENT,
    TRAINS,
    Checkpoints,
    Device,
    Event,
    Link,
    MemoryUse,
    Sample,
    Worker,
)


def worker(rank, **values):
    doing = "is in read_a_batch_of_images (train.py:12), from <module> (train.py:14)"
    times = {"step_s": 0.12345, "compute_s": 0.1, "blocked_s": 0.02345, "private_bytes": 1 << 30}
    return Worker(
        **{
            "rank": rank,
            "pid": 30000 + rank,
            "state": TRAINS,
            "doing": doing,
            "step": 123456,
            "blocked_by": {},
        }
        | times
        | values
    )


def device(number, **values):
    sizes = {"reserved_bytes": 3 << 30, "queue_shards": 12, "sync_cores": 2}
    return Device(
        **{"number": number, "pid": 40000 + number, "doing": "", "memory": "numa:1"} | sizes | values
    )


def link(source, target, rate):
    return Link(
        source=f"worker {source}",
        target=f"md{target}",
        bytes_per_s=rate,
        limit_bytes_per_s=8e9,
        limit_kind="measured",
        algorithms=("gather", "direct"),
    )


def sample(num, **values):
    parts = {
        "workers": tuple(map(worker, range(num))),
        "devices": tuple(map(device, range(num))),
        "links": tuple(link(each, each, 1e9 * each) for each in range(num)),
        "memory": tuple(
            MemoryUse(owner=f"md{each}", what="states", num_bytes=3 << 30) for each in range(num)
        ),
    }
    return Sample(
        **{"number": 1, "time_s": 0.0, "phase": RUNS, "job": "7ce4d0d2", "checkpoints": Checkpoints()}
        | {"program": "train.py", "step": 123456, "steps_per_s": 8.1, "samples_per_s": 129.6}
        | parts
        | values
    )


def shown(*arguments, width=80, most_rows=16):
    console = Console(width=width, height=24, file=io.StringIO())
    console.print(view(*arguments, most_rows=most_rows))
    return console.file.getvalue().splitlines()


def test_a_job_of_two_workers_fits_a_terminal_of_80_times_24_with_all_numbers():
    events = [Event(time_s=float(each), kind=FAULT, text="worker 1 was lost") for each in range(5)]
    lines = shown(sample(2, slowest=1, why_slow="worker 1 takes 80 ms"), events, most_rows=2)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for number in ("123456", "123 ms", "100 ms", "19%", "1 GiB", "3 GiB", "8 GB/s measured", "12%"):
        assert number in text, text


def test_of_many_workers_those_that_matter_stay():
    workers = tuple(worker(rank, state=SILENT if rank == 40 else TRAINS) for rank in range(64))
    lines = shown(sample(64, workers=workers, slowest=50), (), most_rows=4, width=120)
    ranks = [line.split()[0] for line in lines if "read_a_batch" in line]
    assert ranks == ["0", "40", "50"]
    assert sum("and 61 more" in line for line in lines) == 3
    assert [line.split()[1] for line in lines if "measured" in line] == ["61", "62", "63"]


def test_what_nobody_knows_is_a_dash():
    unknown = worker(0, step_s=0.0, compute_s=0.0, blocked_s=0.0)
    row = next(
        line for line in shown(sample(1, workers=(unknown,)), ()) if "123456" in line and "job" not in line
    )
    assert row.split()[2:6] == ["-", "-", "-", "-"]


def test_brackets_are_no_markup():
    lines = shown(sample(1, workers=(worker(0, doing="[red] waits"),)), (), width=120)
    assert any("[red] waits" in line for line in lines)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0 B/s"), (999.0, "999 B/s"), (1234.0, "1.23 kB/s"), (8.1e9, "8.1 GB/s"), (1.2e12, "1200 GB/s")],
)
def test_rates(rate, text):
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "-"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (0.9996, "1000 ms"), (1234.0, "1234 s")],
)
def test_times(seconds, text):
    assert format_time(seconds) == text


def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_number():
    lines = shown(sample(2, slowest=1, why_slow="worker 1 takes 80 ms"), (), width=40, most_rows=3)
    assert max(map(len, lines)) <= 40
    text = "\n".join(lines)
    assert "worker   step   time blocked doing" in text
    for row in ("0      123456 123 ms     19% read_a", "md0", "worker 0 to md0", "worker 1 to md1"):
        assert row in text, text
    tables = [line for line in lines if line.startswith(("0 ", "1 ", "md", "worker "))]
    assert all("…" not in line[:30] for line in tables), text


@pytest.mark.parametrize("width", [20, 30, 40, 55, 79, 80, 100, 120])
def test_lines_are_never_longer_than_the_terminal_is_wide(width):
    events = [Event(time_s=0.0, kind=FAULT, text="x" * 200)]
    long_name = device(0, memory="dax:/dev/dax0.0:0-68719476736")
    found = shown(sample(3, why_slow="y" * 200, devices=(long_name,)), events, width=width)
    assert max(map(len, found)) <= width


def test_a_large_job_with_everything_fits_a_terminal_of_80_times_24():
    events = [Event(time_s=float(each), kind=FAULT, text="worker 1 was lost") for each in range(5)]
    everything = sample(64, slowest=1, why_slow="worker 1 takes 80 ms", nodes=(range(64), range(64, 128)))
    most_rows = _most_rows(Console(width=80, height=24))
    lines = shown(everything, events, most_rows=most_rows)
    assert len(lines) <= 24
    assert "not shown: node 1 (workers 64 to 127); run coarse top there, or see --metrics" in lines
