"""Exports the counters of a metadata node in the Prometheus format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.access.access_metrics import access_metrics
from cutwater.access.quota_metrics import quota_metrics
from cutwater.metadata.server import MetadataServer
from cutwater.runtime.counter_metrics import counter_metrics
from cutwater.wire.listen.certificate_metrics import certificate_metrics
from cutwater.wire.listen.gate_metrics import gate_metrics

PREFIX = "cutwater_mr_"


class MetadataCollector(Collector):
    """Reads from another thread than the one that counts. Each number is consistent by itself, but they may be of
    different moments."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield from counter_metrics(PREFIX, self._server.counters)
        yield from gate_metrics(PREFIX, self._server.gate)
        yield from quota_metrics(PREFIX, self._server.control.quotas.counters)
        yield from access_metrics(PREFIX, self._server.control)
        yield from certificate_metrics(PREFIX, self._server.options.tls)
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
            ("audit_pending", "Audit records that are not in the log yet", len(state.audit.pending)),
            ("store_delay_seconds", "How long the write in flight has been waiting", term.store_delay),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
