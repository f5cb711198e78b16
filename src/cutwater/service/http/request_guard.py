"""Refuses requests by their headers, before anything is read or asked: wrong names, other origins, wrong sizes.

A page of another site can make a browser send requests here, and can have a name that resolves to this machine (DNS
rebinding). So every request must name this service by a name that is expected, and a request that changes something
must not come from another origin. Programs that are no browsers send none of these headers but ``Host``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.service.http.http_problems import HttpRefusal
from cutwater.service.options import HEADER_BYTES_MAX
from cutwater.wire.addresses import is_loopback

PATH_BYTES_MAX = 4 * 1024
QUERY_BYTES_MAX = 8 * 1024
HEADERS_MAX = 64
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD"})
_SITES = frozenset({"same-origin", "none"})
"""``none``: the user began it, by typing the address or through a bookmark."""
_ONCE = frozenset(
    "host origin sec-fetch-site content-type content-length authorization cookie idempotency-key last-event-id".split()
)

SECURITY_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Sent with every answer."""
STRICT_TRANSPORT = "max-age=31536000"


class AllowedHosts(Struct, frozen=True):
    """The names by which requests may name this service, in lower case, without ports."""

    names: frozenset[str]

    def check(self, host: str) -> None:
        if host_name(host) not in self.names:
            raise HttpRefusal(
                421,
                "wrong_host",
                "the request names this service in a way that is not expected here: use an address that the service "
                "was started for, or let its operator allow the name with --allow-host",
            )


def allowed_hosts(listen: str, more: Iterable[str]) -> AllowedHosts:
    """Return the names for a service that listens on this host. Raises if none is known."""
    given = frozenset(name.strip().lower().strip("[]") for name in more if name.strip())
    for name in given:
        if ":" in name and not is_loopback(name) and name.count(":") < 2:
            raise InvalidArgument(f"--allow-host {name}: give the name alone, without a port")
    if is_loopback(listen):
        return AllowedHosts(LOOPBACK_NAMES | given | {listen.lower()})
    names = given if listen in ("", "0.0.0.0", "::") else given | {listen.lower()}
    if not names:
        raise InvalidArgument(
            "a service that listens on all addresses must know by which names it is reached: give each with "
            "--allow-host NAME, such as that of its certificate"
        )
    return AllowedHosts(names)


def host_name(host: str) -> str:
    """Return the name in a ``Host`` header, in lower case; empty if it is none."""
    host = host.strip().lower()
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or _is_port(port)) else ""
    name, colon, port = host.partition(":")
    if colon and not _is_port(colon + port):
        return ""
    return name.removesuffix(".")


def _is_port(text: str) -> bool:
    return text[:1] == ":" and text[1:].isascii() and text[1:].isdigit() and len(text) <= 6


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name, in lower case. Those that matter to the checks may come only once."""
    found: dict[str, str] = {}
    count = size = 0
    for name, value in raw:
        count, size = count + 1, size + len(name) + len(value)
        key = name.decode("latin-1").lower()
        if key in found and key in _ONCE:
            raise HttpRefusal(400, "invalid_argument", f"the header {key} is there twice: send it once")
        found[key] = value.decode("latin-1")
    if count > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise HttpRefusal(
            431,
            "headers_too_large",
            f"{count} headers with {size} bytes are too much: {HEADERS_MAX} with {HEADER_BYTES_MAX} are the most",
        )
    return found


def check_form(headers: Mapping[str, str], name: str, pattern: str) -> None:
    """Refuse a header whose value does not have this form. It may be left out."""
    value = headers.get(name)
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
        raise HttpRefusal(400, "invalid_argument", f"the header {name} is {value[:80]!r}: it has the form {pattern}")


def check_address(path: bytes, query: bytes) -> None:
    if len(path) > PATH_BYTES_MAX or len(query) > QUERY_BYTES_MAX:
        raise HttpRefusal(
            414,
            "uri_too_long",
            f"the address has {len(path)} and {len(query)} bytes before and after the question mark: {PATH_BYTES_MAX} "
            f"and {QUERY_BYTES_MAX} are the most",
        )


def check_origin(method: str, headers: Mapping[str, str], scheme: str) -> None:
    """Refuse a request that changes something and that a page of another origin has made."""
    if method in SAFE_METHODS:
        return
    site = headers.get("sec-fetch-site")
    if site is not None and site.strip().lower() not in _SITES:
        raise _cross_origin("the browser says that another site made it")
    origin = headers.get("origin")
    if origin is not None and origin.strip().lower() != f"{scheme}://{headers.get('host', '').strip().lower()}":
        raise _cross_origin("its origin is not this service")


def _cross_origin(why: str) -> HttpRefusal:
    return HttpRefusal(
        403, "cross_origin", f"this request changes something, and {why}: only pages of this service itself may do that"
    )


def media_type(headers: Mapping[str, str]) -> str:
    """Return the type of the body, without its parameters. Only one is allowed: the character set UTF-8."""
    kind, _, parameters = headers.get("content-type", "").partition(";")
    said = parameters.strip().lower().replace('"', "")
    if said not in ("", "charset=utf-8"):
        raise HttpRefusal(
            415, "unsupported_media_type", "the only parameter that a body's type may have is charset=utf-8"
        )
    return kind.strip().lower()
