"""Runs work in threads, for coroutines that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """Run the job in a thread and return its result.

    A cancelled caller also waits for its end, so that the next operation never finds it half done.
    """
    return await to_the_end(asyncio.get_running_loop().run_in_executor(threads, job))


async def to_the_end(work: Awaitable[T]) -> T:
    """Return the result of work that goes on in a thread.

    A caller that is cancelled, even repeatedly, also waits for its end. So memory or a lock that the thread uses is
    released only when the thread no longer uses it.
    """
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if not future.cancelled():
            # No caller is left to be told of an error.
            future.exception()
        raise
