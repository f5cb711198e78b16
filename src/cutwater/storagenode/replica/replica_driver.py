"""Drives one replica: feeds it events, and carries out its effects on files, peers and clients.

Everything here runs on the event loop's thread except the work of the writer. Effects are carried out in order. While
a barrier is being made durable, and while the files are being reopened, events wait in a bounded queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cutwater.core.messages import GroupOutcome, PublishGroup, SyncBegin, SyncRequest
from cutwater.core.replica.events import (
    Acked,
    AppendFailed,
    AskSync,
    Commit,
    CommitDurable,
    Complain,
    DropBefore,
    Dropped,
    EntriesDurable,
    FeedGroup,
    FillEntry,
    Forward,
    RefuseEntry,
    Remove,
    Reopen,
    ReplicaEffect,
    ReplicaEvent,
    ReportNow,
    Restart,
    SaveDedup,
    SaveHardState,
    StorageFailed,
    TellGroup,
    Tidy,
    Truncate,
    Unsettled,
    Waiter,
    WriteCommit,
    WriteEntry,
)
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.replica import Replica
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    Damaged,
    ProtocolViolation,
    Refused,
    ResourceExhausted,
    Unavailable,
)
from cutwater.format.entry_codec import NO_TIME, RunningEventTime
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.storage.files import look_again
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.writer import Durable, Job, Writer
from cutwater.types import LLSN, Entry, LogStreamId, ReplicaState, StorageNodeId, UncommitReport

EVENTS_WAITING_MAX = 8_192
REOPEN_AGAIN_SECONDS = 1.0
REOPENINGS_MAX = 60
"""A disk that fails for a minute may fail for ever."""
TIDY_AFTER_SECONDS = 2.0
CHECKPOINT_EVERY_ENTRIES = 10_000
"""Entries that may be written between two checkpoints of deduplication; opening replays few more than that."""

_OF_THE_DISK = (EntriesDurable, CommitDurable, StorageFailed, Dropped)
"""Events that are never repeated. There are never many at a time: the disk is busy with the barrier."""

Refusal = Callable[[CutwaterError], None]
T = TypeVar("T")


class Host(Protocol):
    """The interface of the storage node for a replica."""

    def tell(self, job: Job) -> None:
        """Run this soon on the event loop; callable from any thread."""

    async def in_thread(self, job: Callable[[], T]) -> T: ...

    def hand_over_soon(self, writer: Writer) -> None:
        """Let the writer write what it was given, after messages of this turn of the event loop were sent."""

    def forward(self, effect: Forward) -> None: ...

    def acknowledge(self, effect: Acked) -> None: ...

    def fail(self, waiter: Waiter, error: CutwaterError) -> None: ...

    def report_soon(self) -> None: ...

    def complain(self, stream: LogStreamId, peer: StorageNodeId) -> None: ...

    def ask_sync(self, source: StorageNodeId, request: SyncRequest) -> None: ...

    def feed_group(self, stream: LogStreamId, group: PublishGroup) -> None:
        """Feed the entries of this group to the replica."""

    def tell_group(self, outcome: GroupOutcome) -> None:
        """Tell the metadata repository the outcome of a group."""

    def damage_met(self, stream: LogStreamId, error: Damaged) -> None:
        """Note that committed data cannot be read, and request an intact copy."""

    def cannot_open(self, stream: LogStreamId, error: CutwaterError) -> None:
        """Note that the files cannot be opened, and let go of the replica."""

    def remove(self, stream: LogStreamId) -> None:
        """Close and remove the files of the replica, which no longer exists."""

    def storage_failed(self, stream: LogStreamId, error: CutwaterError) -> None:
        """Note that a write failed. The replica is being reopened."""

    def alarm(self, error: CutwaterError) -> None: ...


class ReplicaDriver:
    """One replica with its storage."""

    def __init__(self, node: StorageNodeId, stream: LogStreamId, storage: SegmentStorage, host: Host) -> None:
        self.node, self.stream, self.storage = node, stream, storage
        self.problem = ""
        """Why the replica's data cannot be trusted; empty if it can."""
        self.watchers: dict[Callable[[], None], None] = {}
        """The functions given to ``watch``."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        """Whether a barrier is on its way to the disk."""
        self.is_reopening = False
        """Whether the files are being reopened; this is repeated until the disk can be written again."""
        self._reopenings_failed = 0
        """How often in a row the files could not be reopened, other than for lack of room."""
        self._gone = ""
        """Why the replica is no longer here; empty while it is."""
        self._last_report: UncommitReport | None = None
        """The last report; None once something was removed from the files."""
        self._has_changed = True
        """Whether the replica may have changed since the last report."""
        self._events: deque[tuple[ReplicaEvent, Refusal | None]] = deque()
        self._ways = self._table()
        self._entries_since_checkpoint = 0
        self._sync_running = NO_TIME
        self.replica = self._recover()
        self.writer = Writer(storage, host.tell, self._durable, self._failed, f"writer of log stream {stream}")
        self._tidy_later()

    def watch(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when more can be read, or when it is known that there is no more up to some position. The
        caller must read first: earlier writes are not announced."""
        if not self.watchers:
            # The metadata repository should know that a reader waits here.
            self._host.report_soon()
        self.watchers[tell] = None
        self.writer.on_readable = self._tell_watchers

    def unwatch(self, tell: Callable[[], None]) -> None:
        self.watchers.pop(tell, None)
        if not self.watchers:
            self.writer.on_readable = None

    def report(self) -> UncommitReport | None:
        """Return what the replica may report. While a barrier is pending, the replica's state is ahead of its files, so
        it repeats its last report, as if the message that it handles were still on its way. This is valid while nothing
        is removed from the files; while something is removed, there is nothing to report."""
        if not self._is_waiting and self._has_changed:
            self._last_report, self._has_changed = self.replica.report(), False
        return self._last_report if self.replica.trusted else None

    def feed(self, event: ReplicaEvent, on_refusal: Refusal | None = None) -> None:
        """Let the replica handle an event, now or as soon as possible; ``on_refusal`` gets the error if it refuses."""
        if not (self._is_waiting or self._events or self._gone):
            self._handle(event, on_refusal)
        elif self._gone:
            if on_refusal is not None:
                on_refusal(self._is_gone())
        elif len(self._events) < EVENTS_WAITING_MAX or isinstance(event, _OF_THE_DISK):
            self._events.append((event, on_refusal))
        elif on_refusal is not None:
            on_refusal(ResourceExhausted(f"log stream {self.stream} is busy with its disk", retry_ms=50))

    def begin_sync(self, begin: SyncBegin, running: RunningEventTime) -> None:
        """Take the source's plan. ``running`` is the event time before the first entry that it will send."""
        self._sync_running = running
        self.feed(begin)

    @property
    def is_busy(self) -> bool:
        """Whether events must wait."""
        return self._is_waiting or bool(self._events) or bool(self._gone)

    @property
    def events_waiting(self) -> int:
        return len(self._events)

    def require_committed(self) -> None:
        """Raise if this replica must not even provide copies of committed entries now."""
        self.writer.release()
        if self.writer.turn:
            self._host.hand_over_soon(self.writer)
        name = f"log stream {self.stream} on storage node {self.node}"
        if self._gone:
            raise self._is_gone()
        if self.is_reopening:
            raise Unavailable(f"{name} is just being opened anew: try again, or ask another replica")
        if self.replica.has_lost_entries:
            raise Unavailable(f"{name} has lost entries ({self.problem}): ask another replica")

    def require_readable(self) -> None:
        """Raise if this replica must not be read now; otherwise release the commits that readers need."""
        self.require_committed()
        name = f"log stream {self.stream} on storage node {self.node}"
        if self.replica.state is ReplicaState.LEARNING:
            raise Unavailable(f"{name} is still being learned: ask another replica")
        if not self.replica.trusted:
            raise Unavailable(f"{name} cannot be trusted ({self.problem}): ask another replica")

    def in_writer(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a job on the files while nothing else is written to them."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        result: list[T | CutwaterError] = []

        def careful() -> None:
            try:
                result.append(job())
            except CutwaterError as error:
                # The caller handles this error; the writer has not failed.
                result.append(error)

        def done(error: CutwaterError | None) -> None:
            outcome = error or result[0]
            if isinstance(outcome, StorageBroken):
                self._failed(outcome)
            if future.done():
                return
            if isinstance(outcome, CutwaterError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.writer.submit(careful, done)
        return future

    async def in_reader(self, job: Callable[[], T], *, is_copy: bool = False) -> T:
        """Read from the files in another thread, and repeat this if a trim removes one of them meanwhile. A result that
        was read while the files were reopened is discarded: it may combine data from before and after. ``is_copy``: the
        job copies a committed entry for a peer that repairs. The repair of damage begins before it is raised."""
        require = self.require_committed if is_copy else self.require_readable
        require()
        replica = self.replica
        try:
            result = await self._host.in_thread(lambda: look_again(job, Path(f"log stream {self.stream}")))
        except Damaged as error:
            self._require_same(replica, require)
            self._host.damage_met(self.stream, error)
            raise
        self._require_same(replica, require)
        return result

    def _require_same(self, replica: Replica, require: Callable[[], None]) -> None:
        require()
        if self.replica is not replica:
            raise Unavailable(f"log stream {self.stream} was opened anew on storage node {self.node}: try again")

    def reopen(self) -> None:
        """Reopen the files: the damage that made the replica untrusted may be repaired."""
        if not self.is_busy and not self.replica.trusted and self.replica.learner is None:
            self._reopen(Reopen(None, None, "repaired"))

    def abandon(self, why: str) -> None:
        """Give up the replica, which is no longer here: fail all waiting callers and do nothing any more."""
        for effect in self.replica.handle(StorageFailed(why)):
            if isinstance(effect, Unsettled):
                self._leave_unsettled(effect)
        self._gone = why
        for _, on_refusal in self._events:
            if on_refusal is not None:
                on_refusal(self._is_gone())
        self._events.clear()
        self.writer.end()
        self._tell_watchers()

    def _is_gone(self) -> Unavailable:
        return Unavailable(f"log stream {self.stream} is no longer on storage node {self.node}: {self._gone}")

    def close(self, timeout: float) -> bool:
        """Close the files after ``writer.end``. Returns whether everything could be made durable and closed in time."""
        if not self.writer.join(timeout):
            return False
        try:
            self.storage.close()
        except CutwaterError as error:
            self._host.alarm(error)
            return False
        return True

    # Opening.

    def _recover(self) -> Replica:
        try:
            opening = open_replica(self.node, self.stream, self.storage)
        except OSError as error:
            # The disk may be able to read this again, so it is tried again before it counts as damage.
            raise StorageBroken(f"{self.storage.path} cannot be read ({error}): reopen it") from error
        damage, self.problem = opening.damage, opening.problem
        if damage is not None:
            self._host.tell(lambda: self._host.damage_met(self.stream, damage))
        self._entries_since_checkpoint = opening.replayed
        return opening.replica

    def _tidy_later(self) -> None:
        self._loop.call_later(TIDY_AFTER_SECONDS, self.feed, Tidy())

    # Handling.

    def _handle(self, event: ReplicaEvent, on_refusal: Refusal | None) -> None:
        replica = self.replica
        through, state = replica.complete_through, replica.state
        if type(event) is not Commit or event.context is not None:
            # A cut without records for this replica is nothing that it reports.
            self._has_changed = True
        try:
            effects = replica.handle(event)
        except ProtocolViolation as error:
            self._host.alarm(error)
            if on_refusal is not None:
                on_refusal(error)
            # The replica's state in memory cannot be trusted any more, as after a failed write.
            self._handle(StorageFailed(error.message), None)
        except CutwaterError as error:
            if on_refusal is not None:
                on_refusal(error)
        else:
            if on_refusal is not None:
                for effect in effects:
                    if type(effect) is RefuseEntry:
                        on_refusal(Refused(effect.reason))
            self._carry_out(effects, 0)
        if self.watchers and (self.replica.complete_through, self.replica.state) != (through, state):
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        for tell in self.watchers:
            tell()

    def _table(self) -> dict[type, Callable[[Any], None]]:
        """Map each kind of effect to its function, except those after which the other effects must wait or end."""
        host, stream = self._host, self.stream
        return {
            WriteEntry: self._write,
            WriteCommit: lambda effect: self.writer.write_context(effect.context, effect.generation),
            Forward: host.forward,
            Acked: host.acknowledge,
            AppendFailed: lambda effect: host.fail(effect.waiter, effect.error),
            Unsettled: self._leave_unsettled,
            ReportNow: lambda effect: host.report_soon(),
            RefuseEntry: lambda effect: None,
            Complain: lambda effect: host.complain(stream, effect.peer),
            AskSync: lambda effect: host.ask_sync(effect.source, effect.request),
            DropBefore: self._drop,
            FeedGroup: lambda effect: host.feed_group(stream, effect.group),
            TellGroup: lambda effect: host.tell_group(effect.outcome),
        }

    def _carry_out(self, effects: list[ReplicaEffect], start: int) -> None:
        ways = self._ways
        for i in range(start, len(effects)):
            effect = effects[i]
            way = ways.get(type(effect))
            if way is None:
                self._pause(effects, i)
                break
            way(effect)
        writer = self.writer
        if self.watchers or self.replica.state is not ReplicaState.RUNNING:
            # Watchers wait for the commits, and so does a replica that is not RUNNING.
            writer.release()
        if writer.turn:
            self._host.hand_over_soon(writer)

    def _pause(self, effects: list[ReplicaEffect], i: int) -> None:
        """Handle an effect that delays or cancels the rest of the effects."""
        effect = effects[i]
        if isinstance(effect, Reopen):
            self._reopen(effect)
        elif isinstance(effect, Remove):
            self._host.remove(self.stream)
        else:
            if isinstance(effect, Truncate | Restart):
                self._last_report, self._has_changed = None, True
            self._wait_for(self._barrier(effect), lambda: self._carry_out(effects, i + 1))

    def _write(self, effect: WriteEntry) -> None:
        self._entries_since_checkpoint += 1
        self.writer.write(effect.entry, effect.generation)

    def _leave_unsettled(self, effect: Unsettled) -> None:
        error = AppendUnknown("the head can no longer tell whether this append succeeded")
        self._host.fail(effect.waiter, error)

    def _barrier(self, effect: ReplicaEffect) -> Job:
        storage = self.storage
        match effect:
            case SaveHardState():
                return lambda: storage.save_hard_state(effect.hard_state)
            case SaveDedup():
                return lambda: storage.save_dedup(effect.checkpoint)
            case Truncate():
                return lambda: storage.truncate(effect.end)
            case Restart():
                running = self._sync_running
                return lambda: storage.restart(effect.first_llsn, running, effect.keep_end)
            case FillEntry():
                return lambda: _fill(storage, effect.entry)
        raise AssertionError(f"{effect} is not a barrier")

    def _wait_for(self, job: Job, then: Callable[[], None]) -> None:
        """Give the writer a job; the replica handles nothing else until it is done."""
        self._is_waiting = True

        def done(error: CutwaterError | None) -> None:
            if self._gone:
                return
            self._is_waiting = False
            if error is None:
                then()
            else:
                self._host.storage_failed(self.stream, error)
                self._handle(StorageFailed(error.message), None)
            self._catch_up()
            self._host.report_soon()

        self.writer.submit(job, done)

    def _catch_up(self) -> None:
        while self._events and not self._is_waiting and not self._gone:
            self._handle(*self._events.popleft())

    def _drop(self, effect: DropBefore) -> None:
        first = self.storage.first_llsn

        def job() -> None:
            nonlocal first
            first = self.storage.drop_before(effect.before, effect.upto)

        self._wait_for(job, lambda: self._handle(Dropped(first), None))

    # Results of the writer.

    def _durable(self, durable: Durable) -> None:
        if durable.entries_end is not None:
            self.feed(EntriesDurable(durable.entries_generation, durable.entries_end))
        if durable.context is not None:
            self.feed(CommitDurable(durable.contexts_generation, durable.context))
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self._entries_since_checkpoint >= CHECKPOINT_EVERY_ENTRIES and self.replica.trusted:
            self._entries_since_checkpoint = 0
            checkpoint = self.replica.dedup.checkpoint(self.replica.durable_committed_end)

            def done(error: CutwaterError | None) -> None:
                if error is not None:
                    self._failed(error)

            self.writer.submit(lambda: self.storage.save_dedup(checkpoint), done)

    def _failed(self, error: CutwaterError) -> None:
        if self._gone:
            return
        # Waiting events belong to a replica that is about to be reopened, except the result of a barrier.
        self._host.storage_failed(self.stream, error)
        self.feed(StorageFailed(error.message))

    def _reopen(self, cut: Reopen) -> None:
        """Cut the files back to what is known to be durable and recover from them, as after a restart."""
        if self._gone:
            return
        recovered: list[Replica] = []

        def job() -> None:
            self.storage.cut_back(cut.durable_end, cut.durable_committed_end)
            recovered.append(self._recover())

        self._is_waiting = self.is_reopening = True
        self._last_report, self._has_changed = None, True

        def done(error: CutwaterError | None) -> None:
            if self._gone:
                return
            if error is not None:
                self._cannot_reopen(cut, error)
                return
            self._is_waiting = self.is_reopening = False
            self._reopenings_failed = 0
            self.replica = recovered[0]
            # Results of writes for the previous replica mean nothing to the new one.
            late = (EntriesDurable, CommitDurable, StorageFailed)
            self._events = deque(item for item in self._events if not isinstance(item[0], late))
            self._tidy_later()
            self._host.report_soon()
            self._catch_up()
            self._tell_watchers()

        self.writer.submit(job, done, reopens=True)

    def _cannot_reopen(self, cut: Reopen, error: CutwaterError) -> None:
        """Handle a failed reopening. Without its files the replica can report nothing. Events keep waiting: a disk may
        come back, or get free space. If it fails again and again, as at a block that cannot be read, the replica is
        given up as at a start: it may be learned anew."""
        self.replica.trusted = False
        self.problem = error.message
        self._host.storage_failed(self.stream, error)
        self._host.report_soon()
        self._tell_watchers()
        self._reopenings_failed += not isinstance(error, DiskFull)
        if isinstance(error, Damaged) or self._reopenings_failed >= REOPENINGS_MAX:
            self._host.cannot_open(self.stream, error)
        else:
            self._loop.call_later(REOPEN_AGAIN_SECONDS, self._reopen, cut)


def _fill(storage: SegmentStorage, entry: Entry) -> None:
    with suppress(Damaged):
        if storage.repair(entry) and storage.entry_at(entry.first_llsn) == entry:
            return
    storage.truncate(LLSN(entry.first_llsn - 1))
    raise StorageBroken(f"LLSN {entry.first_llsn} could not be put in its place: what lay from there on is cut off")
