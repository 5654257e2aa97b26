"""All checkpoints of a job: the list, the newest complete one, and those to keep."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from coarse.checkpoint.folder import Folder
from coarse.checkpoint.manifest import Manifest
from coarse.checkpoint.names import LATEST_NAME, PIN_SUFFIX, TEMPORARY_SUFFIX, CheckpointName
from coarse.checkpoint.reader import Checkpoint, Progress, open_checkpoint
from coarse.checkpoint.writer import SaveCancelledError
from coarse.errors import CheckpointError

logger = logging.getLogger(__name__)

_LONGEST_HINT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint in its folder.

    Args:
        name: Name of the checkpoint.
        manifest: Its manifest; None if the checkpoint is not complete.
        reason: Why it is not complete; "" if it is, according to sizes and headers.
        is_pinned: Whether it is kept regardless of its age.
    """

    name: CheckpointName
    manifest: Manifest | None
    reason: str
    is_pinned: bool


def names_of(parent: Folder) -> list[CheckpointName]:
    """All finished checkpoints, oldest first, complete or not."""
    parsed = (CheckpointName.parse(name) for name in parent.names())
    return sorted(name for name in parsed if name is not None)


def unfinished_in(parent: Folder) -> list[str]:
    """Folders of saves that were killed or are in progress."""
    return sorted(
        name for name in parent.names() if name.startswith("step-") and name.endswith(TEMPORARY_SUFFIX)
    )


def list_checkpoints(parent: Folder) -> list[Listed]:
    """All finished checkpoints, oldest first; does not read their contents.

    Raises:
        OSError: If the disk cannot read the folder.
    """
    return [_look_at(parent, name) for name in names_of(parent)]


def find_newest(parent: Folder, progress: Progress = lambda done, total: None) -> Checkpoint | None:
    """Opens the newest checkpoint whose every byte is correct; None if the folder never had a checkpoint.

    Uses the checkpoints that exist: the hint `latest` only reveals lost ones. Logs skipped checkpoints with reasons.

    Raises:
        CheckpointError: If checkpoints exist, but none is complete: names each with its fault. Training that was to
            continue must not start from scratch.
    """
    reasons: list[str] = []
    for name in reversed(names_of(parent)):
        try:
            checkpoint = open_verified(parent, name, progress)
        except (CheckpointError, OSError) as error:
            logger.warning("checkpoint %s is skipped: %s", name, error)
            reasons.append(f"{name}: {error}")
            continue
        _check_hint(parent, name)
        return checkpoint
    if reasons:
        raise CheckpointError(
            f"none of the checkpoints in {parent.path} is complete ({'; '.join(reasons)}). Repair or remove "
            "them to start from scratch."
        )
    hint = read_hint(parent)
    if hint is not None:
        raise CheckpointError(
            f"{parent.path / LATEST_NAME} names {hint}, but the folder has no checkpoint; restore it, or "
            "remove that file to start from scratch"
        )
    return None


def open_verified(
    parent: Folder,
    name: CheckpointName,
    progress: Progress = lambda done, total: None,
    *,
    digests: bool = False,
) -> Checkpoint:
    """Opens a checkpoint and checks every byte with Checkpoint.verify().

    Raises:
        CheckpointError, OSError: As for open_checkpoint() and Checkpoint.verify().
    """
    checkpoint = open_checkpoint(parent, name)
    try:
        checkpoint.verify(progress, digests=digests)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def read_back(parent: Folder, name: CheckpointName, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Reads a newly written checkpoint back from disk, and compares the CRC32C of every chunk.

    Raises:
        SaveCancelledError: If `should_stop`, which is called from time to time, returns True.
        CheckpointError, OSError: As for open_checkpoint() and Checkpoint.verify().
    """

    def check(done_bytes: int, total_bytes: int) -> None:
        if should_stop():
            raise SaveCancelledError(
                f"{name} is on the disk; reading it back was stopped with {done_bytes} of {total_bytes} bytes "
                "compared"
            )

    with open_checkpoint(parent, name) as checkpoint:
        checkpoint.verify(check, past_cache=True)


def read_hint(parent: Folder) -> CheckpointName | None:
    """The checkpoint that `latest` names; None if the hint is missing or names none."""
    try:
        text = parent.read(LATEST_NAME, limit_bytes=_LONGEST_HINT_BYTES)
    except CheckpointError:
        return None
    return CheckpointName.parse(text.decode(errors="replace").strip())


def pin(parent: Folder, name: CheckpointName) -> None:
    """Keeps a checkpoint regardless of its age.

    Raises:
        CheckpointError: If the checkpoint does not exist or is not complete.
    """
    open_checkpoint(parent, name).close()
    if not parent.has(name.pin):
        with parent.writing(name.pin):
            pass
        parent.sync()


def unpin(parent: Folder, name: CheckpointName) -> None:
    """Undoes pin()."""
    parent.remove(name.pin)
    parent.sync()


def remove_unfinished(parent: Folder) -> list[str]:
    """Removes the folders of killed saves and returns their names. No save may be in progress."""
    left = unfinished_in(parent)
    for name in left:
        parent.remove(name)
    return left


def superseded(parent: Folder, *, keep: int) -> list[CheckpointName]:
    """The checkpoints that are neither pinned nor among the newest `keep` complete ones, oldest first.

    Incomplete checkpoints do not count and are not removed, so that the user can inspect them.

    Raises:
        ValueError: If `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    whole = [listed for listed in list_checkpoints(parent) if listed.manifest is not None]
    return [listed.name for listed in whole[:-keep] if not listed.is_pinned]


def prune(parent: Folder, *, keep: int) -> list[CheckpointName]:
    """Verifies every byte of the newest checkpoint, then removes superseded() ones; returns the removed ones.

    Raises:
        CheckpointError: If the newest one is damaged; then nothing was removed.
        ValueError: If `keep` is below 1.
    """
    removable = superseded(parent, keep=keep)
    if removable:
        open_verified(parent, names_of(parent)[-1]).close()
    for name in removable:
        remove(parent, name)
    return removable


def remove(parent: Folder, name: CheckpointName) -> None:
    """Removes one checkpoint. Renames it first, so that a partly removed one never looks complete."""
    doomed = f"{name}.removed{TEMPORARY_SUFFIX}"
    parent.remove(doomed)
    parent.rename(str(name), doomed)
    parent.remove(doomed)
    parent.remove(name.pin)


def _look_at(parent: Folder, name: CheckpointName) -> Listed:
    is_pinned = parent.has(f"{name}{PIN_SUFFIX}")
    try:
        with open_checkpoint(parent, name) as checkpoint:
            return Listed(name=name, manifest=checkpoint.manifest, reason="", is_pinned=is_pinned)
    except (CheckpointError, OSError) as error:
        return Listed(name=name, manifest=None, reason=str(error), is_pinned=is_pinned)


def _check_hint(parent: Folder, found: CheckpointName) -> None:
    hint = read_hint(parent)
    if hint is not None and hint > found:
        logger.warning("%s names %s, but the newest complete checkpoint is %s", LATEST_NAME, hint, found)
