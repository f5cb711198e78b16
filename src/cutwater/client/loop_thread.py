"""Runs an event loop in its own thread, for programs without one. Calls go in, results come out, and no call hangs.

Waiting threads are woken one by one and then all compete for the interpreter, so the cost of each thread limits how
many appends a program with many threads gets done. A lock is the cheapest thing that a thread can wait for.

The event loop of an embedded log may block on a disk. A thread that waits longer than agreed then stops waiting on its
own.

At interpreter exit every loop is closed, because a thread that still runs then can crash the interpreter. After a fork,
the child has the object but not the thread; using the object there raises an error that says so.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from cutwater.client.errors import ClientClosed
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.event_loop import new_event_loop

R = TypeVar("R")

LOOK_SECONDS = 5.0
"""How often a waiting thread checks that the loop's thread, which has to answer it, is still alive."""
STUCK_SECONDS = 1.0
"""A thread that has waited for its full timeout gives up if the loop then makes no progress for this long."""
STUCK_SECONDS_MAX = 30.0
"""The same limit for a thread that gave no timeout."""
EXECUTOR_THREADS_MAX = 8
CLOSING_TURNS = 5
END_SECONDS = 5.0
"""How long interpreter exit waits for one loop."""

_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()


class NotThisWay(Exception):
    """Nothing was done: the call has to be made as a coroutine, which handles every case."""


class Visit(ABC, Generic[R]):
    """Work that a thread hands to the loop and waits for, ended once. The loop ends it in time, unless the loop is
    stuck; so after ``seconds``, if given, the thread checks whether the loop is stuck."""

    __slots__ = ("is_given_up", "over", "seconds")

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.is_given_up = False
        """Whether the thread that made it no longer waits."""
        self.over = threading.Lock()
        self.over.acquire()

    @abstractmethod
    def begin(self) -> None:
        """Begin the work; runs on the loop. Must not raise."""

    def never_begun(self) -> None:
        """End the visit unbegun: the loop has ended, or the thread no longer waits."""
        self.over.release()

    @abstractmethod
    def give_up(self) -> None:
        """Give the work up, because the thread was interrupted; runs on the loop."""

    @abstractmethod
    def result(self) -> R:
        """Return or raise the outcome, once it is over; runs in the thread that made the visit."""

    def stuck(self, seconds: float) -> CutwaterError:
        """Return the error for a loop that has made no progress for ``seconds``; runs in the thread that made the
        visit."""
        return DeadlineExceeded(
            f"nothing was done for {seconds:g} s, as a disk of this log does not answer: see to the disk, and try again"
        )


class CallVisit(Visit[R]):
    """Runs a coroutine."""

    __slots__ = ("_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> None:
        super().__init__(seconds)
        self._work = work
        self._task: asyncio.Task[R] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda _: self.over.release())

    def never_begun(self) -> None:
        self._work.close()
        super().never_begun()

    def give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> R:
        if self._task is None or self._task.cancelled():
            raise ClientClosed("this client was closed meanwhile")
        return self._task.result()


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._loop.set_default_executor(DaemonExecutor(EXECUTOR_THREADS_MAX, name))
        self._visits: deque[Visit[Any]] = deque()
        """Visits that threads have brought and that have not begun: at most one per thread."""
        self._is_woken = False
        """Whether the loop is about to look at ``_visits``."""
        self._pid = os.getpid()
        self._is_closed = False
        self._on_end: Callable[[], Awaitable[None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Set what to run before the loop is closed if the interpreter exits first."""
        self._on_end = close

    def begin(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        try:
            self._check()
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        """Run a coroutine on the loop and wait for it. An interrupted caller gives it up. ``seconds``: how long it
        should take at most."""
        return self.visit(CallVisit(work, seconds))

    def visit(self, visit: Visit[R]) -> R:
        """Do the same as ``run`` for a visit, which need not run a coroutine."""
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
                    # The loop is alive and will end the visit at its deadline.
                    left = LOOK_SECONDS
        except BaseException:
            self._leave(visit)
            raise
        return visit.result()

    def _turns(self, seconds: float) -> bool:
        """Return whether the loop makes progress within this time."""
        turned = threading.Event()
        self._call_soon(turned.set)
        return turned.wait(seconds)

    def _leave(self, visit: Visit[Any]) -> None:
        """Give up a visit after an interrupt. The interrupt may have come before the loop was woken, on which other
        threads rely too, or after the loop has begun the visit. The side that takes the visit out of the queue ends
        it."""
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
        """Begin the visits that threads have brought; runs on the loop. Threads wake the loop once for all visits that
        arrive before it looks. So the flag is cleared before the first look; otherwise a visit that arrives in between
        would be forgotten."""
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
        """Return the result of the future; raise ``TimeoutError`` if that takes longer than ``timeout``."""
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
        """Run a function on the loop, without waiting."""
        self._check()
        self._call_soon(function)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise ClientClosed("this client was closed: make another one") from None

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
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
            # Aborted transports are closed in the next turn; with TLS it takes a few more.
            for _ in range(CLOSING_TURNS):
                self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
            while (visit := self._next_visit()) is not None:
                visit.never_begun()

    def end(self) -> None:
        """Close the loop at interpreter exit."""
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
