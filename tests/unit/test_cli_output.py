"""Worker output: whole lines stay whole, progress bars are redrawn in place, nothing is lost."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.cli.workers.output import Console, LineSplitter, OutputPipe, Piece, Screen, StartupNotes, Tail


def pieces_of(*chunks: bytes) -> list[Piece]:
    splitter = LineSplitter()
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + list(splitter.finish())


def lines_of(*chunks: bytes) -> bytes:
    return b"".join(piece.text for piece in pieces_of(*chunks) if not piece.is_update)


def test_a_line_waits_until_it_is_whole():
    splitter = LineSplitter()
    assert list(splitter.feed(b"first\nsec")) == [Piece(b"first\n")]
    assert list(splitter.feed(b"ond\n")) == [Piece(b"second\n")]
    assert list(splitter.finish()) == []


def test_the_end_of_the_stream_ends_the_last_line():
    assert pieces_of(b"no newline") == [Piece(b"no newline\n")]


@given(st.lists(st.binary().map(lambda text: text.replace(b"\r", b"")), max_size=8))
def test_lines_do_not_depend_on_where_reads_cut_the_stream(chunks: list[bytes]):
    stream = b"".join(chunks)
    missing_end = b"\n" if stream and not stream.endswith(b"\n") else b""
    assert lines_of(*chunks) == stream + missing_end


@given(st.text(alphabet="ab\r\n").map(str.encode), st.integers(0, 20))
def test_what_a_terminal_would_show_does_not_depend_on_the_cut(stream: bytes, cut: int):
    assert lines_of(stream[:cut], stream[cut:]) == lines_of(stream)


def test_a_progress_bar_that_begins_with_a_carriage_return_is_shown_at_once():
    splitter = LineSplitter()
    assert list(splitter.feed(b"\r 10%")) == [Piece(b" 10%", is_update=True)]
    assert list(splitter.feed(b"\r 20%")) == [Piece(b" 20%", is_update=True)]
    assert list(splitter.feed(b"\n")) == [Piece(b" 20%\n")]


def test_a_progress_bar_that_ends_with_a_carriage_return_is_shown_at_once_and_only_once():
    splitter = LineSplitter()
    assert list(splitter.feed(b"10%\r")) == [Piece(b"10%", is_update=True)]
    assert list(splitter.feed(b"20%\r")) == [Piece(b"20%", is_update=True)]
    assert list(splitter.feed(b"done\n")) == [Piece(b"done\n")]


def test_windows_line_ends_are_lines_even_if_a_read_cuts_them():
    assert lines_of(b"one\r", b"\ntwo\r\n") == b"one\r\ntwo\r\n"


def test_an_endless_line_is_cut():
    splitter = LineSplitter()
    cut = [piece for _ in range(40) for piece in splitter.feed(b"x" * 65536)]
    assert cut
    assert all(piece.text.endswith(b"\n") for piece in cut)


def shown(is_terminal: bool, *events: tuple[str, Piece]) -> bytes:
    console = Console(1, Screen(), is_terminal)
    return b"".join(console.render(owner, b"[%b] " % owner.encode(), piece) for owner, piece in events)


BAR = Piece(b"50%", is_update=True)
LINE = Piece(b"loss 1.0\n")


@pytest.mark.parametrize(
    ("is_terminal", "events", "expected"),
    [
        (True, [("w0", LINE), ("w1", LINE)], b"[w0] loss 1.0\n[w1] loss 1.0\n"),
        (True, [("w0", BAR), ("w0", BAR)], b"[w0] 50%\r[w0] 50%"),
        (True, [("w0", BAR), ("w1", LINE)], b"[w0] 50%\r\x1b[K[w1] loss 1.0\n"),
        (False, [("w0", BAR), ("w1", LINE)], b"[w0] 50%\n[w1] loss 1.0\n"),
        (True, [("w0", BAR), ("w1", LINE), ("w0", BAR)], b"[w0] 50%\r\x1b[K[w1] loss 1.0\n[w0] 50%"),
    ],
)
def test_a_line_never_lands_behind_a_foreign_progress_bar(is_terminal, events, expected):
    assert shown(is_terminal, *events) == expected


def test_a_tail_keeps_the_last_bytes():
    tail = Tail(limit_bytes=4)
    tail.feed(b"abc")
    tail.feed(b"def")
    assert tail.text == "cdef"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(writer)


def test_a_channel_that_nobody_reads_tells_it_and_drops_what_comes(pipe):
    reader, writer = pipe
    nobody_reads, broken = os.pipe()
    os.close(nobody_reads)
    told: list[OSError] = []
    channel = OutputPipe(reader, b"", Console(broken, Screen(), False), on_unread=told.append)
    for line in (b"lost\n", b"more\n"):
        os.write(writer, line)
        assert channel.pump()
    channel.close()
    assert [type(error) for error in told] == [BrokenPipeError]
    os.close(broken)


def test_a_tail_knows_when_the_last_traceback_began_however_reads_cut_it():
    tail = Tail()
    tail.feed(b"warning\nTraceback (most rec")
    assert tail.traceback_s is None
    tail.feed(b"ent call last):\n")
    began_s = tail.traceback_s
    assert began_s is not None
    tail.feed(b"ValueError: boom\n")
    assert tail.traceback_s == began_s


ABSL = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
ONEDNN = b"I0000 00:00:%d.609253   11390 port.cc:153] oneDNN custom operations are on. You may see\n"


@pytest.mark.parametrize(("is_shown", "shown"), [(True, ABSL + ONEDNN % 17), (False, b"")])
def test_tensorflows_notes_are_shown_once_or_not_at_all_and_logged(pipe, tmp_path, is_shown, shown):
    reader, writer = pipe
    seen, terminal = os.pipe()
    said = ABSL + ONEDNN % 17 + b"I0000 other.cc:1] line\n" + ABSL + ONEDNN % 26
    with (tmp_path / "log").open("w+b") as log:
        console = Console(terminal, Screen(), False)
        channel = OutputPipe(reader, b"", console, log.fileno(), notes=StartupNotes(is_shown=is_shown))
        os.write(writer, said)
        assert channel.pump()
        channel.close()
    os.close(terminal)
    with open(seen, "rb") as reading:
        assert reading.read() == shown + b"I0000 other.cc:1] line\n"
    assert (tmp_path / "log").read_bytes() == said


def test_what_goes_to_a_log_alone_is_shown_when_the_disk_is_full(pipe):
    reader, writer = pipe
    shown, terminal = os.pipe()
    with open("/dev/full", "wb", buffering=0) as log:
        channel = OutputPipe(reader, b"[w1] ", None, log.fileno(), instead=Console(terminal, Screen(), False))
        os.write(writer, b"one\n")
        assert channel.pump()
        os.write(writer, b"two\n")
        assert channel.pump()
        channel.close()
    os.close(terminal)
    with open(shown, "rb") as reading:
        assert reading.read().splitlines() == [
            b"[w1] coarse run: log stopped: No space left on device",
            b"[w1] one",
            b"[w1] two",
        ]


def test_a_channel_goes_on_logging_when_its_reader_is_gone(pipe, tmp_path):
    reader, writer = pipe
    nobody_reads, broken = os.pipe()
    os.close(nobody_reads)
    with (tmp_path / "log").open("w+b") as log:
        channel = OutputPipe(reader, b"", Console(broken, Screen(), False), log.fileno())
        os.write(writer, b"kept\n")
        assert channel.pump()
        channel.close()
        assert (tmp_path / "log").read_bytes() == b"kept\n"
    os.close(broken)
