"""The result of ``Producer.send``: a ``concurrent.futures.Future`` that costs less.

A standard future has its own condition and acquires it for every operation. Most futures of a producer are never waited
for: the producer settles a batch of them, and later callers find the result. So here the condition is made only when a
thread needs it, and futures without one are settled together, under a lock that all futures of a producer share. ADR
0045 has the figures that justify this.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import suppress
from typing import Any

from cutwater.types import Ack

_DONE = frozenset((FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED))


class SentFuture(Future[Ack]):
    """A future that makes its condition on demand. The lock ``shared`` ensures that a future gets its condition either
    before it is settled or not at all. The lock is reentrant, because a finalizer may run while its thread holds it."""

    _result: Ack | None
    _exception: BaseException | None

    def __init__(self, shared: threading.RLock) -> None:
        # The same attributes as in the base class, except for the condition.
        self._state = PENDING
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._shared = shared
        self._own: threading.Condition | None = None

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._own is None:
            # Made before the lock is taken: a signal handler may run in between and wait for the loop, which takes the
            # lock as well.
            own = threading.Condition()
            with self._shared:
                if self._own is None:
                    self._own = own
        return self._own

    def done(self) -> bool:
        return self._state in _DONE

    def result(self, timeout: float | None = None) -> Ack:
        # The state is set after the result.
        if self._state == FINISHED and self._result is not None:
            return self._result
        return super().result(timeout)


def settle_together(futures: Sequence[SentFuture], acks: Sequence[Ack]) -> None:
    """Set the results of these futures, which share a lock, except for those that were cancelled."""
    awaited: list[tuple[SentFuture, Ack]] = []
    with futures[0]._shared:
        for future, ack in zip(futures, acks, strict=True):
            if future._own is None:
                # No thread has used it, so there is none to wake.
                future._result = ack
                future._state = FINISHED
            else:
                awaited.append((future, ack))
    for future, ack in awaited:
        # Another thread may have cancelled it.
        with suppress(InvalidStateError):
            future.set_result(ack)
