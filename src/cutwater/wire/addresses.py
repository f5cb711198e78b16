"""Parses and formats addresses: ``HOST:PORT``, with brackets around a host that contains colons."""

from __future__ import annotations

import ipaddress

from cutwater.errors import InvalidArgument


def parse_address(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if "@" in address:
        # The login is not repeated: it may have a password.
        raise InvalidArgument(
            "an address has a login before '@', which no server of Cutwater takes: write HOST:PORT, and give a token "
            "or a certificate by itself"
        )
    if not separator or not host or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
        raise InvalidArgument(f"{address!r} is not an address: write HOST:PORT, for example 127.0.0.1:7001")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
