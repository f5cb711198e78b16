"""An event loop in a thread of its own, for those who have none: calls go in, results come out, nothing hangs. That of
an embedded log may wait for a disk; whoever waits for it longer than is agreed leaves by itself.

At the end of the interpreter every loop is closed, because a thread that still runs then can crash it. After a fork the
child has the object but not the thread; whoever uses it there is told so.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from cutwater.client.errors import ClientClosed
from cutwater.client.thread_calls import CallVisit, Visit
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.event_loop import new_event_loop

R = TypeVar("R")

LOOK_SECONDS = 5.0
"""How often a waiting thread looks whether anyone is left who could answer it."""
STUCK_SECONDS = 1.0
"""Whoever waits longer than it wanted to leaves a loop that does nothing for so long."""
STUCK_SECONDS_MAX = 30.0
"""Whoever did not say how long it wants to wait leaves it after this."""
EXECUTOR_THREADS_MAX = 8
CLOSING_TURNS = 5
END_SECONDS = 5.0
"""How long the end of the interpreter waits for one loop."""

_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._loop.set_default_executor(DaemonExecutor(EXECUTOR_THREADS_MAX, name))
        self._visits: deque[Visit[Any]] = deque()
        """Brought by threads and not begun yet: no more than there are threads."""
        self._is_woken = False
        """The loop is about to look at them."""
        self._pid = os.getpid()
        self._is_closed = False
        self._on_end: Callable[[], Awaitable[None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """What to do before the loop is closed, if the interpreter ends first."""
        self._on_end = close

    def begin(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        try:
            self._check()
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        """Wait for it. Whoever is interrupted meanwhile gives it up. ``seconds``: how long it should take at most."""
        return self.visit(CallVisit(work, seconds))

    def visit(self, visit: Visit[R]) -> R:
        """The same for what need not be a coroutine."""
        try:
            self._check()
        except BaseException:
            visit.never_begun()
            raise
        try:
            self._visits.append(visit)
            if not self._is_woken:
                self._is_woken = True
                self._call_soon(self._let_in)
            left, patience = LOOK_SECONDS, STUCK_SECONDS_MAX
            if visit.seconds is not None:
                left, patience = visit.seconds, STUCK_SECONDS
            while not visit.over.acquire(timeout=max(min(left, LOOK_SECONDS), 0.0)):
                if not self._thread.is_alive():
                    raise ClientClosed("this client was closed meanwhile")
                left -= LOOK_SECONDS
                if left <= 0:
                    if not self._turns(patience):
                        raise visit.stuck(patience)
                    # It will end this as soon as it is time.
                    left = LOOK_SECONDS
        except BaseException:
            self._leave(visit)
            raise
        return visit.result()

    def _turns(self, seconds: float) -> bool:
        """Whether the loop gets anything done within this time."""
        turned = threading.Event()
        self._call_soon(turned.set)
        return turned.wait(seconds)

    def _leave(self, visit: Visit[Any]) -> None:
        """An interrupt may have come anywhere: before the loop was woken, for others too who rely on that, or after it
        has begun the visit. Whoever takes it out of the queue ends it."""
        visit.is_given_up = True
        with suppress(ClientClosed):
            self._call_soon(self._let_in)
        try:
            self._visits.remove(visit)
        except ValueError:
            with suppress(ClientClosed):
                self._call_soon(visit.give_up)
        else:
            visit.never_begun()

    def _let_in(self) -> None:
        """On the loop: begin what threads have brought. They wake the loop once for all that come before it looks; so
        the flag goes down before the first look, or one that comes in between would be forgotten."""
        self._is_woken = False
        while (visit := self._next_visit()) is not None:
            if visit.is_given_up:
                visit.never_begun()
            else:
                visit.begin()

    def _next_visit(self) -> Visit[Any] | None:
        try:
            return self._visits.popleft()
        except IndexError:
            return None

    def wait(self, future: concurrent.futures.Future[R], timeout: float | None = None) -> R:
        """Its result; ``TimeoutError`` if that takes longer."""
        while True:
            step = LOOK_SECONDS if timeout is None else min(timeout, LOOK_SECONDS)
            done, _ = concurrent.futures.wait((future,), step)
            if done:
                break
            if not self._thread.is_alive():
                raise ClientClosed("this client was closed meanwhile")
            if timeout is not None:
                timeout -= step
                if timeout <= 0:
                    raise TimeoutError
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed("this client was closed meanwhile") from None

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run something on the loop, without waiting."""
        self._check()
        self._call_soon(function)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise ClientClosed("this client was closed: make another one") from None

    def close(self) -> None:
        """Give up what still runs, and end the thread."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        _running.discard(self)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClientClosed("this client was made before the process was forked: make another one in the child")
        if self._is_closed:
            raise ClientClosed("this client was closed: make another one")
        if threading.current_thread() is self._thread:
            raise ClientClosed("a blocking call was made from the client's own thread, which would wait for itself")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            # Transports that were aborted are closed in the turn after; with TLS it takes some more.
            for _ in range(CLOSING_TURNS):
                self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
            while (visit := self._next_visit()) is not None:
                visit.never_begun()

    def end(self) -> None:
        """The interpreter ends."""
        if self._is_closed or self._pid != os.getpid():
            return
        if self._on_end is not None:
            try:
                closing = asyncio.run_coroutine_threadsafe(_awaited(self._on_end()), self._loop)
                concurrent.futures.wait((closing,), END_SECONDS)
            except RuntimeError:
                pass
        self.close()


async def _awaited(work: Awaitable[None]) -> None:
    await work


@atexit.register
def _end_all() -> None:
    for thread in list(_running):
        thread.end()
