"""A process's part of a timeline, and the trace that is made of parts."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import struct
import threading
from pathlib import Path

import pytest
from chrome_trace import TraceFormatError, read_trace

from coarse.cli.main import main
from coarse.errors import TimelineError
from coarse.timeline import parts as kinds
from coarse.timeline import recorder
from coarse.timeline.chrome_trace import write_trace
from coarse.timeline.merge import merge, remove_parts
from coarse.timeline.part_files import MEMORY_DEVICE, WORKER, GroupNames, Process, parts_folder
from coarse.timeline.parts import EVERY_TENSOR, Event, Lane, Part, files_of_parts, read_parts

MS = 1_000_000


@pytest.fixture
def target(tmp_path):
    yield tmp_path / "trace.json"
    recorder.stop()


def process(role=WORKER, number=0, *, node=0, attempt=0):
    return Process(role=role, number=number, node=node, attempt=attempt, num_clients=2)


def record_spans(target, count, num_events):
    recorder.start(str(target), process(), num_events=num_events)
    for number in range(count):
        recorder.record(f"work {number}", 1000 * number, 1000 * number + 500)
    recorder.stop()


def test_a_process_that_was_not_asked_records_nothing(target):
    recorder.start("", process(), num_events=8)
    assert not recorder.is_recording()
    with recorder.span("work"):
        pass
    assert not parts_folder(target).exists()


def test_spans_and_marks_reach_the_trace(target):
    recorder.start(str(target), process(number=3), num_events=16)
    with recorder.span("outer"), recorder.span("inner"):
        recorder.mark("moment")
    recorder.stop()
    assert merge(target).num_events == 3
    trace = read_trace(target)
    assert set(trace.processes.values()) == {"worker 3"}
    assert set(trace.threads.values()) == {"main thread"}
    outer, inner = trace.slices
    (moment,) = trace.moments
    assert (outer.name, inner.name, moment.name) == ("outer", "inner", "moment")
    assert outer.begin_ns <= inner.begin_ns <= moment.begin_ns <= inner.end_ns <= outer.end_ns


def test_the_oldest_events_are_dropped_and_the_trace_says_so(target):
    record_spans(target, 20, num_events=8)
    merged = merge(target)
    assert (merged.num_events, merged.num_dropped) == (8, 12)
    assert "12 older events were dropped" in str(merged)
    trace = read_trace(target)
    assert [each.name for each in trace.slices] == [f"work {number}" for number in range(12, 20)]
    assert trace.notes["dropped_events"] == {"worker 0": 12}
    assert [each.name for each in trace.moments] == ["12 older events were dropped"]


def test_a_number_of_events_is_rounded_up_to_a_power_of_two(target):
    record_spans(target, 20, num_events=5)
    assert merge(target).num_events == 8


def test_a_trace_is_compressed_if_its_name_says_so(tmp_path):
    target = tmp_path / "trace.json.gz"
    record_spans(target, 2, num_events=8)
    merge(target)
    assert target.read_bytes()[:2] == b"\x1f\x8b"
    assert len(read_trace(target).slices) == 2


def test_an_event_that_was_being_written_as_the_process_was_killed_is_left_out(target):
    record_spans(target, 4, num_events=8)
    (events,) = parts_folder(target).glob("*.events")
    with events.open("r+b") as file:  # the second event has no commit word
        file.seek(8192 + 64)
        file.write(struct.pack("<Q", 0))
    (names,) = parts_folder(target).glob("*.jsonl")
    names.write_text(names.read_text() + '{"name": "cut o')
    merge(target)
    assert [each.name for each in read_trace(target).slices] == ["work 0", "work 2", "work 3"]


def test_a_process_that_was_killed_at_once_has_no_part(target):
    record_spans(target, 1, num_events=8)
    (parts_folder(target) / "worker-1-node-0-pid-7.jsonl").write_text("")
    merge(target)
    assert list(read_trace(target).processes.values()) == ["worker 0"]


def test_a_file_that_is_no_part_is_refused_by_its_name(target):
    record_spans(target, 1, num_events=8)
    (events,) = parts_folder(target).glob("*.events")
    events.write_bytes(b"x" * 9000)
    with pytest.raises(TimelineError, match=events.name):
        read_parts(parts_folder(target))


def test_names_of_another_version_are_refused_by_their_file(target):
    record_spans(target, 1, num_events=8)
    (names,) = parts_folder(target).glob("*.jsonl")
    names.write_text(names.read_text().replace('"boot_id"', '"boot"'))
    with pytest.raises(TimelineError, match=f"{names.name} is of another version"):
        read_parts(parts_folder(target))


def test_without_parts_there_is_no_trace(target):
    with pytest.raises(TimelineError, match=r"trace\.json\.parts has no parts"):
        merge(target)


def test_a_trace_that_cannot_be_written_leaves_the_parts(target):
    record_spans(target, 1, num_events=8)
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        merge(target)
    assert len(files_of_parts(parts_folder(target))) == 2
    assert len(list(target.parent.iterdir())) == 2  # no unfinished trace


def test_parts_of_an_earlier_job_are_removed_and_nothing_else(target):
    record_spans(target, 1, num_events=8)
    other = parts_folder(target) / "notes.txt"
    other.write_text("mine")
    remove_parts(target)
    assert list(parts_folder(target).iterdir()) == [other]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"COARSE_TIMELINE=.*cannot be written") as caught:
        recorder.start(str(tmp_path / "file" / "trace.json"), process(), num_events=8)
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert not recorder.is_recording()


def _work_in_fork():
    recorder.mark("in the fork")
    os._exit(recorder.is_recording())


def test_a_fork_does_not_write_to_its_parents_part(target):
    recorder.start(str(target), process(), num_events=8)
    recorder.mark("before")
    child = multiprocessing.get_context("fork").Process(target=_work_in_fork)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    recorder.mark("after")
    recorder.stop()
    merge(target)
    assert [each.name for each in read_trace(target).moments] == ["before", "after"]


def test_names_are_recorded_by_several_threads(target):
    recorder.start(str(target), process(), num_events=1024)

    def work(number):
        for each in range(50):
            with recorder.span(f"work {(each + number) % 7}"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.stop()
    merge(target)
    assert {each.name for each in read_trace(target).slices} == {f"work {number}" for number in range(7)}


def test_the_command_merges_and_may_keep_the_parts(target, capsys):
    record_spans(target, 2, num_events=8)
    assert main(["timeline", "merge", str(target), "--keep-parts"]) == 0
    assert f"{target}: 2 events of 1 processes" in capsys.readouterr().out
    assert main(["timeline", "merge", str(target)]) == 0
    assert not parts_folder(target).exists()
    assert main(["timeline", "merge", str(target)]) == 1


# ---- traces of several processes ----


def event(kind, begin_ms, end_ms=None, *, index=0, step=1, detail=0, num_bytes=4096):
    return Event(
        begin_ns=begin_ms * MS,
        duration_ns=-1 if end_ms is None else (end_ms - begin_ms) * MS,
        num_bytes=num_bytes,
        detail=detail,
        group=0,
        number=index,
        step=step,
        kind=kind,
        session=1,
        lane=0,
    )


NAMES = GroupNames(
    session=1,
    group=0,
    name="model",
    ranks=[4, 5],
    device_pids=[77],
    tensors=["weight", "bias"],
    tensor_of_shard=[0, 0, 1],
)


def part_of(process, pid, events, *, host="here", clock_offset_ns=0):
    groups = {(1, 0): NAMES} if process.role == WORKER else {}
    return Part(
        process=process,
        pid=pid,
        host=host,
        boot_id=f"boot of {host}",
        clock_offset_ns=clock_offset_ns,
        groups=groups,
        lanes=[Lane(pid, "python")],
        events=events,
    )


def written(tmp_path, parts):
    path = tmp_path / "made.json"
    with path.open("w") as stream:
        write_trace(parts, stream)
    return read_trace(path)


def test_shards_have_the_names_of_their_tensors_and_arrows_to_their_pulls(tmp_path):
    first = part_of(process(number=4), 11, [event(kinds.PUSH, 10, 11), event(kinds.PULL, 12, 20)])
    whole = event(kinds.PULL, 14, 21, index=EVERY_TENSOR, step=0)
    second = part_of(process(number=5), 12, [event(kinds.PUSH, 12, 13), whole])
    device = part_of(
        process(MEMORY_DEVICE), 77, [event(kinds.REDUCE, 15, 16), event(kinds.REDUCE, 16, 18, index=1)]
    )
    trace = written(tmp_path, [first, second, device])
    assert [each.name for each in trace.named("reduce")] == ["reduce weight [1/2]", "reduce weight [2/2]"]
    assert [[each.name for each in arrow] for arrow in trace.arrows] == [
        ["push weight", "reduce weight [1/2]", "pull weight"],
        ["push weight", "reduce weight [1/2]", "pull all of model"],
    ]
    assert ("worker 4", "link traffic (GB/s)") in trace.counters


@pytest.mark.parametrize(
    ("missing", "pushed_ms", "name"),
    [
        (0, 3, "wait for memory devices"),
        (2, 3, "wait for worker 5"),
        (2, 5, "wait for worker 5"),  # its push was not finished, or never came
        (2, 0, "wait for memory devices"),  # pushed, and not taken yet
        (1, 3, "wait for memory devices"),  # only its own is not taken yet
        (3, 3, "wait for worker 5"),
    ],
)
def test_a_wait_names_the_workers_that_had_not_pushed(tmp_path, missing, pushed_ms, name):
    waiting = event(kinds.WAIT, 2, 4, index=2, detail=missing)
    other = event(kinds.PUSH, pushed_ms, pushed_ms + 1, index=1)
    trace = written(
        tmp_path, [part_of(process(number=4), 11, [waiting]), part_of(process(number=5), 12, [other])]
    )
    (wait,) = trace.named("wait")
    assert (wait.name, wait.category) == (name, "wait")
    assert wait.arguments == {"bytes": 4096, "step": 1, "group": "model", "shard": "bias"}


def test_overlapping_transfers_are_no_slices_of_a_thread(tmp_path):
    events = [
        event(kinds.TRANSFER, 1, 5, detail=1 << 16 | 2),
        event(kinds.TRANSFER, 2, 6, detail=2 << 16 | 0),
        event(kinds.NODE_SEND, 3, 7, detail=1),
    ]
    trace = written(tmp_path, [part_of(process(MEMORY_DEVICE), 77, events)])
    assert trace.slices == []
    assert [each.name for each in trace.transfers] == [
        "worker 1 to md0",
        "md0 to worker 0",
        "to node 1: shard 0 of group 0",
    ]


def test_slices_of_a_thread_that_overlap_are_asynchronous(tmp_path):
    """Two models in one backward, of which the one that begins first also ends first."""
    events = [event(kinds.SPAN, 0, 10), event(kinds.SPAN, 2, 12, index=1), event(kinds.SPAN, 3, 10, index=2)]
    part = part_of(process(), 11, events)
    part.names = {0: "first", 1: "second", 2: "inner"}
    trace = written(tmp_path, [part])
    assert [each.name for each in trace.slices] == ["first", "inner"]
    assert [(each.name, each.end_ns) for each in trace.transfers] == [("second", 12 * MS)]


def test_nodes_are_compared_by_their_time_of_day(tmp_path):
    near = part_of(process(), 11, [event(kinds.PUSH, 100, 101)], clock_offset_ns=5 * MS)
    far = part_of(
        process(number=1, node=1), 11, [event(kinds.PUSH, 7, 8)], host="there", clock_offset_ns=100 * MS
    )
    trace = written(tmp_path, [near, far])
    assert trace.notes["clock"] == "monotonic, shifted by each machine's time of day"
    begins = {each.process: each.begin_ns for each in trace.slices}
    assert begins == {"worker 0": 0, "worker 1 of node 1": 2 * MS}


def test_processes_of_a_machine_keep_their_order_though_its_time_of_day_was_set(tmp_path):
    parts = [
        part_of(
            process(number=number),
            11 + number,
            [event(kinds.PUSH, number, number + 1)],
            clock_offset_ns=offset,
        )
        for number, offset in ((0, 9 * MS), (1, 0))
    ]
    begins = {each.process: each.begin_ns for each in written(tmp_path, parts).slices}
    assert begins == {"worker 0": 0, "worker 1": MS}


def test_a_restarted_worker_is_a_process_of_its_own(tmp_path):
    parts = [
        part_of(process(attempt=number), 11 + number, [event(kinds.PUSH, number, number + 1)])
        for number in (0, 1)
    ]
    assert set(written(tmp_path, parts).processes.values()) == {"worker 0", "worker 0 (restart 1)"}


GOOD = {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 0, "dur": 2}
NAMED = [
    {"ph": "M", "name": name, "pid": 1, "tid": 1, "args": {"name": "x"}}
    for name in ("process_name", "thread_name")
]


@pytest.mark.parametrize(
    "wrong",
    [
        [{**GOOD, "ts": "1"}],
        [{**GOOD, "dur": -1}],
        [{**GOOD, "pid": 2}],
        [{**GOOD, "tid": 2}],
        [{**GOOD, "ph": "Q"}],
        [GOOD, {**GOOD, "ts": 1}],
        [GOOD, {**GOOD, "ph": "b", "id": 1}],
        [GOOD, {**GOOD, "ph": "s", "id": 1}],
        [GOOD, {**GOOD, "ph": "s", "id": 1, "ts": 1}, {**GOOD, "ph": "f", "bp": "e", "id": 1, "ts": 2}],
        [GOOD, {**GOOD, "ph": "f", "bp": "e", "id": 1}, {**GOOD, "ph": "s", "id": 1, "ts": 1}],
    ],
)
def test_the_reader_of_these_tests_refuses_what_is_no_trace(tmp_path, wrong):
    path = Path(tmp_path / "trace.json")
    path.write_text(json.dumps({"traceEvents": [*NAMED, *wrong], "otherData": {}}))
    with pytest.raises(TraceFormatError):
        read_trace(path)
