"""A worker that trains with memory devices on a GPU, loses another process, and prints the error that it receives.

Arguments: a folder for the rendezvous; the process that dies: "device", "worker", "gpu" (for another reason), or
"nobody" (instead a group is too large).
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np

from coarse.env import WorkerIdentity
from coarse.errors import CoarseError
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.settings import Settings
from coarse.store import DirectoryStore

LENGTH = 100_000


def lose(session: Session, who: str) -> None:
    spec = TensorSpec(
        name="a", dtype="float32", num_elements=LENGTH if who != "nobody" else 1 << 40, op="mean"
    )
    group = session.register("tensors", [spec])
    values = np.frombuffer(group.buffer(0), np.float32)
    for step in range(1000):
        values[:] = session.identity.rank
        if step == 3 and session.identity.rank == 1 and who == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        group.push(0)
        if step == 3 and session.identity.rank == 0 and who == "device":
            os.kill(session.device_pids[1], signal.SIGKILL)
        group.pull(0)
        assert (values == 0.5).all()


def main() -> None:
    folder, who = sys.argv[1:]
    identity = WorkerIdentity.from_environment()
    settings = Settings.from_environment()
    with Session.join(identity=identity, store=DirectoryStore(folder), settings=settings) as session:
        try:
            lose(session, who)
        except CoarseError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)


if __name__ == "__main__":
    main()
