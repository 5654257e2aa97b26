"""What a training step costs more when the job is watched: jobs with and without, in turns, on this machine.

    python benchmarks/timeline_overhead.py [--with timeline] [--with metrics,dashboard] [--rounds 5] [--steps 20]

Each `--with` adds a job to a round, which is compared with the round's job without. The job has what the flag names:

    timeline     --timeline
    metrics      --metrics-port; the endpoint is scraped once a second, as by Prometheus
    dashboard    --dashboard; its samples are fetched once a second, as by the page. A browser's own work is not in it

Each job trains the model on two workers, and reports the time of each step of worker 0, warmed up. Jobs alternate, so
that a change of the machine's speed meets all of them. Steps are averaged, because work that is done once a second
does not meet each one. The figures are the differences of each round, and their median; for the time, and for the CPU
time of worker 0, which a busy machine changes less. All figures are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeAlias

WARM_UP = 5
FEATURES = ("timeline", "metrics", "dashboard")
FIGURES = ("time", "CPU time of worker 0")
POLL_S = 1.0
PAGE = re.compile(r"coarse dashboard: (http://\S+/)")
WITHOUT: tuple[str, ...] = ()

Ask: TypeAlias = Callable[[str, int], int]
"""Takes a URL and what it has returned before, 0 at first; raises OSError while nobody answers."""


class NobodyAnsweredError(Exception):
    """A job was not watched while it trained, so that its figures say nothing."""


def train(model_name: str, batch: int, sequence: int, steps: int) -> None:
    """A worker: trains, and prints the seconds of its steps, and its CPU time."""
    import torch

    import coarse.torch
    from coarse.bench.models import build_workload

    coarse.torch.init_process_group()
    rank = torch.distributed.get_rank()
    workload = build_workload(model_name, batch=batch, sequence=sequence, rank=rank)
    model = coarse.torch.DistributedDataParallel(workload.module)
    optimizer = coarse.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    seconds, cpu_seconds = [], []
    for step in range(WARM_UP + steps):
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        optimizer.zero_grad()
        workload.loss(model, workload.batches[step % len(workload.batches)]).backward()
        optimizer.step()
        seconds.append(time.monotonic() - began_s)
        cpu_seconds.append(time.process_time() - began_cpu_s)
    if rank == 0:
        print(json.dumps([seconds[WARM_UP:], cpu_seconds[WARM_UP:]]))


class Watcher:
    """Asks a server once a second, in a thread, until close(); it may begin to answer later.

    Args:
        ask: Asks once.
        url: Of the server.
    """

    def __init__(self, ask: Ask, url: str) -> None:
        self.num_answers = 0
        self._ask = ask
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Asks no more. Idempotent."""
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        found = 0
        while not self._is_over.wait(POLL_S):
            with contextlib.suppress(OSError, http.client.HTTPException):  # it starts, or ends
                found = self._ask(self._url, found)
                self.num_answers += 1


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=POLL_S) as answer:
        data: bytes = answer.read()
    return data


def scrape(url: str, _: int) -> int:
    """Asks for the metrics."""
    return len(read(url))


def fetch_samples(url: str, last: int) -> int:
    """Asks for the samples after the last one, as the page does; returns the number of the newest."""
    samples = json.loads(read(f"{url}samples?after={last}"))["samples"]
    return int(samples[-1]["number"]) if samples else last


def run_job(arguments: argparse.Namespace, features: Sequence[str]) -> list[float]:
    """Runs a job and watches it; returns worker 0's mean seconds for a step, and its CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        given = {
            "timeline": ["--timeline", str(Path(folder) / "trace.json.gz")],
            "metrics": ["--metrics-port", str(port)],
            "dashboard": ["--dashboard"],
        }
        own = [f"--{name}={getattr(arguments, name)}" for name in ("model", "batch", "sequence", "steps")]
        flags = [flag for feature in features for flag in given[feature]]
        command = [sys.executable, "-m", "coarse", "run", "-n", "2", *flags, __file__, "--worker", *own]
        watchers = [Watcher(scrape, f"http://127.0.0.1:{port}/metrics")] if "metrics" in features else []
        try:
            output = output_of(command, lambda url: watchers.append(Watcher(fetch_samples, url)))
        finally:
            for watcher in watchers:
                watcher.close()
    (line,) = [line for line in output.splitlines() if line.startswith("[w0] [[")]
    figures = json.loads(line.removeprefix("[w0] "))
    require_answers(features, watchers, sum(figures[0]))
    return [statistics.fmean(each) for each in figures]


def output_of(command: Sequence[str], page_found: Callable[[str], None]) -> str:
    """Runs a job, passes on what it says, and tells the URL of its dashboard's page; returns its standard output.

    Raises:
        subprocess.CalledProcessError: If the job fails.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        listener = threading.Thread(target=pass_on, args=(job.stderr, page_found), daemon=True)
        listener.start()
        output = job.stdout.read()
        listener.join()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, command)
    return output


def pass_on(stream: IO[str], page_found: Callable[[str], None]) -> None:
    for line in stream:
        sys.stderr.write(line)
        if page := PAGE.search(line):
            page_found(page[1])


def require_answers(features: Sequence[str], watchers: Sequence[Watcher], trained_s: float) -> None:
    """Checks that each watcher was answered at least every other second of the steps that count.

    Raises:
        NobodyAnsweredError: If one was not.
    """
    answers = [watcher.num_answers for watcher in watchers]
    if len(answers) < len(set(features) - {"timeline"}) or any(each < trained_s / 2 for each in answers):
        raise NobodyAnsweredError(
            f"with {','.join(features)}: answers per watcher were {answers} in {trained_s:.1f} s of training"
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def compare(arguments: argparse.Namespace) -> None:
    """Runs the jobs, and prints the differences of each round and over all rounds."""
    kinds = [WITHOUT, *arguments.features]
    rounds = []
    for number in range(arguments.rounds):
        order = kinds if number % 2 == 0 else kinds[::-1]
        jobs = {features: run_job(arguments, features) for features in order}
        rounds.append(jobs)
        for line in lines_of_round(jobs, kinds[1:]):
            print(f"round {number + 1} of {arguments.rounds}: {line}", flush=True)
    print(
        f"measured, {arguments.model}, batch {arguments.batch}, 2 workers, {arguments.rounds} rounds of "
        f"{arguments.steps} steps:"
    )
    for features in kinds[1:]:
        print("\n".join(summary(features, rounds)))


def lines_of_round(
    jobs: dict[tuple[str, ...], list[float]], kinds: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    plain = jobs[WITHOUT]
    for features in kinds:
        parts = (
            f"{what} {before * 1e3:.1f} ms without, {after * 1e3:.1f} ms with ({after / before - 1:+.2%})"
            for what, before, after in zip(FIGURES, plain, jobs[features], strict=True)
        )
        yield f"{','.join(features)}: {'; '.join(parts)}"


def summary(features: tuple[str, ...], rounds: Sequence[dict[tuple[str, ...], list[float]]]) -> Iterator[str]:
    for number, what in enumerate(FIGURES):
        plain, watched = ([jobs[kind][number] for jobs in rounds] for kind in (WITHOUT, features))
        differences = [after / before - 1 for before, after in zip(plain, watched, strict=True)]
        yield (
            f"  {','.join(features)}, {what}: {statistics.median(plain) * 1e3:.1f} ms without, "
            f"{statistics.median(watched) * 1e3:.1f} ms with; rounds differ by "
            f"{statistics.median(differences):+.2%} (median; {min(differences):+.2%} to {max(differences):+.2%})"
        )


def features_of(text: str) -> tuple[str, ...]:
    """Reads what a job has.

    Raises:
        argparse.ArgumentTypeError: If a name is unknown.
    """
    features = tuple(text.split(","))
    if unknown := set(features) - set(FEATURES):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {', '.join(FEATURES)}")
    return features


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--with",
        dest="features",
        action="append",
        type=features_of,
        metavar="FEATURES",
        help=f"what a job of each round has: {', '.join(FEATURES)}, by commas; may be repeated (default: timeline)",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.features = list(dict.fromkeys(arguments.features or [("timeline",)]))
    if arguments.worker:
        train(arguments.model, arguments.batch, arguments.sequence, arguments.steps)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
