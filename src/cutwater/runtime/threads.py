"""Work in threads, for coroutines that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """The result of the job. Also whoever is cancelled waits for its end: what comes next finds things as they are, and
    not half done."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(threads, job))


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of work that goes on in a thread. Also whoever is cancelled, however often, waits for its end: memory
    or a lock that the thread uses is given back when it is really free."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if not future.cancelled():
            # Nobody is left to be told of an error.
            future.exception()
        raise
