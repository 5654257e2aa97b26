"""Serves the dashboard's page and its samples on loopback, to those who know the token (docs/design/security.md)."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coarse.dashboard.history import History

ADDRESS: Final = "127.0.0.1"
HOSTS: Final = (ADDRESS, "localhost")
"""Names in a request's Host header that are served; other names may be those of a page that rebinds its own."""

_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_SAMPLES = "samples"
_MOST_CONNECTIONS = 64
_IDLE_S = 5

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)
"""Headers of each answer: the page loads nothing from elsewhere, and no other page loads or frames it."""


class Pages:
    """Answers requests for the page's files and for samples; anything else, and a wrong token, is not found.

    Args:
        history: The samples.
        token: The beginning of each valid path.
        is_live: Whether samples are still being added.
    """

    def __init__(self, history: History, token: str, *, is_live: bool) -> None:
        self._history = history
        self._token = token.encode()
        self._is_live = is_live
        self._files = {file.name: file for file in _PAGE.iterdir() if file.suffix in _TYPES}
        self.last_sent = 0
        """Number of the newest sample that a page has taken."""

    def application(self) -> Starlette:
        """The application for a server."""
        application = Starlette(
            routes=[Route("/{token}/{name:path}", self._answer, methods=["GET"])],
            middleware=[
                Middleware(_WithHeaders),
                Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
            ],
        )
        application.router.redirect_slashes = False  # a redirect would tell paths apart
        return application

    async def _answer(self, request: Request) -> Response:
        token, name = str(request.path_params["token"]), str(request.path_params["name"])
        if not hmac.compare_digest(token.encode(), self._token):
            return _not_found()
        if name == _SAMPLES:
            return self._samples(request.query_params.get("after", "0"))
        file = self._files.get(name or _INDEX)
        if file is None:
            return _not_found()
        return Response(file.read_bytes(), media_type=_TYPES[file.suffix])

    def _samples(self, after: str) -> Response:
        samples, events = self._history.after(int(after) if after.isdecimal() and len(after) < 19 else 0)
        self.last_sent = max(self.last_sent, *(each["number"] for each in samples), 0)
        found = {"is_live": self._is_live, "samples": samples, "events": events}
        # Not JSONResponse: names of files may have bytes that are no UTF-8, which it cannot encode.
        return Response(json.dumps(found, separators=(",", ":")), media_type="application/json")


def _not_found() -> Response:
    return PlainTextResponse("not found\n", status_code=404)


class _WithHeaders:
    """Adds HEADERS to each answer of an application."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._application(scope, receive, send_with_headers)


class _BoundedProtocol(H11Protocol):
    """Turns connections away beyond a limit, so that others cannot take all of this process's descriptors."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()


class Server:
    """Serves the pages at a port of loopback; the URL has a token that nobody can guess.

    Args:
        history: The samples.
        port: The port; 0 for any free one.
        is_live: Whether samples are still being added.

    Raises:
        OSError: If the port is taken.
    """

    def __init__(self, history: History, *, port: int = 0, is_live: bool) -> None:
        token = secrets.token_urlsafe(24)
        self._socket = socket.create_server((ADDRESS, port))
        self.url = f"http://{ADDRESS}:{self._socket.getsockname()[1]}/{token}/"
        """Where a browser finds the page."""
        self.pages = Pages(history, token, is_live=is_live)
        config = uvicorn.Config(
            self.pages.application(),
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            http=_BoundedProtocol,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serves until close(), Ctrl-C or SIGTERM, in the main thread."""
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Ends run(), from any thread."""
        self._server.should_exit = True
