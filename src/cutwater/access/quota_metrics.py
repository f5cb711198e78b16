"""Exports to Prometheus what quotas have held back. Names of limits are the only labels, so their number is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from cutwater.access.quota_meter import QuotaCounters
from cutwater.core.access.quotas import QuotaLimits


def quota_metrics(prefix: str, counters: QuotaCounters) -> Iterator[Metric]:
    families: tuple[tuple[str, str, Mapping[str, float]], ...] = (
        ("quota_delayed", "Calls, streams and items that a quota made wait", counters.delayed),
        ("quota_delayed_seconds", "Seconds that they waited", counters.delayed_seconds),
        ("quota_refused", "Those that a quota refused", counters.refused),
    )
    for name, text, values in families:
        family = CounterMetricFamily(prefix + name, text, labels=["limit"])
        for limit in QuotaLimits.__struct_fields__:
            family.add_metric([limit], values.get(limit, 0))
        yield family
