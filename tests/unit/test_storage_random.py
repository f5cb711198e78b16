"""Files against memory: the same calls in any order, with restarts and power cuts in between, give the same replica."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from storage_kit import DIRECTORY, IDENTITY, commit_of, entries_from

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError
from cutwater.format.entry_codec import RunningEventTime
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, LLSN, CutTime, Epoch, EventTime
from tests.unit.memory_storage import MemoryReplica, MemoryStorage

OPTIONS = SegmentOptions(segment_bytes=800, index_interval_bytes=256, commits_per_file=3)


class FilesAgainstMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.files = FaultFiles()
        self.memory = MemoryReplica()
        self.segments = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        self.twin = MemoryStorage(self.memory)
        self.both(lambda s: s.save_hard_state(HardState(epoch=Epoch(1))))

    def both(self, call):
        """The same call to both, with the same outcome: value, or error and what it tells."""
        outcomes = []
        for storage in (self.segments, self.twin):
            try:
                outcomes.append(call(storage))
            except CutwaterError as error:
                outcomes.append((type(error), getattr(error, "first_left", None)))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    # Writing.

    @rule(count=st.integers(1, 6), size=st.sampled_from([0, 3, 40, 300]), records=st.integers(1, 5))
    def write(self, count: int, size: int, records: int) -> None:
        epoch = self.twin.hard_state.epoch
        group = entries_from(self.twin.end + 1, count, epoch=epoch, size=size, records=records)
        self.both(lambda s: s.write(group))
        self.align()

    @rule()
    def sync(self) -> None:
        self.both(lambda s: (s.sync(), s.durable_end, s.durable_commit))

    @rule(entries=st.booleans())
    def sync_one_kind(self, entries: bool) -> None:
        self.segments.sync(entries=entries, contexts=not entries)
        self.twin.sync(entries=entries, contexts=not entries)
        self.align()

    def align(self) -> None:
        """A full file was synced when it was full, and the twin knows of no files."""
        memory, durable = self.twin.memory, self.segments.durable_commit
        memory.frames_synced = sum(1 for f in memory.frames if f.header.last_llsn <= self.segments.durable_end)
        memory.contexts_synced = memory.contexts.index(durable) + 1 if durable is not None else 0

    @rule(entries=st.integers(1, 4), times=st.integers(1, 4), skip=st.integers(0, 5))
    def commit(self, entries: int, times: int, skip: int) -> None:
        for _ in range(times):
            durable = min(self.segments.durable_end, self.twin.durable_end)
            if self.twin.committed_end >= durable:
                return
            group = list(self.twin.entries(LLSN(self.twin.committed_end + 1), durable))[:entries]
            group = [entry for entry in group if entry.epoch == group[0].epoch]
            context = commit_of(group, self.twin.last_commit, skip)
            self.both(lambda s, context=context: s.write_contexts([context]))
        self.align()

    @rule(part=st.floats(0, 1))
    def truncate(self, part: float) -> None:
        tail = self.twin.find().tail
        ends = [self.twin.committed_end, *(entry.last_llsn for entry in tail)]
        end = ends[int(part * (len(ends) - 1))]
        self.both(lambda s: s.truncate(end))
        self.align()

    @rule()
    def new_epoch(self) -> None:
        fields = {name: getattr(self.twin.hard_state, name) for name in HardState.__struct_fields__}
        hard_state = HardState(**{**fields, "epoch": Epoch(self.twin.hard_state.epoch + 1)})
        self.both(lambda s: s.save_hard_state(hard_state))
        self.both(lambda s: s.truncate(self.twin.committed_end))
        self.align()

    @rule(upto=st.integers(0, 100))
    def save_dedup(self, upto: int) -> None:
        self.both(lambda s: s.save_dedup(DedupCheckpoint(LLSN(upto), ())))

    @precondition(lambda self: self.twin.durable_commit is not None)
    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        before = GLSN(int(self.twin.durable_commit.high_watermark * part) + 1)
        fields = {name: getattr(self.twin.hard_state, name) for name in HardState.__struct_fields__}
        before = max(before, self.twin.hard_state.trimmed_before)
        self.both(lambda s: s.save_hard_state(HardState(**{**fields, "trimmed_before": before})))
        self.both(lambda s: s.drop_before(before, s.committed_end))

    @rule(gap=st.integers(0, 40), time=st.integers(0, 10**6))
    def restart(self, gap: int, time: int) -> None:
        first = self.twin.end + 1 + gap
        fields = {"epoch": self.twin.hard_state.epoch, "base_llsn": LLSN(first - 1), "base_glsn": GLSN(first * 7)}
        self.both(lambda s: s.save_hard_state(HardState(**fields)))
        self.both(lambda s: s.restart(LLSN(first), RunningEventTime(EventTime(time), None)))

    # Misfortune.

    @rule()
    def reopen(self) -> None:
        self.files.kill()
        self.segments = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        self.twin = MemoryStorage(self.memory)

    @rule(seed=st.integers(0, 10**6), keep=st.floats(0, 1))
    def lose_power(self, seed: int, keep: float) -> None:
        """What survives of the unsynced part is for the files to say, and the twin follows, if it may be so."""
        durable, written = self.twin.durable_end, self.twin.end
        durable_commit, contexts = self.twin.durable_commit, list(self.twin.contexts)
        self.files.crash(Random(seed), keep=keep)
        self.segments = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
        assert durable <= self.segments.end <= written
        survived = list(self.segments.contexts)
        assert all(context in contexts for context in survived)
        if durable_commit is not None:
            assert self.segments.last_commit.last_llsn >= durable_commit.last_llsn
        end = self.segments.committed_end
        self.memory.contexts = [context for context in contexts if context.last_llsn <= end]
        self.twin = MemoryStorage(self.memory)
        self.twin.truncate(self.segments.end)

    @rule()
    def fail(self) -> None:
        """As after a failed sync: cut back to what is durable."""
        end = min(self.segments.durable_end, self.twin.durable_end)
        durable = self.twin.durable_commit
        committed_end = durable.last_llsn if durable else self.twin.hard_state.base_llsn
        self.both(lambda s: s.cut_back(end, committed_end))

    @precondition(lambda self: self.segments.end >= self.segments.first_llsn)
    @rule(part=st.floats(0, 1), offset=st.integers(0, 10**6), bit=st.integers(0, 7))
    def damage_and_repair(self, part: float, offset: int, bit: int) -> None:
        self.segments.sync()
        self.twin.sync()
        llsn = int(self.segments.first_llsn + part * (self.segments.end - self.segments.first_llsn))
        entry = self.segments.entry_at(LLSN(llsn))
        segment = self.segments._log.segment_of(LLSN(llsn))
        place = segment.place_of(LLSN(llsn))
        self.files.flip(segment.path, place.offset + offset % (place.end - place.offset), bit)
        assert self.segments.verify()
        assert self.segments.repair(entry)
        assert self.segments.verify() == []

    # What always holds.

    @invariant()
    def they_are_the_same(self) -> None:
        first, twin = self.segments.first_llsn, self.twin
        assert (self.segments.end, self.segments.hard_state, self.segments.dedup) == (
            twin.end,
            twin.hard_state,
            twin.dedup,
        )
        found, expected = self.segments.find(), twin.find()
        assert (found.last_commit, found.entries_end, found.tail) == (
            expected.last_commit,
            expected.entries_end,
            expected.tail,
        )
        assert first == twin.first_llsn
        for llsn in range(twin.first_llsn, twin.committed_end + 1, 7):
            part = self.segments.read(LLSN(llsn), twin.committed_end, 500)
            other = twin.read(LLSN(llsn), twin.committed_end, 10**9)
            assert bytes(other.data).startswith(bytes(part.data))
        kept = [context for context in twin.contexts if context.last_llsn >= first - 1]
        assert list(self.segments.contexts)[-len(kept) :] == kept or not kept
        assert self.segments.running_before(LLSN(twin.end + 1)) == twin.running_before(LLSN(twin.end + 1))
        for position in range(0, 400, 41):
            self.both(lambda s, p=position: s.from_glsn(GLSN(p)) if p >= (twin.hard_state.trimmed_before) else None)
            self.both(lambda s, p=position: s.from_time(CutTime(1_000 + p)) if not twin.memory.first_llsn > 1 else None)

    def teardown(self) -> None:
        assert self.segments.verify() == []


TestFilesAgainstMemory = FilesAgainstMemory.TestCase
TestFilesAgainstMemory.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
