"""Opening a replica from its files, as every driver does it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.recovery import HardState
from cutwater.errors import Damaged
from cutwater.types import LLSN, Entry, Epoch
from tests.unit.replica_bench import HEAD, STREAM, Disk, batch, context, entry, fence, tag


def disk_of(*entries: Entry, committed: int = 0, epoch: int = 1, learning: bool = False) -> Disk:
    disk = Disk()
    disk.hard_state = HardState(epoch=Epoch(epoch), chain=(HEAD,), learning=learning)
    disk.entries = list(entries)
    disk.contexts = [context(1, committed)] if committed else []
    return disk


def test_what_can_never_be_committed_is_removed() -> None:
    disk = disk_of(entry(1, 2), entry(3, 1), entry(4, 1, epoch=2), committed=2)
    opening = open_replica(HEAD, STREAM, disk)
    assert (opening.problem, opening.damage) == ("", None)
    assert (opening.replica.committed_end, opening.replica.durable_end, disk.end) == (2, 3, 3)


def test_the_files_of_a_replica_that_cannot_be_trusted_stay_as_they_are() -> None:
    """A peer may need what is left, and nobody knows yet what a sync will bring."""
    disk = disk_of(entry(1, 2), entry(3, 1), committed=2, learning=True)
    opening = open_replica(HEAD, STREAM, disk)
    assert opening.problem == "an interrupted sync"
    assert not opening.replica.trusted
    assert (opening.replica.committed_end, opening.replica.durable_end, disk.end) == (2, 3, 3)
    assert opening.replica.report() is None


def test_deduplication_is_its_checkpoint_and_what_came_after_it() -> None:
    tagged = [Entry(LLSN(2 + i), Epoch(1), batch(1, b"%d" % i, producer=tag(1 + i))) for i in range(3)]
    disk = disk_of(Entry(LLSN(1), Epoch(1), fence()), *tagged, committed=3)
    whole = open_replica(HEAD, STREAM, disk).replica
    checkpoint = whole.dedup.checkpoint(LLSN(2))
    disk.dedup, disk.entries[:2] = checkpoint, [entry(1), entry(2)]
    again = open_replica(HEAD, STREAM, disk).replica
    assert again.dedup.fate(tag(1).producer) == whole.dedup.fate(tag(1).producer)
    assert again.dedup.fate(tag(1).producer)[0] == 3, "the uncommitted tail counts as well"


class DamagedDisk(Disk):
    """What is committed can be read up to some entry."""

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        raise Damaged("LLSN 1 fails its checksum")

    def truncate(self, end: LLSN) -> None:
        pytest.fail("nothing is removed from it")


def test_entries_that_cannot_be_read_make_it_wait_for_a_copy() -> None:
    disk = DamagedDisk()
    disk.hard_state, disk.entries, disk.contexts = HardState(epoch=Epoch(1)), [entry(1, 2)], [context(1, 2)]
    opening = open_replica(HEAD, STREAM, disk)
    assert isinstance(opening.damage, Damaged)
    assert opening.problem == "LLSN 1 fails its checksum"
    assert not opening.replica.trusted
    assert not opening.replica.has_lost_entries, "what it has need not be copied again"
