"""Probes: transfers without reduction, by which a worker measures links (docs/design/queue-protocol.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.client.interfaces import Waiter
from coarse.kernels import _native
from coarse.schema import TensorSpec
from coarse.wire.registration import GroupSchema

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

MOST_AT_ONCE = 2
"""Concurrent probes of one worker at most: a push and a pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One transfer.

    Args:
        kind: Direction of the transfer.
        device: The memory device that serves it; also the source between devices.
        target: The other memory device, or the client number of the other worker of the node.
        slot_owner: Between devices: a worker of the node with slots in the target's memory.
    """

    kind: _native.ProbeKind
    device: int
    target: int = 0
    slot_owner: int = 0


class LinkProbes:
    """Memory through which one worker measures its links; Client.open_probes() creates it.

    Thread safety: one caller at a time, from any thread.

    Args:
        client: Waits for the probes.
        native: Posts them.
        group: Their tensors (probe_schema).
        num_devices: Number of memory devices.
        time_dilation: Real seconds for each second of the emulated machine; 1 without emulation.
    """

    def __init__(
        self,
        client: Waiter,
        native: _native.Client,
        group: TensorGroup,
        num_devices: int,
        *,
        time_dilation: float = 1.0,
    ) -> None:
        self._client = client
        self._native = native
        self._group = group
        self._num_devices = num_devices
        self._dilation = time_dilation

    def time_s(self, probes: Sequence[Probe], nbytes: int) -> float:
        """The time until all of `probes`, posted together, have arrived, as this worker measures it.

        Args:
            probes: One to MOST_AT_ONCE.
            nbytes: Bytes of each probe.

        Returns:
            Seconds; in an emulated session, seconds of the emulated machine, without time dilation.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        requests = [
            (tensor, probe.device, probe.kind, probe.target, probe.slot_owner, nbytes)
            for tensor, probe in enumerate(probes)
        ]
        status, seconds = self._native.probe(self._group.id, requests, self._client.timeout_s)
        self._client.check(status, lambda: f"a probe of {nbytes} bytes ({', '.join(map(str, probes))})")
        return max(seconds) / self._dilation

    def close(self) -> None:
        """Frees the devices' memory at once, and the slots when every worker has closed."""
        for device in range(self._num_devices):
            self.time_s([Probe(kind=_native.ProbeKind.PUSH, device=device)], 0)
        self._group.close()


def probe_schema(largest_bytes: int, *, on_host: bool) -> GroupSchema:
    """The tensor group of probes of up to `largest_bytes`: a tensor of one shard for each concurrent probe.

    Args:
        on_host: As in GroupSchema; for emulated links, whose time does not depend on the place of the bytes.
    """
    return GroupSchema(
        name="link probes",
        specs=tuple(
            TensorSpec(name=f"probe{number}", dtype="uint8", num_elements=largest_bytes, op="sum")
            for number in range(MOST_AT_ONCE)
        ),
        shard_bytes=largest_bytes,
        gather_bytes=0,
        algorithm="probe",
        on_host=on_host,
    )
