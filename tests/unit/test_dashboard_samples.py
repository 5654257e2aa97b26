"""Samples of the dashboard: rates, parts of a step and events follow from two readings; a recording keeps them."""

from __future__ import annotations

import contextlib
import json
import secrets
from itertools import pairwise

import pytest

from coarse.dashboard import history as recordings
from coarse.dashboard.events import Changes
from coarse.dashboard.follower import Follower
from coarse.dashboard.history import History, Recorder, RecordingError, as_values, open_recording
from coarse.dashboard.pace import Pace, StepTimes
from coarse.dashboard.readings import Counters, Reading
from coarse.dashboard.sampler import Sampler, not_shown, slowest_of
from coarse.dashboard.samples import (
    CHECKPOINT,
    FAULT,
    JOB,
    ROUTE,
    RUNS,
    TRAINS,
    Checkpoints,
    Event,
    Sample,
    Worker,
)
from coarse.status.address import MEMORY_DEVICE, WORKER, Address, find_addresses
from coarse.status.requests import Answer, ask
from coarse.status.responder import Responder

STEP = 'coarse_step_seconds_{}{{worker="0"}}'


def answer(role, number, *, pid=None, state="", **report):
    pid = pid or 100 * (role == MEMORY_DEVICE) + number + 1
    address = Address(user=0, job="0" * 8, role=role, number=number, pid=pid, mark="0" * 8)
    values = {"stacks": [], **report}
    return Answer(address=address, report=None if state else values, state=state)


def worker(rank, step=0, *, waits_s=0.0, waits_for="", **how):
    return answer(WORKER, rank, step=step, waits_s=waits_s, waits_for=waits_for, synchronised_s=0.0, **how)


def device(number, **how):
    return answer(MEMORY_DEVICE, number, serves=[number], **how)


def reading(at_s, *answers, plan=None, **counted):
    """Counters by their names without `coarse_`; those of a worker are worker 0's unless the name has labels."""
    samples = {'coarse_world_size{worker="0"}': 2.0, **counted}
    return Reading(
        taken_s=at_s, time_s=1e9 + at_s, answers=answers, counters=Counters(samples), plan=plan or {}
    )


def steps(count, seconds, **waits):
    counted = {STEP.format("count"): count, STEP.format("sum"): seconds}
    return counted | {
        f'coarse_wait_seconds_sum{{worker="0",cause="{cause}"}}': waited for cause, waited in waits.items()
    }


def texts(events, kind):
    return [event.text for event in events if event.kind == kind]


# ---- counters and pace ----


def test_counters_sum_the_values_with_the_labels_that_are_given():
    counters = Counters(
        {
            'coarse_pushed_bytes_total{worker="0",device="md0",algorithm="direct"}': 3.0,
            'coarse_pushed_bytes_total{worker="0",device="md1",algorithm="direct"}': 5.0,
            'coarse_pushed_bytes_total{worker="1",device="md1",algorithm="gather"}': 7.0,
        }
    )
    name = "coarse_pushed_bytes_total"
    assert counters.total(name) == 15
    assert counters.total(name, worker="0") == 8
    assert counters.by(name, "device", algorithm="direct") == {("md0",): 3, ("md1",): 5}
    assert counters.largest(name) == 7
    assert counters.total("coarse_nothing") == counters.largest("coarse_nothing") == 0


def test_a_step_is_cut_into_computation_waits_and_the_optimizer():
    pace = Pace()
    optimizer = 'coarse_optimizer_seconds_sum{worker="0"}'
    pace.follow(reading(0, **steps(10, 5.0, results=1.0, background=9.0), **{optimizer: 1.0}))
    pace.follow(reading(1, **steps(14, 7.0, results=1.4, queue=0.2, background=12.0), **{optimizer: 1.8}))
    times = pace.step_times(0)
    assert times.step_s == pytest.approx(0.5)
    assert times.blocked_by == {"results": pytest.approx(0.1), "queue": pytest.approx(0.05)}
    assert times.blocked_s == pytest.approx(0.15), "waits in the background block nobody"
    assert times.optimizer_s == pytest.approx(0.2)
    assert times.compute_s == pytest.approx(0.15)


def test_parts_of_a_step_are_never_longer_than_the_step():
    pace = Pace()
    pace.follow(reading(0, **steps(0, 0.0, results=0.0)))
    pace.follow(reading(1, **steps(1, 0.5, results=0.9)))
    times = pace.step_times(0)
    assert (times.blocked_s, times.compute_s, times.optimizer_s) == (0.5, 0.0, 0.0)


def test_before_the_first_step_nothing_is_known_and_without_a_step_the_last_one_stays():
    pace = Pace()
    assert pace.step_times(0) == StepTimes()
    pace.follow(reading(0, **steps(0, 0.0)))
    pace.follow(reading(1, **steps(2, 0.8)))
    for second in range(2, 60):
        pace.follow(reading(second, **steps(2, 0.8)))
        assert pace.step_times(0).step_s == pytest.approx(0.4)


def test_rates_are_those_of_the_last_seconds():
    name = 'coarse_samples_total{worker="0"}'
    pace = Pace()
    for second in range(21):
        pace.follow(reading(second, **steps(10 * second, second), **{name: 100.0 * min(second, 10)}))
    assert pace.rates("coarse_samples_total", "worker") == {("0",): 0.0}, "it stood still for ten seconds"
    pace.follow(reading(21, **steps(210, 21), **{name: 1060.0}))
    ((rate,),) = [pace.rates("coarse_samples_total", "worker").values()]
    assert rate == pytest.approx(60 / 5)


def test_the_first_reading_of_a_job_that_trains_has_rates():
    name = 'coarse_samples_total{worker="0"}'
    pace = Pace()
    pace.follow(reading(100, **steps(10, 5.0), **{name: 640.0}))
    assert pace.rates("coarse_samples_total", "worker") == {("0",): 128.0}


def test_slow_steps_are_averaged_over_two_of_them():
    name = 'coarse_samples_total{worker="0"}'
    pace = Pace()
    for second in range(61):
        pace.follow(reading(second, **steps(second // 8, second // 8 * 8.0), **{name: second // 8 * 64.0}))
    (rate,) = pace.rates("coarse_samples_total", "worker").values()
    assert rate == pytest.approx(8.0, rel=0.34)


def test_rates_begin_again_with_an_attempt_and_are_never_negative():
    name = 'coarse_pushed_shards_total{worker="0",device="md0",algorithm="direct"}'
    pace = Pace()
    pace.follow(reading(0, **{name: 500.0}))
    pace.follow(reading(1, **{name: 600.0}))
    pace.follow(reading(2, **{name: 10.0}))
    assert pace.rates("coarse_pushed_shards_total", "worker") == {("0",): 0.0}
    pace.follow(reading(3, **{name: 30.0}))
    assert pace.rates("coarse_pushed_shards_total", "worker") == {("0",): 20.0}


def values_of(rank, compute_s, blocked_s):
    return Worker(
        rank=rank,
        pid=1,
        state=TRAINS,
        doing="",
        step_s=compute_s + blocked_s,
        compute_s=compute_s,
        blocked_s=blocked_s,
        blocked_by={},
    )


def test_the_slowest_worker_is_the_one_that_waits_for_nobody():
    rank, why = slowest_of([values_of(0, 0.1, 0.2), values_of(1, 0.3, 0.0), values_of(2, 0.12, 0.18)])
    assert rank == 1
    assert why.startswith("worker 1 takes 300 ms of its own for a step, the others 110 ms (median)")


def test_nodes_without_a_worker_here_are_named():
    here = [values_of(2, 0.1, 0.0), values_of(3, 0.1, 0.0)]
    nodes = [[0], [2, 3], [4, 5, 6], [7, 9]]
    assert list(not_shown(here, nodes)) == [
        "node 0 (worker 0)",
        "node 2 (workers 4 to 6)",
        "node 3 (workers 7, 9)",
    ]
    assert list(not_shown(here, [])) == []


def test_nobody_is_slow_among_equals_or_alone():
    assert slowest_of([values_of(0, 0.10, 0.01), values_of(1, 0.105, 0.005)]) == (-1, "")
    assert slowest_of([values_of(0, 0.1, 0.2)]) == (-1, "")
    assert slowest_of([]) == (-1, "")


# ---- events ----


def test_processes_that_come_and_go_are_told_in_one_line():
    changes = Changes()
    everybody = [*(worker(rank, 7) for rank in (0, 1, 2, 5)), device(0)]
    assert texts(changes.follow(reading(0, *everybody)), JOB) == [
        "workers 0 to 2, 5 and memory device 0 have begun"
    ]
    assert changes.follow(reading(1, *everybody)) == ()
    assert texts(changes.follow(reading(2, *everybody[:3], device(0))), JOB) == [
        "worker 5 has ended after step 7"
    ]
    again = [*everybody[:3], worker(5, pid=77), device(0)]
    assert texts(changes.follow(reading(3, *again)), JOB) == ["worker 5 has begun"]


def test_a_process_that_does_not_answer_twice_is_told_once_and_when_it_answers_again():
    changes = Changes()
    silent = answer(WORKER, 1, state="it is stopped")
    changes.follow(reading(0, worker(0), worker(1)))
    assert changes.follow(reading(1, worker(0), silent)) == (), "it may be busy"
    assert changes.follow(reading(2, worker(0), worker(1))) == ()
    assert changes.follow(reading(3, worker(0), silent)) == ()
    said = changes.follow(reading(4, worker(0), silent))
    assert texts(said, FAULT) == ["worker 1 (pid 2) does not answer: it is stopped"]
    assert changes.follow(reading(5, worker(0), silent)) == ()
    assert texts(changes.follow(reading(6, worker(0), worker(1))), JOB) == ["worker 1 (pid 2) answers again"]
    assert changes.follow(reading(7, worker(0), worker(1))) == ()


def test_a_failure_is_told_once_whatever_number_of_devices_tell_it():
    changes = Changes()
    changes.follow(reading(0, device(0), device(1)))
    lost = {"lost": "worker 1 died", "lost_s": 1e9 + 0.5}
    said = changes.follow(reading(1, device(0, **lost), device(1, **lost)))
    assert texts(said, FAULT) == ["worker 1 died"]
    assert texts(changes.follow(reading(2, device(0, **lost))), FAULT) == []


def test_a_failure_of_long_ago_is_not_told():
    old = device(0, lost="worker 1 died", lost_s=1e9 - 100)
    assert texts(Changes().follow(reading(0, old)), FAULT) == []


def test_a_wait_is_told_when_it_is_long_for_the_steps():
    changes = Changes()
    for waits_s, second in ((4, 0), (8, 1)):
        slow_steps = steps(10, 30.0)
        said = changes.follow(reading(second, worker(0, waits_s=waits_s, waits_for="'a'"), **slow_steps))
        assert texts(said, FAULT) == [], "steps of 3 s"
    said = changes.follow(reading(2, worker(0, waits_s=9.0, waits_for="'a' of weights"), **slow_steps))
    assert texts(said, FAULT) == ["worker 0 has been waiting for 9 s: 'a' of weights"]
    assert changes.follow(reading(3, worker(0, waits_s=10, waits_for="'a' of weights"), **slow_steps)) == ()
    assert texts(changes.follow(reading(4, worker(0), **slow_steps)), JOB) == ["worker 0 goes on"]


def saves(count, *, outcome="saved", seconds=0.0, written=0):
    return {
        f'coarse_checkpoint_saves_total{{worker="0",outcome="{outcome}"}}': count,
        'coarse_checkpoint_written_bytes_total{worker="0"}': written,
        'coarse_checkpoint_save_seconds_sum{worker="0"}': seconds,
        'coarse_checkpoint_save_seconds_count{worker="0"}': count,
    }


def test_checkpoints_are_told_with_their_size_and_time():
    changes = Changes()
    changes.follow(reading(0, worker(0), **saves(1, seconds=1.0, written=4_000_000)))
    said = changes.follow(reading(1, worker(0), **saves(2, seconds=1.5, written=16_000_000)))
    assert texts(said, CHECKPOINT) == ["a checkpoint of 12 MB was saved in 0.5 s"]


def test_a_save_that_failed_is_a_fault():
    changes = Changes()
    changes.follow(reading(0, worker(0)))
    said = changes.follow(reading(1, worker(0), **saves(1, outcome="failed")))
    assert texts(said, FAULT) == ["a checkpoint could not be saved; the log of the worker says why"]


def test_new_decisions_and_restarts_are_told():
    changes = Changes()
    restarts = 'coarse_restarts{worker="0"}'
    changes.follow(reading(0, worker(0), plan={"decisions": ["routes: local"]}, **{restarts: 0}))
    said = changes.follow(
        reading(1, worker(0), plan={"decisions": ["routes: local", "w0: md1"]}, **{restarts: 1})
    )
    assert texts(said, ROUTE) == ["w0: md1"]
    assert texts(said, JOB) == ["the workers have been restarted: attempt 2"]


# ---- history and recordings ----


def sample(number, *events):
    return Sample(
        number=number,
        time_s=1_700_000_000.123 + number,
        phase=RUNS,
        job="0f0f0f0f",
        steps_per_s=1 / 3,
        workers=(values_of(0, 0.1, 0.2),),
        checkpoints=Checkpoints(),
        events=tuple(Event(time_s=1_700_000_000.123, kind=JOB, text=text) for text in events),
    )


def test_values_have_four_digits_except_times_of_day():
    values = as_values(sample(1, "began"))
    assert values["steps_per_s"] == 0.3333
    assert values["time_s"] == 1_700_000_001.123
    assert values["events"][0]["time_s"] == 1_700_000_000.123
    assert json.loads(json.dumps(values)) == values


def numbers(kept):
    return [each["number"] for each in kept]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 57, 200, 1000])
def test_a_long_history_covers_the_whole_job_evenly_and_keeps_all_events(count):
    history = History(most_samples=10)
    for number in range(1, count + 1):
        history.add(as_values(sample(number, f"event {number}")))
    samples, events = history.after(0)
    kept = numbers(samples)
    assert kept[-1] == history.last_number == count
    assert min(count, 5) <= len(kept) <= 10
    steps = [after - before for before, after in pairwise(kept)]
    assert kept[0] == 1
    assert len(set(steps[:-1])) <= 1, "evenly"
    assert [event["text"] for event in events] == [f"event {number}" for number in range(1, count + 1)]
    assert numbers(events) == list(range(1, count + 1))


def test_only_newer_samples_and_events_are_given():
    history = History()
    assert history.last_number == 0
    for number in (1, 2, 3):
        history.add(as_values(sample(number, "x")))
    assert [numbers(each) for each in history.after(1)] == [[2, 3], [2, 3]]
    assert history.after(3) == ([], [])


def test_a_recording_is_read_as_it_was_written_without_its_torn_last_line(tmp_path, caplog):
    recorder = Recorder(tmp_path / "job")
    written = [as_values(sample(number, "x")) for number in (1, 2)]
    for each in written:
        recorder.add(each)
    recorder.close()
    with (tmp_path / "job").open("a") as file:
        file.write('{"number":3,"time')
    samples, events = open_recording(tmp_path / "job").after(0)
    assert samples == [{**each, "events": []} for each in written]
    numbered = ({"number": number, "id": number} for number in (1, 2))
    assert events == [each["events"][0] | of for each, of in zip(written, numbered, strict=True)]
    assert caplog.messages == [f"{tmp_path / 'job'}: line 4 is cut off, and left out"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the recording has no sample"),
        ("PNG\n", "line 1 is not JSON"),
        ('{"traceEvents": []}\n', "no recording of this version of the dashboard"),
        ('{"format":"coarse-dashboard","version":1}\n', "the recording has no sample"),
        ('{"format":"coarse-dashboard","version":1}\n{"number":1}\n', "line 2 is no sample"),
        ('{"format":"coarse-dashboard","version":1}\n[1]\n', "line 2 is no sample"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_by_name(tmp_path, content, expected):
    (tmp_path / "file").write_text(content)
    with pytest.raises(RecordingError, match=expected) as refused:
        open_recording(tmp_path / "file")
    assert str(tmp_path / "file") in str(refused.value)


def test_events_keep_their_ids_when_older_ones_fall_out():
    history = History()
    for number in range(1, 1102):
        history.add(as_values(sample(number, "x")))
    _, events = history.after(0)
    assert [each["id"] for each in events] == list(range(102, 1102))


HEADER = '{"format":"coarse-dashboard","version":1}\n'


def recording(path, *lines):
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def line_with(change):
    """A sample's line after a change of its values."""
    values = as_values(sample(1, "began"))
    change(values)
    return json.dumps(values)


def of_worker(**values):
    return lambda sample: sample["workers"][0].update(values)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda sample: sample.pop("memory"), r"it lacks 'memory'"),
        (lambda sample: sample["workers"][0].pop("pid"), r"workers\[0\] lacks 'pid'"),
        (lambda sample: sample.update(number=10**400), r"number is 1000+, not a usual integer"),
        (lambda sample: sample.update(number=-1), r"it has the number -1, after 0"),
        (lambda sample: sample.update(steps_per_s="fast"), r"steps_per_s is 'fast', not a usual number"),
        (lambda sample: sample.update(restarts=True), r"restarts is True, not a usual integer"),
        (lambda sample: sample.update(restarts=0.5), r"restarts is 0.5, not a usual integer"),
        (lambda sample: sample.update(phase="<b>"), r"phase is '<b>', not awaited or runs or over"),
        (lambda sample: sample.update(workers={}), r"workers is {}, not an array"),
        (lambda sample: sample.update(checkpoints=None), r"checkpoints is None, not an object"),
        (lambda sample: sample.update(decisions=[["x"]]), r"decisions\[0\] is \['x'\], not text"),
        (lambda sample: sample.update(events=["began"]), r"events\[0\] is 'began', not an object"),
        (lambda sample: sample["events"][0].update(kind="x"), r"events\[0\].kind is 'x', not fault or"),
        (of_worker(step_s=1e300), r"workers\[0\].step_s is 1e\+300, not a usual number"),
        (of_worker(blocked_by={"a": None}), r"workers\[0\].blocked_by\['a'\] is None, not a usual number"),
        (of_worker(blocked_by=[]), r"workers\[0\].blocked_by is \[\], not an object"),
        (of_worker(state=["trains"]), r"workers\[0\].state is \['trains'\], not text"),
        (of_worker(doing="x" * 50, rank="y" * 5000), r"workers\[0\].rank is 'y{39}, not a usual integer"),
        (lambda sample: sample.update(memory=20_000 * [{}]), r"memory has 20000 items, more than 16384"),
    ],
)
def test_a_sample_that_could_break_the_page_is_refused_by_place(tmp_path, change, problem):
    file = recording(tmp_path / "job", line_with(change))
    with pytest.raises(RecordingError, match=rf"job: line 2 is no sample of the dashboard: {problem}"):
        open_recording(file)


@pytest.mark.parametrize(
    "nonsense", ["NaN", "-Infinity", "1e999", "9" * 5000, 100_000 * "[", '"\\u12"', "00"]
)
def test_numbers_that_are_none_and_endless_nesting_are_refused(tmp_path, nonsense):
    line = line_with(lambda sample: sample.update(steps_per_s="here")).replace('"here"', nonsense)
    with pytest.raises(RecordingError, match=r"job: line 2 is (not JSON|no sample)"):
        open_recording(recording(tmp_path / "job", line))


def test_samples_out_of_order_are_refused(tmp_path):
    lines = [json.dumps(as_values(sample(number))) for number in (1, 3, 3)]
    with pytest.raises(
        RecordingError, match="line 4 is no sample of the dashboard: it has the number 3, after 3"
    ):
        open_recording(recording(tmp_path / "job", *lines))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    (tmp_path / "job").write_text(HEADER + " " * (recordings._LONGEST_LINE + 1))
    with pytest.raises(
        RecordingError, match="line 2: with lines of 4194305 characters or more, it is too large"
    ):
        open_recording(tmp_path / "job")


def test_more_than_a_page_can_hold_is_refused(tmp_path, monkeypatch):
    lines = [json.dumps(as_values(sample(number))) for number in range(1, 10)]
    file = recording(tmp_path / "job", *lines)
    monkeypatch.setattr(recordings, "_MOST_CHARACTERS", 10 * len(lines[0]) + 100)
    assert open_recording(file).last_number == 9
    monkeypatch.setattr(recordings, "_MOST_CHARACTERS", 5 * len(lines[0]))
    with pytest.raises(RecordingError, match="line 5: with lines of"):
        open_recording(file)


@contextlib.contextmanager
def answering(**report):
    """A process of a job that answers so; the job's id."""
    job = secrets.token_hex(4)
    values = {"step": 1, "waits_s": 0.0, "waits_for": "", "synchronised_s": 0.0} | report
    responder = Responder(Address.of_this_process(job, WORKER, 0), lambda: values)
    try:
        yield job
    finally:
        responder.close()


def test_a_process_that_says_nonsense_gives_no_sample(caplog):
    history = History()
    with answering(waits_s=float("nan")) as job:
        Follower(Sampler(job).sample, history).close()
    assert history.last_number == 0
    assert "no sample could be taken: workers[0].waits_s is nan, not a usual number" in caplog.messages


def test_names_of_files_that_are_no_utf_8_are_readable():
    with answering(program="\udcff.py") as job:
        (said,) = ask(find_addresses(job))
    assert said.report["program"] == "?.py"
