"""The shipped storage code under a simulated replica: the same interface as ``ReplicaDisk``, over files that fail.

Torn and lost writes, failing syncs, a full disk and flipped bits happen in the file layer, so the code that handles
them here is the code that handles them in production.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.format.entry_codec import RunningEventTime
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.storage.replica.commits import ContextView
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.fault_files import FaultFiles
from cutwater.testing.simulator.servers.disk import ReplicaDisk
from cutwater.testing.simulator.world import World
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    ClusterId,
    CommitContext,
    Entry,
    Epoch,
    EventTime,
    LogStreamId,
)

if TYPE_CHECKING:
    from cutwater.testing.simulator.servers.storage_node import SimStorageNode

DIRECTORY = Path("/replica")
OPTIONS = SegmentOptions(segment_bytes=4_000, index_interval_bytes=700, commits_per_file=16)
"""Small sizes, so that a simulation begins and drops many files."""
READ_BYTES = 2_000


class SegmentDisk:
    def __init__(self, world: World, node: SimStorageNode, stream: LogStreamId) -> None:
        self._world, self._node, self._stream = world, node, stream
        self._rng = Random(f"disk/{world.seed}/{node.node}/{stream}")
        self._identity = ReplicaIdentity(ClusterId(1), node.node, stream)
        self._files = FaultFiles()
        self._files.recording = False
        self._files.rng = self._rng
        self._files.fail_sync = self._fails_sync
        self._storage: SegmentStorage | None = None

    @property
    def storage(self) -> SegmentStorage:
        if self._storage is None:
            # Checkers read the disk of a dead process too. They read a copy, so that reading changes nothing.
            files = self._files.copy()
            files.fail_sync = lambda path: False
            self._storage = self._open(files)
        return self._storage

    def _open(self, files: FaultFiles) -> SegmentStorage:
        with self._only_entries_damaged():
            return SegmentStorage(DIRECTORY, self._identity, OPTIONS, files)

    @contextmanager
    def _only_entries_damaged(self) -> Iterator[None]:
        """Raise a violation if a file is damaged: bits flip in entries only."""
        try:
            yield
        except DamagedFile as error:
            raise Violation("13 damage", f"storage node {self._node.node}: {error.message}") from error

    def _fails_sync(self, path: Path) -> bool:
        """Whether a sync fails. Any sync may, including those of a full segment, a hard state or at opening."""
        return self._world.chance(self._world.options.fsync_failure, self._rng)

    @contextmanager
    def _little_room(self) -> Iterator[None]:
        """Limit the free space if the disk is full; some small writes still fit."""
        if self._node.disk_full:
            self._files.room_bytes = self._rng.randrange(200)
        try:
            yield
        finally:
            self._files.room_bytes = None

    def _evict_perhaps(self) -> None:
        """Decide whether the system still shows data that a failed sync did not write."""
        if self._rng.random() < 0.5:
            self._files.evict()

    # Content.

    @property
    def hard_state(self) -> HardState | None:
        return self.storage.hard_state

    @property
    def dedup(self) -> DedupCheckpoint | None:
        return self.storage.dedup

    @property
    def first_llsn(self) -> LLSN:
        return self.storage.first_llsn

    @property
    def end(self) -> LLSN:
        return self.storage.end

    @property
    def contexts(self) -> ContextView:
        return self.storage.contexts

    @property
    def entries(self) -> list[Entry]:
        return list(self.entries_from(self.storage.first_llsn))

    @property
    def entries_synced(self) -> int:
        return sum(1 for entry in self.entries if entry.last_llsn <= self.storage.durable_end)

    @property
    def dirty(self) -> bool:
        storage = self.storage
        return storage.end > storage.durable_end or storage.last_commit != storage.durable_commit

    def synced_end(self) -> LLSN:
        return self.storage.durable_end

    def synced_commit(self) -> CommitContext | None:
        return self.storage.durable_commit

    def synced_committed_end(self) -> LLSN:
        last = self.storage.durable_commit
        return last.last_llsn if last else LLSN(0)

    def find(self) -> FoundFiles:
        """Reopen the files, as a process that starts does."""
        self._evict_perhaps()
        with self._little_room():
            self._storage = self._open(self._files)
        return self._storage.find()

    # Writing.

    def save_hard_state(self, hard_state: HardState) -> None:
        with self._little_room():
            self.storage.save_hard_state(hard_state)

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None:
        with self._little_room():
            self.storage.save_dedup(checkpoint)

    def write(self, entry: Entry) -> None:
        with self._little_room():
            self.storage.write([entry])

    def write_context(self, context: CommitContext) -> None:
        with self._little_room():
            self.storage.write_contexts([context])

    def written(self) -> tuple[LLSN, CommitContext | None]:
        return self.storage.end, self.storage.last_commit

    def sync(self, written: tuple[LLSN, CommitContext | None], *, fails: bool) -> tuple[LLSN, CommitContext | None]:
        storage = self.storage
        before = storage.durable_commit
        if fails:
            self._files.fail_sync = lambda path: True
        try:
            storage.sync()
        finally:
            self._files.fail_sync = self._fails_sync
        return storage.durable_end, storage.durable_commit if storage.durable_commit != before else None

    def truncate(self, end: LLSN) -> None:
        with self._little_room():
            self.storage.truncate(end)

    def restart(self, first_llsn: LLSN, running: RunningEventTime | None, keep_end: LLSN) -> None:
        assert running is not None, "the source of a sync has files of the same kind"
        with self._little_room():
            self.storage.restart(first_llsn, running, keep_end)

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        with self._little_room():
            return self.storage.drop_before(before, upto)

    # Faults.

    def lose_power(self, rng: Random, *, torn: bool) -> None:
        self._files.crash(self._rng, keep=self._rng.choice((0.0, 0.5, 0.9, 1.0)), torn=torn)
        self._storage = None

    def lose_process(self) -> None:
        self._files.kill()
        self._storage = None

    def cut_back(self, end: LLSN, committed_end: LLSN) -> None:
        self._evict_perhaps()
        with self._little_room(), self._only_entries_damaged():
            self.storage.cut_back(end, committed_end)

    def damage(self, llsn: LLSN) -> None:
        """Flip a bit somewhere in the entry that holds this LLSN."""
        segment = self.storage._log.segment_of(llsn)
        place = segment.place_of(llsn)
        self._files.flip(segment.path, self._rng.randrange(place.offset, place.end), self._rng.randrange(8))

    def lose_hard_state(self) -> None:
        """Flip a bit somewhere in the small file."""
        path = DIRECTORY / "state"
        self._files.flip(path, self._rng.randrange(len(self._files.content(path))), self._rng.randrange(8))
        self._storage = None

    # Reading.

    def entries_from(self, llsn: LLSN) -> Iterator[Entry]:
        """Yield entries from the one with this LLSN on; a placeholder that is not intact replaces damaged ones."""
        storage = self.storage
        while llsn <= storage.end:
            try:
                found = self._read(storage, llsn)
            except DamagedEntries as error:
                found = [_damaged(error.first_llsn, error.last_llsn)]
            yield from found
            llsn = LLSN(found[-1].last_llsn + 1)

    def _read(self, storage: SegmentStorage, llsn: LLSN) -> list[Entry]:
        if llsn > storage.committed_end:
            return [storage.entry_at(llsn)]
        part = storage.read(llsn, storage.committed_end, READ_BYTES)
        if part.commits[0].first_llsn > part.first_llsn or part.commits[-1].last_llsn < part.last_llsn:
            raise Violation("13 damage", f"the commits {part.commits} do not cover {part.first_llsn}")
        return [frame.entry for frame in part.frames]

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        yield from self.storage.heads(from_llsn, to_llsn)

    def damaged(self) -> list[LLSN]:
        """Return the first and last LLSN of each damaged range that ``verify`` finds. Other findings raise."""
        found: list[LLSN] = []
        for finding in self.storage.verify():
            if finding.first_llsn is None or finding.last_llsn is None:
                raise Violation("13 damage", f"storage node {self._node.node}: {finding}")
            found += (finding.first_llsn, finding.last_llsn)
        return found

    def index_of(self, llsn: LLSN) -> int:
        """Return the index of the entry that holds this LLSN, or would hold it."""
        return sum(1 for entry in self.entries if entry.last_llsn < llsn)

    def running_before(self, llsn: LLSN) -> RunningEventTime | None:
        return self.storage.running_before(llsn)

    def repair(self, entry: Entry, running: RunningEventTime | None) -> bool:
        return self.storage.repair(entry, running)


Disk = ReplicaDisk | SegmentDisk


def _damaged(first_llsn: LLSN, last_llsn: LLSN) -> Entry:
    batch = Batch(last_llsn - first_llsn + 1, b"", 1, EventTime(0), EventTime(0))
    return Entry(first_llsn, Epoch(0), batch)
