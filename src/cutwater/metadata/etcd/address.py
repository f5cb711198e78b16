"""The address of an etcd cluster: ``etcd://HOST:PORT,HOST:PORT/PREFIX?tls.ca=FILE&tls.cert=FILE&tls.key=FILE``."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.runtime.redaction import without_secrets

PREFIX = "cutwater"
FORM = "etcd://HOST:PORT,HOST:PORT/PREFIX, and for TLS ?tls.ca=FILE, with &tls.cert=FILE&tls.key=FILE if need be"
_OPTIONS = frozenset({"tls.ca", "tls.cert", "tls.key"})


class EtcdTls(Struct, frozen=True):
    """Files: the authority to trust, and the certificate and key to present if the cluster asks for one."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


class EtcdAddress(Struct, frozen=True):
    endpoints: tuple[str, ...]
    prefix: str
    tls: EtcdTls | None = None


def parse_address(url: str) -> EtcdAddress:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _no_address(url, str(error)) from None
    if parts.scheme != "etcd" or parts.fragment:
        raise _no_address(url, "it is of another form")
    endpoints = tuple(parts.netloc.split(","))
    if "@" in parts.netloc:
        raise _no_address(url, "it has a login: a metadata node logs in with the certificate tls.cert")
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise _no_address(url, f"{endpoint!r} is not HOST:PORT")
    if len(set(endpoints)) != len(endpoints):
        raise _no_address(url, "an endpoint is named twice")
    prefix = parts.path.strip("/") or PREFIX
    if not prefix.isascii() or not prefix.isprintable() or " " in prefix:
        raise _no_address(url, f"{prefix!r} is no prefix of keys")
    return EtcdAddress(endpoints, prefix, _tls(url, options))


def _tls(url: str, options: dict[str, str]) -> EtcdTls | None:
    if not options:
        return None
    if unknown := sorted(set(options) - _OPTIONS):
        raise _no_address(url, f"{unknown[0]!r} is unknown")
    if not all(options.values()) or "tls.ca" not in options or ("tls.cert" in options) != ("tls.key" in options):
        raise _no_address(url, "TLS needs tls.ca, and tls.cert and tls.key both or neither")
    cert, key = options.get("tls.cert"), options.get("tls.key")
    return EtcdTls(Path(options["tls.ca"]), Path(cert) if cert else None, Path(key) if key else None)


def _no_address(url: str, why: str) -> InvalidArgument:
    # The text may hold a password, though an address has no place for one.
    return InvalidArgument(without_secrets(f"{url!r} is no address of etcd, because {why}: write {FORM}"))
