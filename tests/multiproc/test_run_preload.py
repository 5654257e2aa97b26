"""`coarse run --preload`: workers are forks of one process that has imported modules, and else as without it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, all_end_within, coarse_run, environment, read_pidfds, spawned

GONE_WITHIN_S = 20.0

HEAVY = """\
import os
PID = os.getpid()
print("imported in", PID, flush=True)
"""
"""A module that knows which process has imported it."""


@pytest.fixture(autouse=True)
def heavy(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text(HEAVY)


def write(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(f"import os, sys\nrank = os.environ['RANK']\n{text}\n")
    return path


def without_pids(text: str) -> list[str]:
    """The lines of the workers and of the final report, in any order; the former of `heavy` left out."""
    lines = [re.sub(r"pid \d+", "pid", line) for line in text.splitlines()]
    return sorted(
        line for line in lines if "imported in" not in line and not line.startswith("coarse run: OMP")
    )


# ---- what it brings ----


def test_modules_are_imported_once_and_workers_are_children_of_the_launcher_as_ever(tmp_path):
    path = write(tmp_path, "import heavy; print(heavy.PID, os.getpid(), os.getppid())")
    done = coarse_run("-n", "3", "--preload", "heavy", path)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    ((_, _, _, importer),) = [words for words in said if words[0] == "[preload]"]
    workers = sorted(words for words in said if words[0] != "[preload]")
    assert [words[0] for words in workers] == ["[w0]", "[w1]", "[w2]"]
    assert {words[1] for words in workers} == {importer}
    assert len({importer, *(words[2] for words in workers)}) == 4
    (parent,) = {words[3] for words in workers}
    assert parent != importer


def test_the_variable_does_as_the_flag(tmp_path):
    path = write(tmp_path, "import heavy; print(heavy.PID != os.getpid())")
    done = coarse_run("-n", "2", path, variables={"COARSE_PRELOAD": "heavy"})
    assert sorted(done.stdout.splitlines())[1:] == ["[w0] True", "[w1] True"]


def memory_of_two_workers(path: Path, *options: str) -> int:
    """Bytes of all processes of a job; memory that is shared counts once."""
    with spawned("-n", "2", *options, path, stdout=PIPE, OMP_NUM_THREADS="1") as job:
        supervisor = {int(job.stdout.readline().split()[-1]) for _ in range(2)}.pop()
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return sum(map(proportional_bytes, children))


def proportional_bytes(pid: str) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1])


def test_imported_memory_is_shared(tmp_path):
    num_bytes = 64 << 20
    (tmp_path / "large.py").write_text(f"DATA = bytearray(b'1') * {num_bytes}\n")
    path = write(tmp_path, "import large, signal\nprint(os.getppid(), flush=True)\nsignal.pause()")
    saved = memory_of_two_workers(path) - memory_of_two_workers(path, "--preload", "large")
    assert saved > 0.8 * num_bytes


# ---- as without it ----

SHOW = """\
import ctypes, inspect, json, signal, subprocess, traceback
death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))
volatile = ("COARSE_JOB_SECRET", "COARSE_NOTES_PIPE", "COARSE_PRELOAD", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
variables = {name: value for name, value in os.environ.items() if name not in volatile}
in_c = subprocess.run(["env", "-0"], capture_output=True, text=True, check=True).stdout.split("\\0")
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, repr(sys.flags), sys.path],
    "main": [__name__, __file__, getattr(__spec__, "origin", None), str(__package__)],
    "names": sorted(vars(sys.modules["__main__"])),
    "command": open("/proc/self/cmdline").read(),
    "folder": os.getcwd(),
    "environment": [variables, sorted(each for each in in_c if not each.startswith(volatile))],
    "descriptors": os.listdir("/proc/self/fd"),
    "signals": [str(signal.getsignal(number)) for number in range(1, 65)],
    "mask": [line for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC", "Thr"))],
    "streams": [
        [each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.isatty(), repr(each)]
        for each in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "is_seekable": [sys.stdin.seekable(), sys.__stdin__ is sys.stdin],
    "frames": [len(inspect.stack()), traceback.format_stack()],
    "death_signal": death_signal.value,
}))
"""


def both(*arguments: str | Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A job without and with --preload."""
    return coarse_run("-n", "2", *arguments), coarse_run("-n", "2", "--preload", "heavy", *arguments)


def shown(stdout: str) -> dict[str, object]:
    lines = [line.split(" ", 1) for line in stdout.splitlines() if not line.startswith("[preload]")]
    return {worker: json.loads(text) for worker, text in lines}


def assert_alike(plain: subprocess.CompletedProcess[str], forked: subprocess.CompletedProcess[str]) -> None:
    assert (plain.returncode, forked.returncode) == (0, 0), plain.stderr + forked.stderr
    assert "[preload] imported in" in forked.stdout
    before, after = shown(plain.stdout), shown(forked.stdout)
    assert before.keys() == {"[w0]", "[w1]"} == after.keys()
    for worker, said in before.items():
        for name, value in said.items():
            assert after[worker][name] == value, f"{worker} {name}"


def test_a_script_finds_what_it_finds_without(tmp_path):
    assert_alike(*both(write(tmp_path, SHOW), "--lr", "3", "-n"))


def test_a_script_with_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SHOW)
    assert_alike(*both("train.py"))


def test_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    write(tmp_path, SHOW, "package/train.py")
    assert_alike(*both("-m", "package.train", "x"))


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_script_that_is_a_folder_or_an_archive(tmp_path, kind):
    path = tmp_path / "app"
    modules = {"__main__.py": write(tmp_path, SHOW).read_text(), "heavy.py": HEAVY}
    if kind == "folder":
        path.mkdir()
        for name, text in modules.items():
            (path / name).write_text(text)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in modules.items():
                archive.writestr(name, text)
    (tmp_path / "heavy.py").unlink()
    assert_alike(*both(path))


@pytest.mark.parametrize(
    "text",
    [
        "sys.exit(3)",
        "sys.exit('no data')",
        "def train():\n    raise ValueError(rank)\ntrain()",
        "try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('x') from error",
        "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second')",
        "import atexit; atexit.register(os.write, 2, b'late\\n'); raise SystemExit(5)",
        "os.kill(os.getpid(), 9)",
        "os._exit(4)",
        "import signal; os.kill(os.getpid(), signal.SIGINT)",
        "def f(:",
        "import traceback; sys.excepthook = lambda *error: print('hook', *traceback.format_tb(error[2])); x",
        "import threading; threading.Thread(target=lambda: print(undefined)).start()",
    ],
)
def test_ends_and_tracebacks_are_those_of_a_script(tmp_path, text):
    path = write(tmp_path, text)
    logged = ("--log-dir", tmp_path / "logs")  # otherwise a single worker writes where the launcher does
    plain, forked = (coarse_run(*options, *logged, path) for options in ((), ("--preload", "heavy")))
    assert "imported in" in forked.stdout
    assert forked.returncode == plain.returncode
    assert without_pids(forked.stdout) == without_pids(plain.stdout)
    assert without_pids(forked.stderr) == without_pids(plain.stderr)


def test_worker_0_reads_stdin_and_the_others_do_not(tmp_path):
    path = write(tmp_path, "print(repr(sys.stdin.readline()), *([input()] if rank == '0' else []))")
    with spawned("-n", "2", "--preload", "heavy", path, stdin=PIPE, stdout=PIPE) as process:
        stdout, _ = process.communicate(b"question\nanswer\n", timeout=LIMIT_S)
    said = sorted(line for line in stdout.splitlines() if not line.startswith(b"[preload]"))
    assert said == [b"[w0] 'question\\n' answer", b"[w1] ''"]


def test_worker_0_has_the_terminal_itself_if_asked(tmp_path):
    terminal, its_end = os.openpty()
    path = write(tmp_path, "print('terminal' if sys.stdout.isatty() else 'pipe')")
    with spawned("-n", "2", "--preload", "heavy", "--no-prefix", path, stdout=its_end) as process:
        assert process.wait(timeout=LIMIT_S) == 0
    os.close(its_end)
    _, *said = os.read(terminal, 4096).splitlines()
    assert sorted(said) == [b"[w1] pipe", b"terminal"]
    os.close(terminal)


def test_workers_have_random_numbers_of_their_own(tmp_path):
    pytest.importorskip("torch")
    text = "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(1).item())"
    done = coarse_run("-n", "2", "--preload", "numpy.random,torch", write(tmp_path, text))
    assert done.returncode == 0, done.stderr
    first, second = ([*map(float, line.split()[1:])] for line in done.stdout.splitlines())
    assert len({*first, *second}) == 6


SPAWNS = """\
import heavy, multiprocessing
def tell(queue):
    queue.put(("child", heavy.PID == os.getpid()))
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=tell, args=(queue,))
        process.start()
        print(method, queue.get(), flush=True)
        process.join()
"""


def test_workers_start_processes_of_their_own(tmp_path):
    done = coarse_run("--preload", "heavy", write(tmp_path, SPAWNS))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("imported in")]
    # What is not forked imports the module itself.
    assert said == ["spawn ('child', True)", "fork ('child', False)", "forkserver ('child', True)"]


LOADS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.set_num_threads(2)
    (torch.rand(256, 256) @ torch.rand(256, 256)).sum()
    data = TensorDataset(torch.arange(8.0))
    for method in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
        print(method, [batch.sum().item() for (batch,) in loader])
"""


def test_torchs_threads_and_loaders_work(tmp_path):
    pytest.importorskip("torch")
    path = write(tmp_path, LOADS)
    plain, forked = (coarse_run(*options, path) for options in ((), ("--preload", "torch")))
    assert plain.returncode == forked.returncode == 0, forked.stderr
    assert plain.stdout == forked.stdout
    assert "spawn [6.0, 22.0]" in forked.stdout


DIGITS = """\
import hashlib
sys.path.insert(0, {examples!r})
sys.argv = ["torch_digits.py", "--epochs", "1"]
import torch_digits
models = []
build_model = torch_digits.build_model
torch_digits.build_model = lambda: models.append(build_model()) or models[0]
torch_digits.main()
weights = b"".join(each.detach().numpy().tobytes() for each in models[0].parameters())
print("weights", hashlib.sha256(weights).hexdigest())
"""


def test_digits_have_the_same_bits(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = write(tmp_path, DIGITS.format(examples=str(Path(__file__).parents[2] / "examples")))
    hashes = []
    for options in ((), ("--preload", "torch,sklearn.datasets")):
        done = coarse_run("-n", "2", *options, path)
        assert done.returncode == 0, done.stderr
        hashes.append(re.findall(r"^\[w\d\] weights (\w+)$", done.stdout, re.MULTILINE))
    assert len(hashes[0]) == len(hashes[1]) == 2
    assert len({*hashes[0], *hashes[1]}) == 1


# ---- ends ----


SLOW = """\
import os, signal
os.write(1, b"supervisor %d\\npreloader %d\\n" % (os.getppid(), os.getpid()))
if os.fork() == 0:
    os.setsid()
    os.write(1, b"child %d\\n" % os.getpid())
while True:
    signal.pause()
"""


@contextlib.contextmanager
def importing(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """A job whose modules are being imported, without end."""
    (tmp_path / "slow.py").write_text(SLOW)
    with spawned("-n", "2", "--preload", "slow", write(tmp_path, ""), stdout=PIPE, stderr=PIPE) as launcher:
        yield launcher, read_pidfds(launcher.stdout, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_modules_are_imported_ends_the_job_at_once(tmp_path, number):
    with importing(tmp_path) as (launcher, pidfds):
        os.killpg(launcher.pid, number)  # as a terminal does
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        stderr = launcher.communicate(timeout=LIMIT_S)[1].decode()
    assert launcher.returncode == 128 + number
    assert stderr.splitlines()[-1] == f"coarse run: stopped by {number.name}; no worker is left"


@pytest.mark.parametrize("killed", ["launcher", "supervisor", "preloader"])
def test_nothing_outlives_a_kill_while_modules_are_imported(tmp_path, killed):
    with importing(tmp_path) as (launcher, pidfds):
        if killed == "launcher":
            launcher.kill()
        else:
            signal.pidfd_send_signal(pidfds[killed], signal.SIGKILL)
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        stderr = launcher.communicate(timeout=LIMIT_S)[1].decode()
    if killed == "preloader":
        assert launcher.returncode == 126
        assert "--preload slow: the process that imports ended by SIGKILL" in stderr.splitlines()[-1]


FAMILY = """\
import heavy, signal
if rank == "0":
    os.write(1, b"supervisor %d\\nimporter %d\\n" % (os.getppid(), heavy.PID))
if os.fork() == 0:
    os.setsid()
    name = "grandchild"
else:
    name = "worker"
os.write(1, f"{name}{rank} {os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


@contextlib.contextmanager
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """A job whose forked workers wait, with waiting children in their own sessions."""
    path = write(tmp_path, FAMILY)
    with spawned("-n", "2", "--preload", "heavy", path, stdout=PIPE, stderr=PIPE) as launcher:
        launcher.stdout.readline()
        yield launcher, read_pidfds(launcher.stdout, 6)


@pytest.mark.parametrize("killed", ["launcher", "supervisor"])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, killed):
    with family(tmp_path) as (launcher, pidfds):
        if killed == "launcher":
            launcher.kill()
        else:
            signal.pidfd_send_signal(pidfds["supervisor"], signal.SIGKILL)
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        launcher.wait(timeout=LIMIT_S)


def test_workers_go_on_without_the_process_that_they_were_forked_from(tmp_path):
    with family(tmp_path) as (launcher, pidfds):
        signal.pidfd_send_signal(pidfds["importer"], signal.SIGKILL)
        assert b"OMP_NUM_THREADS" in launcher.stderr.readline()
        said = launcher.stderr.readline().decode()
        assert re.match(
            r"coarse run: the process with the modules .* ended by SIGKILL; workers start without", said
        )
        others = {name: pidfd for name, pidfd in pidfds.items() if name != "importer"}
        assert len(all_end_within(0.2, others)) == len(others)
        launcher.send_signal(signal.SIGTERM)
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGTERM


# ---- further starts ----


def test_restarted_workers_are_forked_from_the_same_process(tmp_path):
    text = (
        "import heavy; print(os.environ['TORCHELASTIC_RESTART_COUNT'], heavy.PID, heavy.PID != os.getpid())"
    )
    path = write(
        tmp_path, f"{text}\nos.kill(os.getpid(), 9) if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0"
    )
    done = coarse_run("-n", "2", "--max-restarts", "1", "--preload", "heavy", path)
    assert done.returncode == 0, done.stderr
    (first, *said) = (line.split(" ", 1)[1] for line in done.stdout.splitlines())
    pid = first.split()[-1]
    assert said[-2:] == [f"1 {pid} True"] * 2
    assert set(said) == {f"0 {pid} True", f"1 {pid} True"}


REPLACED = """\
import heavy, signal
from coarse.env import notes_pipe
from coarse.status.launcher_notes import tell_launcher
os.write(1, b"worker%s %d\\n" % (rank.encode(), os.getpid()))
if "COARSE_INVITATION" in os.environ:
    os.write(1, b"imported by %s %d\\n" % (b"me" if heavy.PID == os.getpid() else b"importer", heavy.PID))
    tell_launcher(notes_pipe(), {"entered": int(rank)})
else:
    tell_launcher(notes_pipe(), {"invitation": {}})
while True:
    signal.pause()
"""


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_replacement_imports_only_if_there_is_nothing_to_fork_any_more(tmp_path, is_lost):
    options = (
        "-n",
        "2",
        "--min-workers",
        "1",
        "--on-loss",
        "replace",
        "--max-restarts",
        "3",
        "--preload",
        "heavy",
    )
    path = write(tmp_path, REPLACED)
    with spawned(*options, path, stdout=PIPE, stderr=PIPE, OMP_NUM_THREADS="1") as job:
        importer = int(job.stdout.readline().split()[-1])
        pidfds = read_pidfds(job.stdout, 2)
        if is_lost:
            os.kill(importer, signal.SIGKILL)
            assert b"workers start without it" in job.stderr.readline()
        signal.pidfd_send_signal(pidfds["worker1"], signal.SIGKILL)
        said = [job.stdout.readline().decode().split() for _ in range(3 if is_lost else 2)]
        told = [job.stderr.readline().decode() for _ in range(3)]
        job.terminate()
        job.communicate(timeout=LIMIT_S)
    assert "takes part in the training" in told[-1]
    assert said[-1] == [
        "[w1]",
        "imported",
        "by",
        *(("me", said[-2][-1]) if is_lost else ("importer", str(importer))),
    ]


# ---- refused ----


def refused(
    tmp_path: Path, preload: str, *, variables: dict[str, str] | None = None
) -> tuple[list[str], str]:
    """A job that cannot start: what was said before, and why."""
    done = coarse_run(
        "-n", "2", "--preload", preload, write(tmp_path, "print('started')"), variables=variables
    )
    assert done.returncode == 126, done.stderr
    assert "started" not in done.stdout
    *said, reason = [line for line in done.stderr.splitlines() if not line.startswith("coarse run: OMP")]
    return said, reason.removeprefix(f"coarse run: --preload {preload}: ")


def test_a_module_that_is_unknown(tmp_path):
    reason = "importing torhc failed: ModuleNotFoundError: No module named 'torhc'"
    assert refused(tmp_path, "heavy,torhc") == ([], reason)


def test_a_module_that_cannot_be_imported_is_shown(tmp_path):
    (tmp_path / "broken.py").write_text("import json\njson.loads('{')\n")
    said, reason = refused(tmp_path, "broken")
    assert said[:2] == [
        "[preload] Traceback (most recent call last):",
        f'[preload]   File "{tmp_path / "broken.py"}", line 2, in <module>',
    ]
    assert reason.startswith("importing broken failed: json.decoder.JSONDecodeError: Expecting property name")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise SystemExit(3)", "importing bad failed: SystemExit: 3"),
        ("import os; os._exit(3)", "the process that imports ended by exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "the process that imports ended by SIGSEGV"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), name='poller').start()",
            "bad starts 1 thread(s) (poller) when it is imported, which a fork would lack",
        ),
    ],
)
def test_modules_whose_import_prevents_forks(tmp_path, text, reason):
    (tmp_path / "bad.py").write_text(text)
    assert refused(tmp_path, "heavy,bad")[1] == reason


def test_a_module_that_initialises_cuda(tmp_path, cuda_stand_ins):
    (tmp_path / "gpu.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    _, reason = refused(tmp_path, "gpu", variables={"LD_LIBRARY_PATH": str(cuda_stand_ins)})
    assert reason == "gpu initialises CUDA when it is imported, which does not work in a fork"


MULTIPLIES = """\
import os, numpy
def product():
    return (numpy.ones((512, 512)) @ numpy.ones((512, 512))).sum()
product()
NUM_THREADS = len(os.listdir("/proc/self/task"))
"""


def test_threads_that_end_before_a_fork_are_no_obstacle(tmp_path):
    pytest.importorskip("numpy")
    (tmp_path / "multiplies.py").write_text(MULTIPLIES)
    path = write(tmp_path, "import multiplies; print(multiplies.NUM_THREADS, multiplies.product())")
    done = coarse_run("--preload", "multiplies", path, variables={"OPENBLAS_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "134217728.0"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--preload", "heavy", "--no-python", "true"), "the program of --no-python cannot be forked"),
        (("--preload", "not-a-module", "-m", "train"), "'not-a-module' is no name of a module"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, reason):
    done = coarse_run(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_site_customisation_of_the_user_runs_before_the_imports(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.customised = 'yes'\n")
    (tmp_path / "reader.py").write_text("print(customised)\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])}
    path = write(tmp_path, "import sitecustomize; print(sitecustomize.__file__, os.environ['PYTHONPATH'])")
    done = coarse_run("--preload", "reader", path, variables=variables)
    assert done.returncode == 0, done.stderr
    expected = f"{tmp_path / 'own' / 'sitecustomize.py'} {variables['PYTHONPATH']}"
    assert done.stdout.splitlines() == ["yes", expected]
