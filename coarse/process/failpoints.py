"""Named places at which tests have something die, such as a worker by `step.push:kill@rank=1,step=7,count=3`.

A failpoint is `PLACE:ACTION@CONDITION,...`; several are separated by semicolons. Actions are `kill` (SIGKILL to this
very process), `kill-mdN` (SIGKILL to memory device N of its node), and likewise `stop` and `stop-mdN` (SIGSTOP).
Conditions are `rank=R`, `attempt=A` and any number that the place gives.

| place | where a worker is | numbers |
|---|---|---|
| `backward.push` | in backward, before it pushes a gradient | `step`, `count` |
| `step.prepare` | in step(), before settings and state of the step are written | `step` |
| `step.push` | in step(), before it pushes an update | `step`, `count` |
| `step.pull` | in step(), when all updates are pushed | `step` |
| `step.done` | in step(), when all updates are pulled | `step` |

`step` is the number of the optimizer's step, from 1; `count` the number of tensors that were pushed before.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PLACES = ("backward.push", "step.prepare", "step.push", "step.pull", "step.done")
_FAILPOINT = re.compile(
    r"(?P<place>[a-z.]+):(?P<action>kill|stop)(?:-md(?P<device>\d+))?(?:@(?P<conditions>.+))?"
)
_CONDITION = re.compile(r"(?P<name>rank|attempt|step|count)=(?P<number>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """A place, and the numbers that must hold there for the worker, or a memory device, to be sent a signal."""

    place: str
    conditions: Mapping[str, int]
    device: int | None = None
    signal: signal.Signals = signal.SIGKILL

    def is_met(self, place: str, numbers: Mapping[str, int]) -> bool:
        """Whether to send it at `place`, given what holds there."""
        return place == self.place and all(
            numbers.get(name) == number for name, number in self.conditions.items()
        )


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """Reads the text of COARSE_FAILPOINTS; "" gives none.

    Raises:
        ValueError: If it does not follow the form, or names a place that there is not.
    """
    return tuple(_parse(part.strip()) for part in text.split(";") if part.strip())


def _parse(text: str) -> Failpoint:
    match = _FAILPOINT.fullmatch(text)
    if match is None or match["place"] not in PLACES:
        raise ValueError(
            f"COARSE_FAILPOINTS: {text!r} is not PLACE:kill@NAME=NUMBER,... (or stop, kill-mdN, stop-mdN) with "
            f"one of the places {', '.join(PLACES)}"
        )
    conditions = {}
    for part in filter(None, (match["conditions"] or "").split(",")):
        condition = _CONDITION.fullmatch(part)
        if condition is None:
            raise ValueError(f"COARSE_FAILPOINTS: {part!r} is not a condition such as rank=1 or step=7")
        conditions[condition["name"]] = int(condition["number"])
    device = match["device"]
    return Failpoint(
        place=match["place"],
        conditions=conditions,
        device=None if device is None else int(device),
        signal=signal.SIGKILL if match["action"] == "kill" else signal.SIGSTOP,
    )


class Failpoints:
    """The failpoints of one worker.

    Args:
        failpoints: All that were asked for.
        rank: This worker's.
        attempt: Number of this start of the job.
        device_pid: The process of a memory device of this worker's node, by its number.
    """

    def __init__(
        self,
        failpoints: Sequence[Failpoint],
        *,
        rank: int,
        attempt: int,
        device_pid: Callable[[int], int] | None = None,
    ) -> None:
        self._failpoints = failpoints
        self._device_pid = device_pid
        self._always = {"rank": rank, "attempt": attempt}

    def __bool__(self) -> bool:
        """Whether there are any; frequent code asks before it calls reach()."""
        return bool(self._failpoints)

    def reach(self, place: str, **numbers: int) -> None:
        """Ends or stops this process, or a memory device, at once, if that was asked for at this place."""
        holds = {**self._always, **numbers}
        for failpoint in self._failpoints:
            if not failpoint.is_met(place, holds):
                continue
            if failpoint.device is None:
                os.kill(os.getpid(), failpoint.signal)
            elif self._device_pid is not None:
                os.kill(self._device_pid(failpoint.device), failpoint.signal)
