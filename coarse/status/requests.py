"""Asks the processes of a job what they do. The kernel's view describes one that does not answer in time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coarse.security.local_sockets import peer_of
from coarse.status.address import Address
from coarse.status.processes import describe_process
from coarse.status.responder import STACKS, STATUS, Report
from coarse.status.stacks import Stack

_MOST_BYTES = 16 << 20
_AT_ONCE = 32


class NotAnsweringError(OSError):
    """The process is there and has not answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One process's answer about itself.

    Args:
        address: Address of the process.
        report: Its answer; None if it has not answered in time.
        state: The kernel's view of a process that has not answered, in words.
    """

    address: Address
    report: Report | None
    state: str = ""

    @property
    def stacks(self) -> list[Stack]:
        """The stacks that were asked for, the main thread's first; empty without an answer."""
        return [] if self.report is None else [Stack.from_json(each) for each in self.report["stacks"]]

    def describe_place(self) -> str:
        """Where the process is, in words."""
        if self.report is None:
            return f"does not answer: {self.state}"
        stacks = self.stacks
        return f"is in {stacks[0].in_a_line()}" if stacks and stacks[0].frames else "runs no Python"


def ask(addresses: Sequence[Address], *, with_stacks: bool = False, timeout_s: float = 1.0) -> list[Answer]:
    """Asks processes at the same time; leaves out those that have ended or belong to somebody else.

    Args:
        addresses: Whom to ask.
        with_stacks: Whether to ask for the stacks of all threads, not only of the main one.
        timeout_s: Longest wait for each.
    """
    if len(addresses) < 2:  # needs no threads, which a process that ends cannot start
        return [answer for each in addresses if (answer := _ask_one(each, with_stacks, timeout_s))]
    with ThreadPoolExecutor(min(_AT_ONCE, len(addresses)), thread_name_prefix="coarse-ask") as pool:
        answers = pool.map(lambda each: _ask_one(each, with_stacks, timeout_s), addresses)
        return [answer for answer in answers if answer is not None]


def ask_for(address: Address, question: str, *, timeout_s: float = 1.0) -> Report:
    """One process's answer to a further question of its responder; {} without an answer.

    Args:
        address: Whom to ask.
        question: METRICS or PLAN.
        timeout_s: Longest wait.
    """
    try:
        return _request(address, question, timeout_s)
    except (OSError, ValueError):
        return {}


def _ask_one(address: Address, with_stacks: bool, timeout_s: float) -> Answer | None:
    try:
        report = _request(address, STACKS if with_stacks else STATUS, timeout_s)
    except NotAnsweringError:
        state = describe_process(address.pid)
        return Answer(address=address, report=None, state=state) if state else None
    except (OSError, ValueError):  # it has ended, or is a stranger
        return None
    return Answer(address=address, report=report)


def _request(address: Address, question: str, timeout_s: float) -> Report:
    """Sends a question and reads the answer.

    Raises:
        NotAnsweringError: If no answer comes in time.
        OSError: If nobody listens, or another process than the address says.
        ValueError: If the answer is none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.name)
            if peer_of(connection) != (address.pid, os.geteuid()):
                raise PermissionError(f"another process listens in place of {address.process}")
            connection.sendall(question.encode())
            data = bytearray()
            while (part := connection.recv(1 << 16)) and len(data) < _MOST_BYTES:
                data += part
        except (TimeoutError, BlockingIOError) as error:  # the latter: many questions wait already
            raise NotAnsweringError(f"{address.process} has not answered within {timeout_s:g} s") from error
    report = json.loads(data)
    if not isinstance(report, dict):
        raise ValueError(f"{address.process} has answered with {type(report).__name__}")
    return report
