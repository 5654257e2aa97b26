"""Jobs of TensorFlow workers. A process takes seconds to import it: few processes, started at the same time."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from second_tries import name_exit

import coarse

HERE = Path(__file__).parent
LIMIT_S = 900.0  # on a machine that does much else; a minute on one that does not


def environment(**variables: str) -> dict[str, str]:
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "TF_CONFIG")
        },
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(coarse.__file__).parents[1]), os.environ.get("PYTHONPATH")])
        ),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "COARSE_PROFILE": "off",
        "COARSE_TIMEOUT_S": "120",
        **variables,
    }


class Job:
    """A process of a job, or its launcher, with what it prints."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        # Sockets have short names: pytest's own temporary directories are too long for them.
        self._temporary = tempfile.TemporaryDirectory(prefix="coarse-test-")
        self._log = Path(self._temporary.name, "log").open("w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._temporary.name,
            env=environment(TMPDIR=self._temporary.name, **variables),
            preexec_fn=_allow_core_dumps,
        )

    def finish(self) -> tuple[int, str]:
        """Waits for its end; returns its exit code and output, with stacks after a crash."""
        try:
            code = self.process.wait(LIMIT_S)
        finally:
            printed = self.close()
        return code, printed

    def close(self) -> str:
        """Ends it if it runs. Idempotent."""
        if self._log.closed:
            return ""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace")
        for core in Path(self._temporary.name).glob("core*"):
            printed += f"\n{core.name} ({name_exit(self.process.returncode)}):\n{_native_stacks(core)}"
        self._log.close()
        self._temporary.cleanup()
        return printed


def _allow_core_dumps() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def _native_stacks(core: Path) -> str:
    """Stacks of all threads of a crashed Python process, from gdb."""
    if shutil.which("gdb") is None:
        return "install gdb to see where it crashed"
    command = [
        "gdb",
        "-batch",
        "-ex",
        "bt 40",
        "-ex",
        "info sharedlibrary coarse",
        "-ex",
        "thread apply all bt 12",
    ]
    shown = subprocess.run([*command, sys.executable, core], capture_output=True, text=True, timeout=LIMIT_S)
    return shown.stdout[-20_000:]
