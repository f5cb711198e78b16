"""What a thread brings to an event loop in another thread, and waits for.

Threads that wait are woken one by one and then all want the interpreter at once, so what each of them costs decides how
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
    """Nothing was done: the call has to be made as a coroutine, which can do more."""


class Visit(ABC, Generic[R]):
    """Begun on the loop, waited for by the thread that made it, ended once. The loop ends it in time, unless it is
    stuck; so after ``seconds``, if there is a time, the thread looks whether it is."""

    __slots__ = ("is_given_up", "over", "seconds")

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.is_given_up = False
        """Whoever made it does not wait any more."""
        self.over = threading.Lock()
        self.over.acquire()

    @abstractmethod
    def begin(self) -> None:
        """On the loop. Must not raise."""

    def never_begun(self) -> None:
        """The loop has ended, or nobody waits any more."""
        self.over.release()

    @abstractmethod
    def give_up(self) -> None:
        """On the loop: whoever made it was interrupted."""

    @abstractmethod
    def result(self) -> R:
        """In the thread that made it, once it is over: what came of it."""

    def stuck(self, seconds: float) -> CutwaterError:
        """In the same thread, if the loop has done nothing for so long: what is known of it."""
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
