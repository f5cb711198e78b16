"""Exports when the certificates of a server end, in the Prometheus format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from cutwater.runtime import system
from cutwater.wire.identity.tls import Tls


def certificate_metrics(prefix: str, tls: Tls | None) -> Iterator[Metric]:
    if tls is None:
        return
    gauge = GaugeMetricFamily(
        prefix + "certificate_expires_seconds",
        "Seconds until a certificate expires, below 0 if it has",
        labels=["certificate"],
    )
    now = system.wall_time_ns() / 1e9
    for found in tls.certificates.expiries:
        gauge.add_metric([found.which], found.until - now)
    yield gauge
    yield GaugeMetricFamily(
        prefix + "certificate_files_unusable",
        "1 if the files for TLS have changed and cannot be used, so that older certificates are in use",
        value=bool(tls.certificates.trouble),
    )
