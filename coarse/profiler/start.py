"""How the workers of a node come to one profile when a session starts (docs/design/profiling.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.errors import ProfileError

if TYPE_CHECKING:  # slow to import, and needed where there is a profile only
    from coarse.profiler.profile import Profile, ProfileKey
    from coarse.settings import Settings

logger = logging.getLogger(__name__)

OFF, CACHED, AUTO, REFRESH = "off", "cached", "auto", "refresh"
"""Modes of COARSE_PROFILE; anything else names a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """What the first worker of a node has found for all of them.

    Args:
        profile: None if there is none, or none yet.
        note: Where it comes from, or why there is none, in words.
        is_to_be_measured: Whether all workers are to measure one.
    """

    profile: Profile | None = None
    note: str = ""
    is_to_be_measured: bool = False

    def to_json(self) -> bytes:
        """The form in which it is passed to other workers."""
        document: dict[str, Any] = {"note": self.note, "is_to_be_measured": self.is_to_be_measured}
        if self.profile is not None:
            from coarse.profiler.profile import as_json

            document["profile"] = as_json(self.profile)
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, text: bytes) -> FoundProfile:
        """Reads what `to_json` or `error_as_json` wrote.

        Raises:
            ProfileError: If that was an error.
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
    """Looks for the profile that a session is to start with; on the first worker of its node.

    Args:
        settings: Of the session.
        key_of: Gives the key of the node; not called where it is not needed.

    Raises:
        ProfileError: If COARSE_PROFILE names a file that is no profile, or one of something else.
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
    """Finds the profile and tells the other workers of the node, also if that fails.

    Raises:
        ProfileError: As `find` does.
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
        # A damaged cache is no reason not to train.
        logger.warning("the cached profile is not used: %s", error)
        return FoundProfile(
            note=f"the cached profile is damaged: {error}", is_to_be_measured=is_to_be_measured
        )
    if profile is not None:
        return FoundProfile(profile=profile, note=f"cached {profile.kind} profile {cache_path(key)}")
    note = "no profile of these workers and memory devices is cached; `coarse profile` measures one"
    return FoundProfile(note=note, is_to_be_measured=is_to_be_measured)
