"""Packages of another Debian, or for another processor, unpacked in a folder; installs nothing and needs no root."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Apt:
    """apt with lists and archives of its own.

    Args:
        folder: For these.
        options: What tells them apart from those of the system.
    """

    folder: Path
    options: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, architecture: str, *, suite: str | None = None) -> Apt:
        """Fetches the lists of packages.

        Args:
            folder: A new folder.
            architecture: Debian's name of the processor, such as arm64.
            suite: A release of Debian such as testing; without one, the releases that this system has.

        Raises:
            OSError: If this system has no apt.
            subprocess.CalledProcessError: If the lists cannot be fetched.
        """
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
        }
        if suite is not None:
            sources = folder / "sources.list"
            sources.write_text(f"deb {_mirror()} {suite} main\n")
            settings |= {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "/dev/null"}
        apt = cls(folder=folder, options=tuple(f"-o{name}={value}" for name, value in settings.items()))
        apt._run("update")
        return apt

    def download(self, *packages: str) -> list[Path]:
        """Downloads packages alone."""
        return self._archives("download", *packages)

    def download_with_dependencies(self, *packages: str) -> list[Path]:
        """Downloads packages and all that they need."""
        return self._archives("install", "--yes", "--download-only", "--no-install-recommends", *packages)

    def _archives(self, *arguments: str) -> list[Path]:
        archives = self.folder / "cache" / "archives"
        self._run(*arguments, cwd=archives)
        return sorted(archives.glob("*.deb"))

    def _run(self, *arguments: str, cwd: Path | None = None) -> None:
        command = ["apt-get", "--quiet=2", *self.options, *arguments]
        subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=600)


def extract(archives: Iterable[Path], root: Path) -> None:
    """Unpacks packages into a folder, as they lie under / where they are installed."""
    for archive in archives:
        subprocess.run(["dpkg-deb", "--extract", archive, root], capture_output=True, text=True, check=True)


def _mirror() -> str:
    """Where this system has Debian from.

    Raises:
        OSError: If it has none.
    """
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    release = re.findall(r'^VERSION_CODENAME="?(\w+)', Path("/etc/os-release").read_text(), re.MULTILINE)
    found = re.findall(rf"^{(release or ['none'])[0]} (\S+)$", done.stdout, re.MULTILINE)
    if not found:
        raise OSError("apt has no source of this system's own release")
    return found[0]
