"""Work that a thread hands to an event loop in another thread, and waits for.

Waiting threads are woken one by one and then all compete for the interpreter, so the cost of each thread limits how
many appends a program with many threads gets done. A lock is the cheapest thing that a thread can wait for.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from cutwater.client.errors import ClientClosed
from cutwater.errors import CutwaterError, DeadlineExceeded

R = TypeVar("R")


class NotThisWay(Exception):
    """Nothing was done: the call has to be made as a coroutine, which handles every case."""


class Visit(ABC, Generic[R]):
    """Work for the loop, ended once. The loop begins it, and the thread that made it waits for it. The loop ends it in
    time, unless the loop is stuck; so after ``seconds``, if given, the thread checks whether the loop is stuck."""

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
