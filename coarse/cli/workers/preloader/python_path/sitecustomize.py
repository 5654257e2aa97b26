"""Python imports this when it starts with this folder in PYTHONPATH, before it runs the script."""

import os
import sys
import traceback
from pathlib import Path

_PACKAGES = str(Path(__file__).parents[5])

sys.path.append(_PACKAGES)  # needed if `coarse run` found COARSE in the current folder
try:
    from coarse.cli.workers.preloader.process import fork_workers
except BaseException:  # after an error here Python would run the script
    traceback.print_exc()
    os._exit(1)
finally:
    del sys.path[len(sys.path) - 1 - sys.path[::-1].index(_PACKAGES)]

fork_workers()
