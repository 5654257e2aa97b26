"""The preloader: a Python process that imports modules and is then forked for each worker.

It is started with a worker's own command line. Python imports `sitecustomize` of the folder python_path before it
runs the script, and that calls fork_workers(). This call returns in the forks alone, where Python goes on with the
script as in every process: so arguments, `__main__`, `-m`, tracebacks and exit codes are Python's own.

    supervisor ── preloader ── (fork that ends) ── worker      the supervisor, a subreaper, adopts the worker

A request is a file in memory with a JSON object, and descriptors. The supervisor closes the channel to end the
preloader.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from coarse.cli.workers.processes import die_with_parent
from coarse.env import process_environment

CHANNEL = "COARSE_PRELOADER"
"""Variable with the descriptor of the preloader's end of the channel."""

MOST_BYTES = 4096
"""Longest message."""

PYTHON_PATH = Path(__file__).parent / "python_path"

_MOST_DESCRIPTORS = 4
_JOIN_LIMIT_S = 1.0
_POLL_S = 0.001
_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads without which their library goes on in a fork, by their names: jemalloc's, for example within pyarrow."""

_CUDA_NOT_INITIALISED = 3
_NUM_NAMES = 3


class _UnforkableError(Exception):
    """What a module has begun at import does not survive a fork."""


def fork_workers() -> None:
    """Imports what the supervisor asks for, then forks a worker at each request; returns in the workers alone.

    Does nothing in other processes.
    """
    if CHANNEL not in process_environment():
        return
    try:
        channel = socket.socket(fileno=int(process_environment().pop(CHANNEL)))
        begin, _ = _receive(channel)
        _replace_environment(begin["environment"])
        sys.path.remove(str(PYTHON_PATH))
        _run_next_sitecustomize()
        _prepare(channel, begin["modules"])
        _serve(channel, begin["supervisor"])
    except BaseException:  # Python would go on with the script
        traceback.print_exc()
        os._exit(1)


def _prepare(channel: socket.socket, modules: list[str]) -> None:
    if failure := _import_all(modules):
        _tell(channel, {"failed": failure})
        os._exit(1)
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker writes to the memory of all objects, which copies it
    _tell(channel, {"ready": True})


# ---- imports ----


def _run_next_sitecustomize() -> None:
    """Runs the sitecustomize that this process would have had, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception:  # as Python does
        traceback.print_exc()


def _import_all(modules: list[str]) -> str:
    """Imports modules as the script would; returns why that failed, or "".

    The traceback of an error within a module goes to stderr.
    """
    folder = os.getcwd()
    for name in modules:
        try:
            _import(name)
            _require_forkable(name)
        except _UnforkableError as error:
            return str(error)
        except BaseException as error:
            if not _is_unknown(error, name):
                _print(error)
            return f"importing {name} failed: {''.join(traceback.format_exception_only(error)).strip()}"
    os.chdir(folder)
    return ""


def _import(name: str) -> None:
    """Imports a module while sys.path begins as for the script."""
    folders = _script_folders()
    sys.path[:0] = folders
    try:
        __import__(name)
    finally:
        for folder in folders:
            with suppress(ValueError):  # the module has removed it
                sys.path.remove(folder)


def _script_folders() -> list[str]:
    """The entry that Python inserts into sys.path for the script: its folder, or itself if it has modules within."""
    is_module = sys.argv[0] == "-m"
    path = os.getcwd() if is_module else os.path.realpath(sys.argv[0])
    if not is_module and _is_importable_from(path):
        return [path]
    if getattr(sys.flags, "safe_path", False):
        return []
    return [path if is_module else os.path.dirname(path)]


def _is_importable_from(path: str) -> bool:
    for hook in sys.path_hooks:
        with suppress(ImportError):
            hook(path)
            return True
    return False


def _is_unknown(error: BaseException, name: str) -> bool:
    """Whether `name` itself is what could not be found."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")


def _print(error: BaseException) -> None:
    """Prints an error with the part of its traceback that lies in the imported modules."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename == __file__:
        place = place.tb_next
    traceback.print_exception(type(error), error, place)


def _require_forkable(name: str) -> None:
    """Refuses threads, which a fork would lack, and CUDA, whose driver does not work in a fork.

    Raises:
        _UnforkableError: If the import of `name` has begun either.
    """
    if _has_initialised_cuda():
        raise _UnforkableError(f"{name} initialises CUDA when it is imported, which does not work in a fork")
    if threads := _threads_lost_by_forks():
        python_threads = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        names = ", ".join(sorted({*(python_threads or threads.values())})[:_NUM_NAMES])
        raise _UnforkableError(
            f"{name} starts {len(threads)} thread(s) ({names}) when it is imported, which a fork would lack"
        )


def _has_initialised_cuda() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALISED


def _threads_lost_by_forks() -> dict[int, str]:
    """Names of this process's threads that a fork would miss, by their ids; libraries such as OpenBLAS end theirs."""
    if not _other_threads():
        return {}
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + _JOIN_LIMIT_S
    while _other_threads() and time.monotonic() < deadline:  # one that was joined may still be listed
        time.sleep(_POLL_S)
    return _other_threads()


def _other_threads() -> dict[int, str]:
    tasks = {int(each.name): each / "comm" for each in Path("/proc/self/task").iterdir()}
    named = {number: path.read_text().strip() for number, path in tasks.items() if number != os.getpid()}
    return {number: name for number, name in named.items() if name not in _FORK_SAFE_THREADS}


# ---- forks ----


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a request and its descriptors; ends this process if the supervisor has closed the channel."""
    data, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    with open(descriptors[0], "rb") as request:
        request.seek(0)
        return json.load(request), descriptors[1:]


def _tell(channel: socket.socket, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    while len(data) > MOST_BYTES:
        answer = {name: str(value)[: MOST_BYTES // 16] for name, value in answer.items()}
        data = json.dumps(answer).encode()
    channel.sendall(data)


def _serve(channel: socket.socket, supervisor: int) -> None:
    while True:
        request, descriptors = _receive(channel)
        if _is_worker(channel, supervisor):
            channel.close()
            _become_worker(request, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _is_worker(channel: socket.socket, supervisor: int) -> bool:
    """Forks a worker that is a child of the supervisor, and answers; returns True in the worker.

    The worker waits until the supervisor has adopted it and knows its process id. If either fails, it ends.
    """
    go, tell_go = os.pipe()
    pid, tell_pid = os.pipe()
    parent = os.fork()
    if parent == 0:
        if _is_second_fork(tell_pid):
            for end in (tell_go, pid, tell_pid):
                os.close(end)
            _wait_for(go, supervisor)
            return True
        os._exit(0)
    for end in (go, tell_pid):
        os.close(end)
    told = int(os.read(pid, 64) or b"0")
    os.waitpid(parent, 0)  # from then on the worker has its new parent
    _tell(channel, {"pid": told} if told > 0 else {"errno": -told})
    with suppress(BrokenPipeError):  # somebody has killed it
        os.write(tell_go, b"!")
    for end in (tell_go, pid):
        os.close(end)
    return False


def _is_second_fork(tell_pid: int) -> bool:
    """Forks, and tells the process id or minus the error; returns True in the fork."""
    try:
        worker = os.fork()
    except OSError as error:
        worker = -(error.errno or 0)
    if worker:
        os.write(tell_pid, b"%d" % worker)
    return worker == 0


def _wait_for(go: int, supervisor: int) -> None:
    if not os.read(go, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(go)
    die_with_parent(supervisor, signal.SIGKILL)


def _become_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this fork the environment, the descriptors and the random numbers of a process of its own."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _replace_environment(request["environment"])
    _reopen_stdin()
    _reseed()


def _reseed() -> None:
    """Seeds global generators that a process seeds at random when it begins; the module `random` does so itself."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _replace_environment(environment: dict[str, str]) -> None:
    variables = process_environment()
    variables.clear()
    variables.update(environment)


def _reopen_stdin() -> None:
    """Opens sys.stdin as Python does at its start: the object knows whether the former stdin was seekable."""
    raw = io.FileIO(0, closefd=False)
    raw.name = "<stdin>"
    stream = io.TextIOWrapper(
        io.BufferedReader(raw),
        encoding=sys.stdin.encoding,
        errors=sys.stdin.errors,
        newline="\n",
        line_buffering=raw.isatty(),
    )
    stream.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]
