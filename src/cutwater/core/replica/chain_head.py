"""The head of a chain: takes appends and groups, one after the other, and gives them their LLSNs.

The leader repeats ``PublishGroup`` until it knows the outcome of the group. If the stream already holds the group, the
head repeats its answer. A new group is opened: the driver hands over its entries, at the pace that disk and chain
allow. While a group is open, nothing else may come between its entries, so appends and other groups wait in a bounded
queue. When the replica leaves RUNNING, the head gives up the group, and the next seal removes what was written of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from msgspec import structs

from cutwater.core.messages import GroupOutcome, GroupState, PublishGroup
from cutwater.core.publish.groups import RememberedGroup
from cutwater.core.replica import events as e
from cutwater.core.replica.deduplication import Deduplicator, Remembered
from cutwater.core.replica.events import Effects
from cutwater.core.replica.pending import PendingEntries
from cutwater.errors import ConditionFailed, CutwaterError, InvalidArgument, Refused, ResourceExhausted
from cutwater.types import (
    LLSN,
    Ack,
    Batch,
    BatchKind,
    BatchNumber,
    Epoch,
    GroupTag,
    LogStreamId,
    ReplicaState,
    RunId,
    StorageNodeId,
)

WAITING_MAX = 1_024
WAITING_BYTES_MAX = 8 * 1024 * 1024
"""Bytes that may wait in memory behind an open group. The limit is low, so that other log streams keep most of a node's
memory for appends. A single append may be larger. Otherwise it would never get its turn where group follows group."""


class HeadReplica(Protocol):
    """What the head of a chain needs of its replica."""

    node: StorageNodeId
    stream: LogStreamId
    state: ReplicaState
    dedup: Deduplicator
    pending: PendingEntries

    @property
    def epoch(self) -> Epoch: ...

    @property
    def next_llsn(self) -> LLSN: ...

    def require_head(self, epoch: Epoch) -> None:
        """Raise unless this replica gives out LLSNs in this epoch."""

    def require_learned(self) -> None:
        """Raise if this replica may lack committed entries."""

    def take_next(self, batch: Batch, waiters: Iterable[e.Waiter] = ()) -> Effects:
        """Give a batch the next LLSNs, write it and pass it on."""

    def stop(self, why: str) -> None:
        """Leave RUNNING, so that the stream is sealed."""


class ChainHead:
    """The role of one replica as head of its chain. All changes of state go through the replica."""

    def __init__(self, replica: HeadReplica) -> None:
        self._replica = replica
        self._open: PublishGroup | None = None
        self._rows = 0
        """Number of records of the open group that were taken."""
        self._waiting: deque[e.Append | PublishGroup] = deque()
        self._waiting_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether a group is open."""
        return self._open is not None

    def append(self, event: e.Append) -> Effects:
        replica, batch = self._replica, event.batch
        if batch.count < 1:
            raise InvalidArgument("an append needs at least one record")
        if batch.more or batch.group is not None:
            raise InvalidArgument("a group is not appended but published: stage its rows")
        self._replica.require_head(event.epoch)
        if self._open is not None:
            return self._wait(event)
        if batch.producer is not None:
            known = replica.dedup.find(batch.producer, batch.kind, batch.checksum)
            if known is not None:
                return self._append_again(event.waiter, known)
        if event.if_llsn is not None and event.if_llsn != replica.next_llsn:
            raise ConditionFailed(replica.stream, event.if_llsn, replica.next_llsn)
        replica.pending.require_room()
        return replica.take_next(batch, (event.waiter,))

    def _append_again(self, waiter: e.Waiter, known: Remembered) -> Effects:
        """Answer a producer that repeats a batch: give the same answer again, or wait for the same commit."""
        if known.glsn is not None:
            ack = Ack(known.glsn, known.first_llsn, self._replica.stream, known.count)
            return [e.Acked(waiter, ack, known.sequence)]
        self._replica.pending.wait(known.first_llsn, waiter)
        return []

    def publish(self, event: PublishGroup) -> Effects:
        replica = self._replica
        replica.require_learned()
        known = replica.dedup.groups.find(event.tag)
        if known is not None and known.glsn is not None:
            return [self.tell(known)]
        if replica.state is ReplicaState.SEALED and replica.epoch == event.epoch:
            return [self._tell(event.tag, GroupState.ABSENT)]
        self._replica.require_head(event.epoch)
        if known is not None or self._is_coming(event):
            # The head tells the outcome when the group is committed.
            return []
        if self._open is not None:
            return self._wait(event)
        self._open, self._rows = event, 0
        return [e.FeedGroup(event)]

    def wants(self, event: PublishGroup) -> bool:
        """Whether the group is new, so that ``publish`` asks for its entries, now or later."""
        try:
            self._replica.require_head(event.epoch)
            return self._replica.dedup.groups.find(event.tag) is None and not self._is_coming(event)
        except CutwaterError:
            return False

    def _is_coming(self, event: PublishGroup) -> bool:
        coming = [group for group in (self._open, *self._waiting) if isinstance(group, PublishGroup)]
        return any((group.run, group.decided) == (event.run, event.decided) for group in coming)

    def take(self, event: e.GroupEntry) -> Effects:
        replica, batch = self._replica, event.batch
        if self._open is None or self._open.tag != event.tag:
            raise Refused(f"this group is not being appended to log stream {replica.stream}: leave it")
        if batch.count < 1 or batch.kind is not BatchKind.DATA or batch.producer is not None:
            return self.fail(e.GroupFailed(event.tag, "an entry of a group has records, and no producer"))
        rows = self._rows + batch.count
        if rows > event.tag.count or (event.last and rows < event.tag.count):
            return self.fail(e.GroupFailed(event.tag, f"its parts have {rows} rows, {event.tag.count} were decided on"))
        self._rows = rows
        batch = structs.replace(batch, more=not event.last, group=event.tag if event.last else None)
        effects = replica.take_next(batch)
        return [*effects, *self._close()] if event.last else effects

    def fail(self, event: e.GroupFailed) -> Effects:
        """Give up the open group. If nothing of it was written, the head goes on with the waiting events. Otherwise the
        stream has to be sealed."""
        if self._open is None or self._open.tag != event.tag:
            return []
        told = self._tell(event.tag, GroupState.PROBLEM, event.reason)
        if self._rows == 0:
            return [told, *self._close()]
        self._replica.stop(f"batch {event.tag.batch} of run {event.tag.run} cannot be finished: {event.reason}")
        return [told, e.ReportNow()]

    def _wait(self, event: e.Append | PublishGroup) -> Effects:
        """Queue an event that arrives while a group is open, until the group is complete."""
        size = _size(event)
        is_full = len(self._waiting) >= WAITING_MAX or self._waiting_bytes + size > WAITING_BYTES_MAX
        if self._waiting and is_full:
            raise ResourceExhausted(
                f"log stream {self._replica.stream} is taking a group of {self._open.rows if self._open else 0} "
                f"records, and {len(self._waiting)} appends wait behind it",
                retry_ms=200,
            )
        self._waiting.append(event)
        self._waiting_bytes += size
        return []

    def give_up(self) -> list[e.Waiter]:
        """Give up the open group and return the appends that waited behind it. Nothing was written of them."""
        waiters = [event.waiter for event in self._waiting if isinstance(event, e.Append)]
        self._open = None
        self._waiting.clear()
        self._waiting_bytes = 0
        return waiters

    def tell(self, group: RememberedGroup) -> e.TellGroup:
        """Return the message that a group is committed."""
        assert group.glsn is not None
        place = (group.first_llsn, group.count, group.glsn)
        return e.TellGroup(GroupOutcome(*self._subject(group), GroupState.PUBLISHED, *place))

    def _tell(self, tag: GroupTag, state: GroupState, problem: str = "") -> e.TellGroup:
        return e.TellGroup(GroupOutcome(*self._subject(tag), state, problem=problem))

    def _subject(
        self, group: GroupTag | RememberedGroup
    ) -> tuple[StorageNodeId, LogStreamId, Epoch, RunId, BatchNumber]:
        return self._replica.node, self._replica.stream, self._replica.epoch, group.run, group.batch

    def _close(self) -> Effects:
        """Close a group that is complete or never began, then handle the waiting events up to the next group."""
        self._open = None
        effects: Effects = []
        while self._waiting and self._open is None:
            event = self._waiting.popleft()
            self._waiting_bytes -= _size(event)
            try:
                effects += self.append(event) if isinstance(event, e.Append) else self.publish(event)
            except CutwaterError as error:
                if isinstance(event, e.Append):
                    effects.append(e.AppendFailed(event.waiter, error))
        return effects


def _size(event: e.Append | PublishGroup) -> int:
    return len(event.batch.body) if isinstance(event, e.Append) else 0
