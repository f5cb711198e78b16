"""Exports the connections of a listener as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cutwater.wire.listen.gate import GateSnapshot


def gate_metrics(prefix: str, gate: GateSnapshot | None) -> Iterator[Metric]:
    if gate is None:
        return
    for name, text, value in (
        ("connections", "Open connections to this node", gate.connections),
        ("handshakes", "Connections whose handshake is not done", gate.handshakes),
    ):
        yield GaugeMetricFamily(prefix + name, text, value=value)
    for name, text, value in (
        ("connections_refused", "Connections that found no room after their handshake", gate.refused_total),
        ("handshakes_evicted", "Connections that made room for others before their handshake", gate.evicted_total),
        ("handshakes_late", "Connections whose handshake took too long", gate.late_total),
    ):
        yield CounterMetricFamily(prefix + name, text, value=value)
    not_let_in = CounterMetricFamily(
        prefix + "connections_not_let_in", "Connections that ended before their handshake was done", labels=["reason"]
    )
    for reason, count in sorted(gate.not_let_in.items()):
        not_let_in.add_metric([reason], count)
    yield not_let_in
