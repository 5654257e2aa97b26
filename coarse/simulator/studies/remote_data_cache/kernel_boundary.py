"""The cost of a kernel's end with software coherence (Table IV), and the contents of a line's spare bits.

The document counts in powers of two throughout: 1 GHz is 2**30 per second, and a millisecond is 2**-10 seconds.
"""

from __future__ import annotations

from coarse.simulator.studies.remote_data_cache.caches.protocol import RemoteCache
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import Coherence
from coarse.simulator.studies.remote_data_cache.parameters import LINE_BYTES, Machine

_HERTZ, _MEMORY, _LINK = 2.0**30, 2.0**40, 2.0**36  # of the clock, and bytes per second
MICROSECOND, MILLISECOND = 2.0**-20, 2.0**-10

_ECC_BYTES, _PROTECTED_BYTES = 16, 16
_SECDED_BITS = 9  # single error corrected, double error detected, in 16 bytes
_VALID_BITS, _TRACKER_BITS = 1, 2


def cache_invalidation_s(machine: Machine) -> float:
    """Each bank of the last-level cache invalidates a line per cycle."""
    return machine.cache_bytes / LINE_BYTES / machine.cache_banks / _HERTZ


def local_s(num_bytes: int) -> float:
    """To move bytes to or from the GPU's own memory."""
    return num_bytes / _MEMORY


def remote_s(num_bytes: int) -> float:
    """To move bytes to another GPU's memory."""
    return num_bytes / _LINK


def epoch_invalidation_s(machine: Machine, num_kernels: int) -> float:
    """To invalidate the remote data cache at the ends of so many kernels, counted on the protocol's cache."""
    lines = machine.remote_cache_bytes // LINE_BYTES
    cache = RemoteCache(lines, Coherence.SOFTWARE, machine.epoch_bits)
    for _ in range(num_kernels):
        cache.next_epoch(stream=0)
    return local_s(cache.num_reset_lines * LINE_BYTES)


def spare_bits() -> int:
    """Bits of a line's ECC that SECDED leaves."""
    return _ECC_BYTES * 8 - LINE_BYTES // _PROTECTED_BYTES * _SECDED_BITS


def tag_bits(machine: Machine) -> int:
    """Bits that tell which line of all GPUs' memories a set holds."""
    all_memory = machine.num_gpus * machine.memory_bytes
    return (all_memory // machine.remote_cache_bytes - 1).bit_length()


def metadata_bits(machine: Machine) -> int:
    """Tag, epoch, valid bit and tracker of a line."""
    return tag_bits(machine) + machine.epoch_bits + _VALID_BITS + _TRACKER_BITS
