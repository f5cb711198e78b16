"""The destination side of a sync: copies committed entries first and their commit contexts last.

While it works, the replica's hard state says ``learning``, so that a crash at any point leaves a replica that never
counts until it has been synced again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from cutwater.core.dedup import DedupCheckpoint, Deduplicator
from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest
from cutwater.core.replica_events import (
    AskSync,
    ReplicaEffect,
    Restart,
    SaveDedup,
    SaveHardState,
    Truncate,
    WriteCommit,
    WriteEntry,
)
from cutwater.core.sync import Extent, SyncPlan
from cutwater.types import GLSN, LLSN, StorageNodeId

if TYPE_CHECKING:
    from cutwater.core.replica import Replica

Effects = list[ReplicaEffect]


class Learner:
    """One attempt of one replica to learn from one source. The replica asks ``done`` and ``failed`` after each step."""

    def __init__(self, replica: Replica, attempt: int, source: StorageNodeId) -> None:
        self.attempt, self.source = attempt, source
        self.done = False
        self.failed: str | None = None
        self._replica = replica
        self._plan: SyncPlan | None = None
        self._end: SyncEnd | None = None
        self._committing = False

    def start(self) -> Effects:
        """Ask for what is missing: everything, if not even the committed entries are all there."""
        replica = self._replica
        extent = Extent(LLSN(1), LLSN(0)) if replica.has_lost_entries else replica.extent
        return [AskSync(self.source, SyncRequest(replica.stream, self.attempt, extent))]

    def handle(self, event: SyncBegin | SyncEntries | SyncEnd | SyncFailed) -> Effects:
        match event:
            case SyncBegin():
                return self._begin(event)
            case SyncEntries():
                return self._write(event)
            case SyncEnd():
                if self._end is not None:
                    return []
                wrong = self._what_is_wrong(event)
                if wrong is not None:
                    return self._fail(wrong)
                self._end = event
                return self.entries_durable(self._replica.durable_end)
            case SyncFailed():
                return [] if self._end is not None else self._fail(event.reason)

    def entries_durable(self, durable_end: LLSN) -> Effects:
        """Once all entries are on disk, and not before, their commits may be written."""
        if self._committing or self._end is None or self._plan is None or durable_end < self._plan.copy.end:
            return []
        self._committing = True
        replica = self._replica
        contexts = [c for c in self._end.contexts if c.last_llsn > replica.committed_end]
        replica.committed_end = self._plan.copy.end
        if not contexts:
            return self._finish()
        return [WriteCommit(context, replica.commits_generation) for context in contexts]

    def commit_durable(self, durable_committed_end: LLSN) -> Effects:
        if not self._committing or self._plan is None or durable_committed_end < self._plan.copy.end:
            return []
        return self._finish()

    def _begin(self, event: SyncBegin) -> Effects:
        """From here on the files change, so from here on the replica must not count until it is done."""
        if self._plan is not None:
            return []
        self._plan = event.plan
        replica = self._replica
        replica.hard_state = structs.replace(replica.hard_state, learning=True)
        effects: Effects = [SaveHardState(replica.hard_state)]
        restart_at = event.plan.restart_at
        if restart_at is None and replica.has_lost_entries:
            restart_at = LLSN(1)
        if not replica.has_lost_entries:
            effects += self._drop_tail()
        if restart_at is not None:
            effects += self._restart(restart_at, event.base_glsn)
        return effects

    def _drop_tail(self) -> Effects:
        """Only committed records are copied, so what is uncommitted would lie in their way; in the files of a replica
        that cannot be trusted there may be more than it knows of."""
        replica = self._replica
        effects = replica.cut_tail(replica.committed_end, definite=False)
        if not effects and not replica.trusted:
            replica.generation += 1
            effects = [Truncate(replica.committed_end, replica.generation)]
        return effects

    def _write(self, event: SyncEntries) -> Effects:
        replica = self._replica
        effects: Effects = []
        for entry in event.entries:
            if self._plan is not None and entry.last_llsn <= replica.written_end:
                continue
            if self._plan is None or entry.first_llsn != replica.written_end + 1:
                return self._fail(f"expected LLSN {replica.written_end + 1}, got {entry.first_llsn}")
            replica.written_end = entry.last_llsn
            effects.append(WriteEntry(entry, replica.generation))
        return effects

    def _what_is_wrong(self, event: SyncEnd) -> str | None:
        """The commits must cover exactly the entries, and the deduplication state must be of their end."""
        if self._plan is None or self._replica.written_end != self._plan.copy.end:
            return "the source ended before it had sent everything"
        end = self._replica.committed_end
        contexts = [context for context in event.contexts if context.last_llsn > end]
        for context in contexts:
            # Only the first one may begin before: where the source has trimmed in the middle of a commit.
            if context.first_llsn > end + 1 or (context is not contexts[0] and context.first_llsn != end + 1):
                return f"commit {context} does not follow LLSN {end}"
            end = context.last_llsn
        if end != self._plan.copy.end or event.dedup.upto != end:
            return f"the commits end at LLSN {end}, deduplication at {event.dedup.upto}, not at {self._plan.copy.end}"
        return None

    def _restart(self, first_llsn: LLSN, base_glsn: GLSN) -> Effects:
        replica = self._replica
        replica.generation += 1
        replica.commits_generation += 1
        base = LLSN(first_llsn - 1)
        replica.first_llsn = first_llsn
        replica.written_end = replica.durable_end = replica.committed_end = replica.durable_committed_end = base
        replica.durable_high_watermark = base_glsn
        replica.complete_through = GLSN(0)
        replica.has_lost_entries = False
        replica.dedup = Deduplicator()
        replica.hard_state = structs.replace(replica.hard_state, learning=True, base_llsn=base, base_glsn=base_glsn)
        return [SaveHardState(replica.hard_state), Restart(first_llsn, replica.generation)]

    def _finish(self) -> Effects:
        assert self._end is not None
        self.done = True
        checkpoint: DedupCheckpoint = self._end.dedup
        replica = self._replica
        replica.dedup = Deduplicator(checkpoint)
        before = max(replica.hard_state.trimmed_before, self._end.trimmed_before)
        newest = max((context.epoch for context in self._end.contexts), default=replica.hard_state.epoch)
        if newest > replica.hard_state.epoch:
            # The records are of a later epoch than the replica knew of: orders for the earlier one come too late.
            replica.hard_state = structs.replace(replica.hard_state, epoch=newest, chain=(), sealed_at=None)
        replica.hard_state = structs.replace(replica.hard_state, trimmed_before=before)
        return [SaveDedup(checkpoint)]

    def _fail(self, reason: str) -> Effects:
        self.failed = reason
        return []
