"""Opening a replica: what its files mean, what of them is kept, and the replica that follows from it.

A replica is created by saving its first hard state where nothing was before; then it is opened like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from cutwater.core.commit_index import context_of_llsn
from cutwater.core.dedup import DedupCheckpoint, Deduplicator
from cutwater.core.recovery import Found, HardState, Invalid, Valid, judge
from cutwater.core.replica import Replica
from cutwater.errors import Damaged
from cutwater.types import LLSN, CommitContext, Entry, LogStreamId, StorageNodeId


class ReplicaFiles(Protocol):
    """What opening needs of the storage of a replica."""

    @property
    def first_llsn(self) -> LLSN: ...

    @property
    def dedup(self) -> DedupCheckpoint | None: ...

    @property
    def contexts(self) -> Sequence[CommitContext]: ...

    def find(self) -> Found: ...

    def truncate(self, end: LLSN) -> None: ...

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """The entries from the one that holds the first LLSN to the one that holds the last, without their bodies."""


class Opening(Struct, frozen=True):
    """``problem`` says why the replica cannot be trusted, if it cannot; ``damage`` what cannot be read, if that is why:
    a copy of it from a peer would help as well as a sync."""

    replica: Replica
    problem: str = ""
    damage: Damaged | None = None


def open_replica(node: StorageNodeId, stream: LogStreamId, files: ReplicaFiles) -> Opening:
    """Whatever can never be committed is removed from the files of a replica that may be trusted. Those of another one
    stay as they are."""
    found = files.find()
    verdict = judge(found)
    kept = verdict.kept if isinstance(verdict, Invalid) else verdict
    dedup = Deduplicator(files.dedup)
    damage: Damaged | None = None
    tail: list[Entry] = []
    try:
        if kept is not None:
            replay(dedup, files, kept.committed_end)
        if isinstance(verdict, Valid):
            tail = [entry for entry in found.tail if entry.last_llsn <= verdict.keep_end]
            if found.entries_end > verdict.keep_end:
                files.truncate(verdict.keep_end)
    except Damaged as error:
        verdict, damage = Invalid(error.message, kept), error
    problem = verdict.reason if isinstance(verdict, Invalid) else ""
    hard_state = found.hard_state or HardState()
    replica = Replica(node, stream, hard_state, verdict, first_llsn=files.first_llsn, tail=tail, dedup=dedup)
    return Opening(replica, problem, damage)


def replay(dedup: Deduplicator, files: ReplicaFiles, committed_end: LLSN) -> None:
    """Deduplication state is its checkpoint and the headers of the committed entries after it."""
    upto = files.dedup.upto if files.dedup else LLSN(0)
    first = max(LLSN(upto + 1), files.first_llsn)
    for entry in files.heads(first, committed_end) if first <= committed_end else ():
        if entry.batch.producer is not None and entry.first_llsn > upto:
            dedup.record(entry)
            context = context_of_llsn(files.contexts, entry.first_llsn)
            assert context is not None
            dedup.commit(context)
