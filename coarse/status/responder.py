"""Answers the questions of `coarse status` in a daemon thread, which needs no cooperation of the main thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeAlias

from coarse.security.local_sockets import peer_of
from coarse.status.address import Address
from coarse.status.stacks import read_stacks

logger = logging.getLogger(__name__)

Report: TypeAlias = dict[str, Any]
"""A process's answer about itself, as JSON values."""

STATUS, STACKS = "status", "stacks"
"""Questions that every process answers."""

METRICS, PLAN = "metrics", "plan"
"""Questions of the dashboard: the metrics of the node; the session's decisions."""

MoreAnswers: TypeAlias = Mapping[str, Callable[[], Report]]
"""Answers to further questions; called in the responder's thread."""

_NOTHING_MORE: MoreAnswers = MappingProxyType({})

LOOK_INTERVAL_S = 1.0
_BACKLOG = 64
_PEER_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 2.0
_AFTER_FAILURE_S = 0.1


class Responder:
    """Answers processes of this user until close(). A fork of this process does not answer.

    Args:
        address: Where it answers.
        report: Returns what this process does; called in the responder's thread.
        look: Called once a second in the responder's thread.
        more: Answers to further questions; {} is the answer to any other one.

    Raises:
        OSError: If it cannot listen.
    """

    def __init__(
        self,
        address: Address,
        report: Callable[[], Report],
        look: Callable[[], None] = lambda: None,
        more: MoreAnswers = _NOTHING_MORE,
    ) -> None:
        self.address = address
        self._report = report
        self._look = look
        self._more = more
        self._pid = os.getpid()
        self._began_s = time.time()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address.name)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        close_in_fork = weakref.WeakMethod(self._close_listener)
        os.register_at_fork(after_in_child=lambda: (close := close_in_fork()) is not None and close())
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="coarse-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering. Idempotent."""
        if os.getpid() != self._pid or self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_TIMEOUT_S)
        self._close_listener()

    def _close_listener(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        next_look_s = time.monotonic() + LOOK_INTERVAL_S
        while not self._is_closing:
            found = poll.poll(1000 * max(0.0, next_look_s - time.monotonic()))
            if self._is_closing or any(events & ~select.POLLIN for _, events in found):
                return  # in the latter case, the program has closed all descriptors
            try:
                if found:
                    self._answer_next()
                if time.monotonic() >= next_look_s:
                    next_look_s = time.monotonic() + LOOK_INTERVAL_S
                    self._look()
            except Exception:  # a question must not end the answers, and the job must not notice
                logger.debug("a question about this process's status has failed", exc_info=True)
                time.sleep(
                    _AFTER_FAILURE_S
                )  # if the descriptor leads elsewhere by now, it fails all the time

    def _answer_next(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has left again
            return
        with connection:
            pid, user = peer_of(connection)
            if user != os.geteuid() or pid == 0:  # 0: of another container, on the host's network
                return
            connection.settimeout(_PEER_TIMEOUT_S)
            question = connection.recv(64).decode(errors="replace")
            answer = json.dumps(self._answer(question), ensure_ascii=False)
            connection.sendall(
                answer.encode(errors="replace")
            )  # names of files may have bytes that are no UTF-8

    def _answer(self, question: str) -> Report:
        if question not in (STATUS, STACKS):
            return self._more.get(question, dict)()
        stacks = read_stacks()
        shown = stacks if question == STACKS else stacks[:1]
        common = {"program": os.path.basename(sys.argv[0]), "began_s": self._began_s}
        return common | self._report() | {"stacks": [asdict(each) for each in shown]}


def try_respond(
    address: Address,
    report: Callable[[], Report],
    look: Callable[[], None] = lambda: None,
    more: MoreAnswers = _NOTHING_MORE,
) -> Responder | None:
    """A Responder; None, with a line in the log, if the system allows no socket or thread: the job needs neither."""
    try:
        return Responder(address, report, look, more)
    except (OSError, RuntimeError) as error:
        logger.info("%s does not answer coarse status: %s", address.process, error)
        return None
