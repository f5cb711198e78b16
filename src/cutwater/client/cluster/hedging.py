"""Asks several replicas the same question: the next one as soon as one fails or is silent. The first answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cutwater.errors import CutwaterError, Unavailable
from cutwater.runtime.deadlines import SLOW_SECONDS

T = TypeVar("T")


async def first_answer(
    askers: Sequence[Callable[[], Coroutine[Any, Any, T]]], *, final: tuple[type[CutwaterError], ...] = ()
) -> T:
    """Return the first answer. Raises the first error of a class in ``final``, or the last error if all have failed."""
    tasks: set[asyncio.Task[T]] = set()
    left = list(reversed(askers))
    last: CutwaterError = Unavailable("no storage node can be asked now: try again")
    try:
        while left or tasks:
            if left:
                tasks.add(asyncio.get_running_loop().create_task(left.pop()()))
            done, tasks = await asyncio.wait(
                tasks, timeout=SLOW_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, CutwaterError) or isinstance(error, final):
                    raise error
                last = error
        raise last
    finally:
        for task in tasks:
            task.cancel()
