"""Imports cost time and memory: the core needs no framework, and a memory device not even numpy."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import coarse

FRAMEWORKS = {"torch", "tensorflow", "transformers", "sklearn"}

LAYERS = (
    ("__main__",),
    ("cli",),
    ("dashboard",),
    ("simulator",),
    ("bench",),
    ("transformers",),
    ("accelerate", "lightning"),
    ("torch", "tensorflow"),
    ("session",),
    ("session_parts",),
    ("tuning",),
    ("startup",),
    ("client",),
    ("proxy",),
    ("wire",),
    ("profiler", "checkpoint", "rendezvous", "arrays"),
    ("emulation", "metrics"),
    ("timeline",),
    ("kernels", "settings"),
    ("env",),
    ("status",),
    ("machine", "schema", "store", "security", "worker_state"),
    ("errors", "process"),
)
"""Packages and modules of coarse: each imports from those below it only."""


def parts_imported(tree):
    """Names of coarse that a module imports, except for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from parts_imported(node)


def part_of(name):
    # The entry point of torch's backends is outside of coarse.torch, which imports torch.
    return name.split(".")[1].removesuffix("_entry")


def modules_after(statement):
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import coarse", FRAMEWORKS | {"numpy"}),
        ("import coarse.session, coarse.rendezvous.launcher_environment", FRAMEWORKS),
        ("import coarse.client.client", FRAMEWORKS | {"numpy"}),
        ("import coarse.proxy.device_process", FRAMEWORKS | {"numpy", "rich"}),
        ("import coarse.cli.device, coarse.cli.main", FRAMEWORKS | {"numpy", "rich"}),
        ("import coarse.profiler.partition, coarse.profiler.routing", FRAMEWORKS | {"numpy"}),
    ],
)
def test_imports_what_it_needs_only(statement, forbidden):
    assert modules_after(statement) & forbidden == set()


def test_dependencies_point_one_way():
    root = Path(coarse.__file__).parent
    layer_of = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
    upward = set()
    for file in root.rglob("*.py"):
        part = part_of(".".join(file.relative_to(root.parent).with_suffix("").parts))
        for name in parts_imported(ast.parse(file.read_text())):
            if not name.startswith("coarse.") or name == "coarse.__version__" or part_of(name) == part:
                continue
            if layer_of[part_of(name)] <= layer_of[part]:
                upward.add(f"{file.relative_to(root)} imports {name}")
    assert upward == set()


def modules_imported(file, modules):
    """Modules of coarse that a file imports anywhere, annotations included."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield name if name in modules else name.rpartition(".")[0]


def modules_and_imports():
    """The modules of coarse that each of its modules imports anywhere."""
    root = Path(coarse.__file__).parent
    modules = {
        ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in root.rglob("*.py")
    }
    return {
        name: {each for each in modules_imported(file, modules) if each in modules and each != name}
        for name, file in modules.items()
    }


def test_no_module_imports_itself_by_way_of_others():
    imported = modules_and_imports()
    assert imported["coarse.session"] >= {"coarse.client.tensor_group", "coarse.session_parts.start"}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


MOST_IMPORTS = 25
"""Modules of coarse that one of its modules imports, annotations and lazy imports included."""

LARGER = {"coarse.client.client": 32}
"""Modules that compose more parts than that."""


def test_no_module_imports_very_many_others():
    counts = {name: len(others) for name, others in modules_and_imports().items()}
    assert counts["coarse.session"] > 15
    too_many = {name: count for name, count in counts.items() if count > LARGER.get(name, MOST_IMPORTS)}
    assert too_many == {}


def test_workers_import_nothing_of_memory_devices():
    root = Path(coarse.__file__).parent
    files = [
        root / "session.py",
        *(f for part in ("client", "session_parts", "torch", "tuning") for f in root.glob(f"{part}/**/*.py")),
    ]
    found = {
        f"{file.relative_to(root)} imports {name}"
        for file in files
        for name in parts_imported(ast.parse(file.read_text()))
        if name.startswith("coarse.proxy")
    }
    assert found == set()


RUNTIME = {"client", "proxy", "session", "startup", "tuning", "wire", "torch", "tensorflow", "kernels"}


def test_the_simulator_loads_nothing_of_the_runtime():
    root = Path(coarse.__file__).parent
    modules = [
        ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in root.glob("simulator/**/*.py")
    ]
    assert "coarse.simulator.events.engine" in modules
    script = f"import {', '.join(modules)}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & FRAMEWORKS
    assert not {name for name in loaded if name.startswith("coarse.") and part_of(name) in RUNTIME}


def test_env_is_the_only_reader_of_the_environment():
    root = Path(coarse.__file__).parent
    readers = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv"} and not _is_a_variable(node):
                readers.add(f"{file.relative_to(root)}")
    assert readers == {"env.py"}


def _is_a_variable(node):
    return isinstance(node, ast.Attribute) and not (
        isinstance(node.value, ast.Name) and node.value.id == "os"
    )


def test_a_tensorflow_that_was_not_tested_is_refused_by_name(tmp_path):
    (tmp_path / "tensorflow.py").write_text("__version__ = '2.99.1'\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import coarse.tensorflow",
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1
    assert (
        "ImportError: coarse.tensorflow works with TensorFlow 2.21.*, but 2.99.1 is installed" in done.stderr
    )
    assert "tensorflow==2.21.*" in done.stderr


def test_nothing_happens_at_import():
    script = (
        "import os, threading\n"
        "before = len(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "import coarse, coarse.session, coarse.proxy.device_process\n"
        "assert before == (len(os.listdir('/proc/self/fd')), threading.active_count())\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], timeout=150, check=True, env={"COARSE_TIMEOUT_S": "nonsense"}
    )
