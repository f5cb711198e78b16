"""Counts what the service does, and exports it to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.runtime.counter_metrics import counter_metrics

PREFIX = "cutwater_service_"
GAUGES = {
    "connections": "Open connections of HTTP clients",
    "cluster_clients": "Tokens with open connections to the cluster",
    "streams": "Streams of events that are being sent",
    "uploads": "Programs that are being sent",
}


class ServiceCounters:
    """``requests``: answers by route and status. ``refused``: requests that the service refused by itself, by the code
    of the problem."""

    connections_taken: Annotated[int, "Connections of HTTP clients that were taken"] = 0
    connections_refused: Annotated[int, "Connections that were refused, as there were too many"] = 0
    connections_replaced: Annotated[int, "Idle connections that were closed to make room for others"] = 0
    slow_requests: Annotated[int, "Connections that were closed since a request came too slowly"] = 0
    slow_readers: Annotated[int, "Answers that were given up since nobody read them"] = 0

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refused: Counter[str] = Counter()


class ServiceCollector(Collector):
    """Reads from another thread than the one that counts."""

    def __init__(self, counters: ServiceCounters, gauges: Callable[[], dict[str, int]]) -> None:
        self._counters, self._gauges = counters, gauges

    def collect(self) -> Iterator[Metric]:
        yield from counter_metrics(PREFIX, self._counters)
        requests = CounterMetricFamily(
            PREFIX + "requests", "Answers, by route and status of HTTP", labels=["route", "status"]
        )
        for (route, status), count in sorted(self._counters.requests.copy().items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        refused = CounterMetricFamily(
            PREFIX + "refused", "Requests that the service refused by itself, by code", labels=["code"]
        )
        for code, count in sorted(self._counters.refused.copy().items()):
            refused.add_metric([code], count)
        yield refused
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], value=value)
