"""A simulated disk under one replica: it keeps what was synced, and as little else as a real one might.

Writes go to a volatile buffer first. A sync moves the buffer to the platter and leaves a durable mark. On a power
failure a random prefix of the unsynced data survives, and the last of it may be torn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from random import Random

from msgspec import structs

from cutwater.core.read.commit_index import first_llsn_at_or_after
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import RunningEventTime
from cutwater.format.errors import StorageBroken
from cutwater.types import GLSN, LLSN, CommitContext, Entry

Written = tuple[LLSN, CommitContext | None]


class ReplicaDisk:
    """The files of one replica: entries, commit contexts, hard state, deduplication checkpoint."""

    def __init__(self) -> None:
        self.hard_state: HardState | None = None
        self.dedup: DedupCheckpoint | None = None
        self.first_llsn = LLSN(1)
        self.entries: list[Entry] = []
        self.contexts: list[CommitContext] = []
        self.entries_synced = 0
        self.contexts_synced = 0
        self.marked_end = LLSN(0)
        """Everything up to here was once synced, so a bad checksum at or below it is damage, not a torn write."""

    @property
    def end(self) -> LLSN:
        return self.entries[-1].last_llsn if self.entries else LLSN(self.first_llsn - 1)

    def synced_end(self) -> LLSN:
        if self.entries_synced == 0:
            return LLSN(self.first_llsn - 1)
        return self.entries[self.entries_synced - 1].last_llsn

    def synced_commit(self) -> CommitContext | None:
        return self.contexts[self.contexts_synced - 1] if self.contexts_synced else None

    def synced_committed_end(self) -> LLSN:
        last = self.synced_commit()
        return last.last_llsn if last else LLSN(0)

    # Writing.

    def save_hard_state(self, hard_state: HardState) -> None:
        self.hard_state = hard_state

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None:
        self.dedup = checkpoint

    def write(self, entry: Entry) -> None:
        assert entry.first_llsn == self.end + 1, (entry.first_llsn, self.end)
        self.entries.append(entry)

    def write_context(self, context: CommitContext) -> None:
        assert context.last_llsn <= self.synced_end(), "a commit context implies that its entries are on disk"
        self.contexts.append(context)

    def written(self) -> Written:
        """Return what a sync that begins now will cover."""
        return self.end, self.contexts[-1] if self.contexts else None

    @property
    def dirty(self) -> bool:
        return len(self.entries) > self.entries_synced or len(self.contexts) > self.contexts_synced

    def sync(self, written: Written, *, fails: bool) -> Written:
        """Make durable what was there when the sync began; a trim may have removed some of it meanwhile. Returns the
        end of the entries, and the last commit if it was not durable before."""
        if fails:
            raise StorageBroken("input/output error on fsync")
        end, context = written
        self.entries_synced = max(self.entries_synced, min(self.index_of(LLSN(end + 1)), len(self.entries)))
        contexts = 0 if context is None else self.contexts.index(context) + 1
        news = contexts > self.contexts_synced
        self.contexts_synced = max(self.contexts_synced, contexts)
        self.marked_end = max(self.marked_end, self.synced_end())
        return end, context if news else None

    def truncate(self, end: LLSN) -> None:
        while self.entries and self.entries[-1].last_llsn > end:
            self.entries.pop()
        self.entries_synced = len(self.entries)
        self.marked_end = self.end

    def restart(self, first_llsn: LLSN, running: RunningEventTime | None, keep_end: LLSN) -> None:
        self.first_llsn = first_llsn
        self.entries = [e for e in self.entries if first_llsn <= e.first_llsn and e.last_llsn <= keep_end]
        self.contexts.clear()
        self.entries_synced, self.contexts_synced = len(self.entries), 0
        self.marked_end = self.end

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        """Remove whole entries below a GLSN, none above ``upto``; return the first LLSN that is left."""
        llsn = first_llsn_at_or_after(self.contexts, before)
        if llsn is None:
            llsn = LLSN(self.contexts[-1].last_llsn + 1) if self.contexts else self.first_llsn
        keep = 0
        while (
            keep < self.entries_synced and self.entries[keep].last_llsn < llsn and self.entries[keep].last_llsn <= upto
        ):
            keep += 1
        if keep:
            self.first_llsn = LLSN(self.entries[keep - 1].last_llsn + 1)
            del self.entries[:keep]
            self.entries_synced -= keep
        return self.first_llsn

    # Faults.

    def lose_power(self, rng: Random, *, torn: bool) -> None:
        survivors = rng.randint(self.entries_synced, len(self.entries))
        tear = torn and survivors > self.entries_synced and rng.random() < 0.5
        del self.entries[survivors:]
        if tear:
            self.entries[-1] = _damaged(self.entries[-1])
        survivors = rng.randint(self.contexts_synced, len(self.contexts))
        # A commit context whose entries did not survive cannot have been written: entries are synced before it.
        del self.contexts[survivors:]

    def lose_process(self) -> None:
        """Kill the process. The system still has everything that was written."""

    def cut_back(self, end: LLSN, committed_end: LLSN) -> None:
        """Drop everything that is not known to be durable, after a failed sync."""
        while self.entries and self.entries[-1].last_llsn > end:
            self.entries.pop()
        while self.contexts and self.contexts[-1].last_llsn > committed_end:
            self.contexts.pop()
        self.entries_synced, self.contexts_synced = len(self.entries), len(self.contexts)
        self.marked_end = self.end

    def damage(self, llsn: LLSN) -> None:
        """Flip a bit in the entry that holds this LLSN."""
        i = self.index_of(llsn)
        self.entries[i] = _damaged(self.entries[i])

    def lose_hard_state(self) -> None:
        """Make the small file unreadable."""
        self.hard_state = None

    # Reading.

    def find(self) -> FoundFiles:
        """Open the files: return recovery points and the tail, not the whole log."""
        last = self.contexts[-1] if self.contexts else None
        base = self.hard_state.base_llsn if self.hard_state else LLSN(0)
        committed_end = last.last_llsn if last else base
        tail: list[Entry] = []
        damaged: LLSN | None = None
        for i in range(self.index_of(LLSN(committed_end + 1)), len(self.entries)):
            entry = self.entries[i]
            if not is_intact(entry):
                if entry.last_llsn <= self.marked_end:
                    damaged = damaged or entry.first_llsn
                    continue
                del self.entries[i:]
                break
            tail.append(structs.replace(entry, batch=structs.replace(entry.batch, body=b"")))
        end = self.end
        self.entries_synced, self.contexts_synced = len(self.entries), len(self.contexts)
        found = (self.hard_state, last, self.first_llsn, end, tuple(tail), damaged)
        return FoundFiles(*found, lacks_dedup=self.dedup is None and self.first_llsn > 1)

    def entries_from(self, llsn: LLSN) -> Iterator[Entry]:
        """Yield entries from the one that holds this LLSN on, including damaged ones."""
        for i in range(self.index_of(llsn), len(self.entries)):
            yield self.entries[i]

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """Yield the entries between two positions, for the content of their headers."""
        for entry in self.entries:
            if from_llsn <= entry.last_llsn and entry.first_llsn <= to_llsn:
                yield entry

    def damaged(self) -> list[LLSN]:
        """Return the first LLSN of each entry that fails its checksum."""
        return [entry.first_llsn for entry in self.entries if not is_intact(entry)]

    def index_of(self, llsn: LLSN) -> int:
        """Return the index of the entry that holds this LLSN, or would hold it."""
        i = bisect_right(self.entries, llsn, key=lambda entry: entry.first_llsn) - 1
        return i if i >= 0 and llsn <= self.entries[i].last_llsn else i + 1

    def running_before(self, llsn: LLSN) -> RunningEventTime | None:
        """Return None: this disk does not know event time."""
        return None

    def repair(self, entry: Entry, running: RunningEventTime | None) -> bool:
        """Replace a damaged entry by an intact copy."""
        i = self.index_of(entry.first_llsn)
        if i < len(self.entries) and self.entries[i].first_llsn == entry.first_llsn and is_intact(entry):
            self.entries[i] = entry
            return True
        return False


def is_intact(entry: Entry) -> bool:
    return crc32c(entry.batch.body) == entry.batch.checksum


def _damaged(entry: Entry) -> Entry:
    body = entry.batch.body
    wrong = bytes([body[0] ^ 1]) + body[1:] if body else b"?"
    return structs.replace(entry, batch=structs.replace(entry.batch, body=wrong))
