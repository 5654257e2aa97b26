"""Jobs whose worker 1 is slower in each step, to be looked at from outside."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from harness import LIMIT_S
from run_harness import spawned

from coarse.status.address import find_addresses

TRAIN = """\
import os, sys, time
import numpy as np
from coarse.env import WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

store, end = sys.argv[1:]
identity = WorkerIdentity.from_environment()
session = Session.join(identity=identity, store=DirectoryStore(store))
group = session.register("weights", [TensorSpec(name="a", dtype="float32", num_elements=1 << 18, op="mean")])

def read_batch():
    time.sleep(0.03 * identity.rank)
    session.count_samples(4)

is_over = np.zeros(1, dtype=np.int32)
for step in range(100_000):
    read_batch()
    group.push(0)
    group.pull_all()
    if step == 20:
        os.write(1, f"worker {os.getpid()}\\n".encode())
    is_over[0] = os.path.exists(end)
    session.all_reduce(is_over, op="max")
    if is_over[0]:
        break
session.close()
"""


@dataclass(frozen=True)
class ObservedJob:
    """A job that runs.

    Args:
        job: The id of its part on this node, or on node 0.
        end_file: Ends it once it exists.
        metrics: HOST:PORT of the metrics of node 1; "" without that node.
    """

    job: str
    end_file: Path
    metrics: str = ""

    def end(self):
        self.end_file.touch()


@contextlib.contextmanager
def on_one_node(folder):
    """A job of two workers."""
    script, store, end = _files(folder)
    with spawned("-n", "2", "-q", script, store, end, stdout=PIPE) as launcher:
        yield ObservedJob(_job_of(launcher), end)


@contextlib.contextmanager
def on_two_nodes(folder):
    """A job of two nodes with a worker each, of which node 1 serves its metrics; ends normally."""
    script, store, end = _files(folder)
    master, metrics = _free_port(), _free_port()
    with contextlib.ExitStack() as nodes:
        launchers = [
            nodes.enter_context(
                spawned(
                    *("-n", "1", "-q", "--nnodes", "2", "--node-rank", str(rank)),
                    *("--master-addr", "127.0.0.1", "--master-port", str(master)),
                    *(script, store, end),
                    stdout=PIPE,
                    COARSE_NODE=f"node{rank}",
                    COARSE_JOB_SECRET="0123456789abcdef" * 2,
                    COARSE_METRICS_PORT=str(metrics * rank),
                )
            )
            for rank in (0, 1)
        ]
        yield ObservedJob(_job_of(launchers[0]), end, f"127.0.0.1:{metrics}")
        end.touch()
        assert [each.wait(LIMIT_S) for each in launchers] == [0, 0]


def _files(folder):
    """The script, its store and the file that ends it."""
    script, store = folder / "train.py", folder / "store"
    script.write_text(TRAIN)
    store.mkdir(mode=0o700)
    return script, store, folder / "end"


def _job_of(launcher):
    """The id of a job whose first worker trains."""
    pid = int(launcher.stdout.readline().split()[-1])
    (job,) = {each.job for each in find_addresses() if each.pid == pid}
    return job


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]
