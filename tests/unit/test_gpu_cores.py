"""Memory devices on GPUs run on the CPU cores nearest to their GPU."""

from __future__ import annotations

import os
import subprocess
import sys

ASKS_FOR_CORES = """
from coarse.machine.host import NumaNode
from coarse.proxy.memory import cuda

cuda.read_pci_node = {"0000:17:00.0": 1, "0000:18:00.0": 0}.get
cuda.read_numa_nodes = lambda: [NumaNode(node=node, cores=(node, node + 2), memory_bytes=1) for node in (0, 1)]
print([cuda.CudaMemory(gpu).cores() for gpu in (0, 1, 2)])
"""


def test_cores_are_those_of_the_node_that_sysfs_names(cuda_stand_ins):
    variables = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "STAND_IN_GPUS": "3"}
    asked = [sys.executable, "-c", ASKS_FOR_CORES]
    done = subprocess.run(asked, env=os.environ | variables, capture_output=True, text=True, timeout=150)
    assert done.stdout == "[(1, 3), (0, 2), ()]\n", done.stderr
