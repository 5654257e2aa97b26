"""Machine code of CUDA sources: compiled once for a machine, by whichever NVRTC goes with its driver and GPU."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from coarse.errors import CoarseError
from coarse.kernels.nvrtc import Nvrtc

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""For NVRTC. The host's bits: one rounding per operation, none flushed to zero."""

_INSTALL = "pip install 'coarse-train[cuda]'; a PyTorch for CUDA brings it too"


def choose_compiler(found: Sequence[Nvrtc], driver_version: tuple[int, int], architecture: int) -> Nvrtc:
    """The newest one that compiles for the GPU, and whose machine code its driver loads: of no newer major version.

    Args:
        found: What there is.
        driver_version: Of CUDA, that the driver supports.
        architecture: Compute capability of the GPU, such as 90 for 9.0.

    Raises:
        CoarseError: If there is none; says what to install.
    """
    if not found:
        raise CoarseError(f"GPU memory devices need NVRTC, which was not found: {_INSTALL}")
    usable = [nvrtc for nvrtc in found if nvrtc.version[0] <= driver_version[0]]
    if not usable:
        version = ".".join(map(str, driver_version))
        raise CoarseError(
            f"the driver supports CUDA {version}, which is older than {_names(found)}: install "
            f"nvidia-cuda-nvrtc-cu{driver_version[0]}, or a newer driver"
        )
    knowing = [nvrtc for nvrtc in usable if architecture in nvrtc.architectures()]
    if not knowing:
        raise CoarseError(
            f"{_names(usable)} cannot compile for this GPU, of compute capability {architecture / 10}: install "
            "another NVRTC in addition, such as nvidia-cuda-nvrtc-cu12, of the newest version for newer GPUs"
        )
    return max(knowing, key=lambda nvrtc: nvrtc.version)


def compiled(sources: Mapping[str, str], compiler: Nvrtc, architecture: int) -> dict[str, bytes]:
    """The machine code of whole source files, by their names without ending.

    It is taken from the cache, or compiled and then kept there, where there is one: by one process of the machine,
    for which the others wait.

    Raises:
        CoarseError: If one does not compile.
    """
    paths = {name: _cache_path(name, text, compiler, architecture) for name, text in sources.items()}
    cubins = _read(paths)
    if len(cubins) == len(sources):
        return cubins
    with _locked(_cache_folder()):
        cubins = _read(paths)
        missing = {name: text for name, text in sources.items() if name not in cubins}
        if missing:
            cubins |= _compile(missing, compiler, architecture)
        with contextlib.suppress(OSError):  # then they compile anew next time
            for name in missing:
                _keep(paths[name], cubins[name])
    return cubins


def _compile(sources: Mapping[str, str], compiler: Nvrtc, architecture: int) -> dict[str, bytes]:
    """Compiles files in parallel."""
    logger.debug("compiling %s", ", ".join(sources))
    if len(sources) > 1:
        logger.warning(
            "compiling CUDA kernels for compute capability %s, once (some 10 seconds, or more on few cores)",
            architecture / 10,
        )

    def compile_one(name: str) -> bytes:
        return compiler.compile(sources[name], name=f"{name}.cu", architecture=architecture, options=OPTIONS)

    with ThreadPoolExecutor(len(sources), "coarse-nvrtc") as pool:
        return dict(zip(sources, pool.map(compile_one, sources), strict=True))


def _read(paths: Mapping[str, Path]) -> dict[str, bytes]:
    cubins: dict[str, bytes] = {}
    for name, path in paths.items():
        with contextlib.suppress(OSError):
            cubins[name] = path.read_bytes()
    return cubins


def _keep(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Has other processes wait, where the folder can be written to."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_path(name: str, text: str, compiler: Nvrtc, architecture: int) -> Path:
    key = sha256("\0".join((text, *OPTIONS, str(compiler.version))).encode()).hexdigest()[:24]
    return _cache_folder() / f"{name}-sm{architecture}-{key}.cubin"


def _cache_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("coarse") / "cuda"


def _names(compilers: Sequence[Nvrtc]) -> str:
    return " and ".join(map(str, compilers))
