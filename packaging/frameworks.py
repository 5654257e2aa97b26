"""The torch backend and TensorFlow's operation, compiled for the frameworks that this Python has.

They call C++ of these frameworks, which changes from version to version. The wheel contains them for one version of
each; with another version they are compiled where they are used, as they are without a wheel.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from toolchain import Toolchain

FOREIGN_LIBRARIES = ("libc10.so", "libtorch_*.so", "libtensorflow_framework.so.2")
"""Libraries of the frameworks, which these modules use and the wheel does not contain."""


def prebuild(source: Path, tools: Toolchain, *, include: Path, suffix: str) -> None:
    """Puts the compiled modules into an unpacked source distribution, in place of those of an earlier call.

    Says which framework is missing. For another processor than this one, it leaves all out.

    Args:
        source: The source distribution's folder. This process must not have imported another COARSE.
        tools: Compile them.
        include: The headers of the wheel's Python.
        suffix: What names of extension modules end with in that Python.
    """
    for left in source.glob("coarse/**/prebuilt"):
        shutil.rmtree(left)
    if tools.architecture != platform.machine():
        _say(f"nothing for frameworks, because this machine is no {tools.architecture}")
        return
    _attempt("torch", lambda: _torch_backend(source, tools, include, suffix))
    _attempt("tensorflow", lambda: _tensorflow_op(source, tools))


def _attempt(framework: str, build: Callable[[], None]) -> None:
    if importlib.util.find_spec(framework) is None:
        _say(f"nothing for {framework}, which is not installed beside {sys.executable}")
    else:
        build()


def _torch_backend(source: Path, tools: Toolchain, include: Path, suffix: str) -> None:
    building = _module_of(source, "torch/backend/building.py")
    target = building.prebuilt_path(suffix)
    target.parent.mkdir()
    unit = _unit(source, "backend.cpp", building.unit_text())
    flags = ["-w", *building.compile_flags(include)]
    tools.build(unit, target, flags=flags, libraries=building.link_flags())


def _tensorflow_op(source: Path, tools: Toolchain) -> None:
    library = _module_of(source, "tensorflow/op_library.py")
    target = library.prebuilt_path()
    target.parent.mkdir()
    unit = _unit(source, "reduce_op.cpp", library.SOURCE.read_text())
    tools.build(unit, target, flags=library.compile_flags(), libraries=library.linked_files())


def _unit(source: Path, name: str, text: str) -> Path:
    """A file to compile, always under the same name, by which zig finds what it has compiled."""
    file = source / "build" / "frameworks" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _module_of(source: Path, path: str) -> ModuleType:
    """A module of the source distribution by itself: its package needs the native module, which is not built yet."""
    if str(source) not in sys.path:
        sys.path.insert(0, str(source))
    spec = importlib.util.spec_from_file_location(Path(path).stem, source / "coarse" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _say(text: str) -> None:
    print(f"wheels: {text}", file=sys.stderr)
