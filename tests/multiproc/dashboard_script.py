"""Trains until a file appears, with worker 1 slower than the others. Run by `coarse run`.

dashboard_script.py STORE END
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from coarse.env import Attempt, WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

FAST_S, SLOW_S = 0.01, 0.04


def main() -> None:
    identity = WorkerIdentity.from_environment()
    store = Path(sys.argv[1], f"attempt{Attempt.from_environment().number}")
    store.mkdir(mode=0o700, exist_ok=True)
    spec = TensorSpec(name="a", dtype="float32", num_elements=1 << 16, op="mean")
    with Session.join(identity=identity, store=DirectoryStore(store)) as session:
        group = session.register("weights", [spec])
        is_over = False
        while not is_over:
            time.sleep(SLOW_S if identity.rank == 1 else FAST_S)
            group.push(0)
            group.pull_all()
            session.count_samples(8)
            is_over = all_see(session, Path(sys.argv[2]))


def all_see(session: Session, path: Path) -> bool:
    """Whether a file exists, as all workers agree."""
    import numpy as np

    seen = np.array([float(path.exists())])
    session.all_reduce(seen, op="max")
    return bool(seen[0])


if __name__ == "__main__":
    main()
