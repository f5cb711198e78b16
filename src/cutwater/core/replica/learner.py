"""The destination side of a sync: copies committed entries first and their commit contexts last.

The learner says what comes next and checks what the source sends. Of its replica it sees only the log. During the sync
the replica's hard state says ``learning``. So a crash at any point leaves a replica that does not count until it has
been synced again.
"""

from __future__ import annotations

from cutwater.core.messages import SyncEnd, SyncEntries, SyncFailed
from cutwater.core.replica.events import Effects
from cutwater.core.replica.replica_log import ReplicaLog
from cutwater.core.replica.sync_ranges import SyncPlan
from cutwater.types import LLSN, CommitContext, StorageNodeId


class Learner:
    """One attempt of one replica to learn from one source. The replica reads ``learned`` and ``failed`` after each
    step."""

    def __init__(self, log: ReplicaLog, attempt: int, source: StorageNodeId) -> None:
        self.attempt, self.source = attempt, source
        self.learned: SyncEnd | None = None
        """The last message of the source, set once all entries and their commits are on disk."""
        self.failed: str | None = None
        self._log = log
        self._plan: SyncPlan | None = None
        self._end: SyncEnd | None = None
        self._committing = False
        self._through = LLSN(0)
        """The source has said which entries up to this LLSN are committed, and this replica holds them."""

    def begin(self, plan: SyncPlan) -> bool:
        """Take the plan of the source. Return False if there is one already."""
        if self._plan is not None:
            return False
        self._plan = plan
        self._through = LLSN(plan.copy.first - 1)
        return True

    def handle(self, event: SyncEntries | SyncEnd | SyncFailed) -> Effects:
        match event:
            case SyncEntries():
                return self._write(event)
            case SyncEnd():
                if self._end is not None:
                    return []
                wrong = self._what_is_wrong(event)
                if wrong is not None:
                    return self._fail(wrong)
                self._end = event
                assert self._plan is not None
                is_last = not event.more or self._log.kept.end <= self._plan.copy.end
                dropped = self._log.drop_kept(self._plan.copy.end) if is_last else []
                return [*dropped, *self.entries_durable()]
            case SyncFailed():
                return [] if self._end is not None else self._fail(event.reason)

    def entries_durable(self) -> Effects:
        """Write the commits, once all entries are on disk."""
        if self._committing or self._end is None or self._plan is None:
            return []
        if self._log.durable_end < self._plan.copy.end:
            return []
        self._committing = True
        effects = self._log.commit_copy(self._new_contexts(self._end), self._plan.copy.end)
        return effects or self.commit_durable()

    def commit_durable(self) -> Effects:
        if self._committing and self._plan is not None and self._log.durable_committed_end >= self._plan.copy.end:
            self.learned = self._end
        return []

    def _write(self, event: SyncEntries) -> Effects:
        effects: Effects = []
        for entry in event.entries:
            if self._plan is not None and entry.last_llsn <= self._through:
                continue
            if self._plan is None or entry.first_llsn != self._through + 1:
                return [*effects, *self._fail(f"expected LLSN {self._through + 1}, got {entry.first_llsn}")]
            effects += self._log.write_copy(entry)
            self._through = entry.last_llsn
        for missing in event.missing:
            if (
                self._plan is None
                or missing.first_llsn != self._through + 1
                or not self._log.kept.covers(missing.first_llsn, missing.last_llsn, missing.epoch)
            ):
                lacks = f"LLSN {missing.first_llsn} to {missing.last_llsn}"
                return [*effects, *self._fail(f"the source cannot read {lacks}, and there is no copy here either")]
            self._through = missing.last_llsn
        return effects

    def _what_is_wrong(self, event: SyncEnd) -> str | None:
        """Check that the commits cover exactly the entries, and that the deduplication state belongs to their end."""
        if self._plan is None or self._through != self._plan.copy.end:
            return "the source ended before it had sent everything"
        end = self._log.committed_end
        contexts = self._new_contexts(event)
        for context in contexts:
            # Only the first commit may begin earlier: the source may have trimmed in the middle of it.
            if context.first_llsn > end + 1 or (context is not contexts[0] and context.first_llsn != end + 1):
                return f"commit {context} does not follow LLSN {end}"
            end = context.last_llsn
        if end != self._plan.copy.end or event.dedup.upto != end:
            return f"the commits end at LLSN {end}, deduplication at {event.dedup.upto}, not at {self._plan.copy.end}"
        return None

    def _new_contexts(self, event: SyncEnd) -> list[CommitContext]:
        """Return the commits that this replica lacks. If it has none, the commit of the last trimmed record is among
        them: it says when the log stream last spoke."""
        end = self._log.committed_end
        known = LLSN(end - 1) if self._log.lacks_commits else end
        return [context for context in event.contexts if context.last_llsn > known]

    def _fail(self, reason: str) -> Effects:
        self.failed = reason
        return []
