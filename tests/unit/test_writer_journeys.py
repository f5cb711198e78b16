"""The shipped writer of a replica on a slow and failing disk: what it reports is on the disk when the report arrives,
even if the power goes while a sync hangs.

Each seed is one test, so the name of a failed one is the command that replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from random import Random
from unittest import mock

import pytest
from storage_journey import OPTIONS, Clock, Violation, check, heads
from storage_kit import DIRECTORY, IDENTITY, commit_of

from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError
from cutwater.format.checksum import crc32c
from cutwater.format.errors import StorageBroken
from cutwater.runtime import system
from cutwater.runtime.system import System
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.writer import Durable, Writer
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import LLSN, Batch, CommitContext, Entry, Epoch, EventTime

FAULTS = (DiskFault.SLOW_SYNC, DiskFault.HUNG_SYNC, DiskFault.SYNC_ERROR, DiskFault.WRITE_ERROR, DiskFault.FULL)
STEPS = 40


class SteppedWorker:
    """A worker that works when it is told to."""

    def __init__(self, step: Callable[[list], object]) -> None:
        self._step, self._items = step, []

    @property
    def is_idle(self) -> bool:
        return not self._items

    def put(self, item: object) -> None:
        self._items.append(item)

    def work(self) -> None:
        items, self._items = self._items, []
        if items and (then := self._step(items)) is not None:
            then()

    def stop(self) -> None: ...

    def join(self, timeout: float) -> bool:
        return True


class SteppedSystem(System):
    def __init__(self) -> None:
        self.files: FaultFiles
        self.workers: list[SteppedWorker] = []

    def monotonic(self) -> float:
        return self.files.now

    def worker(self, name: str, step: Callable[[list], object]) -> SteppedWorker:  # type: ignore[override]
        self.workers.append(SteppedWorker(step))
        return self.workers[-1]


@pytest.fixture(autouse=True)
def stepped() -> Iterator[SteppedSystem]:
    mine = SteppedSystem()
    before = system.use(mine)
    yield mine
    system.use(before)


class WriterLife:
    def __init__(self, stepped: SteppedSystem, seed: int) -> None:
        self.rng = Random(f"writer/{seed}")
        self.clock = Clock()
        self.system = stepped
        self.files = stepped.files = FaultFiles(self.rng, clock=self.clock)
        self.files.recording = False
        self.entries: list[Entry] = []
        self.contexts: list[CommitContext] = []
        self.reported = 0
        """The LLSN up to which entries were reported as durable."""
        self.reported_commit = 0
        """The LLSN up to which commits were."""
        self.jobs: list[tuple[float, Callable[[], None]]] = []
        """What the writer tells the event loop, and when it arrives there."""
        self.has_failed = False
        self.is_here = False
        """Whether the event loop itself writes."""
        self.serial = 0
        self.open()
        self.storage.save_hard_state(HardState(epoch=Epoch(1)))
        self.rules = [DiskFaultRule(fault, self.rng.choice((0.0, 0.1, 0.3))) for fault in FAULTS]

    def open(self) -> None:
        self.storage = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        self.writer = Writer(self.storage, self.tell, self.durable, self.failed, "writer")
        self.worker = self.system.workers[-1]

    def tell(self, job: Callable[[], None]) -> None:
        self.jobs.append((self.files.now, job))

    def durable(self, durable: Durable) -> None:
        if self.is_here:
            # The event loop itself waits for the disk, and hears of this when it has waited so long.
            self.tell(lambda: self.hear(durable))
        else:
            self.hear(durable)

    def hear(self, durable: Durable) -> None:
        if durable.entries_end is not None:
            self.reported = durable.entries_end
        if durable.context is not None:
            self.reported_commit = durable.context.last_llsn

    def failed(self, error: CutwaterError) -> None:
        self.has_failed = True

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.cut_power()

    def step(self) -> None:
        if self.has_failed:
            self.reopen()
            return
        for rule in self.rules:
            self.files.faults.add(rule)
        for _ in range(self.rng.randint(0, 3)):
            self.write()
        if self.rng.random() < 0.5:
            self.commit()
        kind = self.rng.choice(("hand over", "here", "tick"))
        if kind == "here" and self.writer.turn:
            self.is_here = True
            self.writer.write_here(lambda: None)
            self.is_here = False
        else:
            self.writer.hand_over()
            if kind == "tick":
                self.writer.tick()
        self.worker.work()
        self.files.faults.clear()
        self.pass_time()

    def write(self) -> None:
        self.serial += 1
        last = self.entries[-1].last_llsn if self.entries else 0
        body = (b"%d:" % self.serial).ljust(self.rng.choice((16, 16, 200)), b".")
        time = EventTime(self.serial)
        entry = Entry(LLSN(last + 1), Epoch(1), Batch(1, body, crc32c(body), time, time))
        self.entries.append(entry)
        self.writer.write(entry, 1)

    def commit(self) -> None:
        end = self.contexts[-1].last_llsn if self.contexts else 0
        group = [entry for entry in self.entries if end < entry.last_llsn <= self.reported]
        if group:
            self.contexts.append(commit_of(group, self.contexts[-1] if self.contexts else None))
            self.writer.write_context(self.contexts[-1], 1)

    def pass_time(self) -> None:
        """Let the time pass that slow syncs took, or cut the power in the middle of it."""
        charged = self.files.take_charged_seconds()
        stops = charged > 0 and self.rng.random() < 0.4
        self.clock.now += self.rng.uniform(0.0, charged) if stops else charged
        jobs, self.jobs = self.jobs, []
        for at, job in jobs:
            if at <= self.clock.now:
                job()
        if stops:
            self.cut_power()

    def reopen(self) -> None:
        """As a replica does after a failure."""
        outcomes: list[CutwaterError | None] = []
        end, commit = self.reported, self.reported_commit
        self.writer.submit(lambda: self.storage.cut_back(LLSN(end), LLSN(commit)), outcomes.append, reopens=True)
        self.worker.work()
        self.pass_time()
        check(outcomes == [None], f"cannot be reopened: {outcomes}")
        self.has_failed = False
        self.entries = [entry for entry in self.entries if entry.last_llsn <= end]
        self.contexts = [context for context in self.contexts if context.last_llsn <= commit]
        self.compare()
        check(self.storage.end == end, "more is left than was reported")

    def cut_power(self) -> None:
        self.files.crash(self.rng, keep=self.rng.choice((0.0, 0.5)))
        self.jobs.clear()
        self.has_failed = False
        self.open()
        self.compare()
        self.reported = self.storage.end
        self.reported_commit = self.contexts[-1].last_llsn if self.contexts else 0

    def compare(self) -> None:
        """Hold the files against what was written and reported, and go on with what is there."""
        check(self.storage.end >= self.reported, f"{self.reported} was reported, and {self.storage.end} is there")
        found = list(self.storage.entries(LLSN(1), self.storage.end))
        check(found == self.entries[: len(found)], f"{heads(found)} instead of {heads(self.entries)}")
        contexts = list(self.storage.contexts)
        check(contexts == self.contexts[: len(contexts)], "commits differ")
        end = contexts[-1].last_llsn if contexts else 0
        check(end >= self.reported_commit, f"commits to {self.reported_commit} were reported, and {end} is there")
        check(self.storage.verify() == [], f"{self.storage.verify()}")
        self.entries, self.contexts = found, contexts


@pytest.mark.parametrize("seed", range(80))
def test_what_is_reported_is_on_the_disk(seed: int, stepped: SteppedSystem) -> None:
    WriterLife(stepped, seed).run()


# The tester is tested.

Patch = tuple[object, str, object]


def report_entries_before_the_sync() -> list[Patch]:
    def sync_entries(self, tell):
        self._storage.write(self._entries)
        end = self._take_entries()[-1].last_llsn
        tell(partial(self._on_durable, Durable(end, self._generations[0], None, self._generations[1])))
        self._storage.sync(contexts=False, marks=False)

    return [(Writer, "_sync_entries", sync_entries)]


def report_commits_before_the_sync() -> list[Patch]:
    def sync_contexts(self, tell):
        commits = Durable(None, self._generations[0], self._unsynced, self._generations[1])
        self._unsynced = None
        tell(partial(self._on_durable, commits))
        self._storage.sync(entries=False, marks=False)

    return [(Writer, "_sync_contexts", sync_contexts)]


def ignore_a_failed_sync() -> list[Patch]:
    def sync_entries(self, tell):
        self._storage.write(self._entries)
        with suppress(StorageBroken):
            self._storage.sync(contexts=False, marks=False)
        end = self._take_entries()[-1].last_llsn
        tell(partial(self._on_durable, Durable(end, self._generations[0], None, self._generations[1])))

    return [(Writer, "_sync_entries", sync_entries)]


BUGS = [report_entries_before_the_sync, report_commits_before_the_sync, ignore_a_failed_sync]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[], list[Patch]], stepped: SteppedSystem) -> None:
    with ExitStack() as planted:
        for owner, attribute, wrong in bug():
            planted.enter_context(mock.patch.object(owner, attribute, wrong))
        for seed in range(200):
            try:
                WriterLife(stepped, seed).run()
            except Violation:
                return
            except (AssertionError, CutwaterError):
                continue
    pytest.fail(f"not found: {bug.__name__}")
