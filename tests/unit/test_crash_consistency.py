"""Crash consistency: a workload's file operations are recorded; then a replica is recovered from every prefix of them,
in several variants of what a crash may leave of the unsynced part, and held against what had been promised by then.
"""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
from msgspec import structs
from storage_kit import DIRECTORY, IDENTITY, commit_of, entries_from, heads_of

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState, Invalid, Valid, judge
from cutwater.format.entry_codec import NO_TIME
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment import Segment
from cutwater.storage.replica.segment_log import SegmentLog, SegmentOptions
from cutwater.testing.disk_inodes import Made
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch

OPTIONS = SegmentOptions(segment_bytes=700, index_interval_bytes=250, commits_per_file=2)
CALLS = 36
WORKLOADS = 6
STATES_MIN = 500
"""Of each workload; 3,000 together."""
VARIANTS: dict[str, tuple[float, bool]] = {
    "the process dies": (1.0, False),
    "all that is unsynced is lost": (0.0, False),
    "half of it is lost": (0.5, False),
    "half of it is lost or torn": (0.5, True),
    "a little of it is lost or torn": (0.85, True),
}


class World:
    """What was promised and what was written, after one call to the storage."""

    def __init__(self) -> None:
        self.first = LLSN(1)
        self.entries: list[Entry] = []
        """All entries since the log began, trimmed ones too."""
        self.durable = 0
        self.contexts: list[CommitContext] = []
        self.contexts_durable = 0
        self.saved: HardState | None = None
        self.dedup: DedupCheckpoint | None = None
        self.restarts = 0

    def copy(self) -> World:
        other = World()
        other.__dict__.update(self.__dict__)
        other.entries, other.contexts = list(self.entries), list(self.contexts)
        return other

    @property
    def hard_state(self) -> HardState:
        return self.saved or HardState()

    @property
    def base(self) -> int:
        return self.hard_state.base_llsn

    @property
    def end(self) -> int:
        return self.entries[-1].last_llsn if self.entries else self.base

    @property
    def committed_end(self) -> int:
        return self.contexts[-1].last_llsn if self.contexts else self.base


class Step:
    """One call: the operations from ``start`` to ``stop`` lead from one world to the next."""

    def __init__(self, name: str, start: int, stop: int, before: World, after: World) -> None:
        self.name, self.start, self.stop, self.before, self.after = name, start, stop, before, after


class Workload:
    """Random calls, as a replica makes them, and what is promised after each."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"workload/{seed}")
        self.files = FaultFiles()
        self.storage = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        self.world = World()
        self.steps: list[Step] = []
        self.do("save_hard_state")
        while len(self.steps) < CALLS:
            self.do(self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0])

    WEIGHTS = {  # noqa: RUF012
        "write": 28,
        "sync": 12,
        "sync_entries": 10,
        "sync_commits": 4,
        "mark": 6,
        "commit": 25,
        "save_hard_state": 3,
        "save_dedup": 2,
        "truncate": 6,
        "trim": 5,
        "restart": 2,
        "reopen": 4,
    }

    def do(self, name: str) -> None:
        before, start = self.world.copy(), len(self.files.operations)
        getattr(self, name)()
        self.steps.append(Step(name, start, len(self.files.operations), before, self.world.copy()))

    def write(self) -> None:
        world, rng = self.world, self.rng
        more = entries_from(world.end + 1, rng.randint(1, 4), epoch=world.hard_state.epoch, size=rng.choice((5, 90)))
        self.storage.write(more)
        world.entries += more
        # A full segment is synced before the next one begins, so some of it may be durable already.
        world.durable = sum(1 for entry in world.entries if entry.last_llsn <= self.storage.durable_end)

    def sync(self) -> None:
        self.storage.sync()
        self.world.durable, self.world.contexts_durable = len(self.world.entries), len(self.world.contexts)
        assert self.storage.durable_end == self.world.end
        assert self.storage.durable_commit == (self.world.contexts[-1] if self.world.contexts else None)

    def sync_entries(self) -> None:
        """As a storage node does it: who waits is told, and marks come later, if the process lives so long."""
        self.storage.sync(contexts=False, marks=False)
        self.world.durable = len(self.world.entries)

    def sync_commits(self) -> None:
        self.storage.sync(entries=False, marks=False)
        self.world.contexts_durable = len(self.world.contexts)

    def mark(self) -> None:
        self.storage.mark()

    def commit(self) -> None:
        world = self.world
        for _ in range(self.rng.randint(1, 3)):
            group = [e for e in world.entries[: world.durable] if e.last_llsn > world.committed_end]
            group = [e for e in group if e.epoch == group[0].epoch][: self.rng.randint(1, 3)]
            if group:
                last = world.contexts[-1] if world.contexts else None
                world.contexts.append(commit_of(group, last))
                self.storage.write_contexts(world.contexts[-1:])
        durable = self.storage.durable_commit
        world.contexts_durable = world.contexts.index(durable) + 1 if durable else 0

    def save_hard_state(self) -> None:
        world = self.world
        base = {"base_llsn": world.hard_state.base_llsn, "base_glsn": world.hard_state.base_glsn}
        trimmed = world.hard_state.trimmed_before
        world.saved = HardState(epoch=Epoch(world.hard_state.epoch + 1), trimmed_before=trimmed, **base)
        # Of an older epoch nothing uncommitted is kept.
        self.storage.save_hard_state(world.saved)
        self.truncate_to(world.committed_end)

    def save_dedup(self) -> None:
        self.world.dedup = DedupCheckpoint(LLSN(self.rng.randrange(1000)), ())
        self.storage.save_dedup(self.world.dedup)

    def truncate(self) -> None:
        ends = [e.last_llsn for e in self.world.entries if e.last_llsn >= self.world.committed_end]
        self.truncate_to(self.rng.choice([self.world.committed_end, *ends]))

    def truncate_to(self, end: int) -> None:
        world = self.world
        self.storage.truncate(LLSN(end))
        world.entries = [entry for entry in world.entries if entry.last_llsn <= end]
        world.durable = sum(1 for entry in world.entries if entry.last_llsn <= self.storage.durable_end)

    def trim(self) -> None:
        world = self.world
        durable = world.contexts[: world.contexts_durable]
        if durable:
            before = GLSN(self.rng.randint(1, durable[-1].high_watermark + 1))
            trimmed = max(before, world.hard_state.trimmed_before)
            fields = {name: getattr(world.hard_state, name) for name in world.hard_state.__struct_fields__}
            world.saved = HardState(**{**fields, "trimmed_before": trimmed})
            self.storage.save_hard_state(world.saved)
            world.first = self.storage.drop_before(before, LLSN(world.committed_end))

    def restart(self) -> None:
        world = self.world
        first = world.end + self.rng.randint(1, 50)
        tail = [entry for entry in world.entries if entry.first_llsn > world.committed_end]
        if tail and self.rng.random() < 0.7:
            # What was kept of it stays.
            first = self.rng.choice(tail).first_llsn
        kept = [entry for entry in tail if entry.first_llsn >= first]
        world.saved = HardState(epoch=world.hard_state.epoch, base_llsn=LLSN(first - 1), base_glsn=GLSN(10 * first))
        self.storage.save_hard_state(world.saved)
        self.storage.restart(LLSN(first), NO_TIME, kept[-1].last_llsn if kept else None)
        world.first, world.entries, world.contexts = LLSN(first), kept, []
        world.durable, world.contexts_durable = len(kept), 0
        world.restarts += 1

    def reopen(self) -> None:
        """The process dies and comes back. What it finds is durable from then on."""
        self.files.kill()
        self.storage = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        self.world.durable, self.world.contexts_durable = len(self.world.entries), len(self.world.contexts)


# What recovery must find.


def check(found: FoundFiles, storage: SegmentStorage, step: Step) -> None:
    before, after = step.before, step.after
    assert found.damaged is None
    assert found.hard_state in (before.saved, after.saved)
    assert storage.dedup in (before.dedup, after.dedup)
    entries = list(storage.entries(found.first_llsn, found.entries_end))
    contexts = list(storage.contexts)
    if found.last_commit is not None:
        assert contexts[-1] == found.last_commit
        assert found.last_commit.last_llsn <= found.entries_end, "a commit context without its entries"
    problems = [
        matches(found, entries, contexts, step, world) for world in ([before] if before is after else [before, after])
    ]
    assert None in problems, problems
    assert storage.verify() == []


def matches(found, entries, contexts, step, world) -> str | None:
    """What contradicts this world, if anything does. A call that is under way may have done any part of its work, but
    a log that was begun anew is a different log."""
    before, after = step.before, step.after
    other = after if world is before else before
    same_log = before.restarts == after.restarts
    # The longer of the two logs is the one that was cut, or that was written to.
    written = max((world.entries, other.entries), key=len) if same_log else world.entries
    durable = min(world.durable, other.durable) if same_log else world.durable
    first = max(world.first, other.first) if same_log else world.first
    if not world.first <= found.first_llsn <= first and not first <= found.first_llsn <= world.first:
        return f"entries begin at {found.first_llsn}, not at {world.first}"
    left = [entry for entry in written if entry.first_llsn >= found.first_llsn]
    if entries != left[: len(entries)]:
        return f"entries differ from {written}: {entries}"
    lost = [entry for entry in written[:durable] if entry.first_llsn >= found.first_llsn][len(entries) :]
    if lost:
        return f"durable entries are lost: {lost}"
    if not entries and found.entries_end != found.first_llsn - 1:
        return f"no entries, and they end at {found.entries_end}"
    return _matches_contexts(contexts, same_log, world, other)


def _matches_contexts(contexts, same_log, world, other) -> str | None:
    written = max((world.contexts, other.contexts), key=len) if same_log else world.contexts
    durable = min(world.contexts_durable, other.contexts_durable) if same_log else world.contexts_durable
    if not contexts:
        return f"durable commits are lost: {written[:durable]}" if durable else None
    if contexts[0] not in written:
        return f"an unknown commit {contexts[0]}"
    start = written.index(contexts[0])
    if contexts != written[start : start + len(contexts)]:
        return f"commits differ: {contexts}"
    if start + len(contexts) < durable:
        return f"durable commits are lost: {written[start + len(contexts) : durable]}"
    # Trim may remove commits, but never the one before the first entry.
    if contexts[0].first_llsn > max(world.first, other.first) and start:
        return f"commits are missing before {contexts[0]}"
    return None


def states(workload: Workload, variants=VARIANTS, *, every: int = 1):
    """Every crash: number of operations done, the step that was under way, the disk after it, and what it was."""
    disk = FaultFiles()
    disk.make_dir(DIRECTORY)
    operations = workload.files.operations
    steps = iter([Step("open", 0, workload.steps[0].start, World(), World()), *workload.steps])
    step = next(steps)
    for done in range(len(operations) + 1):
        if done:
            disk.do(operations[done - 1])
        while done > step.stop or (step.start == step.stop and done >= step.stop and step is not workload.steps[-1]):
            step = next(steps)
        if done % every:
            continue
        for name, (keep, torn) in variants.items():
            crashed = disk.copy()
            if name != "the process dies":
                crashed.crash(Random(f"{done}/{name}"), keep=keep, torn=torn)
            yield done, step, crashed, name


def recover(disk: FaultFiles) -> SegmentStorage:
    return SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, disk)


@pytest.fixture(scope="module", params=range(WORKLOADS))
def workload(request) -> Workload:
    return Workload(request.param)


def test_every_crash_is_survived(workload: Workload) -> None:
    count = 0
    for done, step, disk, variant in states(workload):
        where = f"crash after {done} operations, in {step.name}, {variant}"
        try:
            storage = recover(disk)
            found = storage.find()
            check(found, storage, step)
            # A replica saves a checkpoint of deduplication before it trims, and this workload does not.
            verdict = judge(structs.replace(found, lacks_dedup=False))
            if step.name == "restart" and isinstance(verdict, Invalid):
                # The new base is saved, and the entries of the old one are still there: to be synced again.
                assert found.hard_state == step.after.saved
                continue
            # Before its first hard state is saved there is no replica.
            assert isinstance(verdict, Valid) or found.hard_state is None, verdict
            if variant == list(VARIANTS)[done % len(VARIANTS)]:
                go_on(disk, found)
        except Exception as error:
            raise AssertionError(where) from error
        count += 1
    assert count >= STATES_MIN


def go_on(disk: FaultFiles, found: FoundFiles) -> None:
    """What was found is durable: the next crash takes nothing of it, and new entries follow it."""
    disk.crash(Random(1), keep=0.0)
    storage = recover(disk)
    assert storage.find() == found
    more = entries_from(found.entries_end + 1, 9, epoch=77)
    storage.write(more)
    storage.sync()
    disk.crash(Random(1), keep=0.0)
    again = recover(disk).find()
    assert again.tail == (*found.tail, *heads_of(more))


def test_the_workloads_do_everything() -> None:
    """Each kind of call is there, and segments and commit files begin and end in them."""
    workloads = [Workload(seed) for seed in range(WORKLOADS)]
    done = {step.name for workload in workloads for step in workload.steps}
    assert done == {*Workload.WEIGHTS}
    made = [op.path for workload in workloads for op in workload.files.operations if isinstance(op, Made)]
    assert sum(".entries" in path for path in made) > 30
    assert sum(".commits" in path for path in made) > 12


# The tester is tested.


def broken_sync(monkeypatch) -> None:
    monkeypatch.setattr(MarkedFile, "sync_data", lambda self: None)


def broken_truncate(monkeypatch) -> None:
    """The shorter file is not synced."""
    right = Segment.truncate

    def truncate(self, end):
        with mock.patch.object(MarkedFile, "sync_all", return_value=None):
            right(self, end)

    monkeypatch.setattr(Segment, "truncate", truncate)


def broken_replace(monkeypatch) -> None:
    """The new content is not synced before it gets its name."""

    def replace(files, path, data):
        temporary = path.with_name(path.name + ".tmp")
        files.create(temporary).pwritev([data], 0)
        files.rename(temporary, path)
        files.sync_dir(path.parent)

    from cutwater.storage.replica import small_files

    monkeypatch.setattr(small_files, "replace", replace)


def broken_names(monkeypatch) -> None:
    monkeypatch.setattr(FaultFiles, "sync_dir", lambda self, path: None)


def broken_recovery(monkeypatch) -> None:
    """What recovery keeps is not made durable."""

    def settle(self, size):
        if self.end.offset < size:
            self._file.truncate(self.end.offset)
        self.durable = self.end

    monkeypatch.setattr(Segment, "_settle", settle)


def broken_roll(monkeypatch) -> None:
    """A segment is not synced before the next one begins."""
    right = SegmentLog.roll

    def roll(self):
        with mock.patch.object(MarkedFile, "sync_data", return_value=None):
            right(self)

    monkeypatch.setattr(SegmentLog, "roll", roll)


def broken_mark(monkeypatch) -> None:
    """The mark goes ahead of the data."""

    def sync(self):
        self.marked.set_mark(self.end.offset, self.end.llsn, self.running)
        self.marked.sync_data()
        self.durable = self.end

    monkeypatch.setattr(Segment, "sync", sync)


BREAKS = [broken_sync, broken_truncate, broken_replace, broken_names, broken_recovery, broken_roll, broken_mark]


@pytest.mark.parametrize("planted", BREAKS, ids=lambda planted: planted.__name__)
def test_a_missing_sync_is_found(planted, monkeypatch) -> None:
    planted(monkeypatch)
    workload = Workload(0)
    with pytest.raises(AssertionError, match="crash after"):
        test_every_crash_is_survived(workload)
