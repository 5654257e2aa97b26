"""Finds one profile for all workers of a node at a session's start (docs/design/profiling.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.errors import ProfileError

if TYPE_CHECKING:  # slow to import, and only needed with a profile
    from coarse.profiler.profile import Profile, ProfileKey
    from coarse.settings import Settings

logger = logging.getLogger(__name__)

OFF, CACHED, AUTO, REFRESH = "off", "cached", "auto", "refresh"
"""Modes of COARSE_PROFILE; any other value names a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """The profile that the first worker of a node has found for all its workers.

    Args:
        profile: The profile; None if none exists, or none exists yet.
        note: Source of the profile, or why none exists, in words.
        is_to_be_measured: Whether all workers must measure a profile.
    """

    profile: Profile | None = None
    note: str = ""
    is_to_be_measured: bool = False

    def to_json(self) -> bytes:
        """The JSON form for other workers."""
        document: dict[str, Any] = {"note": self.note, "is_to_be_measured": self.is_to_be_measured}
        if self.profile is not None:
            from coarse.profiler.profile import as_json

            document["profile"] = as_json(self.profile)
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, text: bytes) -> FoundProfile:
        """Reads the output of `to_json` or `error_as_json`.

        Raises:
            ProfileError: If it is an error.
        """
        document = json.loads(text)
        if "error" in document:
            raise ProfileError(document["error"])
        profile = None
        if "profile" in document:
            from coarse.profiler.profile import from_json

            profile = from_json(document["profile"])
        return cls(profile=profile, note=document["note"], is_to_be_measured=document["is_to_be_measured"])


def find_profile(settings: Settings, key_of: Callable[[], ProfileKey]) -> FoundProfile:
    """Finds the profile for a session's start; on the first worker of its node.

    Args:
        settings: The session's settings.
        key_of: Returns the key of the node; only called if needed.

    Raises:
        ProfileError: If the file that COARSE_PROFILE names is not a profile, or has another key.
    """
    if settings.profile == REFRESH:
        return FoundProfile(note="COARSE_PROFILE=refresh", is_to_be_measured=True)
    if settings.profile in (CACHED, AUTO):
        return _find_cached(key_of(), is_to_be_measured=settings.profile == AUTO)
    from coarse.profiler.profile import Profile

    return FoundProfile(
        profile=Profile.load(Path(settings.profile), expected=key_of()), note=f"profile {settings.profile}"
    )


def share_profile(publish: Callable[[bytes], None], find: Callable[[], FoundProfile]) -> FoundProfile:
    """Finds the profile and publishes it, or the error, to the other workers of the node.

    Raises:
        ProfileError: As for `find`.
    """
    try:
        found = find()
    except ProfileError as error:
        publish(json.dumps({"error": str(error)}).encode())
        raise
    publish(found.to_json())
    return found


def _find_cached(key: ProfileKey, *, is_to_be_measured: bool) -> FoundProfile:
    from coarse.profiler.profile import cache_path, load_cached

    try:
        profile = load_cached(key)
    except ProfileError as error:
        # A damaged cache must not prevent training.
        logger.warning("the cached profile is not used: %s", error)
        return FoundProfile(
            note=f"the cached profile is damaged: {error}", is_to_be_measured=is_to_be_measured
        )
    if profile is not None:
        return FoundProfile(profile=profile, note=f"cached {profile.kind} profile {cache_path(key)}")
    note = "no profile of these workers and memory devices is cached; run `coarse profile` to measure one"
    return FoundProfile(note=note, is_to_be_measured=is_to_be_measured)
