"""Two workers reduce arrays, and say on which Python and processor; the argument is the folder of their store."""

import platform
import sys

import numpy as np

from coarse.env import WorkerIdentity
from coarse.session import Session
from coarse.store import DirectoryStore

identity = WorkerIdentity.from_environment()
with Session.join(identity=identity, store=DirectoryStore(sys.argv[1])) as session:
    for dtype in (np.float32, np.float16, np.int64):
        values = (np.arange(10_000) % 100 * 2**identity.rank).astype(dtype)
        session.all_reduce(values)
        assert (values == np.arange(10_000) % 100 * 3).all()
    print(
        f"{platform.machine()} {sys.version_info.major}.{sys.version_info.minor} {identity.rank}", flush=True
    )
