"""`coarse status`: what each process of a job does, asked of it from another terminal."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence

from coarse.status.address import WORKER, find_addresses
from coarse.status.questions import Answer, ask
from coarse.status.stacks import Stack

_DESCRIPTION = """\
Shows for each worker and memory device of a job on this node its step, what it
waits for and since when, and where its Python code is. It answers for your own
jobs, also while they stand still. A process that is stopped, or whose native
code holds Python's GIL, cannot answer; then the line says what the kernel says
about it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status` to the `coarse` command."""
    parser = subparsers.add_parser(
        "status",
        help="show what each process of a running job does and waits for",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        default="",
        help="id of the job, or its beginning (default: the only one)",
    )
    parser.add_argument("--stacks", action="store_true", help="also show the Python stacks of all threads")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the status of a job, or lists the jobs if there are several; returns 1 if there is no such job."""
    answers = ask(find_addresses(arguments.job), with_stacks=arguments.stacks)
    jobs = {job: list(each) for job, each in itertools.groupby(answers, lambda answer: answer.address.job)}
    if not jobs:
        named = f"job {arguments.job}" if arguments.job else "job"
        print(f"coarse status: no {named} of this user runs on this node", file=sys.stderr)
        return 1
    if len(jobs) > 1:
        for job, of_job in jobs.items():
            print(_summary(job, of_job))
        print("\nName one of them: coarse status JOB")
        return 0
    for line in describe_job(*jobs.popitem(), with_stacks=arguments.stacks):
        print(line)
    return 0


def describe_job(job: str, answers: Sequence[Answer], *, with_stacks: bool) -> Iterator[str]:
    """The lines about one job."""
    yield _summary(job, answers)
    for answer in answers:
        yield f"{answer.address.process:<9} pid {answer.address.pid:<8} {_describe(answer)}"
        for stack in answer.stacks if with_stacks else ():
            yield from _describe_stack(stack)


def _summary(job: str, answers: Sequence[Answer]) -> str:
    is_worker = [answer.address.role == WORKER for answer in answers]
    reports = [answer.report for answer, is_one in zip(answers, is_worker, strict=True) if is_one]
    programs = sorted({report["program"] for report in reports if report is not None})
    counts = f"{is_worker.count(True)} workers, {is_worker.count(False)} memory devices"
    return f"job {job}: {', '.join([*programs, counts])}"


def _describe(answer: Answer) -> str:
    report = answer.report
    if report is None:
        return answer.describe_place()
    if "serves" in report:
        return f"serves workers {', '.join(map(str, report['serves']))}"
    if "step" not in report:
        return f"{'starts; ' if report.get('is_starting') else ''}{answer.describe_place()}"
    return f"step {report['step']:<6} {_describe_wait(answer, report['waits_s'], report['waits_for'])}"


def _describe_wait(answer: Answer, waits_s: float, waits_for: str) -> str:
    if waits_for:
        return f"waits {waits_s:.0f} s for {waits_for}"
    assert answer.report is not None
    return f"{answer.describe_place()}; synchronised {answer.report['synchronised_s']:.0f} s ago"


def _describe_stack(stack: Stack) -> Iterator[str]:
    yield f"    {stack.thread}"
    for frame in stack.frames:
        yield f"        {frame.function} ({frame.file}:{frame.line})"
