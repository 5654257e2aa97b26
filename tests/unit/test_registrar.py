"""Failed registrations leave nothing behind: no group that waits forever, no descriptor that keeps memory."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from types import SimpleNamespace

import pytest

from coarse.client.control.connection import DeviceConnection, collect_replies
from coarse.errors import OutOfDeviceMemoryError
from coarse.proxy.memory import HostMemory
from coarse.proxy.registrar import Registrar
from coarse.schema import TensorSpec
from coarse.wire.messages import ControlChannel
from coarse.wire.registration import GroupSchema

SPEC = TensorSpec(name="tensor", dtype="float32", num_elements=10)
SCHEMA = GroupSchema(name="model", specs=(SPEC,), shard_bytes=64, gather_bytes=0, algorithm="auto")
GROUP = 7


def test_memory_of_a_group_that_all_workers_have_given_up_is_given_back():
    """Another device may have allocated its share of what this one has refused."""
    kept = SimpleNamespace(forget=lambda group: None)
    registrar = Registrar(
        SimpleNamespace(num_clients=2, replaces_workers=False),
        SimpleNamespace(own=None, common=None),
        lambda *_: None,
        lambda *_: None,
        None,
        kept,
        kept,
    )
    for client in range(2):
        registrar.register(client, SCHEMA.to_message(GROUP))
    for client in range(2):
        registrar.unregister(client, {"group": GROUP}, None)
    late = HostMemory().allocate("slots", 4096)
    shares = {"slots": [[0, 0]], "settings": [], "rows": [], "shared": [], "recovered": None}
    registrar.take_peer_memory({"group": GROUP, **shares}, [late])
    assert late.fd == -1
    assert not registrar.is_waiting_for(0)


def test_a_refusal_gives_up_what_other_memory_devices_have_sent(tmp_path):
    is_taken, received = threading.Event(), []

    def answer(listener, message, fds):
        channel = ControlChannel(listener.accept()[0])
        if not fds:
            is_taken.wait(10)
        channel.send(message, fds)
        channel.socket.recv(1)  # until the worker is done
        channel.close()

    def receive(receive_frame):
        received.append(receive_frame())
        is_taken.set()
        return received[-1]

    slots = HostMemory().allocate("slots", 4096)
    answers = [
        ({"type": "registered", "group": GROUP}, [slots.fd]),
        ({"type": "refused", "group": GROUP, "error": "OutOfDeviceMemoryError", "text": "no room"}, []),
    ]
    with contextlib.ExitStack() as stack:
        connections = []
        for device, (message, fds) in enumerate(answers):
            path = str(tmp_path / str(device))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(path)
            listener.listen()
            thread = threading.Thread(target=answer, args=(listener, message, fds))
            thread.start()
            stack.callback(thread.join)
            connections.append(DeviceConnection(device, path))
            stack.callback(connections[-1].close)
        connections[0].receive = functools.partial(receive, connections[0].receive)
        with pytest.raises(OutOfDeviceMemoryError, match="no room"):
            collect_replies(connections, kind="registered", group=GROUP, timeout_s=10, what="a test")
    assert [each.fds for each in received] == [[]]
    slots.close()
