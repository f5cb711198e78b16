"""One replica on a disk in memory, and the small words that its tests are written in.

``Bench.do`` hands over one event, carries out what the replica wants done, and gives back exactly that list.
Entries and commit contexts reach the disk only with ``Bench.sync``; ``Bench.crash`` forgets the rest and opens the
replica again from what is left, by the recovery matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

from cutwater.core.messages import ExcludeReplica, LearnFrom, Replicate, SealReplica, UnsealReplica
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.events import (
    Append,
    Commit,
    CommitDurable,
    EntriesDurable,
    Reopen,
    ReplicaEffect,
    ReplicaEvent,
    Restart,
    SaveDedup,
    SaveHardState,
    Truncate,
    WriteCommit,
    WriteEntry,
)
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.core.replica.replica import Replica
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    BatchKind,
    CommitContext,
    CutTime,
    Entry,
    Epoch,
    EventTime,
    LeaderEpoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Revision,
    Sequence,
    StorageNodeId,
)

STREAM = LogStreamId(1)
HEAD, MIDDLE, LAST = StorageNodeId(1), StorageNodeId(2), StorageNodeId(3)
CHAIN = (HEAD, MIDDLE, LAST)


def batch(count: int = 1, body: bytes = b"x", *, producer: ProducerTag | None = None) -> Batch:
    return Batch(count, body, crc32(body), EventTime(0), EventTime(0), producer=producer)


def tag(sequence: int, *, epoch: int = 1, producer: str = "p") -> ProducerTag:
    return ProducerTag(ProducerId(producer), ProducerEpoch(epoch), Sequence(sequence))


def fence(sequence: int = 0, *, epoch: int = 1, producer: str = "p") -> Batch:
    mark = tag(sequence, epoch=epoch, producer=producer)
    return Batch(1, b"", 0, EventTime(0), EventTime(0), kind=BatchKind.FENCE, producer=mark)


def entry(first: int, count: int = 1, *, epoch: int = 1, body: bytes = b"x") -> Entry:
    return Entry(LLSN(first), Epoch(epoch), batch(count, body))


def context(first: int, count: int, *, glsn: int | None = None, epoch: int = 1, previous: int = 0) -> CommitContext:
    """A commit whose cut gave out nothing else, so that its last GLSN names the cut."""
    glsn = first if glsn is None else glsn
    high_watermark = glsn + count - 1
    return CommitContext(
        Epoch(epoch), LLSN(first), GLSN(glsn), count, GLSN(high_watermark), GLSN(previous), CutTime(1_000 * glsn)
    )


def commit(first: int, count: int, *, glsn: int | None = None, epoch: int = 1, revision: int = 1) -> Commit:
    of_stream = context(first, count, glsn=glsn, epoch=epoch)
    return Commit(of_stream.prev_high_watermark, of_stream.high_watermark, Revision(revision), of_stream)


def quiet(previous: int, high_watermark: int, *, revision: int = 1) -> Commit:
    return Commit(GLSN(previous), GLSN(high_watermark), Revision(revision), None)


def append(waiter: int, of: Batch | None = None, *, epoch: int = 1, if_llsn: int | None = None) -> Append:
    return Append(waiter, Epoch(epoch), of or batch(), None if if_llsn is None else LLSN(if_llsn))


def replicate(of: Entry) -> Replicate:
    return Replicate(STREAM, of)


def seal(sealed_at: int, *, epoch: int = 1, leader: int = 1) -> SealReplica:
    return SealReplica(STREAM, LeaderEpoch(leader), Epoch(epoch), LLSN(sealed_at))


def unseal(start: int, *, epoch: int = 1, leader: int = 1, chain: tuple[StorageNodeId, ...] = CHAIN) -> UnsealReplica:
    return UnsealReplica(STREAM, LeaderEpoch(leader), Epoch(epoch), LLSN(start), chain)


def exclude(*, epoch: int = 2, leader: int = 1) -> ExcludeReplica:
    return ExcludeReplica(STREAM, LeaderEpoch(leader), Epoch(epoch))


def learn(*, epoch: int = 1, leader: int = 1, source: StorageNodeId = MIDDLE) -> LearnFrom:
    return LearnFrom(STREAM, LeaderEpoch(leader), Epoch(epoch), source)


class Disk:
    """What is on it survives a crash. ``unsynced`` does not."""

    def __init__(self) -> None:
        self.hard_state: HardState | None = None
        self.dedup: DedupCheckpoint | None = None
        self.first_llsn = LLSN(1)
        self.entries: list[Entry] = []
        self.contexts: list[CommitContext] = []
        self.unsynced: list[WriteEntry | WriteCommit] = []

    @property
    def end(self) -> LLSN:
        return self.entries[-1].last_llsn if self.entries else LLSN(self.first_llsn - 1)

    def carry_out(self, effect: ReplicaEffect) -> None:
        match effect:
            case SaveHardState():
                self.hard_state = effect.hard_state
            case SaveDedup():
                self.dedup = effect.checkpoint
            case WriteEntry() | WriteCommit():
                self.unsynced.append(effect)
            case Truncate():
                self.truncate(effect.end)
                self.unsynced = [
                    w for w in self.unsynced if isinstance(w, WriteCommit) or w.entry.last_llsn <= effect.end
                ]
            case Restart():
                self.first_llsn = effect.first_llsn
                self.sync()
                kept = [e for e in self.entries if e.first_llsn >= effect.first_llsn and e.last_llsn <= effect.keep_end]
                self.entries, self.contexts = kept, []
            case Reopen(durable_end=None):
                self.unsynced = []
            case Reopen():
                self.entries = [e for e in self.entries if e.last_llsn <= effect.durable_end]
                self.contexts = [c for c in self.contexts if c.last_llsn <= effect.durable_committed_end]
                self.unsynced = []

    def sync(self) -> list[EntriesDurable | CommitDurable]:
        """Everything written is on disk; what the replica is to hear of it."""
        heard: list[EntriesDurable | CommitDurable] = []
        for write in self.unsynced:
            if isinstance(write, WriteEntry):
                assert write.entry.first_llsn == self.end + 1, "entries are contiguous on disk"
                self.entries.append(write.entry)
                heard.append(EntriesDurable(write.generation, write.entry.last_llsn))
            else:
                assert write.context.last_llsn <= self.end, "a commit context implies that its entries are on disk"
                self.contexts.append(write.context)
                heard.append(CommitDurable(write.generation, write.context))
        self.unsynced = []
        return heard

    def find(self) -> FoundFiles:
        last = self.contexts[-1] if self.contexts else None
        base = self.hard_state.base_llsn if self.hard_state else LLSN(0)
        committed_end = last.last_llsn if last else base
        tail = tuple(e for e in self.entries if e.last_llsn > committed_end)
        lacks_dedup = self.dedup is None and self.first_llsn > 1
        return FoundFiles(self.hard_state, last, self.first_llsn, self.end, tail, lacks_dedup=lacks_dedup)

    def truncate(self, end: LLSN) -> None:
        self.entries = [e for e in self.entries if e.last_llsn <= end]

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        return (e for e in self.entries if from_llsn <= e.last_llsn and e.first_llsn <= to_llsn)


def new_disk(high_watermark: int = 0) -> Disk:
    """As a storage node creates a replica: by its first hard state."""
    disk = Disk()
    disk.hard_state = HardState(base_glsn=GLSN(high_watermark))
    return disk


class Bench:
    """A replica, its disk, and a driver that does at once what it is told."""

    def __init__(self, node: StorageNodeId = HEAD, disk: Disk | None = None) -> None:
        self.node = node
        self.disk = disk or new_disk()
        self.replica = self._open()

    def _open(self) -> Replica:
        return open_replica(self.node, STREAM, self.disk).replica

    def do(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        effects = self.replica.handle(event)
        for effect in effects:
            self.disk.carry_out(effect)
        if any(isinstance(effect, Reopen) for effect in effects):
            self.replica = self._open()
        return effects

    def sync(self) -> list[ReplicaEffect]:
        """Let everything that was written become durable and the replica hear of it, until it writes no more."""
        effects: list[ReplicaEffect] = []
        while self.disk.unsynced:
            for event in self.disk.sync():
                effects += self.do(event)
        return effects

    def crash(self) -> None:
        self.disk.unsynced = []
        self.replica = self._open()

    def numbers(self) -> tuple[int, int, int, int]:
        """Durably committed, committed, durable, written."""
        r = self.replica
        return (r.durable_committed_end, r.committed_end, r.durable_end, r.written_end)


def running(node: StorageNodeId = HEAD, *, chain: tuple[StorageNodeId, ...] = CHAIN) -> Bench:
    """A new replica, sealed at 0 in epoch 0 and opened in epoch 1."""
    bench = Bench(node)
    bench.do(seal(0, epoch=0))
    bench.do(unseal(0, epoch=1, chain=chain))
    return bench


def backup_with(*counts: int, committed: int = 0) -> Bench:
    """A backup in the middle of the chain that holds batches of these sizes on disk, the first LLSNs committed."""
    bench = running(MIDDLE)
    first = 1
    for count in counts:
        bench.do(replicate(entry(first, count)))
        first += count
    bench.sync()
    if committed:
        bench.do(commit(1, committed))
        bench.sync()
    return bench
