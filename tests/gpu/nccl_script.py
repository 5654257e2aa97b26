"""One rank of tests/gpu/test_nccl.py: joins a communicator and reduces memory that is allocated as slots are.

Arguments: the path of NCCL; the communicator's unique id, in hexadecimal digits; rank; number of ranks; GPU; a task.
"reduce" prints as JSON whether a sum and a maximum are correct, or NCCL's error. "die" kills itself after joining.
"wait" starts a sum with a dead peer, aborts it, and prints whether its stream waited until then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import numpy as np

from coarse.kernels import _native
from coarse.kernels.cuda_kernels import DTYPES
from coarse.schema import OPS

COUNT = 300_011
MOMENT_S = 0.3


class Rank:
    """One rank with a stream, and memory that is allocated as slots are."""

    def __init__(self, path: str, unique_id: bytes, rank: int, num_ranks: int, gpu: int) -> None:
        self._context = _native.CudaContext(gpu)
        self.stream = _native.CudaStream(self._context)
        self._memory = [_native.CudaMemory.allocate(self._context, COUNT * 4) for _ in range(2)]
        library = _native.NcclLibrary(path)
        self.communicator = _native.NcclCommunicator(library, unique_id, rank, num_ranks, self._context)

    def begin(self, numbers: np.ndarray, op: str) -> None:
        given, received = (memory.address for memory in self._memory)
        self.stream.copy_to_device(given, numbers.ctypes.data, numbers.nbytes)
        codes = DTYPES.index("float32"), OPS.index(op)
        self.communicator.all_reduce(given, received, numbers.size, *codes, self.stream.handle)

    def reduced(self, numbers: np.ndarray, op: str) -> np.ndarray:
        self.begin(numbers, op)
        result = np.zeros_like(numbers)
        self.stream.copy_to_host(result.ctypes.data, self._memory[1].address, result.nbytes)
        self.stream.synchronize()
        self.communicator.check()
        return result


def numbers_of(rank: int) -> np.ndarray:
    """Numbers whose sums are exact in any order."""
    return np.float32(2**rank) + np.arange(COUNT, dtype=np.float32) % 64


def main(path: str, unique_id: str, rank: int, num_ranks: int, gpu: int, task: str) -> None:
    try:
        joined = Rank(path, bytes.fromhex(unique_id), rank, num_ranks, gpu)
    except _native.NcclError as error:
        print(json.dumps(str(error)))
        return
    numbers = numbers_of(rank)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "wait":
        joined.begin(numbers, "sum")
        time.sleep(MOMENT_S)
        was_waiting = not joined.stream.is_idle()
        threading.Thread(target=joined.communicator.abort).start()
        joined.stream.synchronize()
        print(json.dumps({"was_waiting": was_waiting}))
        return
    every = [numbers_of(each) for each in range(num_ranks)]
    is_sum = np.array_equal(joined.reduced(numbers, "sum"), np.sum(every, axis=0, dtype=np.float32))
    is_maximum = np.array_equal(joined.reduced(numbers, "max"), np.max(every, axis=0))
    print(json.dumps({"is_sum": is_sum, "is_maximum": is_maximum}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6])
