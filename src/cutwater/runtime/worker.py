"""Workers: functions that get their items one after the other, off the event loop, without a queue that blocks it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

WorkerStep = Callable[[list[T]], Callable[[], object] | None]
"""Handles the items that are waiting, in order, and owns the list. It must not raise: an exception ends the worker.

It tells the event loop of results through ``call_soon_threadsafe``. A function that it returns is called when these
items count as done; so the receiver of the last result finds the worker idle.
"""


class Worker(Protocol[T_contra]):
    """Calls a step with the items that were put, never two steps at a time. ``system.worker`` makes it."""

    @property
    def is_idle(self) -> bool:
        """Whether the worker has nothing to do, and will have nothing to do until ``put``."""

    def put(self, item: T_contra) -> None:
        """Give it one more item. Only one thread at a time may do this. After ``stop``, items are ignored."""

    def stop(self) -> None:
        """End the worker when it has handled all items that were put before."""

    def join(self, timeout: float) -> bool:
        """Wait for the end of the worker. Returns whether it ended in time."""


class ThreadWorker(Worker[T]):
    """A worker with a thread of its own. It is a daemon thread, because a disk may hang forever."""

    def __init__(self, name: str, step: WorkerStep[T]) -> None:
        self._step = step
        self._queue: queue.SimpleQueue[T | _Stop] = queue.SimpleQueue()
        self._given = self._done = 0
        """Numbers of items. Only threads that put items change ``_given``; only the worker changes ``_done``."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._given == self._done

    def put(self, item: T) -> None:
        self._given += 1
        self._queue.put(item)

    def stop(self) -> None:
        self._queue.put(_STOP)

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Handle what is waiting; the items and their results are in no variable after that. Returns whether the worker
        goes on."""
        items: list[T] = []
        item = self._queue.get()
        while not isinstance(item, _Stop):
            items.append(item)
            if self._queue.empty():
                break
            item = self._queue.get()
        if items:
            count = len(items)
            then = self._step(items)
            self._done += count
            if then is not None:
                then()
        return not isinstance(item, _Stop)


class _Stop:
    pass


_STOP = _Stop()
