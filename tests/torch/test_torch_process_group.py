"""The rendezvous of workers: with torch's process group, without one, and the errors for missing workers.

Workers find each other through a store that the test serves on a port of the system's choice, as torchrun's
agent does.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import preloaded
import pytest
import torch.distributed as dist

from coarse.cli.workers.master_port import MasterPort
from coarse.torch.store import serve_store

TIMEOUT_S = 120
ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

TRAIN = """
import os, torch, torch.distributed as dist
from coarse.torch import DistributedDataParallel
torch.manual_seed(int(os.environ.get("RANK", 0)))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
"""


def clean_environment() -> dict[str, str]:
    """Of a process that no launcher has started."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


class Script:
    """A process of a script, with what it prints.

    Args:
        folder: An empty folder for its files.
        text: The script.
        variables: Of its environment, beside those of this process.
    """

    def __init__(self, folder: Path, text: str, variables: dict[str, str]) -> None:
        script, self._output, self._errors = (folder / name for name in ("script.py", "output", "errors"))
        script.write_text(text)
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = preloaded.start(
                script,
                (),
                {**clean_environment(), **variables},
                output=output.fileno(),
                errors=errors.fileno(),
            )

    def finish(self) -> tuple[int, str, str]:
        """Waits for its end; returns exit status, output and errors."""
        status = self.process.wait(TIMEOUT_S)
        return status, self._output.read_text(), self._errors.read_text()


@contextmanager
def started(scripts: list[tuple[str, dict[str, str]]]) -> Iterator[list[Script]]:
    """Processes of the scripts with these variables; none is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="coarse-test-") as folder:
        processes = []
        try:
            for number, (text, variables) in enumerate(scripts):
                own = Path(folder, str(number))
                own.mkdir()
                processes.append(Script(own, text, variables))
            yield processes
        finally:
            for each in processes:
                each.process.kill()
                each.process.wait()


def run(scripts: list[tuple[str, dict[str, str]]]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each script; they run side by side."""
    with started(scripts) as processes:
        return [process.finish() for process in processes]


@pytest.fixture
def job() -> Iterator[dict[str, str]]:
    """Variables of a job of two workers whose store the test serves."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "COARSE_TIMEOUT_S": "60",
    }
    del store


def test_makes_a_group_from_the_launchers_variables(job: dict[str, str]) -> None:
    script = TRAIN + "print(dist.get_backend(), dist.get_world_size(), model.module.weight.grad.tolist())"
    for status, output, errors in run([(script, {**job, "RANK": str(rank)}) for rank in range(2)]):
        assert status == 0, errors
        assert output.strip() == f"gloo 2 {[[1.5] * 4] * 2}"


def test_a_process_without_launcher_is_a_job_of_one() -> None:
    script = TRAIN + (
        "assert dist.get_world_size() == 1\n"
        "assert not model.module.weight._post_accumulate_grad_hooks\n"
        "with model.no_sync(), model.join(): model(torch.ones(1, 4))\n"
        "model.close()\n"
    )
    [(status, _, errors)] = run([(script, {})])
    assert status == 0, errors


def test_a_missing_worker_is_named(job: dict[str, str]) -> None:
    [(status, _, errors)] = run([(TRAIN, {**job, "RANK": "1", "COARSE_TIMEOUT_S": "6"})])
    assert status != 0
    assert "RendezvousError" in errors.splitlines()[-1]
    assert "[w1] 5 s: waiting for worker 0" in errors
    assert "worker 1: worker 0 did not join within 6.0 s" in errors.splitlines()[-1]
    [(status, _, errors)] = run([(TRAIN, {**job, "RANK": "0", "COARSE_TIMEOUT_S": "6"})])
    assert status != 0
    assert errors.count("workers 0 have joined, waiting for 1") == 2  # after 5 s, and in the error


def test_attempts_that_launchers_of_two_nodes_count_differently_find_each_other(job: dict[str, str]) -> None:
    """torchrun's agents by a c10d rendezvous do: that of the dead worker counts, the other starts a new one too.

    All attempts have one store. In the first worker 0 dies before worker 1 has come.
    """
    dies = (
        "import os\n"
        "from coarse.torch import process_group\n"
        "process_group.gather_workers = lambda *_, **__: os._exit(3)\n"
        "process_group.current_process_group()\n"
    )
    [(status, _, errors)] = run([(dies, {**job, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"})])
    assert status == 3, errors
    script = TRAIN + "print(model.module.weight.grad.tolist())"
    for counts in ("01", "01", "12"):
        ranks = [{"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": counts[rank]} for rank in range(2)]
        for status, output, errors in run([(script, {**job, **rank}) for rank in ranks]):
            assert status == 0, errors
            assert output.strip() == f"{[[1.5] * 4] * 2}"


def test_a_duplicate_rank_is_refused(job: dict[str, str]) -> None:
    store = dist.TCPStore("localhost", int(job["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    with started([(TRAIN, {**job, "RANK": "0"})] * 2) as processes:
        # The first of them waits for worker 1, which never comes.
        refused = _first_to_end(processes)
        status, _, errors = refused.finish()
    assert status != 0
    assert "another process has already joined as rank 0" in errors
    del store


def _first_to_end(scripts: list[Script]) -> Script:
    ended, _, _ = select.select([each.process for each in scripts], [], [], TIMEOUT_S)
    return next(each for each in scripts if each.process in ended)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR=None"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
    ],
)
def test_contradicting_variables_are_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coarse.errors import RendezvousError
    from coarse.torch.process_group import current_process_group

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=words):
        current_process_group()


def test_a_master_that_does_not_answer_is_named() -> None:
    # A store that is gone again leaves a port at which nobody listens.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    [(status, _, errors)] = run([(TRAIN, {**variables, "COARSE_TIMEOUT_S": "2"})])
    assert status != 0
    assert f"no process answered at localhost:{port}" in errors.splitlines()[-1]


def test_a_master_that_takes_connections_and_says_nothing_is_named() -> None:
    """As behind a firewall that drops what follows: torch's own client waits for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        [(status, _, errors)] = run([(TRAIN, {**variables, "COARSE_TIMEOUT_S": "2"})])
    assert status != 0
    assert f"no process answered at localhost:{port} within" in errors.splitlines()[-1]
    assert "s (it accepts the connection, but does not answer)" in errors.splitlines()[-1]


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

STOPS_THE_SERVER = """
import os, signal
from coarse.torch import process_group
connect = process_group._connect
def connect_and_stop(*arguments):
    store = connect(*arguments)
    os.kill(int(os.environ["SERVER"]), signal.SIGSTOP)
    return store
process_group._connect = connect_and_stop
process_group.init_process_group()
"""


def test_a_store_that_stops_answering_is_given_up(job: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            stopped = {"MASTER_PORT": server.stdout.readline().strip(), "SERVER": str(server.pid)}
            variables = {**job, **stopped, "RANK": "0", "COARSE_TIMEOUT_S": "2"}
            [(status, _, errors)] = run([(STOPS_THE_SERVER, variables)])
        finally:
            server.kill()
    assert status != 0
    last = errors.splitlines()[-1]
    assert "RendezvousError: the workers' store, which worker 0" in last
    assert "has not answered within 2.0 s (COARSE_TIMEOUT_S). It may be stopped" in last


@pytest.mark.parametrize("group", ["", "group = dist.group.WORLD\n"], ids=["its own", "the script's too"])
def test_a_clean_exit_waits_for_a_stopped_worker_but_a_moment(job: dict[str, str], group: str) -> None:
    """Whether the destructor of the group runs then, or was left to the interpreter."""
    script = (
        "import signal, torch, torch.distributed as dist, coarse.torch, os\n"
        f"coarse.torch.init_process_group()\n{group}"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "work = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "del work\n"
    )
    variables = {**job, "COARSE_TIMEOUT_S": "600"}
    with started([(script, {**variables, "RANK": str(rank)}) for rank in range(2)]) as (first, _):
        status, _, errors = first.finish()
    assert (status, errors) == (0, "")


def test_what_a_stranger_writes_to_the_store_is_refused(job: dict[str, str]) -> None:
    """Where the workers have been told a secret that the stranger does not know."""
    store = dist.TCPStore("localhost", int(job["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store.set("coarse/door/name/1/1", b"a part of the store that the stranger has prepared")
    [(status, _, errors)] = run([(TRAIN, {**job, "RANK": "1", "COARSE_JOB_SECRET": "s" * 32})])
    assert status != 0
    assert "RendezvousError: refused 'coarse/door/name/1/1'" in errors.splitlines()[-1]
    assert "Either a process outside the job wrote it" in errors.splitlines()[-1]
    del store


def test_the_store_of_one_node_can_be_reached_on_that_node_alone(job: dict[str, str]) -> None:
    script = TRAIN + (
        "import socket\n"
        "try: socket.create_connection(('127.0.0.2', int(os.environ['MASTER_PORT'])))\n"
        "except ConnectionRefusedError: print(model.module.weight.grad.tolist())\n"
    )
    with MasterPort(None) as port:
        variables = {**job, "MASTER_PORT": str(port.number), "COARSE_JOB_SECRET": "s" * 32}
        del variables["TORCHELASTIC_USE_AGENT_STORE"]
        scripts = [(script, {**variables, "RANK": str(rank)}) for rank in range(2)]
        for status, output, errors in run(scripts):
            assert status == 0, errors
            assert output.strip() == f"{[[1.5] * 4] * 2}"


FAILS_AT_THE_START = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else a launcher may end a worker before it has said why
culprit, place = sys.argv[1:]
if os.environ["RANK"] == culprit:
    os.environ["COARSE_TIMELINE"] = place
import torch, coarse.torch
coarse.torch.DistributedDataParallel(torch.nn.Linear(4, 1))
"""


@pytest.mark.parametrize(
    ("launcher", "num_workers", "culprit"),
    [
        ("coarse run", 3, 0),  # who serves the store
        ("coarse run", 2, 1),
        ("torch.distributed.run --standalone", 3, 1),
        pytest.param("torch.distributed.run --standalone", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_all_workers_of_a_launcher_say_who_failed_first_and_why(
    launcher: str, num_workers: int, culprit: int, tmp_path: Path
) -> None:
    """A file stands where the folder of a timeline should be."""
    script, file = tmp_path / "train.py", tmp_path / "file"
    script.write_text(FAILS_AT_THE_START)
    file.touch()
    options = ("--nproc-per-node", str(num_workers))
    command = [*launcher.split(), *options, str(script), str(culprit), f"{file}/trace"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    reason = rf"worker {culprit} failed at the start: \[Errno 20\] COARSE_TIMELINE={file}/trace: "
    for rank in set(range(num_workers)) - {culprit}:
        assert re.search(rf"RendezvousError: worker {rank}: {reason}", done.stderr), done.stderr
    assert not re.search(r"WorkerLostError|MemoryDeviceLostError|DistNetworkError", done.stderr), done.stderr
    if launcher == "coarse run":
        assert f"worker {culprit} (pid " in done.stderr
        assert "NotADirectoryError: [Errno 20] COARSE_TIMELINE" in done.stderr.splitlines()[-1]


def test_a_worker_that_dies_in_backward_ends_the_others(job: dict[str, str]) -> None:
    script = TRAIN + (
        "import signal\n"
        "if dist.get_rank() == 1: model.module.weight.register_hook(lambda g: os.kill(os.getpid(), "
        "signal.SIGKILL))\nmodel(torch.ones(3, 4)).sum().backward()\n"
    )
    survivor, killed = run([(script, {**job, "RANK": str(rank)}) for rank in range(2)])
    assert killed[0] == -9
    assert survivor[0] > 0
    last = survivor[2].strip().splitlines()[-1]
    assert "WorkerLostError" in last
    assert "worker 1" in last


def test_a_worker_that_gives_up_does_not_wait_for_one_that_hangs(job: dict[str, str]) -> None:
    """Neither for collectives, which take COARSE_TIMEOUT_S where COARSE makes the group, nor in a destructor."""
    script = (
        "import signal\n" + TRAIN + "from coarse.torch.checkpoint.agreement import SaveAgreement\n"
        "group = SaveAgreement()._group\n"
        "for each in (dist.group.WORLD, group):\n"
        "    print(each._get_backend(torch.device('cpu')).options._timeout.total_seconds())\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "works = [dist.all_reduce(torch.ones(1), group=each, async_op=True) for each in (None, group)]\n"
        "model.session.limit_waits(1.0)\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
    )
    variables = {**job, "COARSE_TIMEOUT_S": "600"}
    with started([(script, {**variables, "RANK": str(rank)}) for rank in range(2)]) as (first, _):
        _, output, errors = first.finish()
    assert output.split() == ["600.0", "600.0"], errors
    assert "SyncTimeoutError: worker 0" in errors


FORK = """
pid = os.fork()
if pid == 0:
    sys.exit(7)  # tears down what the interpreter has, which os._exit() does not
ended, _, _ = select.select([os.pidfd_open(pid)], [], [], 30)
if not ended: os.kill(pid, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
model(torch.ones(3, 4)).sum().backward()
"""


def test_a_forked_child_may_end_by_itself_while_its_parent_trains_on(job: dict[str, str]) -> None:
    """With the group that COARSE makes, and with one of a script that has another one, too."""
    group = "import select, signal, sys\n"
    own = group + (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nother = dist.new_group()\n"
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = ((group, job), (own, {**job, "MASTER_PORT": str(store.port)}))
    scripts = [(how + TRAIN + FORK, {**meet, "RANK": str(rank)}) for how, meet in groups for rank in range(2)]
    for status, output, errors in run(scripts):
        assert (status, output) == (0, "7\n"), errors
    del store


def test_a_forward_that_others_do_not_call_is_told_with_what_to_do(job: dict[str, str]) -> None:
    """As when one worker evaluates alone."""
    script = (
        "import time, torch, coarse.torch\n"
        "coarse.torch.init_process_group()\n"
        "rank = torch.distributed.get_rank()\n"
        "model = coarse.torch.DistributedDataParallel(torch.nn.BatchNorm1d(4)).eval()\n"
        "model.session.limit_waits(3.0)\n"
        "if rank == 0: model(torch.ones(2, 4))\n"
        "time.sleep(100)\n"
    )
    with started([(script, {**job, "RANK": str(rank)}) for rank in range(2)]) as (first, _):
        last = first.finish()[2].strip().splitlines()[-1]
    assert "SyncTimeoutError: worker 0: waited 3.0 s for 'buffers'" in last
    assert "To evaluate on one worker, call model.module" in last


def test_nothing_of_torch_is_imported_with_coarse() -> None:
    script = "import coarse, coarse.session, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], env=clean_environment(), check=True, timeout=TIMEOUT_S)


def test_a_pickled_model_is_read_where_there_is_a_process_group_or_one_worker():
    script = """
import os, pickle, torch, torch.distributed as dist
from coarse.torch import DistributedDataParallel
pickled = pickle.dumps(DistributedDataParallel(torch.nn.Linear(4, 2)))
dist.destroy_process_group()
print(type(pickle.loads(pickled)).__name__)
dist.destroy_process_group()
os.environ.update(RANK="1", WORLD_SIZE="2")
try:
    pickle.loads(pickled)
except RuntimeError as error:
    print(error)
"""
    [(status, output, errors)] = run([(script, {})])
    assert status == 0, errors
    first, second = output.splitlines()
    assert first == "DistributedDataParallel"
    assert "call torch.distributed.init_process_group() first" in second


def test_a_store_that_cannot_reach_itself_says_why_and_closes_nothing_twice():
    """192.0.2.1 is no machine's address, so that the store listens, and its own connection to it fails."""
    with pytest.raises((RuntimeError, OSError), match=r"192\.0\.2\.1"):
        serve_store("192.0.2.1", 0, timeout=timedelta(seconds=1))
