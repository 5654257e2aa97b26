"""`coarse status`: the activity of each process of a running job, from another terminal."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence

from coarse.cli.arguments import add_job
from coarse.dashboard.readings import Counters, read_counters
from coarse.status.address import WORKER, find_addresses
from coarse.status.requests import Answer, ask
from coarse.status.stacks import Stack

_DESCRIPTION = """\
Shows for each worker and memory device of a job on this node its step, why it
waits and since when, and where its Python code is. It answers for your own
jobs, even while they hang. A process that is stopped, or whose native
code holds Python's GIL, cannot answer; then the line has the kernel's view
of it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status` to the `coarse` command."""
    parser = subparsers.add_parser(
        "status",
        help="show the activity of each process of a running job, and why it waits",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser)
    parser.add_argument("--stacks", action="store_true", help="also show the Python stacks of all threads")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the status of a job, or lists the jobs if there are several; returns 1 if there is no such job."""
    jobs = by_job(ask(find_addresses(arguments.job), with_stacks=arguments.stacks))
    if len(jobs) != 1:
        return say_which("status", arguments.job, jobs)
    for line in describe_job(*jobs.popitem(), with_stacks=arguments.stacks):
        print(line)
    return 0


def by_job(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of each job, by its id."""
    return {job: list(each) for job, each in itertools.groupby(answers, lambda answer: answer.address.job)}


def say_which(command: str, named: str, jobs: Mapping[str, Sequence[Answer]]) -> int:
    """Lists the jobs from which the user must choose, or reports that there are none.

    Args:
        command: The sub-command that shows one job.
        named: The beginning of a job's id that the user has given.
        jobs: The answers of the jobs that begin so.

    Returns:
        The exit code.
    """
    if not jobs:
        what = f"job {named}" if named else "job"
        print(f"coarse {command}: no {what} of this user runs on this node", file=sys.stderr)
        return 1
    for job, answers in jobs.items():
        print(_summary(job, answers))
    print(f"\nName one of them: coarse {command} JOB")
    return 0


def describe_job(job: str, answers: Sequence[Answer], *, with_stacks: bool) -> Iterator[str]:
    """The lines about one job."""
    yield _summary(job, answers)
    counters = read_counters(answers) if any(map(_lacks_steps, answers)) else Counters({})
    for answer in answers:
        yield f"{answer.address.process:<9} pid {answer.address.pid:<8} {_describe(answer, counters)}"
        for stack in answer.stacks if with_stacks else ():
            yield from _describe_stack(stack)


def _summary(job: str, answers: Sequence[Answer]) -> str:
    is_worker = [answer.address.role == WORKER for answer in answers]
    reports = [answer.report for answer, is_one in zip(answers, is_worker, strict=True) if is_one]
    programs = sorted({report["program"] for report in reports if report is not None})
    counts = f"{is_worker.count(True)} workers, {is_worker.count(False)} memory devices"
    return f"job {job}: {', '.join([*programs, counts])}"


def _lacks_steps(answer: Answer) -> bool:
    return answer.report is not None and answer.report.get("step") == 0


def _describe(answer: Answer, counters: Counters) -> str:
    report = answer.report
    if report is None:
        return answer.describe_place()
    if "serves" in report:
        return f"serves workers {', '.join(map(str, report['serves']))}"
    if "step" not in report:
        return f"{'starts; ' if report.get('is_starting') else ''}{answer.describe_place()}"
    wait = _describe_wait(answer, report["waits_s"], report["waits_for"])
    return f"{_describe_progress(answer, counters):<11} {wait}"


def _describe_progress(answer: Answer, counters: Counters) -> str:
    """Finished steps. A loop of all_reduce() alone has none: the pushed shards show its progress."""
    assert answer.report is not None
    steps = answer.report["step"]
    shards = counters.total("coarse_pushed_shards_total", worker=str(answer.address.number))
    return f"step {steps}" if steps or not shards else f"step 0, {shards:.0f} shards pushed"


def _describe_wait(answer: Answer, waits_s: float, waits_for: str) -> str:
    if waits_for:
        return f"waits {waits_s:.0f} s for {waits_for}"
    assert answer.report is not None
    return f"{answer.describe_place()}; synchronised {answer.report['synchronised_s']:.0f} s ago"


def _describe_stack(stack: Stack) -> Iterator[str]:
    yield f"    {stack.thread}"
    for frame in stack.frames:
        yield f"        {frame.function} ({frame.file}:{frame.line})"
