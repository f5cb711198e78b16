"""Options of the service, and its limits. They need none of the packages that the service needs."""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

CONNECTIONS_MAX = 1_000
HEADER_BYTES_MAX = 16 * 1024
HEADER_SECONDS_MAX = 10.0
"""How long the head of a request may take, from the connection on, or from its first byte."""
IDLE_SECONDS_MAX = 15
STOP_SECONDS = 10


class HttpLimits(Struct, frozen=True):
    connections_max: int = CONNECTIONS_MAX
    header_seconds_max: float = HEADER_SECONDS_MAX
    idle_seconds_max: int = IDLE_SECONDS_MAX
    stop_seconds: int = STOP_SECONDS


class ServiceStartOptions(Struct, frozen=True):
    """``certificate`` and ``key`` are those of the HTTP side, ``cluster_tls`` and ``token_file`` for the cluster."""

    listen: str
    addresses: tuple[str, ...]
    cluster_tls: ssl.SSLContext | None = None
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    allow_submit: bool = False
    metrics: str | None = None
    limits: HttpLimits = HttpLimits()


class ServiceServing(Struct, frozen=True):
    """What a service announces when it begins to serve."""

    url: str
    metrics: str | None
