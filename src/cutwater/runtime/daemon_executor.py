"""A thread pool that works until it is shut down, also while the interpreter waits for other threads to end.

The pools of the standard library refuse work as soon as the main thread has ended. But the program may go on in other
threads, and so may the servers of an embedded log.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool of daemon threads.

    It derives from ``ThreadPoolExecutor`` only because event loops demand that; the threads of the base class are never
    started.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        super().__init__(1)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_max, self._name = threads_max, name
        self._running: list[threading.Thread] = []
        self._idle = 0
        self._is_shut = False

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._is_shut:
                raise RuntimeError("this executor was shut down")
            self._work.put(work)
            if self._idle:
                self._idle -= 1
            elif len(self._running) < self._threads_max:
                thread = threading.Thread(target=self._run, name=f"{self._name} {len(self._running) + 1}", daemon=True)
                self._running.append(thread)
                thread.start()
        return future

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._idle += 1

    @property
    def has_ended(self) -> bool:
        """Whether it was shut down and all its threads have ended."""
        return self._is_shut and not any(thread.is_alive() for thread in self._running)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_shut = True
            for _ in self._running:
                self._work.put(None)
        if wait:
            for thread in self._running:
                thread.join()
