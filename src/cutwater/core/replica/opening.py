"""Opens a replica: interprets its files, decides which entries to keep, and builds the replica from them.

A replica is created by saving its first hard state where no files exist. Then it is opened like any other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from msgspec import Struct

from cutwater.core.replica.deduplication import DedupCheckpoint, Deduplicator
from cutwater.core.replica.recovery import FoundFiles, Invalid, Valid, judge, without_hard_state
from cutwater.core.replica.replica import Replica
from cutwater.errors import Damaged
from cutwater.types import LLSN, CommitContext, Entry, LogStreamId, StorageNodeId


class ReplicaFiles(Protocol):
    """The parts of a replica's storage that opening needs."""

    @property
    def first_llsn(self) -> LLSN: ...

    @property
    def dedup(self) -> DedupCheckpoint | None: ...

    @property
    def contexts(self) -> Sequence[CommitContext]: ...

    def find(self) -> FoundFiles: ...

    def truncate(self, end: LLSN) -> None: ...

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """Yield the entries from the one that holds the first LLSN to the one that holds the last, without bodies."""


class Opening(Struct, frozen=True):
    """Result of opening a replica.

    ``problem`` says why the replica cannot be trusted; it is empty if it can. ``damage`` is set if unreadable data is
    the reason: a copy of it from a peer would help as well as a sync. ``replayed`` is the number of entries that came
    after the deduplication checkpoint.
    """

    replica: Replica
    problem: str = ""
    damage: Damaged | None = None
    replayed: int = 0


def open_replica(node: StorageNodeId, stream: LogStreamId, files: ReplicaFiles) -> Opening:
    """Open a replica from its files. If the replica can be trusted, remove all entries that can never be committed.
    Otherwise leave the files unchanged."""
    found = files.find()
    verdict = judge(found)
    kept = verdict.kept if isinstance(verdict, Invalid) else verdict
    dedup = Deduplicator(files.dedup)
    damage: Damaged | None = None
    tail: list[Entry] = []
    replayed = 0
    try:
        if kept is not None:
            replayed = replay(dedup, files, kept.committed_end)
        if isinstance(verdict, Valid):
            tail = [entry for entry in found.tail if entry.last_llsn <= verdict.keep_end]
            if found.entries_end > verdict.keep_end:
                files.truncate(verdict.keep_end)
    except Damaged as error:
        verdict, damage = Invalid(error.message, kept), error
    if isinstance(verdict, Invalid) and kept is not None:
        # The tail does not count, but it is kept until a source has shown which entries are committed.
        tail = list(found.tail)
    problem = verdict.reason if isinstance(verdict, Invalid) else ""
    replica = Replica(
        node,
        stream,
        found.hard_state or without_hard_state(found),
        verdict,
        first_llsn=files.first_llsn,
        tail=tail,
        dedup=dedup,
        # If entries are missing at the end, a cut must come before the next write as well.
        files_end=max(found.entries_end, found.damaged or LLSN(0)),
    )
    return Opening(replica, problem, damage, replayed)


def replay(dedup: Deduplicator, files: ReplicaFiles, committed_end: LLSN) -> int:
    """Apply the headers of the committed entries after the checkpoint to the deduplication state. Return their
    count."""
    upto = files.dedup.upto if files.dedup else LLSN(0)
    first = max(LLSN(upto + 1), files.first_llsn)
    if first > committed_end:
        return 0
    contexts, count = files.contexts, 0
    at = bisect_left(contexts, first, key=attrgetter("last_llsn"))
    context = contexts[at]
    for entry in files.heads(first, committed_end):
        count += 1
        if (entry.batch.producer or entry.batch.group) is not None and entry.first_llsn > upto:
            while context.last_llsn < entry.first_llsn:
                at += 1
                context = contexts[at]
            dedup.record(entry)
            dedup.commit(context)
    return count
