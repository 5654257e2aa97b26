"""The progress bar of saves: only on a terminal, and only if the save takes long enough."""

from __future__ import annotations

import io
import sys

import pytest

from coarse.checkpoint import progress as module
from coarse.checkpoint.progress import SaveProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream, *, patience_s):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "_PATIENCE_S", patience_s)
    with SaveProgress("step 7") as progress:
        for done in range(0, 101, 10):
            progress(done << 20, 100 << 20)
    return stream.getvalue()


def test_a_long_save_shows_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "checkpoint step 7" in shown(monkeypatch, Terminal(), patience_s=0.0)


@pytest.mark.parametrize(("stream", "patience_s"), [(Terminal(), 1e9), (io.StringIO(), 0.0)])
def test_a_short_save_and_a_log_show_nothing(monkeypatch, stream, patience_s):
    assert shown(monkeypatch, stream, patience_s=patience_s) == ""
