"""Deals with storage nodes that may hang: asks the next replica, or waits only as long as the node belongs to its log
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cutwater.client.cluster.catalog_cache import LOOK_SECONDS, Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.errors import CutwaterError, Unavailable
from cutwater.runtime.deadlines import SLOW_SECONDS
from cutwater.types import LogStreamId, StorageNodeId

T = TypeVar("T")


async def first_answer(
    askers: Sequence[Callable[[], Coroutine[Any, Any, T]]], *, final: tuple[type[CutwaterError], ...] = ()
) -> T:
    """Ask several replicas the same question: the next one as soon as one fails or is silent. Return the first answer.
    Raises the first error of a class in ``final``, or the last error if all have failed."""
    tasks: set[asyncio.Task[T]] = set()
    left = list(reversed(askers))
    last: CutwaterError = Unavailable("no storage node can be asked now: try again")
    try:
        while left or tasks:
            if left:
                task = asyncio.get_running_loop().create_task(left.pop()())
                task.add_done_callback(_retrieve)
                tasks.add(task)
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


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a replica that fails after, or together with, the first answer. Otherwise asyncio would log
    it as never retrieved."""
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def watched(catalogs: Catalogs, nodes: Nodes, stream: LogStreamId, node: StorageNodeId) -> AsyncIterator[None]:
    """Guard a call to ``node`` that concerns ``stream``. While there is no answer, repeatedly report the node to the
    metadata repository, and fetch the catalog. Raises ``Unavailable`` once the node is no longer in the chain of the
    log stream."""
    loop = asyncio.get_running_loop()
    is_left_out = False
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer, is_left_out
        nodes.unreachable(stream, node)
        catalogs.look()
        info = catalogs.view.streams.get(stream)
        if info is not None and node in info.chain:
            timer = loop.call_later(LOOK_SECONDS, look)
        else:
            is_left_out = True
            scope.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as scope:
            timer = loop.call_later(SLOW_SECONDS, look)
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError:
        if not is_left_out:
            raise
        raise Unavailable(f"storage node {node} does not answer, and log stream {stream} goes on without it") from None
