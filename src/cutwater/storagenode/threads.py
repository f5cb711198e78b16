"""Work in threads, for coroutines that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """The result of the job. Also whoever is cancelled waits for its end: what comes next finds things as they are, and
    not half done."""
    future = asyncio.get_running_loop().run_in_executor(threads, job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
