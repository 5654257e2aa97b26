"""A real Slurm, of two nodes on this machine, trains the digits over both, also after a preemption."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_node_addresses import hosts_of
from test_nodes import namespaces

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGES = "slurmctld slurmd slurm-client munge"
LIMIT_S = 200.0
NODES = ("node1", "node2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in ("slurmctld", "slurmd", "sbatch", "munged")),
        reason=f"Slurm is missing (apt install {PACKAGES})",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd and network namespaces need root"),
]

CONFIGURATION = """
ClusterName=coarse
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeAddr=10.77.0.1 CPUs=2
NodeName=node2 NodeAddr=10.77.0.2 CPUs=2
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-2] PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Slurm's daemons: a controller on node1, and a slurmd on each of two machines, which are network namespaces.

    Args:
        folder: For all of its files.
        names: The namespaces.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self._names = names
        self._daemons: list[subprocess.Popen[bytes]] = []
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        # Its default looks for mounted control groups, and these machines have none. Nothing here uses them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"seed-file": "munged.seed", "log-file": "munged.log"}
        options = [f"--{option}={self.folder / file}" for option, file in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self.await_true(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start(*self._on(0), "slurmctld", "-D", "-f", self.folder / "slurm.conf")
        for node, name in enumerate(NODES):
            self._start(*self._on(node), "slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", name)
        self.await_true(
            lambda: self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() == "2", "sinfo"
        )

    def submit(self, *arguments: object) -> str:
        """Submits a job to node1; returns its number."""
        return self.ask("sbatch", "--parsable", *arguments).strip()

    def ask(self, *command: object) -> str:
        """What a command says on node1."""
        done = subprocess.run(
            [*map(str, self._on(0)), *map(str, command)],
            cwd=self.folder,
            env={
                **os.environ,
                "SLURM_CONF": str(self.folder / "slurm.conf"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return done.stdout + done.stderr

    def await_line(self, output: Path, pattern: str) -> re.Match[str]:
        """Waits until a job has written a line that matches."""

        def find() -> re.Match[str] | None:
            return re.search(pattern, output.read_text()) if output.exists() else None

        self.await_true(lambda: find() is not None, pattern, output)
        found = find()
        assert found is not None
        return found

    def await_state(self, job: str, state: str, output: Path | None = None) -> None:
        """Waits until a job is in a state."""
        self.await_true(
            lambda: f"JobState={state}" in self.ask("scontrol", "show", "job", job), state, output
        )

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for name in self._names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _on(self, node: int) -> tuple[str, ...]:
        """A command's beginning that runs it on a node, which has a network, a name and an /etc/hosts of its own."""
        named = f'hostname {NODES[node]} && exec "$@"'
        return ("ip", "netns", "exec", self._names[node], "unshare", "--uts", "sh", "-c", named, "sh")

    def _start(self, *command: object) -> None:
        log = (self.folder / "daemons.log").open("ab")
        with log:
            self._daemons.append(subprocess.Popen([*map(str, command)], stdout=log, stderr=log))

    def await_true(self, holds: Callable[[], bool], what: str, output: Path | None = None) -> None:
        """Waits until something holds; a failure shows the daemons' logs and a job's output."""
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{what}: not within {LIMIT_S} s\n{self._logs(output)}")
            time.sleep(0.1)

    def _logs(self, output: Path | None) -> str:
        files = [*self.folder.glob("*.log"), *filter(None, [output])]
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in files if file.exists())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # As Debian's installer writes it: each machine's own name is 127.0.1.1, that of the other its address.
    with (
        namespaces() as names,
        hosts_of(names[0], "127.0.1.1 node1\n10.77.0.2 node2"),
        hosts_of(names[1], "127.0.1.1 node2\n10.77.0.1 node1"),
    ):
        started = Cluster(tmp_path, names)
        try:
            started.start()
            yield started
        finally:
            started.stop()


def newest_step(cluster: Cluster) -> int:
    """Step of the newest whole checkpoint; 0 without one."""
    names = (path.name for path in (cluster.folder / "checkpoints").glob("step-*"))
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name))), default=0)


def submit_digits(cluster: Cluster, output: Path, *arguments: object) -> str:
    return cluster.submit(
        f"--output={output}",
        EXAMPLES / "clusters" / "slurm.sh",
        EXAMPLES / "preemptible_digits.py",
        *("--checkpoints", cluster.folder / "checkpoints"),
        *arguments,
    )


def test_the_digits_train_over_two_nodes_to_the_end(cluster: Cluster) -> None:
    output = cluster.folder / "job.out"
    job = submit_digits(cluster, output, "--epochs", 3)
    cluster.await_state(job, "COMPLETED", output)
    assert "NodeList=node[1-2]" in cluster.ask("scontrol", "show", "job", job)
    text = output.read_text()
    assert re.search(r"begins at step 0 of \d+, with 4 workers", text), text
    assert re.search(r"^test accuracy \d+\.\d+%$", text, re.MULTILINE), text


def test_a_job_that_is_preempted_saves_and_goes_on_when_it_runs_again(cluster: Cluster) -> None:
    """`--every 0` saves only when a signal asks for it: Slurm's SIGTERM at the beginning of the grace time."""
    output = cluster.folder / "job.out"
    job = submit_digits(cluster, output, "--epochs", 100_000, "--every", 0)
    cluster.await_line(output, r"begins at step 0 ")
    cluster.ask("scancel", "--signal=USR1", job)
    cluster.await_true(lambda: newest_step(cluster) > 0, "a checkpoint", output)
    asked = newest_step(cluster)
    urgent = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=srun true")
    cluster.await_state(urgent, "COMPLETED", output)
    assert "Restarts=1" in cluster.ask("scontrol", "show", "job", job)
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    again = cluster.await_line(output, r"begins at step ([1-9]\d*) of \d+, with 4 workers")
    assert int(again[1]) > asked
    cluster.ask("scancel", job)
