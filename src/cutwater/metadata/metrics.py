"""Exports the counters of a metadata node in the Prometheus format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.metadata.server import MetadataServer
from cutwater.wire.listen.gate_metrics import gate_metrics

PREFIX = "cutwater_mr_"


class MetadataCollector(Collector):
    """Reads from another thread than the one that counts. Each number is consistent by itself, but they may be of
    different moments."""

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
            ("fenced", "Writes that the store refused, because another node leads", counters.fenced),
            ("alarms", "Things that must not happen", counters.alarms),
            ("terms", "Times that this node became the leader", counters.terms),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield from gate_metrics(PREFIX, self._server.gate)
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
