"""Handles Ctrl-C and other signals to end (SIGTERM, SIGHUP) for commands that have something to clean up or to report.

A ``KeyboardInterrupt`` that is raised somewhere inside an event loop can swallow the wake-up of a task, which then
never ends. So while a loop runs here, the first signal cancels its main task instead. Later signals do nothing: what
comes after the first is bounded in time.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While this context is entered, the first signal raises ``KeyboardInterrupt``, or cancels the task of ``run``,
    which then raises it."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._signals = signals
        self._is_over = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._signals:
            # A signal that was ignored when the process began stays ignored, as `nohup` wants it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._running is None:
            raise KeyboardInterrupt
        loop, task = self._running
        loop.call_soon_threadsafe(task.cancel)

    def hold_off(self) -> None:
        """Ignore signals from now on: only cleaning up is left."""
        self._is_over = True

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine, as ``asyncio.run`` does."""

        async def noted() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._running = asyncio.get_running_loop(), task
            try:
                return await work
            finally:
                self.hold_off()

        try:
            return asyncio.run(noted())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
