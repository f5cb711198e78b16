"""A storage node: its replicas, its reports and its place in chains. It knows links, but no sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from msgspec import UnsetType

from cutwater.core.messages import (
    CatchUp,
    CommitMessage,
    CreateReplica,
    DropReplica,
    ExcludeReplica,
    GroupOutcome,
    LeaderHello,
    LeaderMessage,
    LearnFrom,
    PublishGroup,
    Replicate,
    SealReplica,
    SyncFailed,
    SyncRequest,
    TrimReplica,
    UnsealReplica,
)
from cutwater.core.replica.events import Acked, Append, Commit, Forward, ReplicateFailed, Waiter
from cutwater.errors import (
    CutwaterError,
    Damaged,
    InvalidArgument,
    ReadOnly,
    ResourceExhausted,
    Unavailable,
)
from cutwater.format.errors import DiskFull
from cutwater.protocol import storage_api as api
from cutwater.runtime import system
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.counters import NodeCounters
from cutwater.storagenode.outside import Outside
from cutwater.storagenode.replica.directory_work import DirectoryWork
from cutwater.storagenode.replica.replica_driver import REOPEN_AGAIN_SECONDS, REOPENINGS_MAX, ReplicaDriver
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.storagenode.replica.sync_scheduler import HandingOver
from cutwater.storagenode.replica.writer import Job, Writer
from cutwater.storagenode.report_writer import BASE_REPLICAS_MIN, Cadence, MemberLists, NodeCondition, ReportWriter
from cutwater.storagenode.validation.entry_validation import check_entry
from cutwater.types import (
    GLSN,
    Batch,
    Epoch,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Revision,
    StorageNodeId,
    UncommitReport,
)
from cutwater.wire.calls.incoming_calls import Call

_log = logging.getLogger(__name__)

REPORT_EVERY_SECONDS = 0.1
"""A report is sent at once when something changed, and at this interval otherwise, in a large cluster less often."""
APPEND_BYTES_MAX = 64 * 1024 * 1024
"""Limit of appends that wait for their commit, over all log streams. Beyond it, clients are told to wait. This bounds
the queues to the disks and to the next node of a chain."""
STOP_SECONDS_MORE = 1.0
"""How much longer than its time limit to wait for the node to stop, if no thread is free to begin that."""
REPLICATE_BYTES_MAX = 256 * 1024 * 1024
"""Limit of entries from other heads that wait for the disk of one replica."""

T = TypeVar("T")


class StorageNode:
    """A storage node on one event loop. ``threads`` runs its reads; by default those of the event loop."""

    def __init__(
        self,
        node: StorageNodeId,
        incarnation: Incarnation,
        outside: Outside,
        stores: VolumeStores,
        threads: Executor | None = None,
        base_replicas_min: int = BASE_REPLICAS_MIN,
    ) -> None:
        self.node = node
        self.replicas: dict[LogStreamId, ReplicaDriver] = {}
        self.unreadable: dict[LogStreamId, str] = {}
        self._openings_failed: dict[LogStreamId, int] = {}
        """How often each of them could not be opened, since it was open last."""
        """Log streams whose files cannot be opened, and why. They are reported, and replaced once a peer can serve as
        the source of a sync; until then their files stay untouched."""
        self.leftovers: set[LogStreamId] = set()
        """Replicas that the leader has replaced by others. Damage in them does not matter."""
        self.state = NodeState.READY
        self.leader_epoch = LeaderEpoch(0)
        self.counters = NodeCounters()
        self._outside = outside
        self._stores = stores
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._handing_over = HandingOver(outside.may_wait_for_disk, outside.flush_peers, self._report_if_due)
        self._waiters: dict[Waiter, tuple[Call[api.AppendArguments], int]] = {}
        self._waiting_bytes = 0
        self._next_waiter = 0
        self._writer = ReportWriter(node, incarnation, base_replicas_min)
        self.cadence = Cadence()
        self._members = MemberLists()
        self._removed_at = 0
        """The last report before a replica was removed: an answer to an older report may concern that replica."""
        self._directories = DirectoryWork(node, stores, self)
        self._is_stopping = False
        self._report_is_due = self._only_ticked = False
        """Whether a report is to be written, and whether nothing but a tick demands it."""
        self._ticking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open the replicas of this node; all of them begin in SEALING. Files of another node or of a newer version
        make this fail; a replica that is only damaged does not keep the others from serving."""
        for stream in self._stores.streams():
            try:
                self._open(stream, self._stores.open(stream))
            except (Damaged, Unavailable) as error:
                # It may be a leftover of a replaced replica: the leader will say so.
                self._note_unreadable(stream, error, logging.INFO)
        self._tick()

    async def take_in(self, streams: list[LogStreamId]) -> None:
        """Open replicas that came with a volume while the node runs; as at a start, they begin in SEALING."""
        for stream in streams:
            try:
                storage = await self.in_thread(partial(self._stores.open, stream))
            except (Damaged, Unavailable) as error:
                self._note_unreadable(stream, error, logging.INFO)
            else:
                self.begin(stream, storage)
        self.report_soon()

    async def in_thread(self, job: Callable[[], T]) -> T:
        """Run a job that the event loop must not wait for. If the caller is cancelled, the job continues."""
        return await self._loop.run_in_executor(self._threads, job)

    async def stop(self, timeout: float) -> bool:
        """Make everything given so far durable. Returns whether all replicas could be closed in time."""
        deadline = self._loop.time() + timeout
        closing = self._loop.run_in_executor(self._threads, self._close, timeout)
        # ``_close`` keeps to this time by itself, once a thread runs it.
        await asyncio.wait({closing}, timeout=timeout + STOP_SECONDS_MORE)
        if not closing.done():
            closing.cancel()
            return False
        at_work = list(self._directories.under_way.values())
        if at_work:
            await asyncio.wait(at_work, timeout=max(0.0, deadline - self._loop.time()))
        return closing.result() and all(future.done() for future in at_work)

    def _close(self, timeout: float) -> bool:
        deadline = system.monotonic() + timeout
        drivers = list(self.replicas.values())
        ended = [driver.close(max(0.0, deadline - system.monotonic())) for driver in drivers]
        ended += [
            d.writer.join(max(0.0, deadline - system.monotonic())) for d in list(self._directories.abandoned.values())
        ]
        return all(ended)

    def stop_reporting(self) -> None:
        """Begin nothing new from here on. Must be called on the event loop before ``stop``."""
        self._is_stopping = True
        self._directories.end()
        for driver in self.replicas.values():
            driver.writer.end()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def driver(self, stream: LogStreamId) -> ReplicaDriver:
        driver = self.replicas.get(stream)
        if driver is None:
            if stream in self.unreadable:
                raise Unavailable(f"{self._name(stream)} cannot be opened ({self.unreadable[stream]}): ask another one")
            # It may be about to be created: only the metadata repository knows which log streams exist.
            raise Unavailable(f"storage node {self.node} has no replica of log stream {stream}: ask another one")
        return driver

    @property
    def incarnation(self) -> Incarnation:
        return self._writer.incarnation

    @incarnation.setter
    def incarnation(self, incarnation: Incarnation) -> None:
        self._writer.incarnation = incarnation

    @property
    def backlog_bytes(self) -> int:
        """Bytes of entries that were accepted and are not on disk yet."""
        return sum(driver.writer.backlog_bytes for driver in self.replicas.values())

    @property
    def appends_waiting(self) -> tuple[int, int]:
        """The number of appends that wait for their commit, and their bytes."""
        return len(self._waiters), self._waiting_bytes

    def set_state(self, state: NodeState, why: str) -> None:
        if state is not self.state:
            self.state = state
            _log.warning("storage node %s is %s now: %s", self.node, state.name, why, extra={"state": state.name})
            self.report_soon()

    def _open(self, stream: LogStreamId, storage: SegmentStorage) -> None:
        driver = self.replicas[stream] = ReplicaDriver(self.node, stream, storage, self)
        self.leader_epoch = max(self.leader_epoch, driver.replica.hard_state.leader_epoch)
        if driver.problem:
            # It may be a leftover of a replaced replica: the leader will say so.
            self._say(logging.INFO, stream, f"cannot be used before it is learned from a peer: {driver.problem}")

    def _note_unreadable(self, stream: LogStreamId, error: CutwaterError, level: int = logging.ERROR) -> None:
        self.unreadable[stream] = error.message
        failed = self._openings_failed.get(stream, 0) + 1
        self._openings_failed[stream] = REOPENINGS_MAX if isinstance(error, Damaged) else failed
        is_given_up = self._openings_failed[stream] >= REOPENINGS_MAX
        what = "waits to be learned from a peer" if is_given_up else "is opened again soon"
        self._say(level, stream, f"cannot be opened and {what}: {error.message}")
        if not isinstance(error, Damaged):
            # The disk failed, and the files may be intact. No other node may have what they hold.
            self._loop.call_later(REOPEN_AGAIN_SECONDS, self._open_again, stream)

    def _open_again(self, stream: LogStreamId) -> None:
        if stream in self._directories.under_way and not self._is_stopping:
            self._loop.call_later(REOPEN_AGAIN_SECONDS, self._open_again, stream)
        elif stream in self.unreadable:
            self._directories.open(stream)

    def _name(self, stream: LogStreamId) -> str:
        return f"log stream {stream} on storage node {self.node}"

    def _say(self, level: int, stream: LogStreamId, what: str) -> None:
        _log.log(level, "log stream %s %s", stream, what, extra={"stream": stream})

    # Appends and the chain.

    def append(self, arguments: api.AppendArguments, batch: Batch, asker: Call[api.AppendArguments]) -> None:
        """Append a batch. ``batch`` is the one of the arguments, with its body."""
        driver, size = self.replicas.get(arguments.stream) or self.driver(arguments.stream), len(batch.body)
        self._outside.take_room(size)
        if self.state is NodeState.READ_ONLY:
            self.counters.outcomes[ReadOnly.code] += 1
            raise ReadOnly(
                f"storage node {self.node} has no room left and takes no appends now: append to another log stream, "
                "make room on its volumes, or trim"
            )
        if self._waiters and self._waiting_bytes + size > APPEND_BYTES_MAX:
            self.counters.outcomes[ResourceExhausted.code] += 1
            raise ResourceExhausted(f"{self._waiting_bytes} bytes wait on storage node {self.node}", retry_ms=20)
        self._next_waiter += 1
        waiter = self._next_waiter
        self._waiters[waiter] = asker, size
        self._waiting_bytes += size
        self.counters.appends += 1
        self.counters.append_bytes += size
        event = Append(waiter, arguments.epoch, batch, arguments.if_llsn)
        driver.feed(event, lambda error: self.fail(waiter, error))

    def revision(self, stream: LogStreamId) -> Revision:
        """The revision of the catalog that the replica here knows."""
        driver = self.replicas.get(stream)
        return driver.replica.revision if driver is not None else Revision(0)

    def replicate(self, message: Replicate, refuse: Callable[[str], None]) -> None:
        """Take an entry from the previous replica of the chain; ``refuse`` gets the reason if it is refused."""

        def refused(error: CutwaterError) -> None:
            self.counters.entries_refused += 1
            refuse(error.message)

        try:
            check_entry(message.entry)
        except InvalidArgument as error:
            refused(error)
            return
        self._outside.take_room(len(message.entry.batch.body))
        driver = self.replicas.get(message.stream)
        if driver is None:
            refused(Unavailable(f"storage node {self.node} has no replica of log stream {message.stream}"))
        elif self.state is NodeState.READ_ONLY:
            refused(ReadOnly(f"storage node {self.node} has no room left"))
        elif driver.writer.backlog_bytes > REPLICATE_BYTES_MAX:
            refused(Unavailable(f"too much waits for the disk of {self._name(message.stream)}"))
        else:
            driver.feed(message, refused)

    def require_room(self, size: int) -> None:
        """Raise if nothing more may be written here."""
        self._outside.take_room(size)
        if self.state is NodeState.READ_ONLY:
            raise ReadOnly(f"storage node {self.node} has no room left")

    def replicate_failed(self, stream: LogStreamId, peer: StorageNodeId, epoch: Epoch, reason: str) -> None:
        driver = self.replicas.get(stream)
        if driver is not None:
            driver.feed(ReplicateFailed(peer, epoch, reason))

    def peer_lost(self, peer: StorageNodeId, reason: str) -> None:
        """Handle a broken connection to a peer: entries that were sent over it may not have arrived."""
        for stream, driver in self.replicas.items():
            hard = driver.replica.hard_state
            if self.node in hard.chain and peer in hard.chain[hard.chain.index(self.node) + 1 :][:1]:
                self.replicate_failed(stream, peer, hard.epoch, reason)

    # The metadata repository.

    def leader_says(self, message: LeaderMessage) -> None:
        match message:
            case CommitMessage():
                self._commit(message)
            case LeaderHello():
                self._writer.hear(message)
                self._hear_leader(message.leader_epoch)
            case ExcludeReplica() if message.replaced:
                self._hear_leader(message.leader_epoch)
                self._leave(message)
            case CreateReplica():
                self.leftovers.discard(message.stream)
                places = (self.replicas, self.unreadable, self._directories.under_way)
                is_here = any(message.stream in some for some in places)
                is_late = message.incarnation != self.incarnation or message.report <= self._removed_at
                if not is_here and not is_late:
                    self._directories.create(message.stream, message.high_watermark)
            case LearnFrom() if message.stream in self.unreadable:
                self._hear_leader(message.leader_epoch)
                self.leftovers.discard(message.stream)
                # Files that may be intact are kept as long as they may be opened again: the peer's may be damaged.
                is_given_up = self._openings_failed.get(message.stream, 0) >= REOPENINGS_MAX
                if is_given_up and message.stream not in self._directories.under_way:
                    self._directories.renew(message.stream)
            case SealReplica() | UnsealReplica() | ExcludeReplica() | LearnFrom():
                self._hear_leader(message.leader_epoch)
                self.leftovers.discard(message.stream)
                if isinstance(message, LearnFrom):
                    self._say_learning(message)
                self._pass_on(message.stream, message)
            case DropReplica() if message.stream in self.unreadable:
                # If it is being renewed, the leader repeats the message.
                if message.stream not in self._directories.under_way:
                    del self.unreadable[message.stream]
                    self._erase(message.stream)
            case PublishGroup():
                self._outside.publish(message)
            case CatchUp() | TrimReplica() | DropReplica():
                self._pass_on(message.stream, message)

    def _say_learning(self, message: LearnFrom) -> None:
        driver = self.replicas.get(message.stream)
        if driver is not None and not driver.replica.trusted and driver.replica.learner is None:
            what = f"learns from storage node {message.source}, because its data cannot be trusted: {driver.problem}"
            self._say(logging.WARNING, message.stream, what)

    def _leave(self, message: ExcludeReplica) -> None:
        """Note that other nodes hold the log stream now, unless a later leader may have decided otherwise since. The
        data stays until an operator removes it."""
        if message.leader_epoch < self.leader_epoch:
            return
        if message.stream not in self.leftovers:
            self.leftovers.add(message.stream)
            self._say(logging.INFO, message.stream, "is held by other nodes now: what is left of it here is not needed")
        self._pass_on(message.stream, message)

    def _commit(self, message: CommitMessage) -> None:
        before, through, revision = message.prev_high_watermark, message.high_watermark, message.revision
        for commit in message.commits:
            driver = self.replicas.get(commit.stream)
            if driver is not None:
                driver.feed(Commit(before, through, revision, commit.context))
        quiet: Sequence[LogStreamId] = message.quiet
        committed = [commit.stream for commit in message.commits]
        if not isinstance(message.names, UnsetType):
            self._members.learn(message.names, (*committed, *quiet))
        elif not isinstance(message.others_of, UnsetType):
            quiet = self._members.others(message.others_of, committed)
        if quiet:
            nothing = Commit(before, through, revision, None)
            for stream in quiet:
                driver = self.replicas.get(stream)
                if driver is not None:
                    driver.feed(nothing)
        self.counters.commits += len(message.commits)

    def _pass_on(
        self,
        stream: LogStreamId,
        message: SealReplica | UnsealReplica | ExcludeReplica | LearnFrom | CatchUp | TrimReplica | DropReplica,
    ) -> None:
        if stream in self.replicas:
            self.replicas[stream].feed(message)

    def _hear_leader(self, leader_epoch: LeaderEpoch) -> None:
        if leader_epoch > self.leader_epoch:
            self.leader_epoch = leader_epoch
            self.report_soon()

    def _tick(self) -> None:
        for driver in self.replicas.values():
            driver.writer.tick()
        if not self._report_is_due:
            self.report_soon()
            self._only_ticked = True
        self._ticking = self._loop.call_later(REPORT_EVERY_SECONDS, self._tick)

    def _report_if_due(self) -> None:
        if self._report_is_due:
            self._report_is_due = False
            self._report(is_tick=self._only_ticked)

    def _report(self, *, is_tick: bool) -> None:
        reports: list[UncommitReport] = []
        invalid: list[LogStreamId] = []
        through: GLSN | None = None
        is_followed = False
        for stream, driver in self.replicas.items():
            replica, of_replica = driver.replica, driver.report()
            if of_replica is not None:
                reports.append(of_replica)
            elif replica.trusted:
                # Something is being removed from its files, and a report without this replica would mean that it is
                # gone. The replica asks for a report when that is done.
                return
            elif stream not in self.leftovers:
                invalid.append(stream)
            if replica.state is ReplicaState.RUNNING and (through is None or replica.complete_through < through):
                through = replica.complete_through
            if driver.watchers:
                is_followed = True
        if self.unreadable:
            invalid += [stream for stream in self.unreadable if stream not in self.leftovers]
        condition = NodeCondition(
            self.leader_epoch, self.state, through or GLSN(0), tuple(invalid), is_followed, self._members.name
        )
        if is_tick and not self._writer.is_waiting and not self.cadence.is_due(reports, condition):
            return
        self.cadence.note(reports, condition)
        report = self._writer.write(reports, condition)
        if self._outside.tell_metadata(api.REPORT, report):
            self.counters.reports += 1

    # Methods for replicas (``replica_driver.Host``).

    def tell(self, job: Job) -> None:
        try:
            self._loop.call_soon_threadsafe(job)
        except RuntimeError:
            # A disk answered after the event loop was closed: nothing is left to tell.
            if not self._loop.is_closed():
                raise

    def hand_over_soon(self, writer: Writer) -> None:
        self._handing_over.soon(writer)

    def forward(self, effect: Forward) -> None:
        peer, message = effect.peer, effect.message
        try:
            self._outside.replicate(peer, message, is_first=not self._handing_over.is_due)
        except CutwaterError as error:
            self._loop.call_soon(self.replicate_failed, message.stream, peer, message.entry.epoch, error.message)

    def acknowledge(self, effect: Acked) -> None:
        known = self._waiters.pop(effect.waiter, None)
        if known is not None:
            asker, size = known
            self._waiting_bytes -= size
            asker.answer(api.AppendAnswer(effect.ack, effect.last_sequence, self.revision(effect.ack.stream)))
            self.counters.outcomes["acknowledged"] += 1

    def fail(self, waiter: Waiter, error: CutwaterError) -> None:
        known = self._waiters.pop(waiter, None)
        if known is not None:
            asker, size = known
            self._waiting_bytes -= size
            asker.fail(error)
            self.counters.outcomes[error.code] += 1

    def report_soon(self) -> None:
        self._only_ticked = False
        if not self._report_is_due:
            self._report_is_due = True
            self._loop.call_soon(self._report_if_due)

    def complain(self, stream: LogStreamId, peer: StorageNodeId) -> None:
        self._outside.tell_metadata(api.COMPLAINT, api.Complaint(stream, self.node, peer))

    def ask_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        try:
            self._outside.begin_sync(source, request)
        except CutwaterError as error:
            failed = SyncFailed(request.stream, request.attempt, error.message)
            self._loop.call_soon(self.replicas[request.stream].feed, failed)

    def feed_group(self, stream: LogStreamId, group: PublishGroup) -> None:
        self._outside.feed_group(self.replicas[stream], group)

    def tell_group(self, outcome: GroupOutcome) -> None:
        self._outside.tell_metadata(api.GROUP_OUTCOME, outcome)

    def damage_met(self, stream: LogStreamId, error: Damaged) -> None:
        if stream in self.leftovers:
            return
        self.counters.damage_met += 1
        self._outside.mend(stream, error)

    def cannot_open(self, stream: LogStreamId, error: CutwaterError) -> None:
        driver = self.replicas.pop(stream, None)
        if driver is not None:
            driver.abandon("its files cannot be opened any more")
            self._directories.abandoned[stream] = driver
            # The driver has tried as often as an opening is tried.
            self._openings_failed[stream] = REOPENINGS_MAX
            self._note_unreadable(stream, error)
            self.report_soon()

    def remove(self, stream: LogStreamId) -> None:
        driver = self.replicas.pop(stream)
        driver.abandon("its topic was deleted")
        self._directories.abandoned[stream] = driver
        self._erase(stream)
        self.report_soon()

    def _erase(self, stream: LogStreamId) -> None:
        self._removed_at = self._writer.sequence
        self._say(logging.INFO, stream, "is removed, because its topic was deleted")
        self._directories.erase(stream)

    def storage_failed(self, stream: LogStreamId, error: CutwaterError) -> None:
        if self._is_stopping:
            # The rest of the work is done after the next start.
            return
        self._say(logging.ERROR, stream, f"is opened anew, because a write failed: {error.message}")
        if isinstance(error, DiskFull):
            self._outside.disk_is_full()

    def alarm(self, error: CutwaterError) -> None:
        _log.error("alarm: %s", error, extra={"code": error.code})

    # Methods for the work on directories (``directory_work.Owner``).

    def begin(self, stream: LogStreamId, storage: SegmentStorage) -> None:
        """Open a replica whose files were created or found."""
        if self._is_stopping:
            storage.close()
            return
        try:
            self._open(stream, storage)
        except (Damaged, Unavailable) as error:
            storage.close()
            self._note_unreadable(stream, error)
        else:
            self._directories.abandoned.pop(stream, None)
            self._openings_failed.pop(stream, None)
            if self.unreadable.pop(stream, None):
                self._say(logging.INFO, stream, "is open again")

    def still_unreadable(self, stream: LogStreamId, error: CutwaterError) -> None:
        self._note_unreadable(stream, error, logging.ERROR if isinstance(error, Damaged) else logging.DEBUG)

    def directory_done(self, stream: LogStreamId, error: CutwaterError | None) -> None:
        if error is not None:
            # The leader asks again after each report.
            self._say(logging.ERROR, stream, f"could not be created, renewed or removed: {error.message}")
            if isinstance(error, DiskFull):
                self._outside.disk_is_full()
        self.report_soon()
