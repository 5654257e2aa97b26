"""`coarse profile`: measures, stores, shows without measuring, measures again; one-line errors."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from harness import LIMIT_S

from coarse.cli.main import main
from coarse.profiler.profile import Profile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coarse" / "profiles"


def test_measures_keeps_and_shows(tmp_path, cache, capsys):
    file = tmp_path / "out" / "profile.json"
    arguments = ["profile", "--budget", "0", "--json", str(file)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "host: 2 workers, 2 memory devices; measured on" in shown
    for words in (
        "Highest bandwidth, GB/s",
        "Time of 4096 bytes",
        "alpha, us",
        "LatProxy",
        "smallest tested size",
    ):
        assert words in shown
    (kept,) = cache.iterdir()
    assert kept.read_text() == file.read_text()
    assert {point.nbytes for point in Profile.load(file).curve("push", 0, 1).points} == {
        4096 << power for power in range(15)
    }

    written = kept.stat().st_mtime_ns
    assert main(arguments) == 0
    assert f"kept in {kept}" in capsys.readouterr().out.replace("\n", "")
    assert kept.stat().st_mtime_ns == written, "it was measured again"
    assert main([*arguments, "--refresh"]) == 0
    assert kept.stat().st_mtime_ns > written

    assert main(["plan", "--profile", str(file)]) == 0
    assert "measured, from" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_that_is_told_to_end_leaves_nothing(tmp_path, number):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "coarse", "profile", "--refresh", "--budget", "60"]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as profile:
        until = time.monotonic() + LIMIT_S
        while not list(temporary.glob("*/progress.value")) and time.monotonic() < until:
            time.sleep(0.01)
        profile.send_signal(number)
        _, stderr = profile.communicate(timeout=LIMIT_S)
    assert profile.returncode == 128 + number, stderr.decode()
    assert not list(temporary.iterdir())


def test_a_result_may_go_to_a_device_or_through_a_link(tmp_path, capsys):
    """Devices and links are not replaced, and the error for an unwritable one contains its name."""
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        full.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root can make devices, and not in every container")
    assert main(["profile", "--budget", "0", "--json", str(full)]) == 1
    assert f"coarse profile: {full}: No space left on device" in capsys.readouterr().err
    assert full.is_char_device()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    assert main(["profile", "--budget", "0", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert Profile.load(tmp_path / "file")


def test_a_damaged_result_is_measured_anew(cache, capsys):
    arguments = ["profile", "--workers", "2", "--memory-devices", "1", "--budget", "0"]
    assert main(arguments) == 0
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text()[:1000])
    capsys.readouterr()
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "measuring anew" in captured.err
    assert "cut off or not JSON" in captured.err
    assert json.loads(kept.read_text())["key"]["num_devices"] == 1


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["profile", "--budget", "0", "--figures", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    stems = {"bandwidth-matrix", "by-size-w0", "by-size-w1", "remote-to-local-w0", "remote-to-local-w1"}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}
    assert "(measured)" in (tmp_path / "figures" / "bandwidth-matrix.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "1"], "--workers 1"),
        (["--memory-devices", "65"], "--memory-devices 65"),
        (["--budget", "nan"], "--budget nan"),
        (["--partition-table", "no-such-table"], "no-such-table"),
        (["--partition-table", "aws-p3", "--workers", "3"], "is for 4 workers, but this job has 3"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, expected, capsys):
    assert main(["profile", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--memory-devices", "numa:9999"], "there is no NUMA node 9999 on this machine; there are "),
        (["--memory-devices", "dax:/dev/none"], "/dev/none: No such file or directory"),
        (
            ["--machine", "aws-p3", "--memory-devices", "cuda:0,cuda:1000"],
            "memory device cuda:",
        ),
    ],
    ids=["numa", "dax", "cuda"],
)
def test_memory_that_is_not_there_is_refused_with_the_reason_alone(arguments, reason, capfd):
    assert main(["profile", *arguments]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"coarse profile: {reason}")
    assert "coarse run" not in line
    assert "--help" not in line


def test_a_failure_of_the_workers_is_told_in_one_line(tmp_path):
    environment = {**os.environ, "COARSE_TIMEOUT_S": "0.001"}
    done = subprocess.run(
        [sys.executable, "-m", "coarse", "profile", "--budget", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1
    assert "MeasurementError" in done.stderr
    assert "Traceback" not in done.stderr
