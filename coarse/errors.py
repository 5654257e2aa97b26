"""Every error that COARSE raises on purpose.

Messages say who, what, how far it had come, and what to do next.
"""

from __future__ import annotations

FOLLOW_UP = "This follows from an error of "
"""How a message begins to name the worker whose error is the cause; `coarse run` reports that one."""


def follow_up(text: object, culprit: str) -> str:
    """The message of an error that another worker's has brought about.

    Args:
        text: Its meaning here.
        culprit: Whose error it was, such as "worker 0".
    """
    return f"{str(text).rstrip('.')}. {FOLLOW_UP}{culprit}; see that error."


def is_follow_up(error: BaseException) -> bool:
    """Whether the message of an error says that another worker's has brought it about."""
    return FOLLOW_UP in str(error)


class CoarseError(Exception):
    """Base of all errors of this package."""


class SettingsError(CoarseError, ValueError):
    """A COARSE_* variable is not known, or has a value that cannot be."""


class BackendBuildError(CoarseError, RuntimeError):
    """A rank has no working C++ compiler, which the torch backend needs at its first use."""


class GpuUnavailableError(CoarseError):
    """Memory lies on a GPU that this worker does not see, or cannot use."""


class WorkerLostError(CoarseError):
    """A worker died or left while others still needed it."""


class MemoryDeviceLostError(CoarseError):
    """A memory device could not be started, died, or stopped answering."""


class SchemaMismatchError(CoarseError):
    """Workers registered tensors that differ in number, name, length, dtype or reduction."""


class RendezvousError(CoarseError):
    """Workers could not find each other: wrong or duplicate rank, or one that never came."""


class SyncTimeoutError(CoarseError, TimeoutError):
    """A wait passed its deadline although every process is alive."""


class OutOfDeviceMemoryError(CoarseError, MemoryError):
    """A memory device lacks the requested memory; nothing was allocated."""


class DeviceMemoryBusyError(CoarseError):
    """Somebody else has the memory for himself that a memory device is to own."""


class SessionClosedError(CoarseError):
    """The session, or a tensor group of it, was used after close()."""


class ForkedSessionError(CoarseError):
    """A session was used in a process forked from the one that opened it."""


class ProtocolError(CoarseError):
    """A peer sent something that the control protocol does not allow."""


class ProfileError(CoarseError):
    """A link profile is missing, damaged, contradicts itself, or is of another machine or version."""


class NonFiniteGradientError(CoarseError, ArithmeticError):
    """Gradients have NaN or Inf, and the optimizer was told to raise; nothing was updated on any worker."""


class CheckpointError(CoarseError):
    """A checkpoint could not be written, is torn or damaged, or does not fit the objects that load it."""


class FolderClaimedError(CheckpointError):
    """Another job saves its checkpoints to the folder."""


class SnapshotLostError(CoarseError):
    """A snapshot was given up because the memory for old versions was full, or was released already."""


class SnapshotsBusyError(CoarseError):
    """All places for snapshots are taken."""


class TimelineError(CoarseError):
    """The parts of a timeline cannot be read or merged."""


_TOLD = (
    SnapshotLostError,
    SnapshotsBusyError,
    CheckpointError,
    WorkerLostError,
    MemoryDeviceLostError,
    SchemaMismatchError,
    OutOfDeviceMemoryError,
    DeviceMemoryBusyError,
    RendezvousError,
    SettingsError,
    SyncTimeoutError,
)


def told_error(name: object, text: object) -> CoarseError:
    """The error that another process tells of by the name of its type and its text."""
    kind = next((kind for kind in _TOLD if kind.__name__ == name), CoarseError)
    return kind(str(text))


class NcclFailedError(CoarseError):
    """NCCL has failed, by which workers reduce some tensors between their GPUs; it says what NCCL says."""


def is_refusal(error: CoarseError) -> bool:
    """Whether a registration failed because memory devices refused it, which they tell every worker alike."""
    of_session = (WorkerLostError, MemoryDeviceLostError, SyncTimeoutError, SchemaMismatchError)
    of_worker = (
        GpuUnavailableError,
        NcclFailedError,
        ProtocolError,
        SessionClosedError,
        ForkedSessionError,
    )
    return not isinstance(error, of_session + of_worker)
