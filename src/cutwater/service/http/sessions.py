"""Credentials of requests: a token in the header, or the session of a browser in a cookie.

A session is a short-lived child of the token that it was begun with: its cookie holds that child, which the cluster
knows and ends with its parent. So a service keeps no sessions, and any service takes those of others.
"""

from __future__ import annotations

from collections.abc import Mapping

from cutwater.service.http.http_problems import HttpRefusal

COOKIE = "__Host-cutwater"
"""Browsers take a cookie with this prefix only over TLS or from this machine, for the whole host and for no other."""
_ATTRIBUTES = "Path=/; Secure; HttpOnly; SameSite=Strict"
SCHEME = "bearer"


def session_token(headers: Mapping[str, str]) -> str:
    """Return the token that a request shows; empty if there is none."""
    authorization = headers.get("authorization")
    if authorization is None:
        return cookie_token(headers)
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() != SCHEME or not token.strip():
        raise HttpRefusal(401, "unauthenticated", "write the token as `Authorization: Bearer cwt_...`")
    return token.strip()


def cookie_token(headers: Mapping[str, str]) -> str:
    """Return the token in the cookie of a session; empty if there is none."""
    found = [
        value.strip()
        for part in headers.get("cookie", "").split(";")
        for name, _, value in [part.strip().partition("=")]
        if name == COOKIE
    ]
    if len(found) > 1:
        raise HttpRefusal(400, "invalid_argument", "the cookie of the session is there twice: end one of them")
    return found[0] if found else ""


def set_cookie(token: str, seconds: int) -> str:
    return f"{COOKIE}={token}; Max-Age={seconds}; {_ATTRIBUTES}"


def clear_cookie() -> str:
    return f"{COOKIE}=; Max-Age=0; {_ATTRIBUTES}"
