"""`coarse run`: workers get their identity; all their output arrives, marked, on the right stream."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, coarse_run, environment, spawned

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COARSE_SYNC_CORES", "OMP_NUM_THREADS")


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(f"import os, sys\nrank = int(os.environ['RANK'])\n{text}\n")
        return path

    return write


def without_notes(stderr: str) -> str:
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("coarse run: "))


def test_workers_know_who_they_are(script):
    path = script(f"import json; print(json.dumps([os.environ[name] for name in {NAMES}]))")
    done = coarse_run("-n", "2", "--sync-cores", "3", path, variables={"OMP_NUM_THREADS": "5"})
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert json.loads(said["[w0]"]) == ["0", "2", "0", "2", "3", "5"]
    assert json.loads(said["[w1]"]) == ["1", "2", "1", "2", "3", "5"]
    assert done.stderr == ""


def test_a_thread_count_that_is_chosen_is_told_in_one_line(script):
    done = coarse_run("-n", "2", script("print(os.environ['OMP_NUM_THREADS'])"))
    (note,) = done.stderr.splitlines()
    threads = done.stdout.split()[-1]
    assert f"OMP_NUM_THREADS={threads}" in note


def test_arguments_reach_the_script_as_they_are(script):
    done = coarse_run(script("print(sys.argv[1:])"), "--lr", "3", "-n", "7", "--", "last")
    assert done.stdout == "['--lr', '3', '-n', '7', '--', 'last']\n"


def test_a_module_is_run_by_its_name(script, tmp_path):
    script("print(__name__, sys.argv[1:])")
    variables = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])}
    done = coarse_run("-n", "2", "-m", "train", "x", variables=variables)
    assert sorted(done.stdout.splitlines()) == ["[w0] __main__ ['x']", "[w1] __main__ ['x']"]


def test_a_program_is_run_without_python():
    done = coarse_run("-n", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(done.stdout.splitlines()) == ["[w0] 0 of 2", "[w1] 1 of 2"]


def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x00 not a program")
    program.chmod(0o700)
    done = coarse_run("-n", "2", "--no-python", program)
    assert done.returncode == 126
    assert "cannot start worker 0" in done.stderr.splitlines()[-1]


def test_stdout_and_stderr_stay_apart(script):
    done = coarse_run("-n", "2", script("print('out'); print('err', file=sys.stderr)"))
    assert sorted(done.stdout.splitlines()) == ["[w0] out", "[w1] out"]
    assert sorted(without_notes(done.stderr).splitlines()) == ["[w0] err", "[w1] err"]


def test_one_worker_alone_is_not_marked(script):
    done = coarse_run(script("print('out'); print('err', file=sys.stderr)"))
    assert (done.stdout, without_notes(done.stderr)) == ("out\n", "err\n")


def test_nothing_is_lost_and_no_line_is_torn(script):
    path = script("sys.stdout.write(''.join(f'{rank}:{i}\\n' for i in range(20000)) + 'no newline')")
    done = coarse_run("-n", "2", path)
    for rank in range(2):
        mark = f"[w{rank}] "
        said = [line.removeprefix(mark) for line in done.stdout.splitlines() if line.startswith(mark)]
        assert said == [f"{rank}:{i}" for i in range(20000)] + ["no newline"]


def test_bytes_that_are_no_text_pass(script):
    path = script("sys.stdout.buffer.write(b'\\xff\\xfe' + str(rank).encode())")
    with spawned("-n", "2", "--log-dir", path.parent / "logs", path, stdout=PIPE) as process:
        stdout, _ = process.communicate(timeout=LIMIT_S)
    assert sorted(stdout.splitlines()) == [b"[w0] \xff\xfe0", b"[w1] \xff\xfe1"]
    assert (path.parent / "logs" / "worker-1.log").read_bytes() == b"\xff\xfe1"


def test_a_progress_bar_arrives_while_it_moves(script, tmp_path):
    os.mkfifo(tmp_path / "go")
    path = script(
        "if rank == 0:\n"
        "    sys.stderr.write('\\r 50%')\n"
        f"    open({str(tmp_path / 'go')!r}).read()\n"
        "    sys.stderr.write('\\r100%\\n')\n"
    )
    with spawned("-n", "2", path, stderr=PIPE, OMP_NUM_THREADS="1") as process:
        assert process.stderr.read(9) == b"[w0]  50%"
        (tmp_path / "go").write_text("")
        assert process.communicate(timeout=LIMIT_S)[1] == b"\r[w0] 100%\n"


def test_logs_hold_what_each_worker_printed(script, tmp_path):
    path = script("print('out', rank, flush=True); print('err', rank, file=sys.stderr)")
    done = coarse_run("-n", "2", "--log-dir", tmp_path / "logs", "--redirects", "1", path)
    assert done.stdout == ""
    assert sorted(without_notes(done.stderr).splitlines()) == ["[w0] err 0", "[w1] err 1"]
    logs = {entry.name: entry.read_text() for entry in (tmp_path / "logs").iterdir()}
    assert logs == {"worker-0.log": "out 0\nerr 0\n", "worker-1.log": "out 1\nerr 1\n"}


def test_no_prefix_gives_worker_0_the_terminal_itself(script):
    terminal, its_end = os.openpty()
    path = script("print('terminal' if sys.stdout.isatty() else 'pipe')")
    with spawned("-n", "2", "--no-prefix", path, stdout=its_end) as process:
        assert process.wait(timeout=LIMIT_S) == 0
    os.close(its_end)
    assert sorted(os.read(terminal, 4096).splitlines()) == [b"[w1] pipe", b"terminal"]
    os.close(terminal)


def test_worker_0_reads_stdin_and_the_others_do_not(script):
    path = script("print(repr(sys.stdin.read()))")
    with spawned("-n", "2", path, stdin=PIPE, stdout=PIPE) as process:
        stdout, _ = process.communicate(b"question", timeout=LIMIT_S)
    assert sorted(stdout.splitlines()) == [b"[w0] 'question'", b"[w1] ''"]


def test_workers_end_without_tracebacks_when_nobody_reads_them(script):
    path = script("while True: print('again')")
    with spawned("-n", "2", path, stdout=PIPE, stderr=PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in stderr
    assert stderr.splitlines()[-1].endswith(
        b"stopped, because nothing reads the output any more; no worker is left"
    )
