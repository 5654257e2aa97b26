"""`coarse run --join`: lets further workers join a running job."""

from __future__ import annotations

import sys

from coarse.cli.workers.join_requests import Answer, ask_to_join
from coarse.status.address import Address, find_addresses, find_launchers


def join(job: str, num_workers: int) -> int:
    """Asks the launcher of a job to start workers, and tells how that goes.

    Args:
        job: The beginning of the job's id; "" for the only one.
        num_workers: How many workers are to join.

    Returns:
        0 if all of them take part in the training.
    """
    launchers = find_launchers(job)
    if len(launchers) != 1:
        _say(_which(job, launchers))
        return 1
    (launcher,) = launchers
    num_entered = 0
    try:
        for answer in ask_to_join(launcher, num_workers):
            _say(_describe(launcher, answer))
            num_entered += "entered" in answer
            if "refused" in answer:
                return 1
    except OSError as error:
        _say(f"{launcher.process} cannot be reached: {error}")
        return 1
    if num_entered < num_workers:
        _say(f"{num_entered} of {num_workers} worker(s) have joined job {launcher.job}; see its output")
    return int(num_entered < num_workers)


def _which(job: str, launchers: list[Address]) -> str:
    """Advice for a command that fits no job, or several."""
    if launchers:
        return f"name one of the jobs {', '.join(each.job for each in launchers)}: coarse run --join JOB"
    jobs = sorted({each.job for each in find_addresses(job)})
    if not jobs:
        return f"no {f'job {job}' if job else 'job'} of this user runs on this node"
    return (
        f"job {', '.join(jobs)} takes no workers: start it by `coarse run` with --min-workers and --max-workers, or "
        "with --on-loss replace"
    )


def _describe(launcher: Address, answer: Answer) -> str:
    if "refused" in answer:
        return f"{launcher.process} refuses: {answer['refused']}"
    if "started" in answer:
        return f"worker {answer['started']} (pid {answer['pid']}) starts"
    if "failed" in answer:
        return f"worker {answer['failed']} has not joined: {answer['how']}"
    return f"worker {answer['entered']} takes part in the training"


def _say(text: str) -> None:
    print(f"coarse run: {text}", file=sys.stderr)
