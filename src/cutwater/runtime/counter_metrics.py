"""Exports plain counters in the Prometheus format. The annotation of a counter is its help text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, get_origin, get_type_hints

from prometheus_client.core import CounterMetricFamily, Metric


def counter_metrics(prefix: str, counters: object) -> Iterator[Metric]:
    """Yield a metric for each annotated field. Other fields are left to the caller."""
    for name, hint in get_type_hints(type(counters), include_extras=True).items():
        if get_origin(hint) is Annotated:
            yield CounterMetricFamily(prefix + name, hint.__metadata__[0], value=getattr(counters, name))
