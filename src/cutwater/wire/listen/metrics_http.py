"""Serves metrics to Prometheus: an HTTP listener in its own thread, which queries a collector on each request."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from cutwater.protocol.errors import CannotListen
from cutwater.wire.addresses import format_address


class MetricsExporter:
    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            started: tuple[WSGIServer, threading.Thread] = start_http_server(port, host, registry)
        except OSError as error:
            where = format_address(host, port)
            raise CannotListen(
                f"cannot listen for metrics on {where}: {error}: stop the process that uses it, or choose another "
                "address"
            ) from error
        self._http, self._thread = started
        self.address = format_address(host, int(self._http.server_port))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
