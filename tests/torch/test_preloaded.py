"""Forks of a process that has imported PyTorch run scripts as `python` does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import preloaded
import pytest
from preloaded import ForkedProcess

TELLS = """
import json, os, sys
had_torch = "torch" in sys.modules
import beside, tempfile
os.write(int(sys.argv[1]), b"passed on")
places = [__file__, beside.__name__, os.getcwd(), tempfile.gettempdir()]
print(json.dumps([had_torch, __name__, sys.argv[1:], os.environ["RANK"], "HOME" in os.environ, *places]))
"""


def start(folder: Path, text: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> ForkedProcess:
    """A process of a script, which prints to a file beside it."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"RANK": "7", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "printed").open("w") as output:
        return preloaded.start(script, arguments, environment, output=output.fileno(), pass_fds=pass_fds)


def test_a_script_has_arguments_environment_folders_and_descriptors(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    ours, theirs = os.pipe()
    process = start(tmp_path, TELLS, str(theirs), "--flag", pass_fds=(theirs,))
    os.close(theirs)
    code, printed = process.wait(60), (tmp_path / "printed").read_text()
    assert code == 0, printed
    places = [str(tmp_path / "script.py"), "beside", os.getcwd(), str(tmp_path)]
    assert json.loads(printed) == [True, "__main__", [str(theirs), "--flag"], "7", False, *places]
    with open(ours, "rb") as passed:
        assert passed.read() == b"passed on", "and no other process keeps its end open"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; print('bye'); sys.exit(3)", 3, "bye\n"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import subprocess; subprocess.run(['false'], check=True)", 1, "exit status 1.\n"),
    ],
)
def test_a_script_ends_as_a_process_does(tmp_path: Path, text: str, code: int, said: str) -> None:
    ended = start(tmp_path, text).wait(60)
    printed = (tmp_path / "printed").read_text()
    assert ended == code, printed
    assert printed.endswith(said)


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "import signal; signal.pause()")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.kill()
    assert process.wait(60) == -9
    process.kill()
