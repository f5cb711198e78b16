"""Shows what a node of the metadata repository counts, in the form that Prometheus reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.metadata.server import MetadataServer
from cutwater.wire.addresses import format_address
from cutwater.wire.errors import CannotListen

PREFIX = "cutwater_mr_"


class MetricsExporter:
    """An HTTP listener of its own, in a thread of its own."""

    def __init__(self, server: MetadataServer, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MetadataCollector(server))
        try:
            started: tuple[WSGIServer, threading.Thread] = start_http_server(port, host, registry)
        except OSError as error:
            where = format_address(host, port)
            raise CannotListen(
                f"cannot listen for metrics on {where}: {error}: stop who uses it, or choose another address"
            ) from error
        self._http, self._thread = started
        self.address = format_address(host, int(self._http.server_port))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class MetadataCollector(Collector):
    """Reads from another thread than the one that counts: each number is whole, and they may be of different
    moments."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        counters = self._server.counters
        for name, text, value in (
            ("cuts", "Cuts with records", counters.cuts),
            ("ticks", "Cuts without records", counters.ticks),
            ("decisions", "Decisions stored", counters.decisions),
            ("records", "Records committed", counters.records),
            ("store_writes", "Writes to the store", counters.store_writes),
            ("store_seconds", "Seconds that those writes took", counters.store_seconds),
            ("reports", "Reports taken in as the leader", counters.reports),
            ("relayed", "Reports and complaints passed on as a follower", counters.relayed),
            ("requests", "Requests dealt with as the leader", counters.requests),
            ("refused", "Events that the order layer refused", counters.refused),
            ("alarms", "Things that must not happen", counters.alarms),
            ("terms", "Times that this node became the leader", counters.terms),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield GaugeMetricFamily(PREFIX + "leads", "1 if this node leads", value=self._server.leads)
        term = self._server.term
        if term is None:
            return
        state = term.layer.state
        history = sum(len(history) for history in state.histories.values())
        for name, text, value in (
            ("high_watermark", "The highest GLSN that was given out", state.high_watermark),
            ("leader_epoch", "The epoch of this leader", term.epoch),
            ("revision", "Version of the catalog", state.revision),
            ("history", "Commits kept for replicas that may ask for them", history),
            (
                "halted",
                "1 if no more cuts are made, because the order layer lost its memory",
                term.layer.halted is not None,
            ),
            ("store_delay_seconds", "How long the write in flight has been waiting", term.store_delay),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
