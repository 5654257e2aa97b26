"""The `coarse` command: fast to start, and one clear line for a wrong command line."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from coarse.cli.examples import EXAMPLES
from coarse.cli.main import COMMANDS, build_parser, main
from coarse.errors import RendezvousError

REPORT_MODULES = """
import sys
from coarse.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {"torch", "tensorflow", "rich", "numpy"} & sys.modules.keys()
print("code", code, "heavy", sorted(heavy))
"""


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"], ["doctor", "--help"]])
def test_nothing_heavy_is_imported(arguments):
    done = subprocess.run(
        [sys.executable, "-c", REPORT_MODULES, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "code 0 heavy []"


def test_version_names_the_release(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == "coarse 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "-n", "0", "train.py"], "'0' is not a number of workers of one node, from 1 to 256"),
        (["run", "-n", "two", "train.py"], "'two' is not a number of workers"),
        (["run", "-n", "257", "train.py"], "'257' is not a number of workers"),
        (["run", "-n", "2", "--profile", "missing.toml", "-m", "this"], "auto, refresh nor a file"),
        (["bench", "sync", "--json", "missing/it.jsonl"], "there is no folder missing"),
        (["bench", "sync", "--json", "/"], "/: is a folder; name a file"),
        (["bench", "sync", "--workers", "1000"], "'1000' is not a number of workers"),
        (["bench", "train-step", "--budget", "nan"], "'nan' is not a time in seconds"),
        (["bench", "checkpoint", "--folder", "/dev/null/saves"], "/dev/null/saves: /dev/null is no folder"),
        (["profile", "--figures", "/dev/null/saves"], "/dev/null/saves: /dev/null is no folder"),
        (["plan", "--json", "missing/plan.json"], "there is no folder missing"),
        (["run", "-n", "2"], "required: SCRIPT"),
        (["run", "-n", "2", "missing.py"], "missing.py: no such file"),
        (["run", "-n", "2", "python", "script.py"], "python: no such file; name the script itself"),
        (["run", "--no-python", "no-such-program"], "no-such-program: no such program"),
        (["run", "--nnodes", "2", "-m", "this"], "--nnodes 2: needs --master-addr and --master-port"),
        (["run", "--nnodes", "1:2", "-m", "this"], "'1:2': the number of nodes cannot change"),
        (["run", "--nnodes", "0", "-m", "this"], "'0' is not a whole number from 1 on"),
        (["run", "--nnodes", "2", "--standalone", "-m", "this"], "--standalone is for one node"),
        (["run", "--node-rank", "1", "-m", "this"], "--node-rank 1 of --nnodes 1: nodes are numbered from 0"),
        (["run", "--node-rank", "-1", "-m", "this"], "'-1' is not a whole number from 0 on"),
        (["run", "--master-port", "70000", "-m", "this"], "'70000' is not a port"),
        (["run", "--shard-bytes", "4 apples", "-m", "this"], "'4 apples' is not a size"),
        (["run", "--timeout", "nan", "-m", "this"], "COARSE_TIMEOUT_S=nan is out of range"),
        (["run", "--algorithm", "magic", "-m", "this"], "COARSE_ALGORITHM='magic' must be one of"),
        (["run", "--redirects", "1", "-m", "this"], "needs --log-dir"),
        (["run", "-m", "--no-python", "this"], "not allowed with"),
        (["run", "--max-restarts", "-1", "-m", "this"], "'-1' is not a whole number from 0 on"),
        (["run", "--rdzv-backend", "etcd", "-m", "this"], "unrecognized arguments: --rdzv-backend"),
    ],
)
def test_a_wrong_command_line_gives_one_line_and_exit_code_2(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_a_command_the_choices_are_named(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in ("run", "doctor", "device", "bench"))


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of all its commands and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def test_every_help_fits_80_columns_and_ends_with_examples(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    texts = {each.prog: each.format_help() for each in parsers(build_parser(tuple(COMMANDS)))}
    assert EXAMPLES.keys() == texts.keys() - {"coarse device"}
    for prog, text in texts.items():
        assert max(map(len, text.splitlines())) <= 80, text
        shown = text.partition("\nexamples:\n")[2]
        assert all(
            f"  {command}" in shown and purpose in shown
            for command, purpose in EXAMPLES.get(prog, {}).items()
        )


def test_every_example_is_a_command_line_of_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = build_parser(tuple(COMMANDS))
    for prog, command in [(prog, command) for prog, examples in EXAMPLES.items() for command in examples]:
        assert command.startswith(prog)
        words = shlex.split(command)
        words = words[1 : next((at for at, word in enumerate(words) if word in (">", "|")), None)]
        if words[-1] != "--help":
            assert parser.parse_args(words).command == words[0]


@pytest.mark.parametrize(
    ("error", "exit_code", "stderr"),
    [
        (RendezvousError("rank 1 never came"), 1, "coarse fail: RendezvousError: rank 1 never came\n"),
        (
            PermissionError(13, "Permission denied", "/a/b"),
            1,
            "coarse fail: [Errno 13] Permission denied: '/a/b'\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_expected_errors_of_a_command_give_one_line(error, exit_code, stderr, monkeypatch, capsys):
    def fail(arguments):
        if isinstance(error, signal.Signals):
            signal.raise_signal(error)
        raise error

    def add_parser(subparsers):
        subparsers.add_parser("fail").set_defaults(handler=fail)

    monkeypatch.setattr("coarse.cli.main.COMMANDS", {"fail": "fail_module"})
    monkeypatch.setitem(sys.modules, "fail_module", SimpleNamespace(add_parser=add_parser))
    assert main(["fail"]) == exit_code
    assert capsys.readouterr().err == stderr


@pytest.mark.parametrize(
    ("redirection", "exit_code", "stderr"),
    [
        ("| true", 128 + signal.SIGPIPE, ""),
        ("> /dev/full", 1, "coarse machine: [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(redirection, exit_code, stderr):
    # What reads the pipe has gone before anything is written.
    command = f"set -o pipefail; (sleep 1; exec {sys.executable} -m coarse machine list --json) {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (exit_code, stderr, "")


@pytest.mark.parametrize("bench", ["sync", "train-step"])
def test_emulated_links_are_not_compared_with_measured_ones(bench, monkeypatch, capsys):
    monkeypatch.setenv("COARSE_MACHINE", "aws-p3")
    assert main(["bench", bench]) == 2
    assert "do not compare with peers" in capsys.readouterr().err
