"""A simulated storage node: drives the replicas of the core over simulated disks and a simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from cutwater.core import messages as m
from cutwater.core.replica import events as e
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.recovery import HardState
from cutwater.core.replica.replica import Replica
from cutwater.core.requests import StagedAnswer
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    InvalidArgument,
    ProtocolViolation,
    ReadOnly,
    Unavailable,
)
from cutwater.format.entry_codec import RunningEventTime
from cutwater.format.errors import DamagedEntries, DiskFull, StorageBroken
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.simulator import protocol as p
from cutwater.testing.simulator.servers.disk import ReplicaDisk, Written
from cutwater.testing.simulator.servers.segment_disk import Disk, SegmentDisk
from cutwater.testing.simulator.servers.serving import SimServing
from cutwater.testing.simulator.servers.staging import SimPartStore
from cutwater.testing.simulator.world import Address, Process, World
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    Batch,
    CommitContext,
    Entry,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)

REPORT_EVERY_US = 50 * MILLISECOND
REPORT_DELAY_US = 500
SYNC_TIMEOUT_US = 300 * MILLISECOND
LEADER_SILENCE_US = 200 * MILLISECOND
TIDY_AFTER_US = 50 * MILLISECOND


_WRITES = (e.WriteEntry, e.WriteCommit, e.SaveHardState, e.SaveDedup, e.Restart)


class _Crash(Exception):
    """The process dies between two effects."""


class SimStorageNode(Process):
    """A storage node. ``disks`` and ``incarnation`` survive the process; everything else is volatile."""

    def __init__(self, world: World, node: StorageNodeId) -> None:
        super().__init__(world, ("sn", node))
        self.node = node
        self.disks: dict[LogStreamId, Disk] = {}
        self.disk_full = False
        self.applied: dict[LogStreamId, set[CommitContext]] = {}
        """Every commit that any replica here ever applied, for the checkers."""
        self.incarnation = Incarnation(0)
        self.staging = SimPartStore(self)
        self._serving = SimServing(self)
        self._deadly: dict[LogStreamId, DamagedEntries] = {}
        """Damage that ended the process; its log file tells the next process."""
        self._reset()

    def _reset(self) -> None:
        self.replicas: dict[LogStreamId, Replica] = {}
        self._waiters: dict[int, tuple[Address, int]] = {}
        self._next_waiter = 0
        self._sequence = 0
        self._removed_at = 0
        """The last report before a replica was removed."""
        self._report_due = False
        self._syncing: set[LogStreamId] = set()
        self._unreadable: dict[LogStreamId, DamagedEntries] = {}
        """Replicas that could not be opened because of damaged entries, and these entries."""
        self._sync_running: dict[LogStreamId, RunningEventTime | None] = {}
        self._turn = 0
        self._leader_heard = self.world.now
        self._leader_epoch = LeaderEpoch(0)

    # Life.

    def on_start(self) -> None:
        self._reset()
        self.incarnation = Incarnation(self.incarnation + 1)
        for stream in self.disks:
            self._open(stream)
        self._unreadable = self._deadly | self._unreadable
        self._leader_epoch = max((r.hard_state.leader_epoch for r in self.replicas.values()), default=LeaderEpoch(0))
        self._report_now()
        self.after(REPORT_EVERY_US, self._report_timer)
        self.staging.start()

    def on_kill(self) -> None:
        only_process = self.world.chance(self.world.options.process_deaths)
        for disk in self.disks.values():
            if only_process:
                disk.lose_process()
            else:
                disk.lose_power(self.world.rng, torn=self.world.options.torn_writes)

    def _create(self, message: m.CreateReplica) -> None:
        """Create a replica. It exists once its first hard state is saved; if that fails, the leader asks again."""
        disk = self._new_disk(message.stream)
        try:
            disk.find()
            disk.save_hard_state(HardState(base_glsn=message.high_watermark))
        except (StorageBroken, DiskFull) as error:
            self.world.trace("cannot create", self.node, message.stream, error.message)
            return
        self.disks[message.stream] = disk
        self._open(message.stream)
        self._report_now()

    def _new_disk(self, stream: LogStreamId) -> Disk:
        return SegmentDisk(self.world, self, stream) if self.world.options.segment_files else ReplicaDisk()

    def _open(self, stream: LogStreamId) -> None:
        """Recover a replica from its disk; repeat this if the disk fails meanwhile."""
        while True:
            try:
                opening = open_replica(self.node, stream, self.disks[stream])
                break
            except StorageBroken as error:
                self.world.trace("storage failed", self.node, stream, error.message)
            except DiskFull as error:
                raise Violation("3 durable", f"storage node {self.node}: {error.message}") from error
        self._unreadable.pop(stream, None)
        if isinstance(opening.damage, DamagedEntries):
            self._unreadable[stream] = opening.damage
            self.fetch_copies(stream, opening.damage.first_llsn, opening.damage.last_llsn)
        if opening.problem:
            self.world.trace("invalid", self.node, stream, opening.problem)
        self.replicas[stream] = opening.replica
        self.after(TIDY_AFTER_US, self._handle, stream, e.Tidy())

    def run(self, life: int, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            super().run(life, what, args)
        except _Crash:
            self.kill()
            self.world.on_death(self)

    # Messages.

    def on_message(self, source: Address, message: Any) -> None:
        match message:
            case p.SimCall():
                self._call(source, message)
            case m.CommitMessage():
                self._leader_heard = self.world.now
                by_stream = {commit.stream: commit.context for commit in message.commits}
                for stream in (*by_stream, *message.quiet):
                    event = e.Commit(
                        message.prev_high_watermark, message.high_watermark, message.revision, by_stream.get(stream)
                    )
                    self._handle(stream, event)
            case m.LeaderHello():
                self._hear_leader(message.leader_epoch)
            case m.CreateReplica():
                is_late = message.incarnation != self.incarnation or message.report <= self._removed_at
                if message.stream not in self.replicas and not is_late:
                    self._create(message)
            case m.SealReplica() | m.UnsealReplica() | m.ExcludeReplica() | m.LearnFrom():
                self._hear_leader(message.leader_epoch)
                self._handle(message.stream, message)
            case m.CatchUp() | m.TrimReplica() | m.DropReplica() | m.PublishGroup():
                self._leader_heard = self.world.now
                self._handle(message.stream, message)
            case m.Replicate():
                self._replicate(source, message)
            case m.SyncRequest():
                self._serving.sync(source, message)
            case p.SyncStart():
                self._sync_running[message.begin.stream] = message.running
                self._handle(message.begin.stream, message.begin)
            case m.SyncEntries() | m.SyncEnd() | m.SyncFailed():
                self._handle(message.stream, message)
            case p.Return():
                if isinstance(message.outcome, StagedAnswer):
                    self.staging.answered(message.outcome)
            case p.FetchReturn():
                self.staging.fetched(message)
            case p.CopyReturn():
                self._repair(message)
            case _:
                self._handle(message[0], message[1])

    def _hear_leader(self, leader_epoch: LeaderEpoch) -> None:
        self._leader_heard = self.world.now
        if leader_epoch > self._leader_epoch:
            self._leader_epoch = leader_epoch
            self._report_now()

    def _handle(self, stream: LogStreamId, event: e.ReplicaEvent) -> None:
        replica = self.replicas.get(stream)
        if replica is None:
            return
        try:
            effects = replica.handle(event)
        except ProtocolViolation as error:
            # A healthy cluster never gets here.
            what = f"storage node {self.node} was told what cannot be: {error}"
            raise Violation("12 one cut sequence", what) from error
        except CutwaterError as error:
            self.world.trace("refused", self.node, stream, error.code)
        else:
            self.carry_out(stream, replica, effects)

    # Effects.

    def carry_out(self, stream: LogStreamId, replica: Replica, effects: list[e.ReplicaEffect]) -> None:
        for effect in effects:
            if self.world.chance(self.world.options.crash_between_effects):
                raise _Crash
            try:
                goes_on = self._carry_out_one(stream, replica, effect)
            except (StorageBroken, DiskFull) as error:
                self._fail_storage(stream, error.message)
                return
            except DamagedEntries as error:
                # The entries to cut off cannot be found. The next start asks for a copy.
                self._deadly[stream] = error
                raise _Crash from error
            if not goes_on:
                return

    def _carry_out_one(self, stream: LogStreamId, replica: Replica, effect: e.ReplicaEffect) -> bool:
        disk = self.disks[stream]
        if isinstance(disk, ReplicaDisk) and isinstance(effect, _WRITES):
            self._strike(effect)
        match effect:
            case e.WriteEntry():
                self._note_written(stream, effect.entry)
                disk.write(effect.entry)
                self._sync_soon(stream)
            case e.WriteCommit():
                disk.write_context(effect.context)
                self.applied.setdefault(stream, set()).add(effect.context)
                self._sync_soon(stream)
            case e.SaveHardState():
                disk.save_hard_state(effect.hard_state)
            case e.SaveDedup():
                disk.save_dedup(effect.checkpoint)
            case e.Truncate():
                disk.truncate(effect.end)
            case e.Restart():
                disk.restart(effect.first_llsn, self._sync_running.get(stream), effect.keep_end)
            case e.FillEntry():
                if not disk.repair(effect.entry, None):
                    disk.truncate(LLSN(effect.entry.first_llsn - 1))
                    raise StorageBroken("the entry does not fit")
            case e.DropBefore():
                self._drop(stream, effect)
            case e.Forward():
                self._forward(stream, effect)
            case e.Acked():
                if effect.ack.glsn + effect.ack.count - 1 > self.world.stored_high_watermark():
                    raise Violation("12 one cut sequence", f"{effect.ack} was acknowledged before its cut was stored")
                self._answer_waiter(
                    effect.waiter, p.SimAppendAnswer(effect.ack, effect.last_sequence, replica.revision)
                )
            case e.AppendFailed():
                self._answer_waiter(effect.waiter, effect.error)
            case e.Unsettled():
                self._answer_waiter(effect.waiter, AppendUnknown("the head can no longer tell the outcome"))
            case e.FeedGroup():
                self.after(0, self.staging.feed, effect.group, replica)
            case e.TellGroup():
                self._to_metadata(effect.outcome)
            case e.ReportNow():
                self._report_now()
            case e.Complain():
                self._to_metadata(p.ComplaintMessage(stream, self.node, effect.peer))
            case e.AskSync():
                source: Address = ("sn", effect.source)
                self.send(source, effect.request)
                self.after(SYNC_TIMEOUT_US, self._watch_sync, stream, effect.request.attempt)
            case e.Reopen():
                if effect.durable_end is not None and effect.durable_committed_end is not None:
                    try:
                        disk.cut_back(effect.durable_end, effect.durable_committed_end)
                    except StorageBroken as error:
                        # The disk cannot be opened until the node is restarted.
                        raise _Crash from error
                self._open(stream)
                self._report_now()
                return False
            case e.Remove():
                self._unreadable.pop(stream, None)
                self._deadly.pop(stream, None)
                self._removed_at = self._sequence
                del self.disks[stream], self.replicas[stream]
                self._report_now()
            case e.RefuseEntry():
                pass
        return True

    def _note_written(self, stream: LogStreamId, entry: Entry) -> None:
        """Check that one place in one epoch has only one content, regardless of the writer."""
        batch = self.world.written.setdefault((stream, entry.epoch, entry.first_llsn), entry.batch)
        if batch != entry.batch:
            raise Violation("1 unique", f"log stream {stream} has two contents at LLSN {entry.first_llsn}")

    def _forward(self, stream: LogStreamId, effect: e.Forward) -> None:
        failed = e.ReplicateFailed(effect.peer, effect.message.entry.epoch, "the connection broke")
        self.send(("sn", effect.peer), effect.message, lambda: self.on_message(self.address, (stream, failed)))

    def _replicate(self, source: Address, message: m.Replicate) -> None:
        """Take an entry from the previous replica of the chain; tell it if that was not possible."""
        replica = self.replicas.get(message.stream)
        refused = e.ReplicateFailed(self.node, message.entry.epoch, "refused")
        if replica is None:
            self.send(source, (message.stream, refused))
            return
        try:
            effects = replica.handle(structs.replace(message, sender=StorageNodeId(source[1])))
        except CutwaterError as error:
            self.world.trace("refused", self.node, message.stream, error.code)
            self.send(source, (message.stream, refused))
            return
        if any(isinstance(effect, e.RefuseEntry) for effect in effects):
            self.send(source, (message.stream, refused))
        self.carry_out(message.stream, replica, effects)

    # The disk.

    def _strike(self, effect: e.ReplicaEffect) -> None:
        """Fail a write to a simple disk; segment files fail by themselves."""
        if self.disk_full and (isinstance(effect, e.WriteEntry) or self.world.rng.random() < 0.5):
            raise DiskFull("no space left on device")
        if not isinstance(effect, e.WriteEntry) and self.world.chance(self.world.options.fsync_failure):
            raise StorageBroken("input/output error")

    def _drop(self, stream: LogStreamId, effect: e.DropBefore) -> None:
        try:
            first = self.disks[stream].drop_before(effect.before, effect.upto)
        except DiskFull:
            # Nothing is lost; the next trim, or the next start, drops everything.
            return
        self._handle(stream, e.Dropped(first))

    def _sync_soon(self, stream: LogStreamId) -> None:
        """Schedule a group commit: one sync at a time; later writes go into the next one."""
        if stream in self._syncing:
            return
        self._syncing.add(stream)
        disk, replica = self.disks[stream], self.replicas[stream]
        delay = 50 + int(self.world.rng.random() * self.world.options.fsync_us_max)
        written = disk.written()
        generations = (replica.generation, replica.commits_generation)
        self.after(delay, self._synced, stream, replica, generations, written)

    def _synced(
        self,
        stream: LogStreamId,
        replica: Replica,
        generations: tuple[int, int],
        written: Written,
    ) -> None:
        self._syncing.discard(stream)
        disk = self.disks.get(stream)
        if disk is None:
            return
        if self.replicas.get(stream) is not replica or (replica.generation, replica.commits_generation) != generations:
            if disk.dirty:
                self._sync_soon(stream)
            return
        try:
            end, context = disk.sync(written, fails=self.world.chance(self.world.options.fsync_failure))
        except StorageBroken as error:
            self._fail_storage(stream, error.message)
            return
        if disk.dirty:
            self._sync_soon(stream)
        if end > replica.durable_end:
            self._handle(stream, e.EntriesDurable(generations[0], end))
        if context is not None:
            self._handle(stream, e.CommitDurable(generations[1], context))

    def _fail_storage(self, stream: LogStreamId, reason: str) -> None:
        self.world.trace("storage failed", self.node, stream, reason)
        if self.world.chance(self.world.options.deadly_disk_errors):
            raise _Crash
        self._handle(stream, e.StorageFailed(reason))

    # Reports.

    def _report_timer(self) -> None:
        if self.world.now - self._leader_heard > LEADER_SILENCE_US:
            # No answer: perhaps both metadata nodes that cover this one are gone.
            self._turn += 1
            self._leader_heard = self.world.now
        for stream, error in self._unreadable.items():
            self.fetch_copies(stream, error.first_llsn, error.last_llsn)
        self._send_report()
        self.after(REPORT_EVERY_US, self._report_timer)

    def _report_now(self) -> None:
        if not self._report_due:
            self._report_due = True
            self.after(REPORT_DELAY_US, self._send_report)

    def _send_report(self) -> None:
        self._report_due = False
        self._sequence += 1
        reports = [replica.report() for replica in self.replicas.values()]
        running = [r.complete_through for r in self.replicas.values() if r.state is ReplicaState.RUNNING]
        report = Report(
            self.node,
            self.incarnation,
            self._sequence,
            self._leader_epoch,
            NodeState.READ_ONLY if self.disk_full else NodeState.READY,
            tuple(ur for ur in reports if ur is not None),
            min(running, default=GLSN(0)),
            tuple(stream for stream, replica in self.replicas.items() if not replica.trusted),
        )
        self._check_report(report)
        self._to_metadata(p.ReportMessage(report))

    def _check_report(self, report: Report) -> None:
        """Check the base of every other guarantee: a report never includes what a power failure could take back."""
        for ur in report.uncommit_reports:
            if ur.state is ReplicaState.LEARNING:
                continue
            disk = self.disks[ur.log_stream_id]
            if ur.durable_end > disk.synced_end():
                raise Violation("3 durable", f"storage node {self.node} reports {ur}, synced to {disk.synced_end()}")
            self._check_group(ur, disk)
            last = disk.synced_commit()
            applied = last.high_watermark if last else 0
            base = disk.hard_state.base_glsn if disk.hard_state else 0
            if ur.high_watermark > max(applied, base):
                raise Violation("3 durable", f"storage node {self.node} reports HWM {ur}, on disk is {applied}")

    def _check_group(self, ur: UncommitReport, disk: Disk) -> None:
        """Check that the report does not end inside a group: a cut could end there too."""
        try:
            last = list(disk.heads(ur.durable_end, ur.durable_end)) if ur.uncommitted_llsn_length else []
        except DamagedEntries:
            return
        if any(entry.batch.more for entry in last):
            raise Violation("groups", f"storage node {self.node} reports {ur}, which ends inside a group")

    def _to_metadata(self, message: object) -> None:
        """Send a message to the two metadata nodes that cover this one."""
        n = self.world.options.metadata_nodes
        for i in range(min(2, n)):
            self.send(("mr", (self.node + self._turn + i) % n + 1), message)

    # Calls from clients and peers.

    def _call(self, source: Address, call: p.SimCall) -> None:
        try:
            match call.body:
                case p.AppendCall():
                    self._append(source, call.call_id, call.body)
                case p.ReadCall():
                    self._return(source, call.call_id, self._serving.read(call.body))
                case p.FateCall():
                    fate = self.replica_of(call.body.stream).fate(call.body.stream_epoch, call.body.producer)
                    self._return(source, call.call_id, fate)
                case p.StageCall():
                    self.staging.stage(source, call.call_id, call.body)
                case p.FetchCall():
                    self.staging.serve(source, call.body)
                case p.CopyCall():
                    self._serving.copy(source, call.body)
        except CutwaterError as error:
            self._return(source, call.call_id, error)

    def _return(self, target: Address, call_id: int, outcome: object) -> None:
        self.send(target, p.Return(call_id, outcome))

    def _append(self, source: Address, call_id: int, call: p.AppendCall) -> None:
        replica = self.replica_of(call.stream)
        if self.disk_full:
            raise ReadOnly(f"storage node {self.node} has no room left")
        self._check_content(replica, call.batch)
        self._next_waiter += 1
        waiter = self._next_waiter
        effects = replica.handle(e.Append(waiter, call.epoch, call.batch))
        self._waiters[waiter] = (source, call_id)
        self.carry_out(call.stream, replica, effects)

    def _check_content(self, replica: Replica, batch: Batch) -> None:
        """Refuse event times too far ahead. Each node has its own clock, so one node may refuse what another accepts,
        and the outcome changes with time."""
        ahead = self.world.options.event_time_ahead_us
        is_ahead = batch.time_max > self.world.now + ahead + self.node * 5 * MILLISECOND
        if ahead and is_ahead and not self.world.healing and not replica.dedup.has(batch):
            raise InvalidArgument(f"event time {batch.time_max} is too far ahead")

    def _answer_waiter(self, waiter: int, outcome: object) -> None:
        source, call_id = self._waiters.pop(waiter, (None, 0))
        if source is not None:
            self._return(source, call_id, outcome)

    def replica_of(self, stream: LogStreamId) -> Replica:
        replica = self.replicas.get(stream)
        if replica is None:
            # The replica is not there yet although the catalog lists it, or not there any more.
            raise Unavailable(f"storage node {self.node} has no replica of log stream {stream}: ask another")
        return replica

    # Sync and repair between peers.

    def _watch_sync(self, stream: LogStreamId, attempt: int) -> None:
        """Fail a sync that did not end in time: the source is gone, or a part was lost."""
        self.on_message(self.address, m.SyncFailed(stream, attempt, "timed out"))

    def _repair(self, copy: p.CopyReturn) -> None:
        disk, replica = self.disks.get(copy.stream), self.replicas.get(copy.stream)
        if disk is None or replica is None:
            return
        try:
            repaired = disk.repair(copy.entry, copy.running)
        except StorageBroken as error:
            self._fail_storage(copy.stream, error.message)
            return
        if repaired:
            self._deadly.pop(copy.stream, None)
        if repaired and copy.stream in self._unreadable and replica.learner is None:
            self._open(copy.stream)
            self._report_now()

    def fetch_copies(self, stream: LogStreamId, first: LLSN, last: LLSN) -> None:
        """Fetch copies of the first and the last of the damaged entries; the others follow."""
        for llsn in sorted({first, last}):
            self.fetch_copy(stream, llsn)

    def fetch_copy(self, stream: LogStreamId, llsn: LLSN) -> None:
        """Ask all other storage nodes for an intact copy of a damaged entry."""
        for kind, peer in self.world.processes:
            if kind == "sn" and peer != self.node:
                self.send(("sn", peer), p.SimCall(0, p.CopyCall(stream, llsn)))
