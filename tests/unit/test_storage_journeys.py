"""Random lives of a replica on disks that fail, and wrong code that they find.

Each seed is one test, so the name of a failed one is the command that replays it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
from storage_journey import ERRORS, SLOW, DamagedJourney, Journey, Violation

from cutwater.errors import Damaged
from cutwater.format.entry_codec import EntryFrame
from cutwater.format.errors import StorageBroken
from cutwater.storage.files import TEMPORARY
from cutwater.storage.replica import marked_file, segment, small_files
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment import Segment
from cutwater.storage.replica.segment_log import SegmentLog
from cutwater.testing.disk_faults import DiskFault
from cutwater.types import LLSN

Life = Callable[[int], Journey]
"""Lives the life of a seed, and raises ``Violation`` if the contract of storage was broken."""


def life(*faults: DiskFault, probability: float = 0.02, **weights: int) -> Life:
    def live(seed: int) -> Journey:
        journey = Journey(seed, faults, probability, weights)
        journey.run()
        return journey

    return live


def wrong_reads(seed: int) -> Journey:
    # Old versions are kept only while reads can be stale.
    journey = DamagedJourney(seed, (DiskFault.STALE_READ,), probability=0.0)
    journey.live()
    journey.read_wrong()
    return journey


def silent_damage(fault: DiskFault) -> Life:
    def live(seed: int) -> Journey:
        journey = DamagedJourney(seed, (fault,), probability=0.1)
        journey.live(fault)
        journey.find_damage()
        return journey

    return live


LIVES: dict[str, Life] = {
    "power cuts": life(),
    "errors": life(*ERRORS),
    "full": life(DiskFault.FULL, probability=0.08),
    "full, mostly writing": life(DiskFault.FULL, probability=0.3, write=20, sync_entries=4, truncate=3, cut_power=4),
    "failed syncs": life(DiskFault.SYNC_ERROR, probability=0.08),
    "failed reads": life(DiskFault.READ_ERROR, probability=0.1),
    "slow syncs": life(*SLOW, probability=0.2),
    "everything that fails": life(*ERRORS, *SLOW, probability=0.03),
    "wrong reads": wrong_reads,
    "bits flip at rest": silent_damage(DiskFault.FLIP_AT_REST),
    "misdirected writes": silent_damage(DiskFault.MISDIRECTED_WRITE),
}
SEEDS = 30


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", LIVES)
def test_nothing_that_was_reported_is_lost_and_nothing_wrong_is_served(name: str, seed: int) -> None:
    LIVES[name](seed)


def test_every_fault_strikes() -> None:
    """A fault that never strikes finds nothing."""
    struck = {fault for life in LIVES.values() for seed in range(5) for fault, _ in life(seed).files.faults.struck}
    assert struck == set(DiskFault)


@pytest.mark.parametrize(("name", "seed"), [("errors", 212), ("errors", 350), ("errors", 983), ("wrong reads", 10)])
def test_seeds_that_found_a_fault(name: str, seed: int) -> None:
    LIVES[name](seed)


# The tester is tested: each bug is one wrong function in storage.

Patch = tuple[object, str, object]


def replace_without(*, file: bool = False, directory: bool = False) -> list[Patch]:
    def replace(files, path, data):
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            made = files.create(temporary)
            made.pwritev([data], 0)
            if not file:
                made.sync_all()
            files.rename(temporary, path)
        except OSError:
            files.unlink(temporary)
            raise
        if not directory:
            files.sync_dir(path.parent)

    return [(small_files, "replace", replace), (marked_file, "replace", replace)]


def report_before_the_sync() -> list[Patch]:
    right, right_mark = Segment.sync, Segment.mark

    def sync(self):
        self._before, self.durable = self.durable, self.end

    def mark(self):
        self.durable = self.__dict__.pop("_before", self.durable)
        right(self)
        right_mark(self)

    return [(Segment, "sync", sync), (Segment, "mark", mark)]


def retry_a_failed_sync() -> list[Patch]:
    def sync(self, call):
        try:
            call()
        except OSError:
            try:
                call()
            except OSError as error:
                raise StorageBroken("twice") from error

    return [(MarkedFile, "_sync", sync)]


def skip_at_a_segment_boundary() -> list[Patch]:
    right = SegmentLog.read

    def read(self, llsn, to_llsn, bytes_max):
        segment = self.segment_of(llsn)
        if llsn == segment.first_llsn > self.first_llsn:
            following = LLSN(segment.place_of(llsn).last_llsn + 1)
            if following <= min(segment.end.llsn, to_llsn):
                llsn = following
        return right(self, llsn, to_llsn, bytes_max)

    return [(SegmentLog, "read", read)]


def read_without_checking() -> list[Patch]:
    return [(EntryFrame, "problem", None)]


def take_an_error_for_the_end() -> list[Patch]:
    right = segment._frame_at

    def frame_at(file, offset, expected, size):
        try:
            return right(file, offset, expected, size)
        except OSError:
            return None

    return [(segment, "_frame_at", frame_at)]


def leave_a_write_half_undone() -> list[Patch]:
    return [(MarkedFile, "undo", MarkedFile.shorten)]


def go_on_after_half_a_truncation() -> list[Patch]:
    def truncate(self, end):
        with self._guard:
            self._log.truncate(end)

    return [(SegmentStorage, "truncate", truncate)]


def read_from_where_damage_begins() -> list[Patch]:
    """The place of a damaged entry may begin before the entry that a reader asked for."""
    right = Segment.read

    def read(self, llsn, to_llsn, bytes_max, hint=None):
        if hint is None:
            place = self.place_of(llsn)
            return right(self, llsn if place.header else place.first_llsn, to_llsn, bytes_max, place.offset)
        return right(self, llsn, to_llsn, bytes_max, hint)

    return [(Segment, "read", read)]


def do_not_write_again_what_a_failed_sync_left() -> list[Patch]:
    return [(MarkedFile, "rewrite", lambda self, start, end: None)]


BUGS: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "forget to sync the directory after a rename": ("power cuts", lambda: replace_without(directory=True)),
    "forget to sync the file before a rename": ("power cuts", lambda: replace_without(file=True)),
    "report before the sync": ("slow syncs", report_before_the_sync),
    "retry a failed sync": ("failed syncs", retry_a_failed_sync),
    "do not write again what a failed sync left": ("failed syncs", do_not_write_again_what_a_failed_sync_left),
    "skip at a segment boundary": ("power cuts", skip_at_a_segment_boundary),
    "read without checking": ("wrong reads", read_without_checking),
    "serve damage at rest": ("bits flip at rest", read_without_checking),
    "take an error for the end": ("failed reads", take_an_error_for_the_end),
    "leave a write half undone": ("full, mostly writing", leave_a_write_half_undone),
    "go on after half a truncation": ("full, mostly writing", go_on_after_half_a_truncation),
    "read from where damage begins": ("wrong reads", read_from_where_damage_begins),
}
SEEDS_MAX = 200


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    name, patches = BUGS[bug]
    with ExitStack() as planted:
        for owner, attribute, wrong in patches():
            planted.enter_context(mock.patch.object(owner, attribute, wrong))
        for seed in range(SEEDS_MAX):
            try:
                LIVES[name](seed)
            except Violation:
                return
            except (AssertionError, Damaged):
                # Storage noticed it by itself. A checker has to find it, too.
                continue
    pytest.fail(f"not found within {SEEDS_MAX} seeds: {bug}")
