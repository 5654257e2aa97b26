"""Whether this kernel reports the pages that a process has written; private writes need this."""

from __future__ import annotations

import functools
import os

from coarse.kernels import _native


@functools.cache
def tells_written_pages() -> bool:
    fd = _native.create_sealed_memory("coarse-test", 4096)
    try:
        _native.PrivateView(fd, 4096)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
