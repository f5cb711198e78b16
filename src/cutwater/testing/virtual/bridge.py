"""Makes shipped modules use ``SimSystem`` where they do not call ``runtime.system`` yet. Shrinks to nothing.

Every line here stands for a call of the standard library in shipped code that has no port yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cutwater.storagenode import node
from cutwater.storagenode.publish import publishing
from cutwater.storagenode.replica import writer
from cutwater.testing.virtual.loop import VirtualLoop

_system: Any
_loop: VirtualLoop


class _Time:
    @staticmethod
    def monotonic() -> float:
        return float(_system.monotonic())


class _NothingWaits(BaseException):
    pass


class _Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self.run: Callable[[], None] = lambda: None
        self._worker: Any = _system.worker("", self._step)

    def put(self, item: Any) -> None:
        self._worker.put(item)

    def get(self) -> Any:
        if not self._items:
            raise _NothingWaits
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def _step(self, items: list[Any]) -> None:
        self._items += items
        try:
            self.run()
        except _NothingWaits:
            return
        self._worker.stop()


class _Thread:
    def __init__(self, target: Any, name: str = "", daemon: bool = True) -> None:
        self._queue = target.__self__._queue
        self._queue.run = target

    def start(self) -> None: ...

    def join(self, timeout: float) -> None:
        self._queue._worker.join(timeout)

    def is_alive(self) -> bool:
        return bool(self._queue._worker.is_alive())


class _Threading:
    Thread = _Thread
    RLock = threading.RLock
    Lock = threading.Lock


class _Queues:
    SimpleQueue = _Queue


class _Executor:
    """Stands in for a pool whose ``submit`` is called."""

    def __init__(self, *given: Any, **options: Any) -> None: ...

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        _loop.call_later(0.0, lambda: _loop.in_thread(lambda: job(*args), done))
        return future

    def shutdown(self, **options: Any) -> None: ...


def install(loop: VirtualLoop, system: Any) -> Callable[[], None]:
    """Replace what shipped modules use. Returns a function that puts it back."""
    global _system, _loop
    _system, _loop = system, loop
    before: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, value: Any) -> None:
        before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    put(writer, "time", _Time)
    put(writer, "threading", _Threading)
    put(writer, "queue", _Queues)
    put(node, "ThreadPoolExecutor", _Executor)
    put(publishing, "ThreadPoolExecutor", _Executor)

    def remove() -> None:
        for module, name, value in reversed(before):
            setattr(module, name, value)
        globals().update(_system=None, _loop=None)

    return remove
