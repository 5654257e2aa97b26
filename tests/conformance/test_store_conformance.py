"""Every rendezvous store passes the same suite."""

from __future__ import annotations

import os

import pytest
from store_suite import run_store_suite

from coarse.rendezvous.socket_store import LocalAddress, PrefixStore, SocketStore, TcpAddress, serve
from coarse.store import DirectoryStore


def test_directory_store(tmp_path):
    run_store_suite(lambda: DirectoryStore(tmp_path))


def test_torch_store():
    dist = pytest.importorskip("torch.distributed", reason="coarse.torch needs PyTorch")
    from coarse.torch.store import TorchStore

    store = dist.HashStore()
    run_store_suite(lambda: TorchStore(store, prefix="suite"))


@pytest.mark.parametrize("kind", ["tcp", "local"])
def test_socket_store(kind):
    address = TcpAddress("127.0.0.1", 0) if kind == "tcp" else LocalAddress(f"test-{os.getpid()}")
    server = serve(address)
    stores = []

    def open_store():
        found = TcpAddress("127.0.0.1", server.port) if kind == "tcp" else address
        stores.append(SocketStore(found, timeout_s=20.0))
        return PrefixStore(stores[-1], "suite")

    try:
        run_store_suite(open_store)
    finally:
        for store in stores:
            store.close()
        server.close()


def test_additions_of_several_processes_do_not_get_lost(tmp_path):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                store = DirectoryStore(tmp_path)
                for _ in range(100):
                    store.add("many", 1)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert DirectoryStore(tmp_path).add("many", 0) == 300


def test_values_survive_the_process_that_set_them_and_leave_no_other_files(tmp_path):
    for i in range(3):
        DirectoryStore(tmp_path).set("key", str(i).encode())
    assert DirectoryStore(tmp_path).get("key", 0.0) == b"2"
    assert len(list(tmp_path.iterdir())) == 1
