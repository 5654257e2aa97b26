"""Data that a socket does not accept immediately is sent later."""

from __future__ import annotations

import contextlib
import socket
import threading

from coarse.proxy import outbox
from coarse.proxy.event_loop import EventLoop
from coarse.wire.messages import ControlChannel

MESSAGES = 2000


def connected():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ControlChannel(ours), ControlChannel(theirs)


def test_messages_to_one_who_reads_late_arrive_in_order():
    loop = EventLoop()
    with contextlib.closing(loop):
        sender, reader = connected()
        loop.watch(sender.fileno(), lambda: None)
        for number in range(MESSAGES):
            outbox.send(loop, sender, {"type": "number", "number": number})
        assert not sender.flush(), "the socket takes all at once: send more"
        heard = []
        thread = threading.Thread(
            target=lambda: heard.extend(reader.receive().message["number"] for _ in range(MESSAGES))
        )
        thread.start()
        while thread.is_alive():
            loop.run_once(0.05)
        assert heard == list(range(MESSAGES))
        assert sender.flush()
        sender.close()
        reader.close()


def test_a_socket_that_takes_all_is_not_looked_at_again():
    loop = EventLoop()
    with contextlib.closing(loop):
        sender, reader = connected()
        calls = []
        loop.watch(sender.fileno(), lambda: calls.append("read"))
        loop.flush_later(sender.fileno(), lambda: calls.append("flush") or True)
        for _ in range(3):
            loop.run_once(0.01)
        assert calls == ["flush"]
        sender.close()
        reader.close()
