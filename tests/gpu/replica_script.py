"""One attempt of a worker with persistent memory devices: trains for some steps, or kills a memory device.

Arguments: a folder for the rendezvous; the attempt; the worker's GPU, or "host". To kill a memory device, in
addition: its number, the rank of the worker that kills it, and when: 1, 0, 4, "step.pull".
Prints the result, or the error that the worker receives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))

from persistent_training import train

from coarse.client.memory.tensor_bytes import gpu_uuid
from coarse.env import WorkerIdentity
from coarse.errors import CoarseError
from coarse.machine.memory_name import MemoryName
from coarse.session import Session
from coarse.store import DirectoryStore
from coarse.wire.persistent_sessions import PersistentDevices, find_session_directory


@dataclass
class Me:
    """The interface of a worker that persistent_training needs."""

    identity: WorkerIdentity
    folder: Path
    session: Session | None = None

    @property
    def rank(self) -> int:
        return self.identity.rank

    def store(self, name: str) -> DirectoryStore:
        (self.folder / name).mkdir(exist_ok=True)
        return DirectoryStore(str(self.folder / name))


def main() -> None:
    folder, attempt, place, *death = sys.argv[1:]
    me = Me(WorkerIdentity.from_environment(), Path(folder))

    def reach(group: object, step: int, at: str) -> None:
        if death and [str(me.rank), str(step), at] == death[1:]:
            os.kill(
                PersistentDevices.read(find_session_directory("test", "session")).pids[int(death[0])],
                signal.SIGKILL,
            )
            assert me.session is not None
            me.session.barrier()  # the other worker never reaches it

    memories = tuple(map(MemoryName.parse, os.environ["COARSE_MEMORY_DEVICES"].split(",")))
    gpu = "" if place == "host" else gpu_uuid(int(place))
    try:
        first, updates, digest = train(me, int(attempt), reach, gpu, memory_devices=memories, replicas=1)
        told = {"first": first, "updates": updates, "digest": digest}
    except CoarseError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
