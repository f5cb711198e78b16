"""State machine of one log stream replica: sequencing, durability, commits, seal and unseal.

The life of a batch at the head: ``Append`` gives it the next LLSNs and registers the waiter, *then* writes and forwards
it. ``EntriesDurable`` moves the durable end, which ``report()`` tells the metadata repository. ``Commit`` gives the
records their GLSNs and answers the waiter. Backups do the same from ``Replicate`` on.

Invariants:

1. ``durable_committed_end <= committed_end <= durable_end <= written_end``, and all four fall on batch boundaries, the
   first three also on group boundaries.
2. ``report()`` tells only what is on disk: the durable end, and the durably applied commits.
3. A commit applies only at ``committed_end + 1`` and only in the epoch it was made for.
4. Entries beyond a stored sealed position are removed from disk before their waiters are told.
5. A replica that is not ``trusted`` reports nothing until a sync has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from cutwater.core import messages as m
from cutwater.core.producer_session import Fate
from cutwater.core.publish.groups import GroupBounds
from cutwater.core.recent_history import Journal
from cutwater.core.replica import events as e
from cutwater.core.replica.chain_head import ChainHead
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.events import Effects
from cutwater.core.replica.kept_tail import KeptTail
from cutwater.core.replica.learner import Learner
from cutwater.core.replica.pending import PendingEntries
from cutwater.core.replica.recovery import HardState, Invalid, Valid
from cutwater.core.replica.replica_log import DurableEnds, ReplicaLog
from cutwater.core.replica.states import Step, next_state
from cutwater.core.replica.sync_ranges import Extent
from cutwater.errors import (
    ContradictoryCommand,
    InvalidTransition,
    LeaderFenced,
    NotSealed,
    Refused,
    StreamSealed,
    WrongEpoch,
)
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    CommitContext,
    Entry,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    ProducerId,
    ReplicaState,
    Revision,
    StorageNodeId,
    UncommitReport,
)


class Replica(ReplicaLog):
    """One log stream replica, as the module's docstring describes. Only ``handle`` changes it."""

    def __init__(
        self,
        node: StorageNodeId,
        stream: LogStreamId,
        hard_state: HardState,
        recovered: Valid | Invalid,
        *,
        first_llsn: LLSN,
        tail: Iterable[Entry],
        dedup: Deduplicator,
        files_end: LLSN | None = None,
    ) -> None:
        """Build a replica from its recovered files.

        ``recovered`` describes the files, all of them synced; ``tail`` holds the uncommitted entries that are kept. The
        files of an invalid replica stay unchanged until a source has answered, up to ``files_end``.
        """
        super().__init__(recovered, first_llsn, tail, files_end)
        self.node, self.stream = node, stream
        self.hard_state = hard_state
        # A replica that has forgotten its epochs can only learn.
        is_lost = isinstance(recovered, Invalid) and recovered.forgot_epochs
        self.state = ReplicaState.LEARNING if is_lost else ReplicaState.SEALING
        self.complete_through = GLSN(0)
        self.revision = Revision(0)
        self.dedup = dedup
        self.learner: Learner | None = None
        self._attempts = 0
        self._last_context: CommitContext | None = None
        self._progress = LLSN(0)
        """The LLSN up to which entries are on disk, if it lies inside a group; otherwise 0."""
        self._bounds = GroupBounds()
        self._head = ChainHead(self)
        self.pending = PendingEntries(stream)
        self._untold: list[e.Waiter] = []
        """Waiters whose outcome follows a barrier in the effects last returned. If the barrier fails, they are not
        told."""
        self._journal = Journal(f"replica of log stream {stream} on storage node {node}")
        self._handlers = self._table()
        self.dedup.depart(hard_state.departed)
        for entry in tail if self.trusted else ():
            if entry.last_llsn <= self.durable_end:
                self._register(entry)

    # Queries.

    @property
    def epoch(self) -> Epoch:
        return self.hard_state.epoch

    @property
    def next_llsn(self) -> LLSN:
        return LLSN(self.written_end + 1)

    @property
    def is_head(self) -> bool:
        return bool(self.hard_state.chain) and self.hard_state.chain[0] == self.node

    def report(self) -> UncommitReport | None:
        """Return what the metadata repository may rely on, or None while the data cannot be trusted."""
        if not self.trusted:
            return None
        assert self.learner is not None or self._bounds.whole(self.durable_end) == self.durable_end
        return UncommitReport(
            log_stream_id=self.stream,
            epoch=self.epoch,
            state=self.state,
            high_watermark=self.durable_high_watermark,
            uncommitted_llsn_offset=LLSN(self.durable_committed_end + 1),
            uncommitted_llsn_length=self.durable_end - self.durable_committed_end,
            trimmed_before=self.hard_state.trimmed_before,
            progress=self._progress,
        )

    def fate(self, stream_epoch: Epoch, producer: ProducerId) -> Fate:
        """Return what became of a producer's batches. This is certain only when nothing more can be committed."""
        if self.state is not ReplicaState.SEALED or self.epoch != stream_epoch:
            raise NotSealed(f"log stream {self.stream} is not sealed in epoch {stream_epoch} here: ask another replica")
        last_sequence, batches = self.dedup.fate(producer)
        return Fate(self.stream, stream_epoch, last_sequence, batches)

    def wants(self, group: m.PublishGroup) -> bool:
        """Whether a ``PublishGroup`` for this group, handled now, would ask for the group's entries."""
        return self._head.wants(group)

    def handle(self, event: e.ReplicaEvent) -> Effects:
        """Handle an event. This is the only mutator.

        A refusal is raised before anything has changed. A ``ProtocolViolation`` is an alarm; after it, the replica has
        to be opened anew from disk.
        """
        kind = type(event)
        if kind is not e.StorageFailed:
            self._untold.clear()
            self._ends_before = None
        effects = self._handlers[kind](event)
        if self.state is not ReplicaState.RUNNING and self._head.is_busy:
            effects = [*self._give_up_group(), *effects]
        return effects

    def _give_up_group(self) -> Effects:
        """Fail the appends that waited behind the open group. Nothing was written of them, so the failure is definite
        and needs no barrier."""
        return [_settle(waiter, self.stream, definite=True) for waiter in self._head.give_up()]

    def _table(self) -> dict[type, Callable[[Any], Effects]]:
        return {
            e.Append: self._head.append,
            m.PublishGroup: self._head.publish,
            e.GroupEntry: self._head.take,
            e.GroupFailed: self._head.fail,
            m.Replicate: self._replicate,
            e.EntriesDurable: self._entries_durable,
            e.Commit: self._commit,
            e.CommitDurable: self._commit_durable,
            m.CatchUp: self._catch_up,
            m.SealReplica: self._seal,
            m.UnsealReplica: self._unseal,
            m.ExcludeReplica: self._exclude,
            m.LearnFrom: self._learn,
            m.SyncBegin: self._begin_copy,
            m.SyncEntries: self._sync,
            m.SyncEnd: self._sync,
            m.SyncFailed: self._sync,
            m.TrimReplica: self._trim,
            e.Dropped: self._dropped,
            m.DropReplica: self._drop,
            e.Tidy: lambda event: self._drop_trimmed(),
            e.ReplicateFailed: self._replicate_failed,
            e.StorageFailed: self._storage_failed,
        }

    # Sequencing.

    def take_next(self, batch: Batch, waiters: Iterable[e.Waiter] = ()) -> Effects:
        return self._take(Entry(self.next_llsn, self.epoch, batch), waiters)

    def stop(self, why: str) -> None:
        """Stop the replica because it cannot go on. Its stream has to be sealed."""
        self._step(Step.FAULT, why)

    def _take(self, entry: Entry, waiters: Iterable[e.Waiter]) -> Effects:
        """Give an entry its place, write it, and pass it on. Waiters are registered before anything is written."""
        self._register(entry, waiters)
        write = self._write(entry)
        after = self.neighbour(1)
        return [write] if after is None else [write, e.Forward(after, m.Replicate(self.stream, entry))]

    def neighbour(self, by: int) -> StorageNodeId | None:
        """Return the node before (-1) or after (1) this replica in the chain of its epoch."""
        chain = self.hard_state.chain
        at = chain.index(self.node) + by if self.node in chain else -1
        return chain[at] if 0 <= at < len(chain) else None

    def _register(self, entry: Entry, waiters: Iterable[e.Waiter] = ()) -> None:
        batch = entry.batch
        if batch.more or batch.group is not None:
            self._bounds.add(entry)
        self.pending.add(entry, self.dedup.record(entry), waiters)

    def _replicate(self, event: m.Replicate) -> Effects:
        entry = event.entry
        self.check_epoch(entry.epoch)
        if self.state is not ReplicaState.RUNNING:
            raise StreamSealed(f"the replica of log stream {self.stream} on storage node {self.node} is not running")
        if event.sender is not None and event.sender != self.neighbour(-1):
            raise Refused(f"storage node {event.sender} is not before storage node {self.node} in the chain")
        if entry.first_llsn == self.written_end + 1:
            return self._take(entry, ())
        last_llsn = entry.last_llsn
        if last_llsn <= self.committed_end or (last_llsn <= self.written_end and self.pending.holds(entry)):
            # The entry is here already. A committed entry was compared long ago.
            return []
        reason = f"expected LLSN {self.written_end + 1}, got {entry.first_llsn}"
        self._step(Step.FAULT, reason)
        return [e.RefuseEntry(reason), e.ReportNow()]

    def _entries_durable(self, event: e.EntriesDurable) -> Effects:
        if event.generation != self.generation:
            return []
        assert event.end <= self.written_end
        if self.learner is not None:
            self.durable_end = max(self.durable_end, event.end)
            return self._after_learning(self.learner.entries_durable())
        self.durable_end = max(self.durable_end, self._bounds.whole(event.end))
        self._progress = event.end if event.end > self.durable_end else LLSN(0)
        return [e.ReportNow()]

    # Commits.

    def _commit(self, event: e.Commit) -> Effects:
        context, through = event.context, self.complete_through
        if context is None:
            effects: Effects = []
            complete = event.prev_high_watermark <= through
        else:
            effects = self._apply(context)
            complete = self.committed_end >= context.last_llsn
        if complete and event.high_watermark > through:
            self.complete_through, self.revision = event.high_watermark, event.revision
        return effects

    def _catch_up(self, event: m.CatchUp) -> Effects:
        effects: Effects = []
        for context in event.contexts:
            effects += self._apply(context)
        if self.committed_end == event.committed_end and event.high_watermark > self.complete_through:
            self.complete_through, self.revision = event.high_watermark, event.revision
        return effects

    def _apply(self, context: CommitContext) -> Effects:
        """Give GLSNs to the next uncommitted records. Ignore repeated, early and foreign commits, which are normal."""
        last_llsn, following, hard_state = context.last_llsn, self.committed_end + 1, self.hard_state
        if last_llsn < following:
            self._assert_same_commit(context)
            return []
        if context.first_llsn > following or context.epoch != hard_state.epoch:
            return []
        if not hard_state.chain or not self.trusted or self.state is ReplicaState.LEARNING:
            # The replica is not a member of this epoch and has to learn the records that the epoch commits.
            return []
        if context.first_llsn != following:
            raise self._contradiction(f"commit {context} overlaps what is committed to {self.committed_end}")
        sealed_at = hard_state.sealed_at
        if self.state is ReplicaState.SEALED or (sealed_at is not None and last_llsn > sealed_at):
            raise self._contradiction(f"commit {context} goes beyond the sealed position {sealed_at}")
        if last_llsn > self.durable_end:
            raise self._contradiction(f"commit {context} goes beyond the durable end {self.durable_end}")
        return self._apply_next(context)

    def _apply_next(self, context: CommitContext) -> Effects:
        effects: Effects = [e.WriteCommit(context, self.commits_generation), *self.pending.commit(context)]
        self.committed_end, self._last_context = context.last_llsn, context
        groups = self.dedup.commit(context)
        self._journal.note("applied", context.first_llsn, "to", self.committed_end, "as", context.first_glsn)
        if groups and self.is_head:
            effects += map(self._head.tell, groups)
        return effects

    def _assert_same_commit(self, context: CommitContext) -> None:
        last = self._last_context
        if last is None or last == context:
            return
        if last.first_llsn <= context.last_llsn and context.first_llsn <= last.last_llsn:
            raise self._contradiction(f"{context} came after {last} was applied")

    def _commit_durable(self, event: e.CommitDurable) -> Effects:
        if event.generation != self.commits_generation:
            return []
        self.durable_committed_end = event.context.last_llsn
        self.durable_high_watermark = event.context.high_watermark
        if self.learner is not None:
            return self._after_learning(self.learner.commit_durable())
        self.dedup.groups.settle(self.durable_committed_end)
        self._settle_seal()
        return [e.ReportNow()]

    # Seal and unseal.

    def _seal(self, event: m.SealReplica) -> Effects:
        self._check_leader(event.leader_epoch)
        if event.epoch < self.epoch:
            raise WrongEpoch(self.stream, event.epoch, self.epoch, history=self._journal.lines())
        self.require_learned()
        if event.sealed_at < self.committed_end:
            raise self._contradiction(f"asked to seal at {event.sealed_at}, below the committed {self.committed_end}")
        earlier = self.hard_state.sealed_at if event.epoch == self.epoch else None
        if earlier is not None and earlier != event.sealed_at:
            raise self._contradiction(
                f"asked to seal at {event.sealed_at}, but epoch {event.epoch} is sealed at {earlier}"
            )
        if earlier is not None and self.written_end <= earlier and self.state is not ReplicaState.RUNNING:
            # The seal is a repetition, perhaps from before a restart. Commits or a sync will bring what is still
            # missing.
            before, effects = self.state, self._remember(event.leader_epoch)
            self._settle_seal()
            return effects if self.state is before else [*effects, e.ReportNow()]
        same_epoch = event.epoch == self.epoch
        self._step(Step.SEAL_ASKED, f"epoch {event.epoch} at {event.sealed_at}")
        chain = self.hard_state.chain if same_epoch else ()
        effects = self._save_order(event, sealed_at=event.sealed_at, chain=chain)
        # Entries of an epoch that was closed without this replica may differ from those that the others committed.
        effects += self._cut_tail(event.sealed_at if same_epoch else self.committed_end, definite=same_epoch)
        self._settle_seal()
        return [*effects, e.ReportNow()]

    def _cut_tail(self, end: LLSN, *, definite: bool) -> Effects:
        """Durably remove the entries above ``end`` and tell their waiters. The outcome is definite only when a stored
        sealed position says so."""
        if self.written_end <= end:
            return []
        self._begin_removal()
        effects: Effects = [e.Truncate(end, self.generation)]
        waiters = self.pending.cut(end)
        effects += [_settle(waiter, self.stream, definite=definite) for waiter in waiters]
        self._untold += waiters
        self.dedup.truncate(end)
        self._bounds.cut(end)
        self._progress = LLSN(0)
        self.written_end = end
        self.durable_end = min(self.durable_end, end)
        return effects

    def _settle_seal(self) -> None:
        """Enter SEALED when the disk holds exactly what the seal says: everything committed, nothing beyond."""
        if self.state is ReplicaState.SEALING and self.trusted:
            sealed_at = self.hard_state.sealed_at
            if sealed_at is not None and self.durable_committed_end == sealed_at == self.written_end:
                self._step(Step.SEAL_REACHED, str(sealed_at))

    def _unseal(self, event: m.UnsealReplica) -> Effects:
        self._check_leader(event.leader_epoch)
        epoch = self.epoch
        if event.epoch == epoch and self.hard_state.sealed_at is None and self.state is ReplicaState.RUNNING:
            return self._remember(event.leader_epoch)
        if event.epoch <= epoch:
            raise WrongEpoch(self.stream, event.epoch, epoch, history=self._journal.lines())
        if self.node not in event.chain:
            raise self._contradiction(f"unseal of epoch {event.epoch} for {event.chain}, without this node")
        if self.state is not ReplicaState.SEALED or event.start != self.committed_end or event.epoch != epoch + 1:
            raise NotSealed(
                f"log stream {self.stream} on storage node {self.node} is {self.state.name} in epoch {epoch} at "
                f"{self.committed_end}: it cannot open epoch {event.epoch} at {event.start}",
                history=self._journal.lines(),
            )
        self._step(Step.UNSEAL, f"epoch {event.epoch} at {event.start} {event.chain}")
        self.dedup.depart(event.departed)
        saved = self._save_order(event, sealed_at=None, chain=event.chain, departed=event.departed)
        return [*saved, e.ReportNow()]

    def _exclude(self, event: m.ExcludeReplica) -> Effects:
        self._check_leader(event.leader_epoch)
        if event.epoch < self.epoch:
            raise WrongEpoch(self.stream, event.epoch, self.epoch, history=self._journal.lines())
        if event.epoch == self.epoch:
            if self.state is ReplicaState.RUNNING:
                raise self._contradiction("excluded from the epoch in which it runs")
            return []
        self._step(Step.EXCLUDE, f"epoch {event.epoch}")
        effects = self._save_order(event, sealed_at=None, chain=())
        if self.trusted and not self.hard_state.learning:
            # Also while a source has been asked and has not answered: if it never does, the tail would stay.
            effects += self._cut_tail(self.committed_end, definite=False)
        return [*effects, e.ReportNow()]

    def check_epoch(self, epoch: Epoch) -> None:
        """Raise if an append or an entry belongs to another epoch, which means that it is late or early."""
        if epoch != self.epoch:
            raise WrongEpoch(self.stream, epoch, self.epoch)

    def require_head(self, epoch: Epoch) -> None:
        """Raise unless this replica gives out LLSNs in this epoch."""
        if self.state is not ReplicaState.RUNNING:
            raise StreamSealed(f"log stream {self.stream} takes no appends now ({self.state.name}): use another one")
        self.check_epoch(epoch)
        if not self.is_head:
            raise Refused(f"storage node {self.node} is not the head of log stream {self.stream}: append to the head")

    def require_learned(self) -> None:
        if not self.trusted or self.state is ReplicaState.LEARNING:
            raise Refused(f"the replica of log stream {self.stream} on storage node {self.node} must learn first")

    def _check_leader(self, leader_epoch: LeaderEpoch) -> None:
        if leader_epoch < self.hard_state.leader_epoch:
            raise LeaderFenced(
                f"leader epoch {leader_epoch} is over, {self.hard_state.leader_epoch} leads now",
                history=self._journal.lines(),
            )

    # Learning from a peer.

    def _learn(self, event: m.LearnFrom) -> Effects:
        self._check_leader(event.leader_epoch)
        if self.learner is not None:
            return []
        if self.trusted and self.state is not ReplicaState.LEARNING:
            # An order that was meant for its past must not make a learner of a replica that counts, or may soon.
            self.check_epoch(event.epoch)
        if next_state(self.state, Step.LEARN) is None:
            raise Refused(f"log stream {self.stream} on storage node {self.node} is {self.state.name}: it cannot learn")
        self._step(Step.LEARN, f"from storage node {event.source}")
        return self._begin_learning(event.source)

    def _begin_learning(self, source: StorageNodeId) -> Effects:
        self._attempts += 1
        self.learner = Learner(self, self._attempts, source)
        extent = Extent(LLSN(1), LLSN(0)) if self.has_lost_entries else self.extent
        return [e.AskSync(source, m.SyncRequest(self.stream, self._attempts, extent))]

    def _sync(self, event: m.SyncEntries | m.SyncEnd | m.SyncFailed) -> Effects:
        if self.learner is None or event.attempt != self.learner.attempt:
            return []
        return self._after_learning(self.learner.handle(event))

    def _after_learning(self, effects: Effects) -> Effects:
        learner = self.learner
        assert learner is not None
        if learner.failed:
            self.learner = None
            if self.trusted and not self.hard_state.learning:
                self._step(Step.NOTHING_LEARNED, learner.failed)
            self._journal.note("sync failed", learner.failed)
            return effects
        return effects if learner.learned is None else [*effects, *self._learned(learner.learned)]

    def _begin_copy(self, event: m.SyncBegin) -> Effects:
        """Begin to change the files for a sync. From here on the replica does not count until the sync is done.

        Only committed records are copied. The tail of a replica that was trusted is removed, since the others have
        sealed without it and hold what is committed. Any other tail is kept until the source has shown what is
        committed.
        """
        learner = self.learner
        if learner is None or event.attempt != learner.attempt or not learner.begin(event.plan):
            return []
        cut: Effects = []
        if self.trusted and not self.hard_state.learning:
            cut = self._cut_tail(self.committed_end, definite=False)
            self.kept = KeptTail(self.committed_end)
        restart_at = event.plan.restart_at or (LLSN(1) if self.has_lost_entries else None)
        if restart_at is None:
            return [*self._save(learning=True), *cut]
        saved = self._save(learning=True, base_llsn=LLSN(restart_at - 1), base_glsn=event.base_glsn)
        self.complete_through = GLSN(0)
        self.dedup = Deduplicator()
        return [*saved, *cut, self._restart(restart_at, event.base_glsn)]

    def _learned(self, end: m.SyncEnd) -> Effects:
        """Finish the sync, once all entries and commits that the source had committed are on disk."""
        if end.more and self.kept.end > self.committed_end:
            # The source has not shown yet which entries of the rest of the tail are committed.
            assert self.learner is not None
            return self._begin_learning(self.learner.source)
        self.learner = None
        self.trusted = True
        self.dedup = Deduplicator(end.dedup)
        changes: dict[str, object] = {"trimmed_before": max(self.hard_state.trimmed_before, end.trimmed_before)}
        newest = max((context.epoch for context in end.contexts), default=self.epoch)
        if newest > self.epoch:
            # The records belong to a later epoch than the replica knew. Orders for the earlier epoch now come too late.
            changes |= {"epoch": newest, "chain": (), "sealed_at": None}
        self._step(Step.LEARNED, str(self.committed_end))
        effects: Effects = [e.SaveDedup(end.dedup), *self._save(learning=False, **changes), e.ReportNow()]
        self._settle_seal()
        return [*effects, *self._drop_trimmed()]

    # Trim and failures.

    def _trim(self, event: m.TrimReplica) -> Effects:
        if event.before <= self.hard_state.trimmed_before or self.learner is not None:
            return []
        if self.trusted:
            return [*self._save(trimmed_before=event.before), *self._drop_trimmed()]
        if self.has_lost_entries:
            return []
        # The unreadable entries may be trimmed by now. Then no replica has a copy of them, and none needs one.
        is_learning = self.hard_state.learning
        saved = self._save(trimmed_before=event.before, learning=is_learning)
        return [*saved, e.Reopen(None, None, f"trimmed before {event.before}")]

    def _dropped(self, event: e.Dropped) -> Effects:
        self.first_llsn = max(self.first_llsn, event.first_llsn)
        return []

    def _drop(self, event: m.DropReplica) -> Effects:
        """Remove the replica. Its waiters are told that their outcome is unknown: a cut may have committed their
        entries, and no further message will tell this replica."""
        return [*self._give_up_group(), *(e.Unsettled(waiter) for waiter in self.pending.waiters()), e.Remove()]

    def _drop_trimmed(self) -> Effects:
        """Remove trimmed entries, or what is left of them: a crash may have interrupted an earlier removal, and a sync
        may have brought entries back. Deduplication state outlives the entries that it came from."""
        before, end = self.hard_state.trimmed_before, self.durable_committed_end
        if not self.trusted or before <= self.hard_state.base_glsn + 1 or self.first_llsn > end:
            return []
        return [e.SaveDedup(self.dedup.checkpoint(end)), e.DropBefore(before, end)]

    def _replicate_failed(self, event: e.ReplicateFailed) -> Effects:
        if event.epoch != self.epoch or self.state is not ReplicaState.RUNNING:
            return []
        if event.peer != self.neighbour(1):
            # The replica forwards nothing to this peer, so the failure says nothing about the chain.
            return []
        self._step(Step.FAULT, f"cannot replicate to storage node {event.peer}: {event.reason}")
        return [e.Complain(event.peer), e.ReportNow()]

    def _storage_failed(self, event: e.StorageFailed) -> Effects:
        self._step(Step.FAULT, event.reason)
        effects: Effects = [e.Unsettled(waiter) for waiter in (*self._untold, *self.pending.waiters())]
        unknown: DurableEnds = (None, None)
        is_unknown = not self.trusted and self.learner is None
        end, committed_end = self._ends_before or (unknown if is_unknown else self._durable_ends())
        return [*effects, e.Reopen(end, committed_end, event.reason)]

    # Helpers.

    def _step(self, step: Step, why: str) -> None:
        state = next_state(self.state, step)
        if state is None:
            raise InvalidTransition(
                f"log stream {self.stream} on storage node {self.node}: {step.name} ({why}) in {self.state.name}",
                history=self._journal.lines(),
            )
        self._journal.note(self.state.name, "->", state.name, step.name.lower(), why)
        self.state = state

    def _remember(self, leader_epoch: LeaderEpoch) -> Effects:
        return self._save(leader_epoch=leader_epoch) if leader_epoch > self.hard_state.leader_epoch else []

    def _save_order(self, event: m.SealReplica | m.UnsealReplica | m.ExcludeReplica, **changes: object) -> Effects:
        return self._save(epoch=event.epoch, leader_epoch=event.leader_epoch, **changes)

    def _save(self, **changes: object) -> Effects:
        if not self.trusted:
            # When the replica is opened again, the saved state must not look like that of a replica that counts.
            changes.setdefault("learning", True)
        self.hard_state = structs.replace(self.hard_state, **changes)
        return [e.SaveHardState(self.hard_state)]

    def _contradiction(self, what: str) -> ContradictoryCommand:
        return ContradictoryCommand(
            f"log stream {self.stream} on storage node {self.node} in epoch {self.epoch}: {what}",
            history=self._journal.lines(),
        )


def _settle(waiter: e.Waiter, stream: LogStreamId, *, definite: bool) -> e.ReplicaEffect:
    if not definite:
        return e.Unsettled(waiter)
    return e.AppendFailed(waiter, StreamSealed(f"log stream {stream} was sealed before this append was committed"))
