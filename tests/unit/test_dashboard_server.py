"""The dashboard's server: nothing without the token, to another host's name, or beside the page's files."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from coarse.dashboard.history import History, as_values
from coarse.dashboard.samples import RUNS, Checkpoints, Sample
from coarse.dashboard.server import _PAGE, HEADERS, Server

LIMIT_S = 60.0


def values(number):
    return as_values(Sample(number=number, time_s=number, phase=RUNS, job="0f0f", checkpoints=Checkpoints()))


@pytest.fixture(scope="module")
def server():
    history = History()
    for number in (1, 2, 3):
        history.add(values(number))
    made = Server(history, is_live=True)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def ask(server, path, *, method="GET", **headers):
    """The answer's status, headers and body; `path` has no leading slash."""
    host = urlsplit(server.url)
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=LIMIT_S)
    try:
        connection.request(method, f"/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def token(server):
    return urlsplit(server.url).path.strip("/")


def test_the_page_and_all_that_it_names_are_served(server):
    status, headers, body = ask(server, f"{token(server)}/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    named = set(re.findall(rb'(?:src|href)="([^"#]+)"', body))
    assert {b"style.css", b"main.js", b"icon.svg"} <= named
    scripts = {
        name for file in _PAGE.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', file.read_text())
    }
    for name in {each.decode() for each in named} | scripts:
        status, headers, _ = ask(server, f"{token(server)}/{name}")
        assert status == 200, name
        assert headers["content-type"].split(";")[0] in ("text/css", "text/javascript", "image/svg+xml")


def test_the_page_names_nothing_of_the_network():
    for file in _PAGE.iterdir():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+\S*", file.read_text()))
        assert {each for each in found if "www.w3.org/2000/svg" not in each} == set(), file.name


def test_samples_are_those_after_a_number(server):
    def numbers(query):
        status, _, body = ask(server, f"{token(server)}/samples{query}")
        assert status == 200
        answer = json.loads(body)
        assert answer["is_live"] is True
        return [each["number"] for each in answer["samples"]]

    assert numbers("") == numbers("?after=0") == [1, 2, 3]
    assert numbers("?after=2") == [3]
    assert numbers("?after=3") == []
    for nonsense in ("-1", "x", "9" * 5000, "%00", "1.5"):
        assert numbers(f"?after={nonsense}") == [1, 2, 3]
    assert server.pages.last_sent == 3


def test_text_that_is_no_utf_8_is_served():
    history = History()
    history.add(values(1) | {"program": "\udcff.py"})
    made = Server(history, is_live=False)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        status, _, body = ask(made, f"{token(made)}/samples")
    finally:
        made.close()
        thread.join(LIMIT_S)
    assert status == 200
    assert json.loads(body)["samples"][0]["program"] == "\udcff.py"


def test_without_the_right_token_nothing_is_found(server):
    right = token(server)
    assert len(right) >= 32
    swapped = right[:-1] + ("A" if right[-1] != "A" else "B")
    for wrong in ("", "x", right[:-1], right + "x", swapped, right.swapcase(), "%C3%BC", "samples"):
        for name in ("", "samples", "main.js"):
            status, _, body = ask(server, f"{wrong}/{name}" if wrong else name)
            assert (status, body.strip().lower()) == (404, b"not found"), (wrong, name)


@pytest.mark.parametrize(
    "name",
    [
        "../server.py",
        "..%2fserver.py",
        "%2e%2e/server.py",
        "page/main.js",
        "/etc/passwd",
        "//etc/passwd",
        "main.js/",
        "main.js%00",
        "style.css.map",
        "favicon.ico",
        "__pycache__",
        ".",
    ],
)
def test_no_other_file_is_served(server, name):
    assert ask(server, f"{token(server)}/{name}")[0] == 404


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "10.0.0.1", ""]
)
def test_another_host_s_name_is_refused_even_with_the_token(server, host):
    for name in ("", "samples", "main.js"):
        status, _, body = ask(server, f"{token(server)}/{name}", Host=host)
        assert status == 400
        assert b"number" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8080", "127.0.0.1:1"])
def test_names_of_loopback_are_served_as_through_a_tunnel(server, host):
    assert ask(server, f"{token(server)}/samples", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_written(server, method):
    assert ask(server, f"{token(server)}/samples", method=method)[0] == 405


def test_every_answer_forbids_other_pages_to_use_it(server):
    right = token(server)
    asked = [
        (f"{right}/", {}),
        (f"{right}/samples", {}),
        ("x/", {}),
        ("", {}),
        (f"{right}/", {"Host": "a.example"}),
    ]
    for path, headers in asked:
        found = ask(server, path, **headers)[1]
        for name, value in HEADERS.items():
            assert found.get(name.lower()) == value, (path, name)
        assert "access-control-allow-origin" not in found
        assert "server" not in found


def test_it_listens_on_loopback_alone(server):
    listener = server._socket.getsockname()
    assert listener[0] == "127.0.0.1"
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.2", listener[1]))


def test_each_server_has_a_token_of_its_own():
    made = [Server(History(), is_live=False) for _ in range(8)]
    for each in made:
        each._socket.close()
    assert len({token(each) for each in made}) == len(made)
