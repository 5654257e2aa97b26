"""TerminationNotice: the first SIGTERM is noted if the worker may leave, and ends the process otherwise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from coarse.client.membership import termination_notice
from coarse.client.membership.termination_notice import TerminationNotice


@pytest.fixture(autouse=True)
def usual_effect() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def opened(*, may_leave: bool = True, told: list[str] | None = None) -> TerminationNotice:
    notice = TerminationNotice(lambda: may_leave, lambda: (told if told is not None else []).append("told"))
    notice.open()
    return notice


def fate_of_child(function: Callable[[], object]) -> int:
    """The exit code of a fork that calls `function`, as of Popen."""
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_signal_is_noted_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    notice = opened(told=told)
    assert not notice.has_come
    signal.raise_signal(signal.SIGTERM)
    assert told == ["told"]
    assert not notice.has_come, "a launcher that ends all workers sends it again"
    monkeypatch.setattr(termination_notice, "_CONFIRMED_AFTER_S", 0.0)
    assert notice.has_come


@pytest.mark.parametrize(
    ("may_leave", "num_signals", "fate"), [(True, 1, 0), (True, 2, -15), (False, 1, -15)]
)
def test_a_second_signal_ends_the_process_and_so_does_the_first_where_it_may_not_leave(
    may_leave: bool, num_signals: int, fate: int
) -> None:
    def receive() -> None:
        opened(may_leave=may_leave)
        for _ in range(num_signals):
            signal.raise_signal(signal.SIGTERM)

    assert fate_of_child(receive) == fate


def test_a_handler_of_the_script_counts() -> None:
    taken: list[int] = []

    def handle(number: int, frame: object) -> None:
        taken.append(number)

    signal.signal(signal.SIGTERM, handle)
    before = opened()
    signal.raise_signal(signal.SIGTERM)
    before.close()
    assert signal.getsignal(signal.SIGTERM) is handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    after = opened()
    signal.signal(signal.SIGTERM, handle)
    signal.raise_signal(signal.SIGTERM)
    after.close()
    assert signal.getsignal(signal.SIGTERM) is handle
    assert taken == [signal.SIGTERM] * 2


def test_close_gives_the_signal_its_usual_effect_back() -> None:
    opened().close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_fork_ends_by_the_signal() -> None:
    notice = opened()
    assert fate_of_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
    notice.close()


def test_other_threads_open_nothing() -> None:
    thread = threading.Thread(target=opened)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
