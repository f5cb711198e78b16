"""The result of ``Producer.send``: a ``concurrent.futures.Future`` that costs less (ADR 0032, 0045).

A standard future has its own condition and acquires it for every operation. Most futures of a producer are never waited
for: the producer settles a batch of them, and later callers find the result. So here a future gets the attributes of a
standard one only when something uses them, and futures without them are settled together, under a lock that all futures
of a producer share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from cutwater.types import Ack


class SentFuture(Future[Ack]):
    """A future that becomes a standard one on demand. The lock ``shared`` ensures that this happens either before it is
    settled or with its result. The lock is reentrant, because a finalizer may run while its thread holds it."""

    _ack: Ack | None = None
    _is_standard = False

    def __init__(self, shared: threading.RLock) -> None:
        # The constructor of the base class is not called: ``__getattr__`` does its work.
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        """Become a standard future, as something looks for one of its attributes."""
        while "_is_standard" not in (before := self.__dict__):
            # Made before the lock is taken: a signal handler may run in between and wait for the loop, which takes the
            # lock as well.
            ack, standard = self._ack, Future[Ack]()
            if ack is not None:
                standard.set_result(ack)
            attributes = {**before, **vars(standard), "_ack": ack, "_is_standard": True}
            with self._shared:
                if self.__dict__ is before and self._ack is ack:
                    self.__dict__ = attributes
        return super().__getattribute__(name)

    def done(self) -> bool:
        return self._ack is not None or (self._is_standard and super().done())

    def result(self, timeout: float | None = None) -> Ack:
        return self._ack if self._ack is not None else super().result(timeout)


def settle_together(futures: Sequence[SentFuture], acks: Sequence[Ack]) -> None:
    """Set the results of these futures, which share a lock, except for those that were cancelled."""
    awaited: list[tuple[SentFuture, Ack]] = []
    with futures[0]._shared:
        for future, ack in zip(futures, acks, strict=True):
            if future._is_standard:
                awaited.append((future, ack))
            else:
                # No thread has used it, so there is none to wake.
                future._ack = ack
    for future, ack in awaited:
        # Another thread may have cancelled it.
        with suppress(InvalidStateError):
            future.set_result(ack)
