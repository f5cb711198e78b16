"""The uncommitted entries of one replica, in order, and the calls that wait for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from cutwater.core.replica.events import Acked, Waiter
from cutwater.errors import ResourceExhausted
from cutwater.types import LLSN, Ack, CommitContext, Entry, LogStreamId, Sequence

UNCOMMITTED_BATCHES_MAX = 4096
"""Batches that may lie between the head and the next cut. Above this number, appends are told to retry later."""
WAITERS_PER_BATCH_MAX = 64
"""Calls that may wait for one batch: a producer may repeat it before it is committed, and each repetition waits."""


class _Pending(Struct):
    first_llsn: LLSN
    count: int
    checksum: int
    last_sequence: Sequence
    waiters: list[Waiter]
    more: bool
    in_group: bool

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.count - 1)


class PendingEntries:
    """Queue of uncommitted entries. Appends add at the end, commits remove at the front, seals at the end."""

    def __init__(self, stream: LogStreamId) -> None:
        self._stream = stream
        self._entries: deque[_Pending] = deque()
        self._appended = 0
        """Number of entries that belong to no group. Groups do not count, since their size was decided before."""

    def require_room(self) -> None:
        if self._appended >= UNCOMMITTED_BATCHES_MAX:
            raise ResourceExhausted(f"log stream {self._stream} has {self._appended} uncommitted batches", retry_ms=50)

    def add(self, entry: Entry, last_sequence: Sequence, waiters: Iterable[Waiter] = ()) -> None:
        """Add an entry. ``last_sequence`` is the producer's last sequence at this entry, or 0 if the entry has no
        producer."""
        batch = entry.batch
        in_group = batch.more or batch.group is not None
        self._appended += not in_group
        self._entries.append(
            _Pending(entry.first_llsn, batch.count, batch.checksum, last_sequence, list(waiters), batch.more, in_group)
        )

    def wait(self, first_llsn: LLSN, waiter: Waiter) -> None:
        """Let one more call wait for the entry that begins at ``first_llsn``."""
        waiters = next(pending for pending in self._entries if pending.first_llsn == first_llsn).waiters
        if len(waiters) >= WAITERS_PER_BATCH_MAX:
            raise ResourceExhausted(f"{len(waiters)} calls wait for this batch already", retry_ms=50)
        waiters.append(waiter)

    def holds(self, entry: Entry) -> bool:
        same = (entry.first_llsn, entry.batch.count, entry.batch.checksum)
        return any((p.first_llsn, p.count, p.checksum) == same for p in self._entries)

    def waiters(self) -> list[Waiter]:
        return [waiter for pending in self._entries for waiter in pending.waiters]

    def commit(self, context: CommitContext) -> list[Acked]:
        """Remove the entries that this commit gives GLSNs, and return the acknowledgements for their waiters."""
        acks: list[Acked] = []
        entries, last_llsn = self._entries, context.last_llsn
        while entries and entries[0].first_llsn <= last_llsn:
            pending = entries.popleft()
            self._appended -= not pending.in_group
            # One cut commits all records of a batch, and all entries of a group.
            assert pending.last_llsn <= last_llsn - pending.more
            for waiter in pending.waiters:
                ack = Ack(context.glsn_of(pending.first_llsn), pending.first_llsn, self._stream, pending.count)
                acks.append(Acked(waiter, ack, pending.last_sequence))
        return acks

    def cut(self, end: LLSN) -> list[Waiter]:
        """Remove the entries above ``end`` and return their waiters."""
        waiters: list[Waiter] = []
        while self._entries and self._entries[-1].last_llsn > end:
            pending = self._entries.pop()
            self._appended -= not pending.in_group
            # The sealed position is a minimum of durable ends, and those fall on batch boundaries.
            assert pending.first_llsn > end
            waiters += pending.waiters
        return waiters
