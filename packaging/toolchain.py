"""zig's clang for glibc 2.28 and the libstdc++ of GCC 8, for this processor or another.

zig has the headers and symbols of every glibc for every processor. The C++ library is GCC's, not zig's own, because
PyTorch and TensorFlow have it: their extensions exchange objects and exceptions with the native module. The headers
are those of the installed GCC; `libstdcxx_8` has the few functions that they call and GCC 8's library lacks.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ziglang
from elftools.elf.elffile import ELFFile

GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")

_ZIG = Path(ziglang.__file__).with_name("zig")
_OLD_LIBRARY = Path(__file__).with_name("libstdcxx_8")
_PYTHONS_OR_CPLUSPLUS = re.compile(r"_?Py|_Z")


class ToolchainError(Exception):
    """A compiler is missing, or has used what old systems lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Commands that compile and link C++ for old systems.

    Args:
        architecture: The processor, as in `platform.machine()`.
        compile: Compiles files of C++; one word, because setuptools puts it in place of the linker's first.
        link: Links objects to a shared library.
        cache: zig's folder, where it finds again what it has compiled.
        python_headers: A folder for the headers of the Python for which is compiled, searched before others.
    """

    architecture: str
    compile: str
    link: tuple[str, ...]
    cache: Path
    python_headers: Path

    @classmethod
    def of(cls, architecture: str, folder: Path) -> Toolchain:
        """The commands for a processor.

        Args:
            architecture: One of ARCHITECTURES.
            folder: For what zig keeps.

        Raises:
            ToolchainError: If GCC for that processor is missing.
        """
        gcc = _gcc(architecture)
        own = Path(shutil.copytree(_OLD_LIBRARY, folder / _OLD_LIBRARY.name, dirs_exist_ok=True))
        python = folder / "python-headers"
        headers = (f"-I{path}" for path in (python, own, *_headers(gcc)))
        clang = (_ZIG, "cc", "-target", f"{architecture}-linux-gnu.{GLIBC}", "-g0")
        driver = _script(own / f"c++-{architecture}", *clang, *headers, "-include", own / "first.hpp")
        added = own / f"{architecture}.o"
        libraries = (_file_of(gcc, name) for name in ("libstdc++.so", "libgcc_s.so.1"))
        link = (driver, "-shared", "-s", str(added), *libraries)
        tools = cls(
            architecture=architecture, compile=driver, link=link, cache=folder / "zig", python_headers=python
        )
        tools.run([driver, "-std=c++17", "-O2", "-fPIC", "-c", own / "functions.cpp", "-o", added])
        return tools

    def environment(self) -> dict[str, str]:
        """Variables by which setuptools takes these commands."""
        compile, link = shlex.quote(self.compile), shlex.join(self.link)
        zig = {"ZIG_GLOBAL_CACHE_DIR": str(self.cache), "ZIG_LOCAL_CACHE_DIR": str(self.cache)}
        return {"CC": compile, "CXX": compile, "LDSHARED": link, "LDCXXSHARED": link, "CFLAGS": "-g0", **zig}

    def build(self, unit: Path, target: Path, *, flags: Sequence[str], libraries: Sequence[str]) -> None:
        """Compiles a file of C++ and makes a shared library of it."""
        compiled = unit.with_suffix(".o")
        self.run([self.compile, *flags, "-c", str(unit), "-o", str(compiled)])
        self.run([*self.link, str(compiled), *libraries, "-o", str(target)])

    def run(self, command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
        """Runs a command with these commands as setuptools's; what it prints goes to standard error.

        Raises:
            subprocess.CalledProcessError: If it fails.
        """
        environment = {**os.environ, **self.environment(), **(variables or {})}
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)


def _script(path: Path, *command: str | Path) -> str:
    """An executable that runs a command with further arguments."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    path.chmod(0o755)
    return str(path)


def check_symbols(module: Path) -> None:
    """Checks what auditwheel does not see: functions of the C library that the old one does not have at all.

    Such symbols have no version, as those of Python and of the frameworks, which have other names.

    Raises:
        ToolchainError: If the module uses some; names them.
    """
    with module.open("rb") as file:
        elf = ELFFile(file)
        versions = elf.get_section_by_name(".gnu.version")
        unknown = [
            symbol.name
            for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and isinstance(versions.get_symbol(number)["ndx"], str)
            and not _PYTHONS_OR_CPLUSPLUS.match(symbol.name)
        ]
    if unknown:
        raise ToolchainError(f"{module.name} uses what glibc {GLIBC} does not have: {', '.join(unknown)}")


def _gcc(architecture: str) -> str:
    """The command of GCC's C++ compiler for a processor."""
    is_native = architecture == platform.machine()
    command = "g++" if is_native else f"{architecture}-linux-gnu-g++"
    if shutil.which(command) is None:
        package = "g++" if is_native else f"g++-{architecture.replace('_', '-')}-linux-gnu"
        raise ToolchainError(
            f"{command} is missing, whose headers of C++ a wheel for {architecture} needs: apt install {package}"
        )
    return command


def _headers(gcc: str) -> list[str]:
    """GCC's folders of C++ headers, as it searches them."""
    done = subprocess.run(
        [gcc, "-E", "-v", "-x", "c++", os.devnull],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    _, _, searched = done.stderr.partition("#include <...> search starts here:\n")
    folders = searched.partition("End of search list.")[0].split("\n")
    return [os.path.normpath(folder.strip()) for folder in folders if "/c++/" in folder]


def _file_of(gcc: str, name: str) -> str:
    done = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return os.path.realpath(done.stdout.strip())
