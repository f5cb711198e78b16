"""A replica that learns, on real files: holes in its tail are filled in place, and one that ends too early goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutwater.core.messages import LearnFrom, SyncBegin, SyncEnd, SyncEntries
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.events import (
    CommitDurable,
    EntriesDurable,
    FillEntry,
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
from cutwater.core.replica.recovery import HardState
from cutwater.core.replica.replica import Replica
from cutwater.core.replica.sync_ranges import Extent, SyncCase, SyncPlan
from cutwater.format.errors import StorageBroken
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.replica_driver import _fill
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch, LeaderEpoch, StorageNodeId
from tests.unit.storage_kit import IDENTITY, commit_of, entries_from

NODE, SOURCE, STREAM = IDENTITY.node, StorageNodeId(7), IDENTITY.stream


class Machine:
    """A replica and its files: LLSNs are committed by one commit, more follow, and the hard state is lost."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.committed = entries_from(1, 4, size=50)
        self.tail = entries_from(self.committed[-1].last_llsn + 1, 12, size=50)
        storage = SegmentStorage(directory, IDENTITY)
        storage.save_hard_state(HardState(epoch=Epoch(1)))
        storage.write(self.committed)
        storage.sync()
        storage.write_contexts([commit_of(self.committed, None)])
        storage.write(self.tail)
        storage.close()
        (directory / "state").unlink()
        (self.file,) = directory.glob("*.entries")
        self.done: list[ReplicaEffect] = []

    def open(self) -> Replica:
        self.storage = SegmentStorage(self.directory, IDENTITY)
        self.replica = open_replica(NODE, STREAM, self.storage).replica
        return self.replica

    def flip(self, entry: Entry) -> None:
        content = bytearray(self.file.read_bytes())
        at = content.index(entry.batch.body) + 3
        content[at] ^= 1
        self.file.write_bytes(content)

    def do(self, event: ReplicaEvent) -> None:
        heard: list[ReplicaEvent] = []
        for effect in self.replica.handle(event):
            self.done.append(effect)
            match effect:
                case SaveHardState():
                    self.storage.save_hard_state(effect.hard_state)
                case SaveDedup():
                    self.storage.save_dedup(effect.checkpoint)
                case Truncate():
                    self.storage.truncate(effect.end)
                case Restart():
                    self.storage.restart(effect.first_llsn, keep_end=effect.keep_end)
                case FillEntry():
                    _fill(self.storage, effect.entry)
                case WriteEntry():
                    self.storage.write([effect.entry])
                    heard.append(EntriesDurable(effect.generation, effect.entry.last_llsn))
                case WriteCommit():
                    self.storage.sync()
                    self.storage.write_contexts([effect.context])
                    heard.append(CommitDurable(effect.generation, effect.context))
        self.storage.sync()
        for one in heard:
            self.do(one)

    def learn(self, *entries: Entry) -> None:
        """All of the tail is committed where the source is."""
        first, end = self.tail[0].first_llsn, self.tail[-1].last_llsn
        self.do(LearnFrom(STREAM, LeaderEpoch(1), Epoch(2), SOURCE))
        self.do(SyncBegin(STREAM, 1, SyncPlan(SyncCase.BEHIND, None, Extent(first, end)), GLSN(0)))
        self.do(SyncEntries(STREAM, 1, entries))
        self.do(SyncEnd(STREAM, 1, (self.context(),), DedupCheckpoint(end, ()), GLSN(1)))

    def context(self) -> CommitContext:
        return commit_of(self.tail, commit_of(self.committed, None))

    def kinds(self) -> list[type]:
        return [type(effect) for effect in self.done if isinstance(effect, (FillEntry, Truncate, WriteEntry))]


def test_entries_behind_a_damaged_one_stay(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    bodies = [entry for entry in machine.tail if entry.batch.body]
    for entry in bodies[1:3]:
        machine.flip(entry)
    machine.open()
    machine.learn(*machine.tail)
    assert machine.kinds() == [FillEntry, FillEntry]
    assert machine.replica.trusted
    assert machine.storage.verify() == []
    assert list(machine.storage.entries(LLSN(1), machine.storage.end)) == machine.committed + machine.tail


def test_what_does_not_fit_is_cut_off_and_the_next_sync_goes_on(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    bad = next(entry for entry in machine.tail[2:] if entry.batch.body)
    machine.flip(bad)
    machine.open()
    other = entries_from(bad.first_llsn, 1, epoch=2, size=33)[0]
    with pytest.raises(StorageBroken):
        machine.learn(*(entry for entry in machine.tail if entry.first_llsn < bad.first_llsn), other)
    machine.storage.close()
    assert machine.open().kept.end == bad.first_llsn - 1
    assert machine.storage.find().damaged is None
    machine.done.clear()
    machine.learn(*machine.tail)
    assert FillEntry not in machine.kinds()
    assert machine.replica.trusted


def test_a_tail_that_ends_too_early_goes_on(tmp_path: Path) -> None:
    """The file is shorter than its mark says: nothing can be written behind it before that is put right."""
    machine = Machine(tmp_path)
    content = machine.file.read_bytes()
    last = next(entry for entry in reversed(machine.tail) if entry.batch.body)
    machine.file.write_bytes(content[: content.index(last.batch.body)])
    machine.open()
    assert machine.storage.find().damaged is not None
    machine.learn(*machine.tail)
    assert machine.kinds()[0] is Truncate
    assert machine.replica.trusted
    assert machine.storage.verify() == []
