"""The small parts of a storage node by themselves: its writer, what it takes, its sense of room, its histograms."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import BODY_BYTES_MAX, NO_TIME, decode_header, encode_frame
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.protocol.storage_api import VolumeRoom
from cutwater.storage.sync_latency import MEMORY, SLOW_SECONDS, Pace
from cutwater.storagenode.counters import BOUNDS_SECONDS, Histogram
from cutwater.storagenode.disk_space import MIB, RoomWatch
from cutwater.storagenode.replica.sync_scheduler import HERE_BYTES_MAX, HandingOver
from cutwater.storagenode.replica.writer import Durable, Writer
from cutwater.storagenode.validation.entry_validation import check_batch, check_entry
from cutwater.types import (
    LLSN,
    Batch,
    BatchKind,
    CommitContext,
    Entry,
    Epoch,
    EventTime,
    NodeState,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Sequence,
)
from tests.unit.memory_storage import MemoryStorage
from tests.unit.storage_kit import commit_of, entries_from

WITHIN_SECONDS = 10


class FullStorage(MemoryStorage):
    """Has no room while ``is_full``."""

    is_full = False

    def write(self, entries: list[Entry]) -> None:  # type: ignore[override]
        if self.is_full:
            raise DiskFull("no room")
        super().write(entries)


class Told:
    """A writer, and what it says, in order."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._said: queue.Queue[Durable | CutwaterError | str] = queue.Queue()
        self.writer = Writer(storage, lambda job: job(), self._said.put, self._said.put, "writer")

    def write(self, entry: Entry, generation: int) -> None:
        self.writer.write(entry, generation)
        self.writer.hand_over()

    def submit(self, name: str, *, reopens: bool = False) -> None:
        def done(error: CutwaterError | None) -> None:
            self._said.put(name if error is None else error)

        self.writer.submit(lambda: None, done, reopens=reopens)

    def next(self) -> Durable | CutwaterError | str:
        return self._said.get(timeout=WITHIN_SECONDS)

    def until_idle(self) -> None:
        deadline = time.monotonic() + WITHIN_SECONDS
        while not self.writer.is_idle:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def storage() -> FullStorage:
    return FullStorage()


@pytest.fixture
def told(storage: FullStorage) -> Iterator[Told]:
    told = Told(storage)
    yield told
    told.writer.end()
    assert told.writer.join(WITHIN_SECONDS)


def test_what_was_written_is_told_when_it_is_durable(storage: FullStorage, told: Told) -> None:
    for entry in entries_from(1, 3):
        told.write(entry, 7)
    while told.writer.backlog_bytes:
        last = told.next()
    assert isinstance(last, Durable)
    assert (last.entries_end, last.entries_generation) == (storage.durable_end, 7)
    assert sum(told.writer.entry_syncs.counts) >= 1


def test_after_a_failure_nothing_is_done_until_the_files_are_opened_anew(storage: FullStorage, told: Told) -> None:
    first, second, third = entries_from(1, 3)
    storage.is_full = True
    told.write(first, 0)
    assert isinstance(told.next(), DiskFull)
    # There is room again, but what comes now was made for files that have the first entry.
    storage.is_full = False
    told.write(second, 0)
    told.submit("too early")
    assert isinstance(told.next(), StorageBroken)
    told.submit("reopened", reopens=True)
    assert told.next() == "reopened"
    assert storage.end == LLSN(0)
    told.write(first, 1)
    durable = told.next()
    assert isinstance(durable, Durable)
    assert (durable.entries_end, durable.entries_generation) == (first.last_llsn, 1)
    assert told.writer.backlog_bytes == 0
    assert third.first_llsn > storage.end


def test_commits_wait_for_company_and_not_for_the_next_entries(told: Told) -> None:
    first, second = entries_from(1, 2)
    commit = commit_of([first], None)
    told.write(first, 0)
    assert told.next() == Durable(first.last_llsn, 0, None, 0)
    told.writer.write_context(commit, 0)
    told.write(second, 0)
    assert told.next() == Durable(second.last_llsn, 0, None, 0)
    # Whatever comes after a barrier finds everything before it durable.
    told.submit("barrier")
    assert told.next() == Durable(None, 0, commit, 0)
    assert told.next() == "barrier"
    assert sum(told.writer.context_syncs.counts) == 1


def test_commits_are_held_until_someone_wants_them_and_synced_with_the_tick(storage: FullStorage, told: Told) -> None:
    (first,) = entries_from(1, 1)
    commit = commit_of([first], None)
    told.write(first, 0)
    assert told.next() == Durable(first.last_llsn, 0, None, 0)
    told.writer.write_context(commit, 0)
    assert not told.writer.turn
    told.writer.release()
    assert told.writer.turn
    told.writer.hand_over()
    told.until_idle()
    assert storage.last_commit == commit
    assert storage.durable_commit is None
    told.writer.tick()
    assert told.next() == Durable(None, 0, commit, 0)
    told.until_idle()
    told.writer.tick()
    assert told.writer.is_idle, "there is nothing to sync"


def test_what_is_written_by_the_loop_itself_is_told_at_once(storage: FullStorage, told: Told) -> None:
    first, second, third = entries_from(1, 3)
    told.write(first, 0)
    assert told.next() == Durable(first.last_llsn, 0, None, 0)
    told.until_idle()
    told.writer.write(second, 0)
    told.writer.write_here(lambda: None)
    assert storage.durable_end == second.last_llsn
    assert told.writer.backlog_bytes == 0
    assert told.next() == Durable(second.last_llsn, 0, None, 0)
    # A failure is the same as in the thread, and is made good there.
    storage.is_full = True
    told.writer.write(third, 0)
    told.writer.write_here(lambda: None)
    assert isinstance(told.next(), DiskFull)
    storage.is_full = False
    told.writer.write(third, 0)
    told.writer.write_here(lambda: None)
    assert storage.end == second.last_llsn
    told.submit("reopened", reopens=True)
    assert told.next() == "reopened"
    told.write(third, 1)
    assert told.next() == Durable(third.last_llsn, 1, None, 0)


class SlowToMark(MemoryStorage):
    """Takes its time where nobody waits."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def write_contexts(self, contexts: Seq[CommitContext]) -> None:
        super().write_contexts(contexts)
        self.order.append("commits")

    def mark(self) -> None:
        time.sleep(0.05)
        self.order.append("mark")


def test_entries_are_told_first_and_the_thread_waits_until_the_loop_has_left_the_files() -> None:
    order: list[str] = []
    done = threading.Event()
    first, second = entries_from(1, 2)

    def durable(what: Durable) -> None:
        order.append("durable")
        if what.entries_end == second.last_llsn:
            writer.submit(lambda: order.append("task"), lambda error: done.set())

    writer = Writer(SlowToMark(order), lambda job: job(), durable, lambda error: None, "writer")
    try:
        writer.write(first, 0)
        writer.write_here(lambda: None)
        order.clear()
        writer.write_context(commit_of([first], None), 0)
        writer.write(second, 0)
        writer.write_here(lambda: order.append("reported"))
        assert done.wait(WITHIN_SECONDS)
    finally:
        writer.end()
        assert writer.join(WITHIN_SECONDS)
    assert order[:4] == ["durable", "reported", "commits", "mark"]
    assert "task" in order[4:]


def test_commits_that_someone_waits_for_come_before_the_sync() -> None:
    order: list[str] = []
    first, second = entries_from(1, 2)
    storage = SlowToMark(order)
    writer = Writer(storage, lambda job: job(), lambda durable: order.append("durable"), lambda error: None, "writer")
    try:
        writer.write(first, 0)
        writer.write_here(lambda: None)
        order.clear()
        writer.on_readable = lambda: order.append("readable")
        writer.write_context(commit_of([first], None), 0)
        writer.write(second, 0)
        writer.write_here(lambda: None)
    finally:
        writer.end()
        assert writer.join(WITHIN_SECONDS)
    assert order[:4] == ["commits", "readable", "durable", "mark"]


def test_commits_are_not_lost_when_those_who_are_told_fail() -> None:
    storage = MemoryStorage()
    first, second, third = entries_from(1, 3)

    def durable(what: Durable) -> None:
        if what.entries_end == second.last_llsn:
            raise ZeroDivisionError

    writer = Writer(storage, lambda job: job(), durable, lambda error: None, "writer")
    commits = [commit_of([first], None)]
    commits.append(commit_of([second], commits[0]))
    try:
        writer.write(first, 0)
        writer.write_here(lambda: None)
        writer.write_context(commits[0], 0)
        writer.write(second, 0)
        with pytest.raises(ZeroDivisionError):
            writer.write_here(lambda: None)
        writer.write_context(commits[1], 0)
        writer.write(third, 0)
        writer.write_here(lambda: None)
    finally:
        writer.end()
        assert writer.join(WITHIN_SECONDS)
    assert list(storage.contexts) == commits


def test_a_writer_whose_thread_has_something_to_do_is_not_idle(storage: FullStorage, told: Told) -> None:
    held = threading.Event()
    assert told.writer.is_idle
    told.writer.submit(lambda: _waits(held), lambda error: None)
    assert not told.writer.is_idle
    told.write(entries_from(1, 1)[0], 0)
    held.set()
    assert isinstance(told.next(), Durable)
    told.until_idle()
    told.writer.end()
    assert not told.writer.is_idle, "so nobody writes beside its last writes"


def test_a_writer_that_has_ended_says_so_at_once(storage: FullStorage, told: Told) -> None:
    told.submit("before")
    told.writer.end()
    assert told.next() == "before"
    told.submit("after")
    assert isinstance(told.next(), StorageBroken)
    told.write(entries_from(1, 1)[0], 0)
    assert told.writer.backlog_bytes == 0
    assert told.writer.join(WITHIN_SECONDS)
    assert storage.end == LLSN(0)


def _waits(held: threading.Event) -> None:
    held.wait(WITHIN_SECONDS)


class Who(MemoryStorage):
    """Remembers which threads wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def write(self, entries: Seq[Entry]) -> None:
        self.threads.append(threading.current_thread())
        super().write(entries)


def by_the_loop(count: int, *, may_wait: bool = True, body_bytes: int = 10, slow: bool = False) -> list[bool]:
    """Which of so many writers' entries the loop wrote by itself, all of one turn."""
    storages = [Who() for _ in range(count)]

    async def turn() -> None:
        handing_over = HandingOver(lambda: may_wait, lambda: None, lambda: None)
        if slow:
            handing_over._pace.observe(time.monotonic() - 2 * MEMORY * SLOW_SECONDS)
        told = [Told(storage) for storage in storages]
        for one in told:
            (entry,) = entries_from(1, 1)
            body = bytes(body_bytes)
            one.writer.write(structs.replace(entry, batch=structs.replace(entry.batch, body=body)), 0)
            handing_over.soon(one.writer)
            handing_over.soon(one.writer)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for one in told:
            one.writer.end()
            assert await asyncio.to_thread(one.writer.join, WITHIN_SECONDS)

    asyncio.run(turn())
    return [storage.threads == [threading.current_thread()] for storage in storages]


def test_the_loop_writes_by_itself_only_what_keeps_nobody_waiting() -> None:
    assert by_the_loop(1) == [True]
    assert by_the_loop(2) == [False, False]
    assert by_the_loop(1, may_wait=False) == [False]
    assert by_the_loop(1, body_bytes=HERE_BYTES_MAX) == [False]
    assert by_the_loop(1, slow=True) == [False]


def test_a_disk_that_is_slow_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    pace.observe(time.monotonic())
    pace.observe(time.monotonic() - 2 * SLOW_SECONDS)
    assert pace.is_quick, "a single one tells nothing"
    for _ in range(2 * MEMORY):
        pace.observe(time.monotonic() - 2 * SLOW_SECONDS)
    assert not pace.is_quick
    monkeypatch.setattr("cutwater.storage.sync_latency.REST_SECONDS", -1.0)
    for _ in range(2 * MEMORY):
        pace.observe(time.monotonic() - 2 * SLOW_SECONDS)
    assert pace.is_quick, "it is tried again"


def around(*limits: int) -> st.SearchStrategy[int]:
    """Numbers near what just fits, and some others."""
    near = [limit + step for limit in (0, *limits) for step in (-1, 0, 1)]
    return st.sampled_from(near) | st.integers(-(2**65), 2**65)


@given(
    count=around(1, 2**32),
    schema=around(2**32),
    times=st.tuples(around(2**63, -(2**63)), around(2**63, -(2**63))),
    declared=st.none() | around(2**63, -(2**63)),
    tag=st.none()
    | st.builds(
        ProducerTag,
        st.sampled_from(["p", "p" * 1024, "p" * 1025, "ö" * 512, "ö" * 513]).map(ProducerId),
        around(2**63).map(ProducerEpoch),
        around(2**63).map(Sequence),
    ),
    llsn=around(1, 2**63 - 2**32),
)
def test_what_is_taken_can_be_written_and_read_back(
    count: int,
    schema: int,
    times: tuple[int, int],
    declared: int | None,
    tag: ProducerTag | None,
    llsn: int,
) -> None:
    time_min, time_max = map(EventTime, times)
    watermark = None if declared is None else EventTime(declared)
    body = b"body"
    batch = Batch(count, body, crc32c(body), time_min, time_max, producer=tag, declared=watermark, schema=schema)
    entry = Entry(LLSN(llsn), Epoch(1), batch)
    try:
        check_entry(entry)
    except InvalidArgument:
        return
    header, _ = encode_frame(entry, NO_TIME)
    decoded = decode_header(header)
    assert decoded is not None
    assert decoded.entry(body) == entry


def test_what_cannot_be_stored_is_refused_with_what_is_allowed() -> None:
    good = Batch(1, b"x", crc32c(b"x"), EventTime(0), EventTime(0))
    check_batch(good)
    tag = ProducerTag(ProducerId("p" * 1025), ProducerEpoch(1), Sequence(1))
    for change, says in (
        ({"count": 0}, "from 1 to"),
        ({"count": 2**32}, "count of records is 4294967296"),
        ({"schema": 2**40}, "number of the schema is 1099511627776"),
        ({"declared": 2**63}, "declared watermark"),
        ({"time_max": 2**63}, "largest event time"),
        ({"producer": tag}, "at most 1024 bytes, this one 1025"),
        ({"checksum": 1}, "damaged on the way"),
        ({"body": bytes(BODY_BYTES_MAX + 1)}, "send smaller ones"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            check_batch(structs.replace(good, **change))


def test_a_declaration_declares_something_and_nothing_else() -> None:
    bare = Batch(1, b"", 0, EventTime(0), EventTime(0), BatchKind.DECLARATION)
    for declared in ({"declared": EventTime(5)}, {"idle": True}, {"declared": EventTime(5), "idle": True}):
        check_batch(structs.replace(bare, **declared))
    fence = structs.replace(bare, kind=BatchKind.FENCE)
    check_batch(fence)
    for wrong, says in (
        (bare, "declares nothing"),
        (structs.replace(bare, idle=True, count=2), "takes one position and has no body, this one has 2 positions"),
        (
            structs.replace(bare, idle=True, body=b"x", checksum=crc32c(b"x")),
            "has no body, this one has 1 positions, 1",
        ),
        (structs.replace(bare, idle=True, schema=1), "and schema 1"),
        (structs.replace(fence, idle=True), "a fence ends idleness"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            check_batch(wrong)


def room(free_mib: int) -> tuple[VolumeRoom, ...]:
    return VolumeRoom("a", 10_000 * MIB, 9_000 * MIB), VolumeRoom("b", 10_000 * MIB, free_mib * MIB)


def test_the_volume_with_the_least_room_decides() -> None:
    changes: list[NodeState] = []
    watch = RoomWatch(lambda: [Path("a"), Path("b")], 64 * MIB, lambda state, why: changes.append(state), lambda: 0)
    for free_mib, state in ((100, "READY"), (65, "READY"), (63, "READ_ONLY"), (70, "READ_ONLY"), (80, "READY")):
        watch.judge(room(free_mib))
        assert (changes or [NodeState.READY])[-1].name == state, free_mib
    assert changes == [NodeState.READ_ONLY, NodeState.READY]


def test_what_is_not_written_yet_takes_room_too() -> None:
    changes: list[NodeState] = []
    backlog = [0]
    watch = RoomWatch(lambda: [Path("b")], 64 * MIB, lambda state, why: changes.append(state), lambda: backlog[0])
    backlog[0] = 40 * MIB
    watch.judge(room(100))
    assert changes == [NodeState.READ_ONLY]


def test_a_write_that_found_no_room_counts_more_than_what_the_file_system_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cutwater.storagenode.disk_space.FULL_FOR_SECONDS_MIN", 3_600.0)
    changes: list[NodeState] = []
    watch = RoomWatch(lambda: [Path("b")], 0, lambda state, why: changes.append(state), lambda: 0)
    watch.judge(room(5_000))
    watch.found_full()
    watch.judge(room(5_000))
    assert changes == [NodeState.READ_ONLY]


def test_a_histogram_counts_by_bounds() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_SECONDS[0], 0.003, 99.0):
        histogram.observe(seconds)
    assert histogram.counts[0] == 2
    assert histogram.counts[BOUNDS_SECONDS.index(0.005)] == 1
    assert histogram.counts[-1] == 1
    assert histogram.seconds == pytest.approx(99.003 + BOUNDS_SECONDS[0])
