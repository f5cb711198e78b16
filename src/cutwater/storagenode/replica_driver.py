"""Drives one replica: events in, effects out to its files, its peers and its clients.

Everything here runs on the event loop's thread except what the writer does. Effects are carried out in order. While a
barrier is being made durable, and while the files are being opened anew, events wait in a bounded queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from cutwater.core.commit_index import context_of_llsn
from cutwater.core.dedup import Deduplicator
from cutwater.core.messages import Replicate, SyncRequest
from cutwater.core.recovery import Fresh, HardState, Invalid, Valid, judge
from cutwater.core.replica import Replica
from cutwater.core.replica_events import (
    BARRIERS,
    Acked,
    AskSync,
    CommitDurable,
    Complain,
    DropBefore,
    Dropped,
    EntriesDurable,
    Failed,
    Forward,
    RefuseEntry,
    Reopen,
    ReplicaEffect,
    ReplicaEvent,
    ReportNow,
    Restart,
    SaveDedup,
    SaveHardState,
    StorageFailed,
    Truncate,
    Unsettled,
    Waiter,
    WriteCommit,
    WriteEntry,
)
from cutwater.errors import AppendUnknown, CutwaterError, ProtocolViolation, ResourceExhausted
from cutwater.storage.interface import ReplicaStorage
from cutwater.storagenode.writer import Durable, Job, Writer
from cutwater.types import GLSN, LLSN, Entry, LogStreamId, StorageNodeId, UncommitReport

EVENTS_WAITING_MAX = 8_192
CHECKPOINT_EVERY_RECORDS = 1_000_000
"""How many records may be committed before deduplication is checkpointed, so that opening replays no more than that."""

Refusal = Callable[[CutwaterError], None]


class Host(Protocol):
    """What a replica needs of its storage node."""

    def tell(self, job: Job) -> None:
        """Run this soon on the event loop; callable from any thread."""

    def forward(self, peer: StorageNodeId, message: Replicate) -> None: ...

    def answer(self, waiter: Waiter, outcome: Acked | CutwaterError) -> None: ...

    def report_soon(self) -> None: ...

    def complain(self, stream: LogStreamId, peer: StorageNodeId) -> None: ...

    def ask_sync(self, source: StorageNodeId, request: SyncRequest) -> None: ...

    def refuse_entry(self, stream: LogStreamId, reason: str) -> None: ...

    def alarm(self, error: CutwaterError) -> None: ...


class ReplicaDriver:
    """One replica with its storage. ``created_at``: the replica is being created, and its stream begins there."""

    def __init__(
        self,
        node: StorageNodeId,
        stream: LogStreamId,
        storage: ReplicaStorage,
        host: Host,
        *,
        created_at: GLSN | None = None,
    ) -> None:
        self.node, self.stream, self.storage = node, stream, storage
        self._host = host
        self._is_waiting = False
        """A barrier is on its way to the disk."""
        self._events: deque[tuple[ReplicaEvent, Refusal | None]] = deque()
        self._checkpointed = LLSN(0)
        self.replica = self._recover(created_at)
        self._writer = Writer(storage, host.tell, self._durable, self._failed, f"writer of log stream {stream}")

    def report(self) -> UncommitReport | None:
        """What the replica may report; nothing while a barrier is pending, because it is not yet as it says it is."""
        return None if self._is_waiting else self.replica.report()

    def feed(self, event: ReplicaEvent, on_refusal: Refusal | None = None) -> None:
        """Let the replica handle an event, now or as soon as it can; ``on_refusal`` hears if it will not."""
        if not self._is_waiting and not self._events:
            self._handle(event, on_refusal)
        elif len(self._events) < EVENTS_WAITING_MAX:
            self._events.append((event, on_refusal))
        elif on_refusal is not None:
            on_refusal(ResourceExhausted(f"log stream {self.stream} is busy with its disk", retry_ms=50))

    def close(self, timeout: float) -> bool:
        """Make durable what was given and stop; whether that was possible in time."""
        ended = self._writer.stop(timeout)
        if ended:
            self.storage.close()
        return ended

    # Opening.

    def _recover(self, created_at: GLSN | None) -> Replica:
        storage = self.storage
        found = storage.find()
        verdict = judge(found, creating=created_at is not None)
        hard_state = found.hard_state or HardState()
        if isinstance(verdict, Fresh):
            assert created_at is not None
            hard_state = HardState(base_glsn=created_at)
            storage.save_hard_state(hard_state)
            verdict = Valid(LLSN(0), created_at, LLSN(0))
        dedup = Deduplicator(storage.dedup)
        kept = verdict.kept if isinstance(verdict, Invalid) else verdict
        if kept is not None:
            self._replay(dedup, kept.committed_end)
        tail: list[Entry] = []
        if isinstance(verdict, Valid):
            tail = [entry for entry in found.tail if entry.last_llsn <= verdict.keep_end]
            if found.entries_end > verdict.keep_end:
                storage.truncate(verdict.keep_end)
        return Replica(
            self.node, self.stream, hard_state, verdict, first_llsn=storage.first_llsn, tail=tail, dedup=dedup
        )

    def _replay(self, dedup: Deduplicator, committed_end: LLSN) -> None:
        """Deduplication state is its checkpoint and the headers of the committed entries after it."""
        upto = self.storage.dedup.upto if self.storage.dedup else LLSN(0)
        start = max(LLSN(upto + 1), self.storage.first_llsn)
        self._checkpointed = upto
        if start > committed_end:
            return
        for entry in self.storage.heads(start, committed_end):
            if entry.batch.producer is not None and entry.first_llsn > upto:
                dedup.record(entry)
                context = context_of_llsn(self.storage.contexts, entry.first_llsn)
                assert context is not None
                dedup.commit(context)

    # Handling.

    def _handle(self, event: ReplicaEvent, on_refusal: Refusal | None) -> None:
        try:
            effects = self.replica.handle(event)
        except ProtocolViolation as error:
            self._host.alarm(error)
            if on_refusal is not None:
                on_refusal(error)
            self._reopen(None)
        except CutwaterError as error:
            if on_refusal is not None:
                on_refusal(error)
        else:
            self._carry_out(effects, 0)

    def _carry_out(self, effects: list[ReplicaEffect], start: int) -> None:
        for i in range(start, len(effects)):
            effect = effects[i]
            if isinstance(effect, BARRIERS):
                self._wait_for(self._barrier(effect), lambda i=i: self._carry_out(effects, i + 1))  # type: ignore[misc]
                return
            if isinstance(effect, Reopen):
                self._reopen(effect)
                return
            self._do(effect)

    def _do(self, effect: ReplicaEffect) -> None:
        host = self._host
        match effect:
            case WriteEntry():
                self._writer.write(effect.entry, effect.generation)
            case Forward():
                host.forward(effect.peer, effect.message)
            case Acked():
                host.answer(effect.waiter, effect)
            case ReportNow():
                host.report_soon()
            case WriteCommit():
                self._writer.write_context(effect.context, effect.generation)
            case Failed():
                host.answer(effect.waiter, effect.error)
            case Unsettled():
                host.answer(effect.waiter, AppendUnknown("the head can no longer tell whether this append succeeded"))
            case RefuseEntry():
                host.refuse_entry(self.stream, effect.reason)
            case Complain():
                host.complain(self.stream, effect.peer)
            case AskSync():
                host.ask_sync(effect.source, effect.request)
            case DropBefore():
                self._drop(effect)

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
                return lambda: storage.restart(effect.first_llsn)
        raise AssertionError(f"{effect} is not a barrier")

    def _wait_for(self, job: Job, then: Callable[[], None]) -> None:
        """Have the writer do something; nothing else happens to the replica until it is done."""
        self._is_waiting = True

        def done(error: CutwaterError | None) -> None:
            self._is_waiting = False
            if error is None:
                then()
            else:
                self._handle(StorageFailed(error.message), None)
            self._catch_up()

        self._writer.submit(job, done)

    def _catch_up(self) -> None:
        while self._events and not self._is_waiting:
            self._handle(*self._events.popleft())

    def _drop(self, effect: DropBefore) -> None:
        first = self.storage.first_llsn

        def job() -> None:
            nonlocal first
            first = self.storage.drop_before(effect.before, effect.upto)

        self._wait_for(job, lambda: self._handle(Dropped(first), None))

    # What the writer says.

    def _durable(self, durable: Durable) -> None:
        if durable.entries_end is not None:
            self.feed(EntriesDurable(durable.entries_generation, durable.entries_end))
        if durable.context is not None:
            self.feed(CommitDurable(durable.contexts_generation, durable.context))
            self._checkpoint(durable.context.last_llsn)

    def _checkpoint(self, committed_end: LLSN) -> None:
        if committed_end - self._checkpointed >= CHECKPOINT_EVERY_RECORDS and self.replica.trusted:
            self._checkpointed = committed_end
            checkpoint = self.replica.dedup.checkpoint(self.replica.durable_committed_end)
            self._writer.submit(lambda: self.storage.save_dedup(checkpoint), lambda error: None)

    def _failed(self, error: CutwaterError) -> None:
        # Whatever still waits belongs to a replica that is about to be opened anew, except what a barrier will say.
        self.feed(StorageFailed(error.message))

    def _reopen(self, effect: Reopen | None) -> None:
        """Cut the files back to what is known to be durable and recover from them, as after a restart."""
        replica = self.replica
        cut = effect or Reopen(replica.durable_end, replica.durable_committed_end, "")
        recovered: list[Replica] = []

        def job() -> None:
            if cut.durable_end is not None and cut.durable_committed_end is not None:
                self.storage.cut_back(cut.durable_end, cut.durable_committed_end)
            recovered.append(self._recover(None))

        self._is_waiting = True

        def done(error: CutwaterError | None) -> None:
            self._is_waiting = False
            if error is not None:
                # The disk does not let itself be opened: silent from now on, until someone restarts the node.
                self._host.alarm(error)
                self.replica.trusted = False
                return
            self.replica = recovered[0]
            # What was written for the replica before this one means nothing to it.
            late = (EntriesDurable, CommitDurable, StorageFailed)
            self._events = deque(item for item in self._events if not isinstance(item[0], late))
            self._host.report_soon()
            self._catch_up()

        self._writer.submit(job, done)
