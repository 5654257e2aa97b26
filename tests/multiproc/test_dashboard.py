"""The dashboard of a real job, in a real browser: who trains, who is slow, who was killed; live and recorded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from subprocess import DEVNULL, PIPE

import observed_jobs
import pytest
from run_harness import LIMIT_S, environment, spawned

from coarse.dashboard.history import History, Recorder, as_values
from coarse.dashboard.samples import (
    JOB,
    RUNS,
    TRAINS,
    Checkpoints,
    Device,
    Event,
    Link,
    MemoryUse,
    Sample,
    Worker,
)

pytest.importorskip("coarse.kernels._native", reason="needs the native module")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from coarse.dashboard.server import Server

SCRIPT = Path(__file__).with_name("dashboard_script.py")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing (apt install chromium)")
URL = rb"coarse dashboard: (http://127\.0\.0\.1:\d+/\S+/)"


@contextlib.contextmanager
def training(folder, *options):
    """A job of two workers; the launcher, and the URL of its dashboard."""
    (folder / "store").mkdir(mode=0o700)
    arguments = ("-n", "2", *options, SCRIPT, folder / "store", folder / "end")
    with spawned(*arguments, stdout=DEVNULL, stderr=PIPE) as launcher:
        yield launcher, said_in(launcher.stderr, URL) if "--dashboard" in options else ""


def said_in(stream, pattern):
    """What the pattern's group finds in the first line that has it."""
    while line := stream.readline():
        if found := re.search(pattern, line):
            return found[1].decode()
    raise AssertionError(f"nobody said {pattern}")


@contextlib.contextmanager
def showing(*arguments):
    """`coarse dashboard` with arguments; its URL."""
    command = [sys.executable, "-m", "coarse", "dashboard", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment(), stdin=DEVNULL, stderr=PIPE)
    try:
        yield said_in(process.stderr, URL)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def taken(url, after=0):
    """The samples and events after a number."""
    with urllib.request.urlopen(f"{url}samples?after={after}", timeout=LIMIT_S) as answer:
        found = json.loads(answer.read())
    return found["samples"], found["events"]


def wait_for(url, condition):
    """Waits for a sample that fulfils the condition; returns it and all events up to it."""
    until = time.monotonic() + LIMIT_S
    number, told = 0, []
    while time.monotonic() < until:
        samples, events = taken(url, number)
        told += events
        for sample in samples:
            number = sample["number"]
            if condition(sample):
                return sample, told
        time.sleep(0.05)
    raise AssertionError(f"no such sample; the last one has number {number}, and events were {told}")


def trains(sample):
    return len(sample["workers"]) == 2 and all(each["step_s"] for each in sample["workers"])


def page_of(url, folder):
    """The page's elements as text, once its script has run; by their ids."""
    profile = folder / "browser"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=3000", "--window-size=1400,1000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _TextOf(HTMLParser):
    """Collects the text of the element with an id."""

    def __init__(self, element):
        super().__init__()
        self.parts, self._element, self._depth = [], element, 0

    def handle_starttag(self, tag, attributes):
        if self._depth or ("id", self._element) in attributes:
            self._depth += tag not in ("img", "input", "br")

    def handle_endtag(self, tag):
        self._depth -= self._depth > 0

    def handle_data(self, data):
        if self._depth:
            self.parts.append(data)


def text_of(page, element):
    """The text of an element of the page, by its id, in one line."""
    parser = _TextOf(element)
    parser.feed(page)
    return " ".join(" ".join(parser.parts).split())


def step_shown(page):
    return int(re.search(r"Step (\d+)", text_of(page, "figures"))[1])


@in_a_browser
def test_the_page_shows_both_workers_moving_steps_and_the_slow_one(tmp_path):
    with training(tmp_path, "--dashboard") as (_, url):
        wait_for(url, lambda sample: trains(sample) and sample["slowest"] == 1)
        page = page_of(url, tmp_path)
        steps, flow = text_of(page, "steps"), text_of(page, "flow")
        assert re.search(r"worker 0 [\d.]+ ms \d\d % blocked", steps), "the fast one waits"
        assert re.search(r"worker 1 [\d.]+ ms slowest", steps)
        assert re.search(r"Slow: worker 1 takes [\d.]+ ms of its own for a step", text_of(page, "slow"))
        for name in ("worker 0", "worker 1", "md0", "md1"):
            assert name in flow
        assert re.search(r"worker 1 to md1 [\d.]+ [kM]B/s", text_of(page, "links"))
        assert re.search(r"gradients", text_of(page, "memory-legend"))
        assert re.search(r"routes: local", text_of(page, "routes"))
        assert re.search(r"job: workers? [01].* ha(s|ve) begun", text_of(page, "events"))
        assert text_of(page, "phase") == "running"
        first = step_shown(page)
        wait_for(url, lambda sample: sample["step"] > first)
        assert step_shown(page_of(url, tmp_path)) > first


@in_a_browser
def test_a_killed_worker_and_the_restart_are_told(tmp_path):
    with training(tmp_path, "--dashboard", "--max-restarts", "1") as (launcher, url):
        sample, _ = wait_for(url, trains)
        pid = sample["workers"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        _, events = wait_for(url, lambda sample: trains(sample) and sample["restarts"] == 1)
        told = [each["text"] for each in events if each["kind"] == "fault"]
        assert f"worker 1 (pid {pid}) was killed by SIGKILL; restart 1 of 1" in told
        page = page_of(url, tmp_path)
        assert f"fault: worker 1 (pid {pid}) was killed by SIGKILL" in text_of(page, "events")
        assert re.search(r"restart 1", text_of(page, "figures"))
        (tmp_path / "end").touch()
        assert launcher.wait(LIMIT_S) == 0


def test_the_dashboard_ends_with_its_job_and_its_recording_tells_why(tmp_path):
    with training(tmp_path, "--dashboard", "--dashboard-record", tmp_path / "job.jsonl") as (launcher, url):
        sample, _ = wait_for(url, trains)
        os.kill(sample["workers"][0]["pid"], signal.SIGKILL)
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGKILL
        with pytest.raises(urllib.error.URLError):
            taken(url)
    header, *recorded = map(json.loads, (tmp_path / "job.jsonl").read_text().splitlines())
    assert header == {"format": "coarse-dashboard", "version": 1}
    assert any(map(trains, recorded))
    assert recorded[-1]["phase"] == "over"
    faults = [each["text"] for sample in recorded for each in sample["events"] if each["kind"] == "fault"]
    assert any(re.match(r"worker 0 \(pid \d+\) was killed by SIGKILL", text) for text in faults)


@in_a_browser
def test_a_recorded_job_is_shown_as_it_was(tmp_path):
    with training(tmp_path, "--dashboard", "--dashboard-record", tmp_path / "job.jsonl") as (launcher, url):
        wait_for(url, trains)
        (tmp_path / "end").touch()
        assert launcher.wait(LIMIT_S) == 0
    with showing("--open", tmp_path / "job.jsonl") as url:
        page = page_of(url, tmp_path)
        assert text_of(page, "phase") == "recorded, ended"
        assert "worker 1" in text_of(page, "steps")
        assert re.search(r"job: \d+ steps in [\d.]+ s", text_of(page, "events")), "the launcher's summary"


def test_a_job_that_runs_already_is_shown_and_a_stopped_worker_told(tmp_path):
    with training(tmp_path) as (launcher, _):
        job = said_in(launcher.stderr, rb"coarse run: job ([0-9a-f]{8}): 2 workers")
        with showing(job) as url:
            sample, _ = wait_for(url, trains)
            assert sample["devices"][0]["reserved_bytes"] > 0
            assert all(link["bytes_per_s"] > 0 for link in sample["links"]), (
                "of the first steps that are seen"
            )
            pid = sample["workers"][1]["pid"]
            os.kill(pid, signal.SIGSTOP)
            wait_until_told(url, f"worker 1 (pid {pid}) does not answer: it is stopped")
            os.kill(pid, signal.SIGCONT)
            wait_until_told(url, f"worker 1 (pid {pid}) answers again")
            (tmp_path / "end").touch()
            assert launcher.wait(LIMIT_S) == 0
            _, events = wait_for(url, lambda sample: sample["phase"] == "over")
            assert any("ended after step" in text for text in texts(events))


def of_many_workers(number, count):
    """A sample of a job with many workers, each with a memory device of its own; for the layout alone."""
    workers = [
        Worker(
            rank=rank,
            pid=1000 + rank,
            state=TRAINS,
            doing="is in forward (train.py:12)",
            step=number,
            step_s=0.4,
            compute_s=0.2 + 0.002 * rank,
            blocked_s=0.2 - 0.002 * rank,
            blocked_by={"results": 0.2 - 0.002 * rank},
        )
        for rank in range(count)
    ]
    devices = [
        Device(number=rank, pid=2000 + rank, doing="", serves=(rank,), busy=0.3) for rank in range(count)
    ]
    links = [
        Link(source=f"worker {rank}", target=f"md{rank}", bytes_per_s=1e6 * rank) for rank in range(count)
    ]
    memory = [MemoryUse(owner=f"worker {rank}", what="private", num_bytes=1 << 30) for rank in range(count)]
    return Sample(
        number=number,
        time_s=1_700_000_000 + number,
        phase=RUNS,
        job="0f0f0f0f",
        step=number,
        workers=tuple(workers),
        devices=tuple(devices),
        links=tuple(links),
        memory=tuple(memory),
        checkpoints=Checkpoints(),
    )


@in_a_browser
def test_sixty_four_workers_are_shown_with_their_devices(tmp_path):
    recorder = Recorder(tmp_path / "job.jsonl")
    for number in (1, 2, 3):
        recorder.add(as_values(of_many_workers(number, 64)))
    recorder.close()
    with showing("--open", tmp_path / "job.jsonl") as url:
        page = page_of(url, tmp_path)
    for part, names in (("flow", ("worker", "md")), ("steps", ("worker",)), ("devices", ("md",))):
        shown = text_of(page, part)
        for name in names:
            numbers = re.findall(rf"\b{name} ?(\d+)\b", shown)
            assert sorted(map(int, numbers)) == list(range(64)), (part, name)


@in_a_browser
def test_the_page_shows_other_nodes_by_their_metrics(tmp_path):
    with observed_jobs.on_two_nodes(tmp_path) as job:
        node = job.metrics
        with showing(job.job, "--metrics", node, "--metrics", "127.0.0.1:1") as url:
            wait_for(url, lambda sample: trains(sample) and sample["slowest"] == 1)
            page = page_of(url, tmp_path)
    assert re.search(r"worker 1 [\d.]+ ms slowest", text_of(page, "steps"))
    assert re.search(rf"worker 1 \S trains \d+ on {node}", text_of(page, "doing")), "nobody knows its process"
    assert re.search(rf"md0 {node}, \d+ % busy", text_of(page, "flow"))
    assert re.search(rf"md0 \d+ % 0 queued {node}, 1 sync core", text_of(page, "devices"))
    assert re.search(rf"worker 1 to {node} md0 [\d.]+ [kM]B/s", text_of(page, "links"))
    assert "fault: no metrics from 127.0.0.1:1: " in text_of(page, "events")


def wait_until_told(url, beginning):
    """Waits for an event whose text begins so."""
    wait_for(url, lambda _: any(text.startswith(beginning) for text in texts(taken(url)[1])))


def texts(events):
    return [each["text"] for each in events]


def test_without_a_job_the_command_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "coarse", "dashboard", "no-job"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "coarse dashboard: NoJobError: no job no-job of this user runs on this node\n"


WITHOUT_UVICORN = """
import sys
sys.modules["uvicorn"] = None
from coarse.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "command", [("dashboard",), ("run", "--dashboard", "-m", "this")], ids=lambda each: each[0]
)
def test_a_missing_package_is_named_with_what_brings_it(command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_UVICORN, *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode in (1, 2)
    assert "uvicorn" in done.stderr
    assert "pip install 'coarse-train[dashboard]'" in done.stderr
    assert done.stderr.count("\n") == 1


HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'
"""HTML that would run if the page took it as such."""

CHOICES = ("phase", "state", "kind")


def changed(value, of_text, of_number):
    """JSON values with other texts and numbers, except those that are one of a few words."""
    if isinstance(value, dict):
        return {
            name: each if name in CHOICES else changed(each, of_text, of_number)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [changed(each, of_text, of_number) for each in value]
    if isinstance(value, bool):
        return value
    return of_text(value) if isinstance(value, str) else of_number(value)


def hostile_recording(path):
    """Texts that are HTML; then the largest numbers; both with workers that are there twice."""
    values = as_values(of_many_workers(1, 2))
    values["events"] = [{"time_s": 0, "kind": "fault", "text": ""}]
    values["decisions"] = ["", ""]
    values["links"][0]["algorithms"] = [""]
    values["workers"][0]["blocked_by"][HOSTILE] = 1.0
    for name in ("workers", "devices", "links", "memory"):
        values[name] *= 2
    texts = changed(values, lambda _: HOSTILE, lambda number: number)
    numbers = changed(texts, str, lambda _: 2**53)
    recorder = Recorder(path)
    recorder.add(texts)
    recorder.add(numbers)
    recorder.close()
    return path


class _Tags(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@in_a_browser
def test_no_text_and_no_number_of_a_recording_breaks_the_page(tmp_path):
    with showing("--open", hostile_recording(tmp_path / "job.jsonl")) as url:
        page = page_of(url, tmp_path)
    tags = _Tags()
    tags.feed(page)
    assert [attributes["src"] for tag, attributes in tags.found if tag in ("img", "script")] == [
        "main.js",
        "icon.svg",
    ]
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on")]
    for part in ("program", "doing", "memory", "routes", "events"):
        assert HOSTILE in text_of(page, part), part
    assert f"step {2**53}</title>" in page
    assert text_of(page, "phase") == "recorded, running"
    assert text_of(page, "events").count(HOSTILE) == 2, "of both samples: the page was drawn to its end"


class GrowingHistory(History):
    """Has one more sample with one event after each question."""

    def after(self, number):
        found = super().after(number)
        self.grow()
        return found

    def grow(self):
        number = self.last_number + 1
        event = Event(time_s=number, kind=JOB, text=f"event {number}")
        self.add(as_values(replace(of_many_workers(number, 1), events=(event,))))


@contextlib.contextmanager
def serving(history):
    """The URL of a live page."""
    server = Server(history, is_live=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.close()
        thread.join(LIMIT_S)


@in_a_browser
def test_new_events_are_shown_after_old_ones_have_fallen_out(tmp_path):
    """The page begins again with what the server still has when it holds more than 1200 samples."""
    history = GrowingHistory(most_samples=4000)
    for _ in range(1300):
        history.grow()
    with serving(history) as url:
        page = page_of(url, tmp_path)
    shown = list(map(int, re.findall(r"event (\d+)", text_of(page, "events"))))
    assert shown[0] > 1300
    assert shown == list(range(shown[0], shown[0] - 500, -1))


def test_half_an_event_of_a_killed_launcher_ends_nothing(tmp_path):
    events = b'{"kind": "fault", "text\n{"kind": "fault", "text": "worker 1 was killed"}\n[]\n{"kind": "fault'
    record = tmp_path / "job.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "coarse", "dashboard", "0" * 8, "--launched", "--record", record],
        env=environment(),
        input=events,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"an event of the launcher cannot be read") == 3
    _, *samples = map(json.loads, record.read_text().splitlines())
    assert [each["text"] for sample in samples for each in sample["events"]] == ["worker 1 was killed"]
