"""Reads the body of a request: bounded in size and in time, and of the one type that the route takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive

from cutwater.service.http.http_problems import HttpRefusal
from cutwater.service.http.request_guard import media_type
from cutwater.service.routes import BodyKind, RestRoute

BODY_SECONDS_MIN = 10.0
BODY_BYTES_PER_SECOND = 64 * 1024
"""A body must come at least this fast, after the first seconds."""


class ClientGone(Exception):
    """The connection ended before the request was complete: there is no caller to answer."""


async def read_body(route: RestRoute, headers: Mapping[str, str], receive: Receive) -> bytes:
    """Return the body. Raises if it is too large, too slow, or of another type."""
    return b"".join([chunk async for chunk in body_chunks(route, headers, receive)])


def body_chunks(route: RestRoute, headers: Mapping[str, str], receive: Receive) -> AsyncIterator[bytes]:
    """Return the body as it comes. What its headers say is checked now, and its size and pace on the way."""
    length = _length(headers)
    if length is not None and "transfer-encoding" in headers:
        raise HttpRefusal(400, "invalid_argument", "the size of the body is said in two ways: say it in one")
    if route.body_kind is BodyKind.NONE:
        if length:
            raise _too_large(route)
        return _received(receive, 0, route) if "transfer-encoding" in headers else _nothing()
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpRefusal(415, "unsupported_media_type", "compressed bodies are not taken: send it as it is")
    kind = media_type(headers)
    if kind != route.body_kind.value:
        raise HttpRefusal(
            415,
            "unsupported_media_type",
            f"the body must be {route.body_kind.value}, and say so in its Content-Type",
        )
    if length is not None and length > route.body_bytes_max:
        raise _too_large(route)
    return _received(receive, route.body_bytes_max, route)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise HttpRefusal(400, "invalid_argument", "Content-Length is no number")
    return int(text[:20])


async def _received(receive: Receive, bytes_max: int, route: RestRoute) -> AsyncIterator[bytes]:
    size = 0
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        try:
            # The more has come, the longer it may go on.
            async with asyncio.timeout_at(begun + BODY_SECONDS_MIN + size / BODY_BYTES_PER_SECOND):
                message = await receive()
        except TimeoutError:
            raise HttpRefusal(
                408, "slow_request", f"the body came too slowly, {size} bytes of it: send it again, in one piece"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(route)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


def _too_large(route: RestRoute) -> HttpRefusal:
    if route.body_kind is BodyKind.NONE:
        return HttpRefusal(413, "too_large", "this request takes no body: leave it out")
    return HttpRefusal(413, "too_large", f"the body may have {route.body_bytes_max} bytes at most")


def decode_body(route: RestRoute, body: bytes) -> Any:
    """Return the body as the type of the route."""
    if route.body_kind is BodyKind.NONE:
        return None
    try:
        return msgspec.json.decode(body, type=route.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HttpRefusal(400, "invalid_argument", f"the body is not what is wanted here: {error}") from None
