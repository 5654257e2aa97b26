"""The commands in the files for clusters train over two machines, with the variables that each cluster sets."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml
from test_node_addresses import hosts_of
from test_nodes import namespaces

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
WORKERS = ("train-0", "train-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LIMIT_S = 200.0

Kind: TypeAlias = Callable[[Path, str], tuple[list[str], list[dict[str, str]]]]

pytestmark = pytest.mark.slow


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces that know each other by the names of pods."""
    names = [
        f"coarse-train-{node}.coarse-train coarse-train-master-{node} {WORKERS[node]}" for node in range(2)
    ]
    known = "\n".join(f"{address} {name}" for address, name in zip(ADDRESSES, names, strict=True))
    with namespaces() as made, hosts_of(made[0], known), hosts_of(made[1], known):
        yield made


def pod_of(name: str, *path: str) -> dict[str, Any]:
    """The container of the last document's pod."""
    *_, found = yaml.safe_load_all((CLUSTERS / name).read_text())
    for key in (*path, "template", "spec"):
        found = found[key]
    (container,) = found["containers"]
    return dict(container)


def command_of(container: dict[str, Any], folder: Path, options: str = "--epochs 2") -> list[str]:
    """What a container starts, with a folder of this machine for checkpoints, and with more options."""
    words = [*container["command"], *container.get("args", ())]
    return [word.replace("/checkpoints", f"{folder}/checkpoints {options}") for word in words]


@dataclass
class Running:
    """A command on each machine, with a file for what it prints."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]

    def printed(self) -> str:
        return "\n".join(path.read_text() for path in self.outputs)

    def await_line(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.printed())) is None:
            assert time.monotonic() < deadline_s, self.printed()
            assert any(process.poll() is None for process in self.processes), self.printed()
            time.sleep(0.1)
        return found

    def await_ends(self) -> list[int]:
        return [process.wait(timeout=LIMIT_S) for process in self.processes]


@contextlib.contextmanager
def running_on(
    machines: list[str], commands: list[list[str]], variables: list[dict[str, str]], folder: Path
) -> Iterator[Running]:
    """Runs a command on each machine; ends all that is left of them."""
    path = f"{folder / 'programs'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"OMP_NUM_THREADS": "1"}
    outputs = [folder / f"{machine}.{len(list(folder.iterdir()))}.out" for machine in machines]
    processes = []
    for machine, command, own, output in zip(machines, commands, variables, outputs, strict=True):
        with output.open("wb") as file:
            started = ["ip", "netns", "exec", machine, *command]
            processes.append(
                subprocess.Popen(
                    started, cwd=ROOT, env=environment | own, stdout=file, stderr=subprocess.STDOUT
                )
            )
    try:
        yield Running(processes, outputs)
    finally:
        for machine in machines:
            listed = subprocess.run(
                ["ip", "netns", "pids", machine], capture_output=True, text=True, check=True
            )
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in processes:
            process.wait()


def check_trains(
    machines: list[str], commands: list[list[str]], variables: list[dict[str, str]], folder: Path
) -> None:
    with running_on(machines, commands, variables, folder) as running:
        codes = running.await_ends()
        text = running.printed()
    assert codes == [0] * len(codes), text
    assert len(re.findall(r"begins at step 0 of \d+, with 4 workers", text)) == 1, text
    assert len(re.findall(r"test accuracy \d+\.\d+%", text)) == 1, text


def of_kubernetes(folder: Path, options: str) -> tuple[list[str], list[dict[str, str]]]:
    """The command of the Indexed Job's pods, and their variables."""
    container = pod_of("kubernetes-job.yaml", "spec")
    secret = {"COARSE_JOB_SECRET": "0123456789abcdef"}
    return command_of(container, folder, options), [
        {"JOB_COMPLETION_INDEX": str(node), **secret} for node in range(2)
    ]


def of_pytorchjob(folder: Path, options: str) -> tuple[list[str], list[dict[str, str]]]:
    """The same of the PyTorchJob's; the training operator sets these variables."""
    container = pod_of("kubeflow-pytorchjob.yaml", "spec", "pytorchReplicaSpecs", "Master")
    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "coarse-train-master-0"}
    common |= {"PET_MASTER_PORT": "23456"}
    command = [word for text in command_of(container, folder, options) for word in text.split()]
    return command, [{**common, "PET_NODE_RANK": str(node)} for node in range(2)]


each_kind = pytest.mark.parametrize("kind", [of_kubernetes, of_pytorchjob])


@each_kind
def test_pods_train_to_the_end(machines: list[str], tmp_path: Path, kind: Kind) -> None:
    command, variables = kind(tmp_path, "--epochs 2")
    check_trains(machines, [command] * 2, variables, tmp_path)


@each_kind
def test_a_pod_that_is_taken_away_has_saved_and_new_ones_go_on(
    machines: list[str], tmp_path: Path, kind: Kind
) -> None:
    """`--every 0` saves only when a signal asks for it: SIGTERM, which the pod's first process gets."""
    command, variables = kind(tmp_path, "--epochs 100000 --every 0")
    with running_on(machines, [command] * 2, variables, tmp_path) as running:
        running.await_line(r"begins at step 0 ")
        running.processes[1].terminate()
        assert all(running.await_ends()), running.printed()
    with running_on(machines, [command] * 2, variables, tmp_path) as running:
        found = running.await_line(r"begins at step (\d+) of \d+, with 4 workers")
        assert int(found[1]) > 0, running.printed()


def test_the_job_of_skypilot(machines: list[str], tmp_path: Path) -> None:
    """Without the mount, which needs a server."""
    run = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())["run"]
    container = {"command": ["bash", "-c", run[run.index("exec ") :]]}
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES)}
    variables = [{**common, "SKYPILOT_NODE_RANK": str(node)} for node in range(2)]
    check_trains(machines, [command_of(container, tmp_path)] * 2, variables, tmp_path)


def test_the_mpijob_under_open_mpi(machines: list[str], tmp_path: Path) -> None:
    """The launcher starts workers as by SSH: a program in its place enters the other machine."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("Open MPI is missing (apt install openmpi-bin)")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))
    hosts = tmp_path / "hostfile"
    hosts.write_text("".join(f"{name} slots=2\n" for name in WORKERS))
    enter = tmp_path / "enter"
    cases = " ".join(f"{name}) machine={machine};;" for name, machine in zip(WORKERS, machines, strict=True))
    enter.write_text(
        f'#!/bin/sh\ncase "$1" in {cases} esac\nshift\nexec ip netns exec "$machine" sh -c "$*"\n'
    )
    enter.chmod(0o700)
    container = pod_of("kubeflow-mpijob.yaml", "spec", "mpiReplicaSpecs", "Launcher")
    command = [word.replace("/etc/mpi/hostfile", str(hosts)) for word in command_of(container, tmp_path)]
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(hosts),
        "OMPI_MCA_plm_rsh_agent": str(enter),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    check_trains(machines[:1], [command], [variables], tmp_path)
