"""Jobs of TensorFlow workers, each process of which takes seconds to import it: few are started, all at once."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

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
            env=environment(TMPDIR=self._temporary.name, **variables),
        )

    def finish(self) -> tuple[int, str]:
        """Waits for its end; returns the exit code and what was printed."""
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
        self._log.close()
        self._temporary.cleanup()
        return printed
