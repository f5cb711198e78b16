"""Checks listen addresses: a server listens beyond this machine only if strangers are kept out."""

from __future__ import annotations

from cutwater.errors import InvalidArgument
from cutwater.wire.addresses import is_loopback, parse_address

WILDCARDS = ("", "0.0.0.0", "::")


def check_listen(listen: str, advertise: str, metrics: str | None, *, has_tls: bool, insecure: bool) -> tuple[str, int]:
    """Return host and port to listen on. Others are told to connect to ``advertise``, if it is given."""
    host, port = parse_flag("--listen", listen)
    _check_exposure("--listen", host, insecure or has_tls)
    if advertise:
        parse_flag("--advertise", advertise)
    elif host in WILDCARDS:
        raise InvalidArgument(
            f"others cannot connect to {listen}: say with --advertise HOST:PORT where they reach this node"
        )
    if metrics is not None:
        check_metrics(metrics, insecure=insecure)
    return host, port


def check_metrics(metrics: str, *, insecure: bool) -> None:
    """Check the address for metrics, which are served without TLS."""
    _check_exposure("--metrics", parse_flag("--metrics", metrics)[0], insecure)


def parse_flag(flag: str, address: str) -> tuple[str, int]:
    try:
        return parse_address(address)
    except InvalidArgument as error:
        raise InvalidArgument(f"{flag}: {error.message}") from None


def _check_exposure(flag: str, host: str, is_allowed: bool) -> None:
    if not is_allowed and not is_loopback(host):
        remedy = "give --tls-certificate, --tls-key and --tls-ca, " if flag == "--listen" else ""
        raise InvalidArgument(
            f"{flag} {host} can be reached from other machines, without encryption and by anyone: {remedy}"
            "use 127.0.0.1, or say --insecure"
        )
