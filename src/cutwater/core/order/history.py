"""The commits of one log stream that some replica may still need.

A replica may be behind by several cuts; its report is answered with every later range. Ranges that every replica that
counts has durably applied are forgotten. The history is contiguous in LLSN. It ends at the stream's committed end, even
when all of its ranges are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cutwater.errors import ProtocolViolation
from cutwater.types import LLSN, CommitContext


class CommitHistory:
    """Commit contexts in LLSN order. Cuts append to it, and ranges that replicas have on disk are trimmed."""

    __slots__ = ("_contexts", "_end")

    def __init__(self, contexts: Iterable[CommitContext] = (), end: LLSN | None = None) -> None:
        """``end`` is the committed end of the stream; by default it is the end of the contexts."""
        self._contexts: deque[CommitContext] = deque()
        self._end = LLSN(0) if end is None else end
        for context in contexts:
            if not self._contexts:
                self._end = LLSN(context.first_llsn - 1)
            self.append(context)
        if end is not None and self._end != end:
            raise ProtocolViolation(f"commit history ends at LLSN {self._end}, the stream at {end}")

    def __len__(self) -> int:
        return len(self._contexts)

    def contexts(self) -> tuple[CommitContext, ...]:
        return tuple(self._contexts)

    def append(self, context: CommitContext) -> None:
        if context.first_llsn != self._end + 1:
            raise ProtocolViolation(f"commit history ends at LLSN {self._end}, {context} does not follow")
        self._contexts.append(context)
        self._end = context.last_llsn

    def after(self, committed_end: LLSN) -> tuple[CommitContext, ...] | None:
        """Return every range above ``committed_end``, oldest first. An empty tuple means that the replica is current.
        None means that the history no longer reaches down to it, so the replica has to learn from a peer."""
        if committed_end >= self._end:
            return ()
        newer: list[CommitContext] = []
        for context in reversed(self._contexts):
            if context.last_llsn <= committed_end:
                break
            newer.append(context)
        newer.reverse()
        if not newer or newer[0].first_llsn != committed_end + 1:
            return None
        return tuple(newer)

    def trim(self, applied_end: LLSN) -> int:
        """Forget the ranges that end at or below ``applied_end``, and return their number."""
        count = 0
        while self._contexts and self._contexts[0].last_llsn <= applied_end:
            self._contexts.popleft()
            count += 1
        return count
