"""Memory devices that are forks of a process with their modules, because imports take longer than many tests.

They run `coarse device` with the arguments, environment and descriptors that a session gives them. A worker with
anything else for its devices to inherit than the template has, such as a network namespace, starts them as for users.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import preloaded
from preloaded import ForkedProcess

from coarse.startup import device_processes

_SCRIPT = Path(__file__).parent / "device_script.py"
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_START = ["-m", "coarse"]


class DeviceTemplate:
    """What devices are forks of. The process that makes it may fork; its forks start devices."""

    def __init__(self) -> None:
        preloaded.prepare(os.environ, preloaded.DEVICE)
        self._inherited = _inherited(os.environ)

    def use(self) -> None:
        """Has all sessions of this process start their devices as forks."""
        device_processes.subprocess = _Subprocess(self._inherited)


class _Subprocess:
    """Stands for the module subprocess where memory devices are started."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, inherited: Sequence[Any]) -> None:
        self._inherited = inherited

    def Popen(  # noqa: N802
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        stdin: int,
        preexec_fn: Callable[[], None],
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if command[1:3] != _START or preexec_fn is not os.setpgrp or _inherited(env) != self._inherited:
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, stdin=stdin, preexec_fn=preexec_fn)
        return preloaded.start(
            _SCRIPT,
            command[3:],
            env,
            output=1,
            errors=2,
            pass_fds=pass_fds,
            imports=preloaded.DEVICE,
            is_own_group=True,
        )


def _inherited(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What a process has from the one that starts it, and a fork of the template from the template."""
    variables = {name: value for name, value in environment.items() if name != "PYTHONSAFEPATH"}
    return (
        preloaded.environment_of_imports(variables),
        [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "user")],
        Path("/proc/self/cgroup").read_text(),
        os.sched_getaffinity(0),
        [resource.getrlimit(limit) for limit in _LIMITS],
        [os.geteuid(), os.getegid()],
    )
