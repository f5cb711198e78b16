"""Exports what access control refuses, in the Prometheus format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from cutwater.access.access_control import AccessControl


def access_metrics(prefix: str, control: AccessControl) -> Iterator[Metric]:
    """Principals are no labels: a client can make up names. The audit has them."""
    refused = CounterMetricFamily(
        prefix + "calls_unproven",
        "Calls that only servers may make, of peers that have not proved to be the right one",
        labels=["method"],
    )
    for method, count in sorted(control.book.refused.copy().items()):
        refused.add_metric([method], count)
    yield refused
    for name, text, counts in (
        ("calls_denied", "Calls that were denied because the caller lacks a right", control.denials.refused),
        (
            "calls_denied_if_enforced",
            "Calls that would have been denied, if not in permissive mode",
            control.denials.recorded,
        ),
    ):
        by_right: Counter[str] = Counter()
        for (_, right), count in counts.copy().items():
            by_right[right] += count
        family = CounterMetricFamily(prefix + name, text, labels=["right"])
        for right, count in sorted(by_right.items()):
            family.add_metric([right], count)
        yield family
