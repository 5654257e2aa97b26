"""Serves a node's metrics to Prometheus, by HTTP."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from coarse.metrics.values import Family, Histogram, Metrics

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.1
_CLOSE_TIMEOUT_S = 1.0


class MetricsEndpoint:
    """Serves /metrics until close(), in a thread of its own.

    It serves one request at a time, and drops a connection that is silent for 2 s, so that others can occupy no more
    of this process than one descriptor.

    Args:
        read: Reads the metrics, in the server's thread.
        address: IP address or name at which to listen.
        port: The port; 0 for any free one.

    Raises:
        OSError: If it cannot listen there.
        ImportError: If prometheus-client is not installed.
    """

    def __init__(self, read: Callable[[], Metrics], address: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_collector(read))
        self._server = make_server(
            address, port, make_wsgi_app(registry), _server_class(address, port), _Handler
        )
        self.port: int = self._server.server_port
        """The port at which it listens."""
        self._thread = _start(lambda: self._server.serve_forever(_POLL_INTERVAL_S))

    def close(self) -> None:
        """Stops serving, and waits a second at most for a request that is being served. Idempotent."""
        _start(self._server.shutdown)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._server.server_close()


def try_endpoint(read: Callable[[], Metrics], address: str, port: int, who: str) -> MetricsEndpoint | None:
    """Opens an endpoint; logs its address, or why there is none: training goes on without it.

    Args:
        read, address, port: As for MetricsEndpoint.
        who: The process that serves it, for the log.
    """
    try:
        endpoint = MetricsEndpoint(read, address, port)
    except (OSError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        logger.warning(
            "[%s] metrics are not served at %s port %d: %s. Training goes on without; set COARSE_METRICS_PORT to a "
            "free port and COARSE_METRICS_ADDRESS to an address of this machine",
            *(who, address, port, reason),
        )
        return None
    host = f"[{address}]" if ":" in address else address
    logger.info("[%s] metrics are served at http://%s:%d/metrics", who, host, endpoint.port)
    return endpoint


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="coarse-metrics", daemon=True)
    thread.start()
    return thread


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # scrapes are no news
        pass


def _server_class(address: str, port: int) -> type[WSGIServer]:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]

    class Server(WSGIServer):
        address_family = family

        def server_bind(self) -> None:
            # http.server would ask for the host's name, which may take long where names are not resolved.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
            self.setup_environ()

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.debug("a request of %s for metrics failed", client_address, exc_info=True)

    return Server


def _collector(read: Callable[[], Metrics]) -> Collector:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    class NodeCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            return map(_to_prometheus, read().families())

    return NodeCollector()


def _to_prometheus(family: Family) -> Any:
    from prometheus_client.core import Metric

    declared = family.declaration
    metric = Metric(declared.name.removesuffix("_total"), declared.help, declared.kind)
    for series in family.series:
        labels = dict(series.labels)
        if isinstance(series.value, Histogram):
            for bound, count in series.value.buckets():
                metric.add_sample(f"{declared.name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{declared.name}_count", labels, series.value.count)
            metric.add_sample(f"{declared.name}_sum", labels, series.value.sum_s)
        else:
            metric.add_sample(declared.name, labels, series.value)
    return metric
