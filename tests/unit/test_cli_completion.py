"""`coarse completion`: bash completes commands and options by the script that is printed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from coarse.cli.main import main

ASK = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
_shtab_coarse
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(script: str, words: str) -> list[str]:
    asked = script + ASK.format(words=words)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
def test_bash_completes_commands_and_options(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "coarse pro") == ["profile"]
    assert completed(script, "coarse run --max-r") == ["--max-restarts"]
    assert "verify" in completed(script, "coarse checkpoint ver")


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err
