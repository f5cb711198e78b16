"""Streams of what changes: of a job and of an operation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from cutwater.errors import DeadlineExceeded
from cutwater.service.resources.records import ALIVE_SECONDS
from cutwater.service.routes import SentEvent

T = TypeVar("T")
_END: Any = object()


async def events_of(found: AsyncIterator[T], encode: Callable[[T], SentEvent]) -> AsyncIterator[SentEvent | None]:
    """Send each item as an event, and a sign of life in between. The end of the time that was asked for is no error."""
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(found, _END))
            done, _ = await asyncio.wait({pending}, timeout=ALIVE_SECONDS)
            if not done:
                yield None
                continue
            try:
                item = pending.result()
            except DeadlineExceeded:
                return
            pending = None
            if item is _END:
                return
            yield encode(item)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await found.aclose()  # type: ignore[attr-defined]
