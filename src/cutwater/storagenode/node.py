"""A storage node: its replicas, its reports, and the chains it is part of. Sockets are not known here, only links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import structs

from cutwater.core.messages import (
    CatchUp,
    CommitMessage,
    CreateReplica,
    ExcludeReplica,
    LeaderHello,
    LeaderMessage,
    LearnFrom,
    Replicate,
    SealReplica,
    SyncFailed,
    SyncRequest,
    TrimReplica,
    UnsealReplica,
)
from cutwater.core.replica_events import Acked, Append, Commit, ReplicateFailed, Waiter
from cutwater.errors import CutwaterError, NotFound
from cutwater.storage.interface import ReplicaStorage
from cutwater.storagenode.replica_driver import ReplicaDriver
from cutwater.storagenode.writer import Job
from cutwater.types import (
    GLSN,
    Batch,
    Epoch,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
)
from cutwater.wire.storage_api import AppendAnswer, AppendArguments, Complaint

_log = logging.getLogger(__name__)

REPORT_EVERY_SECONDS = 0.1
"""A report leaves at once when something changed, and this often when nothing did."""

Outcome = Callable[[AppendAnswer | CutwaterError], None]


class Outside:
    """What a node needs of the world; the server fills it in."""

    def send_report(self, report: Report) -> None:
        raise NotImplementedError

    def send_complaint(self, complaint: Complaint) -> None:
        raise NotImplementedError

    def replicate(self, peer: StorageNodeId, message: Replicate) -> None:
        """Raises if the peer cannot be reached."""
        raise NotImplementedError

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        raise NotImplementedError


class StorageNode:
    """Runs on one event loop. ``open_storage`` opens, or creates, the files of a log stream."""

    def __init__(
        self,
        node: StorageNodeId,
        incarnation: Incarnation,
        outside: Outside,
        open_storage: Callable[[LogStreamId], ReplicaStorage],
    ) -> None:
        self.node, self.incarnation = node, incarnation
        self.replicas: dict[LogStreamId, ReplicaDriver] = {}
        self.leader_epoch = LeaderEpoch(0)
        self._outside = outside
        self._open_storage = open_storage
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[Waiter, Outcome] = {}
        self._next_waiter = 0
        self._sequence = 0
        self._report_is_due = False
        self._refused: list[str] = []
        self._ticking: asyncio.TimerHandle | None = None

    def start(self, streams: list[LogStreamId]) -> None:
        """Open the replicas that this node has; all of them begin in SEALING."""
        for stream in streams:
            self.replicas[stream] = ReplicaDriver(self.node, stream, self._open_storage(stream), self)
        epochs = [driver.replica.hard_state.leader_epoch for driver in self.replicas.values()]
        self.leader_epoch = max(epochs, default=LeaderEpoch(0))
        self._tick()

    def stop(self, timeout: float) -> bool:
        """Make durable what was given; whether all replicas could be closed in time."""
        if self._ticking is not None:
            self._ticking.cancel()
        closed = [driver.close(timeout) for driver in self.replicas.values()]
        return all(closed)

    def driver(self, stream: LogStreamId) -> ReplicaDriver:
        driver = self.replicas.get(stream)
        if driver is None:
            raise NotFound(f"storage node {self.node} has no replica of log stream {stream}: fetch the catalog again")
        return driver

    # Appends and the chain.

    def append(self, arguments: AppendArguments, body: bytes, outcome: Outcome) -> None:
        driver = self.driver(arguments.stream)
        self._next_waiter += 1
        waiter = self._next_waiter
        self._waiters[waiter] = outcome
        batch: Batch = structs.replace(arguments.batch, body=body)
        event = Append(waiter, arguments.epoch, batch, arguments.if_llsn)
        driver.feed(event, lambda error: self._settle(waiter, error))

    def replicate(self, message: Replicate) -> str | None:
        """Take an entry from the replica before this one; the reason if that is not possible."""
        driver = self.replicas.get(message.stream)
        if driver is None:
            return f"storage node {self.node} has no replica of log stream {message.stream}"
        self._refused.clear()
        driver.feed(message, lambda error: self._refused.append(error.message))
        return self._refused[0] if self._refused else None

    def replicate_failed(self, stream: LogStreamId, peer: StorageNodeId, epoch: Epoch, reason: str) -> None:
        driver = self.replicas.get(stream)
        if driver is not None:
            driver.feed(ReplicateFailed(peer, epoch, reason))

    def peer_lost(self, peer: StorageNodeId, reason: str) -> None:
        """The connection to a peer broke: what was sent over it may not have arrived."""
        for stream, driver in self.replicas.items():
            hard = driver.replica.hard_state
            if self.node in hard.chain and peer in hard.chain[hard.chain.index(self.node) + 1 :][:1]:
                self.replicate_failed(stream, peer, hard.epoch, reason)

    # The metadata repository.

    def leader_says(self, message: LeaderMessage) -> None:
        match message:
            case CommitMessage():
                contexts = {commit.stream: commit.context for commit in message.commits}
                for stream in (*contexts, *message.quiet):
                    if stream in self.replicas:
                        event = Commit(
                            message.prev_high_watermark, message.high_watermark, message.revision, contexts.get(stream)
                        )
                        self.replicas[stream].feed(event)
            case LeaderHello():
                self._hear_leader(message.leader_epoch)
            case CreateReplica():
                if message.stream not in self.replicas:
                    self._create(message)
            case SealReplica() | UnsealReplica() | ExcludeReplica() | LearnFrom():
                self._hear_leader(message.leader_epoch)
                if message.stream in self.replicas:
                    self.replicas[message.stream].feed(message)
            case CatchUp() | TrimReplica():
                if message.stream in self.replicas:
                    self.replicas[message.stream].feed(message)

    def _create(self, message: CreateReplica) -> None:
        storage = self._open_storage(message.stream)
        self.replicas[message.stream] = ReplicaDriver(
            self.node, message.stream, storage, self, created_at=message.high_watermark
        )
        self.report_soon()

    def _hear_leader(self, leader_epoch: LeaderEpoch) -> None:
        if leader_epoch > self.leader_epoch:
            self.leader_epoch = leader_epoch
            self.report_soon()

    def _tick(self) -> None:
        self.report_soon()
        self._ticking = self._loop.call_later(REPORT_EVERY_SECONDS, self._tick)

    def _report(self) -> None:
        self._report_is_due = False
        self._sequence += 1
        reports = [driver.report() for driver in self.replicas.values()]
        if any(
            driver.replica.trusted and report is None
            for driver, report in zip(self.replicas.values(), reports, strict=True)
        ):
            # A barrier is pending somewhere: a report without that replica would mean that it is gone.
            self._loop.call_later(0.001, self.report_soon)
            return
        running = [
            d.replica.complete_through for d in self.replicas.values() if d.replica.state is ReplicaState.RUNNING
        ]
        report = Report(
            self.node,
            self.incarnation,
            self._sequence,
            self.leader_epoch,
            NodeState.READY,
            tuple(report for report in reports if report is not None),
            min(running, default=GLSN(0)),
            tuple(stream for stream, driver in self.replicas.items() if not driver.replica.trusted),
        )
        self._outside.send_report(report)

    # What replicas want (``replica_driver.Host``).

    def tell(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(job)

    def forward(self, peer: StorageNodeId, message: Replicate) -> None:
        try:
            self._outside.replicate(peer, message)
        except CutwaterError as error:
            failed = ReplicateFailed(peer, message.entry.epoch, error.message)
            self._loop.call_soon(self.replicas[message.stream].feed, failed)

    def answer(self, waiter: Waiter, outcome: Acked | CutwaterError) -> None:
        if isinstance(outcome, Acked):
            self._settle(waiter, AppendAnswer(outcome.ack, outcome.last_sequence))
        else:
            self._settle(waiter, outcome)

    def _settle(self, waiter: Waiter, outcome: AppendAnswer | CutwaterError) -> None:
        tell = self._waiters.pop(waiter, None)
        if tell is not None:
            tell(outcome)

    def report_soon(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            self._loop.call_soon(self._report)

    def complain(self, stream: LogStreamId, peer: StorageNodeId) -> None:
        self._outside.send_complaint(Complaint(stream, self.node, peer))

    def ask_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        try:
            self._outside.begin_sync(source, request)
        except CutwaterError as error:
            failed = SyncFailed(request.stream, request.attempt, error.message)
            self._loop.call_soon(self.replicas[request.stream].feed, failed)

    def refuse_entry(self, stream: LogStreamId, reason: str) -> None:
        self._refused.append(reason)

    def alarm(self, error: CutwaterError) -> None:
        _log.error("storage node %s: %s", self.node, error)
