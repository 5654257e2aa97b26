"""Runs the models of membership changes through Spin; the tests run what is short, `make model` all.

membership.pml is the whole design, newcomers.pml what is built for newcomers, nodes.pml losses on several nodes,
lost_node.pml the loss of a whole node.

Spin translates the model into a C program, which visits every state within the given bounds, or, where Bounds says
so, as many as its bit array can tell apart.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

DESIGN, BUILT, NODES, LOST_NODE = (
    Path(__file__).with_name(name)
    for name in ("membership.pml", "newcomers.pml", "nodes.pml", "lost_node.pml")
)
MISSING = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]
MEMORY_LIMIT_MIB = 6000
SEARCH_LIMIT_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may happen in a run of the model. Three ranks, two memory devices; nodes.pml: two nodes of two ranks;
    lost_node.pml: three nodes of one rank, whose deaths are those of nodes.

    Args:
        founders: Bit mask of the ranks that are taken at the start.
        is_lazy: In newcomers.pml, whether workers pull a shard only before they push it again.
        leaves: In nodes.pml, how many workers may leave between two steps.
        has_local: In nodes.pml, whether each step ends with one that nodes do not exchange.
        victims: In lost_node.pml, bit mask of the nodes that may die first; 0 for all.
        model: The model.
        bits: 0 for an exhaustive search; else log2 of the bits of an array that has two bits per state, so that
            states which fall on the same bits as others are left out.
    """

    steps: int
    shards: int = 2
    founders: int = 0b111
    deaths: int = 0
    joins: int = 0
    device_deaths: int = 0
    min_workers: int = 1
    bits: int = 0
    is_lazy: bool = False
    leaves: int = 0
    has_local: bool = False
    victims: int = 0
    model: Path = DESIGN

    def macros(self) -> list[str]:
        names = ("steps", "shards", "founders", "deaths", "joins", "device_deaths", "min_workers")
        values = [
            f"-D{name.upper()}={getattr(self, name)}"
            for name in names
            if self.model == DESIGN or name != "shards"
        ]
        flags = {
            "-DLAZY": self.is_lazy,
            "-DLOCAL": self.has_local,
            f"-DLEAVES={self.leaves}": self.leaves > 0,
            f"-DVICTIMS={self.victims}": self.victims > 0,
        }
        return [*values, *(flag for flag, is_set in flags.items() if is_set)]

    def __str__(self) -> str:
        workers = f"{self.founders.bit_count()} workers, {self.shards} shards, {self.steps} steps"
        events = [
            *(("deaths", self.deaths), ("joins", self.joins), ("device deaths", self.device_deaths)),
            ("leaves", self.leaves),
        ]
        happens = ", ".join(f"{name} {count}" for name, count in events if count)
        extra = f", at least {self.min_workers}" if self.min_workers > 1 else ""
        how = ", lazily" if self.is_lazy else ", with steps of each node" if self.has_local else ""
        model = f"{self.model.stem}{how}: " if self.model != DESIGN else ""
        return f"{model}{workers}; {happens or 'nothing happens'}{extra}{', bitstate' if self.bits else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search has found. `error` is empty if every state is in order."""

    error: str
    num_states: int
    seconds: float
    memory_mib: float


QUICK = [
    Bounds(steps=2),
    Bounds(steps=1, deaths=1),
    Bounds(steps=3, shards=1, deaths=1, joins=1),
    Bounds(steps=3, founders=0b011, joins=1),
    Bounds(steps=1, device_deaths=1),
    Bounds(steps=1, shards=1, deaths=2, min_workers=2),
    Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT),
    Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT, is_lazy=True),
    Bounds(steps=1, founders=0b1111, deaths=1, model=NODES),
    Bounds(steps=2, founders=0b1111, leaves=1, model=NODES),
    Bounds(steps=1, deaths=1, victims=0b001, model=LOST_NODE),
]
"""Bounds for every run of the tests."""

FULL = [
    Bounds(steps=2, deaths=2),
    Bounds(steps=2, deaths=2, min_workers=2),
    Bounds(steps=2, deaths=1, device_deaths=1),
    Bounds(steps=3, founders=0b011, deaths=1, joins=1),
    Bounds(steps=4, deaths=1, joins=1),
    Bounds(steps=3, shards=1, deaths=1, joins=1, model=BUILT),
    Bounds(steps=2, shards=1, founders=0b011, deaths=1, joins=1, model=BUILT),
    Bounds(steps=2, shards=1, founders=0b011, joins=1, device_deaths=1, model=BUILT),
    Bounds(steps=1, founders=0b1111, deaths=2, model=NODES),
    Bounds(steps=2, founders=0b1111, deaths=1, model=NODES, has_local=True),
    Bounds(steps=1, deaths=1, model=LOST_NODE),
    Bounds(steps=1, deaths=2, model=LOST_NODE),
    Bounds(steps=3, deaths=2, model=LOST_NODE, bits=26),
    Bounds(steps=4, deaths=2, joins=2, device_deaths=1, bits=26),
]
"""Bounds of `make model`, exhaustive but for those with bits."""

MISTAKES = {
    "PUSH_BEFORE_DATA": Bounds(steps=1),
    "NO_DRAIN": Bounds(steps=1, deaths=1),
    "NO_FENCE": Bounds(steps=1, deaths=1),
    "NO_CLAIM": Bounds(steps=1, deaths=1),
    "NO_BOUNDARY": Bounds(steps=2, deaths=1),
    "RANK_AT_ONCE": Bounds(steps=3, deaths=1, joins=1),
    "WRITE_VACANT": Bounds(steps=3, founders=0b011, deaths=1, joins=1),
    "NO_FLAGS": Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT, is_lazy=True),
    "NO_LABEL": Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT),
    "STAND_IN_BY_STATE": Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT, is_lazy=True),
    "FLAGS_GO_BACK": Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT),
    "OWN_STAND_INS": Bounds(steps=1, founders=0b1111, deaths=1, model=NODES, has_local=True),
    "ABSENT_BEHIND_PARTIAL": Bounds(steps=1, founders=0b1111, deaths=1, model=NODES),
    "ABSENT_BEHIND_RESULT": Bounds(steps=1, founders=0b1111, deaths=1, model=NODES),
    "NO_DRAIN_ON_NODE": Bounds(steps=1, founders=0b1111, deaths=1, model=NODES),
    "FIRST_SLOT": Bounds(steps=2, founders=0b1111, leaves=1, model=NODES),
    "RESULT_IN_SLOT": Bounds(steps=1, deaths=1, model=LOST_NODE),
    "NO_REPORTS": Bounds(steps=1, deaths=1, model=LOST_NODE),
    "LATE_FRAMES": Bounds(steps=1, deaths=1, model=LOST_NODE),
    "COUNT_OLD": Bounds(steps=2, deaths=1, victims=0b100, model=LOST_NODE),
    "NOT_AGAIN": Bounds(steps=1, deaths=1, model=LOST_NODE),
}
"""Planted mistakes (macros MISTAKE_...), and bounds within which each one shows."""


WITNESSES = {
    "UNLIKE_SHARDS": Bounds(steps=1, deaths=1),
    "REUSED_RANK": Bounds(steps=4, deaths=1, joins=1),
    "NEWCOMER": Bounds(steps=3, shards=1, founders=0b011, joins=1, model=BUILT),
    "UNLIKE_SHARDS_OVER_NODES": Bounds(steps=1, founders=0b1111, deaths=1, model=NODES),
    "UNLIKE_SHARDS_OF_LOST_NODE": Bounds(steps=1, deaths=1, model=LOST_NODE),
}
"""Macros (WITNESS_...) under which a search must find that something happens: the model is not empty."""


@dataclass(slots=True)
class Checker:
    """Translates and compiles the model in a folder of its own, which it removes on exit.

    Args:
        optimisation: Of the C compiler: -O0 for few states, which a compilation would outlast.
    """

    optimisation: str = "-O0"
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def check(self, bounds: Bounds, macro: str = "", *, finds_cycles: bool = False) -> Outcome:
        """Searches the states within `bounds` until one is in error.

        Args:
            macro: A planted mistake or a witness.
            finds_cycles: Whether a run that goes on for ever is an error too; takes twice the states.

        Raises:
            RuntimeError: If Spin or the compiler fail, or if the search ends early for want of memory or time.
        """
        self._run("spin", "-a", *bounds.macros(), *([f"-D{macro}"] if macro else []), str(bounds.model))
        kind = "-DNP" if finds_cycles else "-DSAFETY"
        storage = "-DBITSTATE" if bounds.bits else "-DCOLLAPSE"
        limit = f"-DMEMLIM={MEMORY_LIMIT_MIB}"
        self._run("cc", self.optimisation, kind, storage, limit, "-o", "pan", "pan.c")
        options = [
            "-m1000000",
            *(["-l"] if finds_cycles else []),
            *([f"-w{bounds.bits}"] if bounds.bits else []),
        ]
        start = time.monotonic()
        text = self._run("./pan", *options)
        return outcome_of(text, time.monotonic() - start)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._folder.name, capture_output=True, text=True, timeout=SEARCH_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(
                f"{command[0]} failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}"
            )
        return done.stdout


def outcome_of(text: str, seconds: float) -> Outcome:
    """Reads the report of a search."""
    found = re.search(r"errors: (\d+)", text)
    if found is None or (found[1] == "0" and "Search not completed" in text):
        raise RuntimeError(f"the search has not ended: {text[-2000:]}")
    error = re.search(r"pan:1: (.*)", text)
    return Outcome(
        error=error[1] if error else "",
        num_states=int(float(re.search(r"([\d.e+]+) states, stored", text)[1])),
        seconds=seconds,
        memory_mib=float(re.search(r"([\d.]+)\s+total actual memory", text)[1]),
    )


def main() -> int:
    """Prints a line for every search. @returns the exit code."""
    if MISSING:
        print(f"the model is SKIPPED: install {' and '.join(MISSING)} to check it (apt install spin gcc)")
        return 0
    failures = 0
    with Checker("-O2") as checker:
        for mistake, bounds in MISTAKES.items():
            outcome = checker.check(bounds, f"MISTAKE_{mistake}")
            failures += not outcome.error
            print(
                f"{mistake}: {outcome.error or 'NOT FOUND'}, after {outcome.num_states:,} states", flush=True
            )
        for bounds in QUICK + FULL:
            outcome = checker.check(bounds)
            failures += bool(outcome.error)
            figures = f"{outcome.num_states:,} states, {outcome.seconds:.0f} s, {outcome.memory_mib:.0f} MiB"
            print(f"{bounds}: {outcome.error or 'in order'}, {figures}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
