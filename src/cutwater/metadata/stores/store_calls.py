"""Calls of a store that are in progress: each has a deadline, and closing the store ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from cutwater.errors import DeadlineExceeded, InvalidArgument, Unavailable
from cutwater.metadata.stores.store_interface import LeaderInfo

RETRY_SECONDS = 0.2
"""How long a watch waits before it retries a store that could not be reached."""

T = TypeVar("T")


class Calls:
    """The calls of one store. ``trouble`` explains, for error messages, why a call takes long, if that is known."""

    def __init__(self, store: str, trouble: Callable[[], str] = str) -> None:
        self.store = store
        self.trouble = trouble
        self.closed = False
        self._under_way: dict[asyncio.Timeout, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def call(self, name: str, timeout_ms: int) -> AsyncIterator[None]:
        """Run a call, until its time is up or the store is closed."""
        if timeout_ms < 1:
            raise InvalidArgument(f"{name}: a call needs a timeout of at least 1 ms, not {timeout_ms}")
        self.check_open(name)
        scope = asyncio.timeout(timeout_ms / 1_000)
        ended = asyncio.get_running_loop().create_future()
        try:
            async with scope:
                self._under_way[scope] = ended
                try:
                    yield
                finally:
                    self._under_way.pop(scope).set_result(None)
        except TimeoutError:
            if not scope.expired():
                raise
            self.check_open(name)
            trouble = self.trouble()
            raise DeadlineExceeded(
                f"{name}: {self.store} did not answer within {timeout_ms} ms"
                + (f", the last it said was: {trouble}" if trouble else "")
                + "; see whether it runs, and try again"
            ) from None

    def check_open(self, name: str) -> None:
        if self.closed:
            raise Unavailable(f"{name}: {self.store} was closed: open it again")

    async def close(self) -> bool:
        """End all calls and wait until they have ended. Returns whether this was the first time."""
        if self.closed:
            return False
        self.closed = True
        for scope in self._under_way:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        while self._under_way:
            await asyncio.wait(self._under_way.values())
        return True


async def watch_leader(
    calls: Calls, read: Callable[[], Awaitable[tuple[LeaderInfo, T]]], changed: Callable[[T], Awaitable[None]]
) -> AsyncIterator[LeaderInfo]:
    """Yield the leader whenever it changes. ``read`` also returns a place to wait from. ``changed`` may return although
    nothing changed, because only the result of ``read`` counts."""
    told: LeaderInfo | None = None
    while True:
        try:
            info, place = await read()
        except Unavailable:
            calls.check_open("watch_leader")
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if info != told:
            told = info
            yield info
        await changed(place)


class Changes:
    """Wakes watchers, for stores whose leader changes in this process."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def watch_leader(self, calls: Calls, leader: Callable[[], Awaitable[LeaderInfo]]) -> AsyncIterator[LeaderInfo]:
        async def read() -> tuple[LeaderInfo, asyncio.Event]:
            # Take the place to wait first, then read: a change in between is either read or ends the wait.
            place = self._next
            return await leader(), place

        async def changed(place: asyncio.Event) -> None:
            await place.wait()

        return watch_leader(calls, read, changed)
