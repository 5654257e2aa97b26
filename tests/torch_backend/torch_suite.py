"""Runs PyTorch's own tests of c10d and DDP (distributed_test.py, which ships inside torch) with the coarse backend.

    python tests/torch_backend/torch_suite.py --backend coarse --backend gloo --ranks 4 --report results.md [NAME ...]
    python tests/torch_backend/torch_suite.py --wrapper coarse --wrapper torch --ranks 2 [NAME ...]

The file selects its tests by the name of a known backend. Here the name is always gloo, so that it selects the same
tests for both, and every process group that it creates uses the tested backend.

With --wrapper, the tests that wrap models run on gloo with the CPU instead of GPUs, and wrap models in
coarse.torch.DistributedDataParallel or in torch's class.

Ranks live through many tests, each test on a process group of its own; after a test that failed or took too
long they are started anew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TEST_LIMIT_S = 150.0
GROUP_LIMIT_S = 30.0  # the time-out of a test's process groups: some wait for it to pass
START_LIMIT_S = 300.0
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_FOLDERS = ("barrier", "test_dir", "init_dir")


@dataclass(frozen=True, slots=True)
class System:
    """What is tested: a backend, coarse or gloo; or a wrapper, coarse or torch, on gloo."""

    backend: str = "gloo"
    wrapper: str = ""

    @property
    def name(self) -> str:
        return f"DDP of {self.wrapper}" if self.wrapper else self.backend

    def arguments(self) -> tuple[str, str]:
        """By which another process is told."""
        return ("--wrapper", self.wrapper) if self.wrapper else ("--backend", self.backend)

    def prepare(self) -> None:
        """Makes this process one that can run its tests."""
        if not self.wrapper:
            return
        import processor_as_gpu
        import torch

        import coarse.torch

        processor_as_gpu.take_processor_for_gpus()
        of_torch, of_coarse = (
            torch.nn.parallel.DistributedDataParallel,
            coarse.torch.DistributedDataParallel,
        )
        processor_as_gpu.wrap_with(of_coarse if self.wrapper == "coarse" else of_torch)


# ---- in the ranks ----


def serve(system: System, rank: int, num_ranks: int, pipe: int) -> None:
    """Runs tests by name, as told over the pipe, until it is told nothing more."""
    import processor_as_gpu
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import SEED, set_rng_seed

    from coarse import torch_entry

    torch_entry.register()  # where this source tree is not installed
    torch.set_num_threads(1)
    system.prepare()
    case = _make_case(rank, num_ranks)
    connection = Connection(pipe)
    connection.send([])
    while (request := connection.recv()) is not None:
        name, store = request
        outcome = [PASSED, ""]
        try:
            _pretend(system.backend)
            dist.init_process_group(
                system.backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_ranks,
                timeout=_timeout_of(name),
            )
            case._barrier()
            set_rng_seed(SEED)
            with processor_as_gpu.OnProcessor() if system.wrapper else contextlib.nullcontext():
                getattr(case, name)()
            case._barrier()
        except unittest.SkipTest as skip:
            outcome = [SKIPPED, str(skip)]
        except SystemExit as end:
            outcome = _outcome_of_exit(end)
        except BaseException:
            outcome = [FAILED, traceback.format_exc()]
        gc.collect()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        connection.send(outcome)


def list_tests(system: System) -> list[tuple[str, str]]:
    """Every test, and why it does not run under gloo on this machine ("" if it does)."""
    system.prepare()
    case = _make_case(0, int(os.environ["WORLD_SIZE"]))
    names = [name for name in dir(case) if name.startswith("test_")]
    if system.wrapper:
        names = [name for name in names if _wraps_models(case, name)]
    return [(name, getattr(getattr(case, name), "__unittest_skip_why__", "")) for name in names]


def _wraps_models(case: Any, name: str) -> bool:
    """Whether a test, or a function of the suite that it calls, wraps a model."""
    source = inspect.getsource(inspect.unwrap(getattr(type(case), name)))
    helpers = [getattr(type(case), each, None) for each in re.findall(r"self\.(_\w+)\(", source)]
    sources = [source, *(inspect.getsource(inspect.unwrap(each)) for each in helpers if each is not None)]
    return any("DistributedDataParallel(" in each for each in sources)


def _make_case(rank: int, num_ranks: int) -> Any:
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    class Suite(TestCase, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def runTest(self) -> None:  # noqa: N802
            """What unittest wants a case to have."""

    case = Suite()
    case.rank, case.world_size, case.file_name = rank, num_ranks, ""
    return case


def _pretend(backend: str) -> None:
    """Has the tests make groups of `backend` where they name gloo."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    if backend == "gloo" or hasattr(dist, "_new_group_of_torch"):
        return
    dist._new_group_of_torch = new_group = dist.new_group  # type: ignore[attr-defined]

    def new_group_of_backend(*arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            options["backend"] = backend
        return new_group(*arguments, **options)

    dist.new_group = new_group_of_backend
    for names in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append(backend)


def _timeout_of(name: str) -> Any:
    from datetime import timedelta

    from torch.testing._internal.distributed import distributed_test

    seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, GROUP_LIMIT_S)
    return timedelta(seconds=min(seconds, GROUP_LIMIT_S))


def _outcome_of_exit(end: SystemExit) -> list[str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if end.code == skip.exit_code:
            return [SKIPPED, skip.message]
    return [FAILED, f"exit code {end.code}"]


# ---- in the process that runs the suite ----


class Ranks:
    """The processes of one system.

    Args:
        system: What is tested.
        num_ranks: How many there are.
        variables: What they are started with; this process's environment without.
    """

    def __init__(self, system: System, num_ranks: int, variables: Mapping[str, str] | None = None) -> None:
        self._system = system
        self._num_ranks = num_ranks
        self._variables = dict(os.environ if variables is None else variables)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder = Path()
        self._num_runs = 0

    def run(self, name: str) -> tuple[str, str]:
        """The outcome of a test over all ranks, and why."""
        if not self._processes:
            self._start()
        self._num_runs += 1
        for folder in _FOLDERS[1:]:
            shutil.rmtree(self._folder / folder, ignore_errors=True)
            (self._folder / folder).mkdir()
        for connection in self._connections:
            connection.send((name, str(self._folder / f"store{self._num_runs}")))
        outcomes = self._receive(TEST_LIMIT_S)
        for status in (FAILED, SKIPPED):
            reasons = [reason for found, reason in outcomes if found == status]
            if status == FAILED and reasons:
                self.stop()
            if reasons and (status == FAILED or len(reasons) == self._num_ranks):
                return status, reasons[0]
        return PASSED, ""

    def stop(self) -> None:
        """Ends the ranks. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections = [], []

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="coarse-suite-"))
        for folder in _FOLDERS:
            (self._folder / folder).mkdir()
        for rank in range(self._num_ranks):
            ours, theirs = Pipe()
            self._processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, __file__, *self._system.arguments()),
                        *("--ranks", str(self._num_ranks)),
                        *("--rank", str(rank), "--pipe", str(theirs.fileno())),
                    ],
                    env={**self._variables, **_suite_variables(self._folder, rank, self._num_ranks)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._connections.append(ours)
        self._receive(START_LIMIT_S)

    def _receive(self, limit_s: float) -> list[tuple[str, str]]:
        deadline = time.monotonic() + limit_s
        outcomes = []
        for connection in self._connections:
            try:
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    outcomes.append(tuple(connection.recv()))
                else:
                    outcomes.append((FAILED, f"no end within {limit_s:.0f} s"))
            except (EOFError, OSError):
                outcomes.append((FAILED, "the process ended"))
        return outcomes


def _suite_variables(folder: Path, rank: int, num_ranks: int) -> dict[str, str]:
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
        "TEMP_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


def run_suite(system: System, num_ranks: int, names: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Runs the tests, all or those of `names`; the outcome of each and why."""
    outcomes: dict[str, tuple[str, str]] = {}
    ranks = Ranks(system, num_ranks)
    try:
        for name, skipped in _listed(system, num_ranks):
            if names and name not in names:
                continue
            outcomes[name] = (SKIPPED, skipped) if skipped else ranks.run(name)
            status, reason = outcomes[name]
            print(f"{system.name} {name}: {status} {reason.strip().splitlines()[-1:] or ''}", flush=True)
    finally:
        ranks.stop()
    return outcomes


def _listed(system: System, num_ranks: int) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--list", *system.arguments()],
            env={**os.environ, **_suite_variables(Path(folder), 0, num_ranks)},
            capture_output=True,
            text=True,
            check=True,
        )
    return [(name, reason) for name, reason in json.loads(done.stdout.splitlines()[-1])]


def report(results: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The outcomes of all systems as a Markdown page."""
    lines = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    counts = {
        system: Counter(status for status, _ in outcomes.values()) for system, outcomes in results.items()
    }
    for status in (PASSED, FAILED, SKIPPED):
        lines.append(f"| {status} | " + " | ".join(str(counts[system][status]) for system in results) + " |")
    names = sorted({name for outcomes in results.values() for name in outcomes})
    lines += ["", "| test | " + " | ".join(results) + " | why |", "|---" * (len(results) + 2) + "|"]
    for name in names:
        found = [outcomes.get(name, ("", "")) for outcomes in results.values()]
        reasons = [reason.strip().splitlines()[-1] for _, reason in found if reason.strip()]
        why = reasons[0][:160].replace("|", "/") if reasons else ""
        lines.append(f"| {name} | " + " | ".join(status for status, _ in found) + f" | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tests; all without any")
    parser.add_argument("--backend", action="append", help="coarse or gloo; may be given twice")
    parser.add_argument("--wrapper", action="append", help="coarse or torch; may be given twice")
    parser.add_argument("--ranks", type=int, default=3, help="how many")
    parser.add_argument("--report", type=Path, help="a file for the outcomes, as Markdown")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wrappers = [System(wrapper=each) for each in arguments.wrapper or []]
    systems = wrappers or [System(backend=each) for each in arguments.backend or ["coarse"]]
    if arguments.list:
        print(json.dumps(list_tests(systems[0])))
    elif arguments.rank is not None:
        serve(systems[0], arguments.rank, arguments.ranks, arguments.pipe)
    else:
        results = {each.name: run_suite(each, arguments.ranks, arguments.names) for each in systems}
        text = report(results)
        print(text.partition("\n\n")[0])
        if arguments.report:
            arguments.report.write_text(text)


if __name__ == "__main__":
    main()
