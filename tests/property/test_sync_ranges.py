"""Sync: the plan for all small ranges against sets of LLSNs, and whole syncs with a crash after every single effect.

“All cases: destination behind, empty, trimmed further than the source, fully below the source's first entry,
source fully trimmed, already equal.” “An interrupted sync leaves a replica that never counts until synced again.”
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from msgspec import Struct

from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, SyncMessage, SyncRequest, TrimReplica
from cutwater.core.read.commit_index import context_of_llsn, glsn_of_llsn
from cutwater.core.replica.events import AskSync, Dropped, Restart, SaveHardState, Truncate
from cutwater.core.replica.sync_ranges import Extent, SyncCase, SyncPlan, plan_sync
from cutwater.errors import Refused
from cutwater.types import GLSN, LLSN, Entry, Epoch, ReplicaState
from tests.unit.replica_bench import HEAD, MIDDLE, STREAM, Bench, batch, commit, fence, learn, replicate, running, tag

END_MAX = 6


def extents() -> list[Extent]:
    return [Extent(LLSN(first), LLSN(end)) for end in range(END_MAX + 1) for first in range(1, end + 2)]


def llsns(extent: Extent) -> set[int]:
    return set(range(extent.first, extent.end + 1))


def carried_out(plan: SyncPlan, source: Extent, destination: Extent) -> tuple[int, set[int]]:
    """What the destination holds afterwards, and where it begins."""
    first, held = int(destination.first), llsns(destination)
    if plan.restart_at is not None:
        first, held = plan.restart_at, set()
    for llsn in sorted(llsns(plan.copy)):
        assert llsn in llsns(source), "copied from where it is"
        assert llsn not in held, "nothing that it already holds is copied again"
        assert llsn == max(held, default=first - 1) + 1, "in order and without a hole"
        held.add(llsn)
    return first, held


@pytest.mark.parametrize("source", extents(), ids=str)
def test_the_plan_for_every_destination(source: Extent) -> None:
    for destination in extents():
        if destination.end > source.end:
            with pytest.raises(Refused):
                plan_sync(source, destination)
            continue
        plan = plan_sync(source, destination)
        first, held = carried_out(plan, source, destination)
        end = max(held, default=first - 1)
        assert end == source.end, "1: it ends where the source ends"
        lacking = llsns(source) - held
        assert all(llsn < destination.first for llsn in lacking), "2: all of the source, but what it had trimmed itself"
        assert held == set(range(first, end + 1))
        hole = destination.end + 1 < source.first and destination.end < source.end
        assert (plan.restart_at is not None) == hole, "3: entries are dropped only if a hole would lie between"


def test_every_case_has_its_name() -> None:
    def case(*numbers: int) -> SyncCase:
        source_first, source_end, first, end = map(LLSN, numbers)
        return plan_sync(Extent(source_first, source_end), Extent(first, end)).case

    assert case(1, 6, 1, 4) is SyncCase.BEHIND
    assert case(1, 6, 1, 0) is SyncCase.EMPTY
    assert case(3, 6, 1, 0) is SyncCase.EMPTY
    assert case(1, 6, 3, 4) is SyncCase.TRIMMED_FURTHER
    assert case(1, 6, 5, 4) is SyncCase.TRIMMED_FURTHER
    assert case(5, 6, 1, 3) is SyncCase.BELOW
    assert case(7, 6, 1, 3) is SyncCase.SOURCE_TRIMMED
    assert case(7, 6, 1, 0) is SyncCase.SOURCE_TRIMMED
    assert case(1, 6, 1, 6) is SyncCase.EQUAL
    assert case(3, 6, 1, 6) is SyncCase.EQUAL
    assert case(1, 0, 1, 0) is SyncCase.EQUAL
    assert case(7, 6, 7, 6) is SyncCase.EQUAL


# Whole syncs between two replicas.

LOG = (
    fence(),
    batch(2, b"one", producer=tag(1)),
    batch(1, b"two", producer=tag(2)),
    batch(3, b"plain"),
    batch(1, b"three", producer=tag(3)),
    batch(2, b"last"),
)
"""LLSN 1, 2–3, 4, 5–7, 8, 9–10."""
COMMITS = ((1, 3), (4, 4), (8, 1), (9, 2))
"""First LLSN and count; the GLSN is the LLSN + 100."""
COMMIT_ENDS = (0, 3, 7, 8, 10)
FIRSTS = (1, 2, 4, 5, 8, 9, 11)


def entries() -> list[Entry]:
    made: list[Entry] = []
    for of_log in LOG:
        made.append(Entry(LLSN(made[-1].last_llsn + 1 if made else 1), Epoch(1), of_log))
    return made


def replica_with(node: int, first: int, committed_end: int, *, tail: bool = False) -> Bench:
    """A replica that holds the log from ``first`` to ``committed_end``, perhaps with more that is not committed."""
    bench = running(MIDDLE if node == MIDDLE else HEAD)
    for of_log in entries():
        if of_log.last_llsn <= committed_end or tail:
            bench.do(replicate(of_log))
    bench.sync()
    for begin, count in COMMITS:
        if begin + count - 1 <= committed_end:
            bench.do(commit(begin, count, glsn=begin + 100))
    bench.sync()
    if first > 1:
        bench.do(TrimReplica(STREAM, GLSN(first + 100)))
        bench.disk.entries = [e for e in bench.disk.entries if e.first_llsn >= first]
        bench.disk.first_llsn = LLSN(first)
        bench.do(Dropped(LLSN(first)))
    return bench


def serve(source: Bench, request: SyncRequest) -> Iterator[SyncMessage]:
    """What a storage node sends: the plan, the entries two by two, and the commit contexts last."""
    replica, disk, attempt = source.replica, source.disk, request.attempt
    plan = plan_sync(replica.extent, request.extent)
    base = context_of_llsn(disk.contexts, LLSN(plan.copy.first - 1))
    yield SyncBegin(STREAM, attempt, plan, base.high_watermark if base else GLSN(0))
    wanted = [e for e in disk.entries if plan.copy.first <= e.first_llsn and e.last_llsn <= plan.copy.end]
    for i in range(0, len(wanted), 2):
        yield SyncEntries(STREAM, attempt, tuple(wanted[i : i + 2]))
    contexts = tuple(c for c in disk.contexts if c.last_llsn >= plan.copy.first)
    yield SyncEnd(
        STREAM, attempt, contexts, replica.dedup.checkpoint(replica.committed_end), replica.hard_state.trimmed_before
    )


class Crashed(Exception):
    pass


class Case(Struct, frozen=True):
    """Where the two replicas stand, and whether the destination's data can be trusted at first."""

    source_first: int
    destination_first: int
    destination_end: int
    tail: bool = False
    lost: bool = False

    def destination(self) -> Bench:
        bench = replica_with(MIDDLE, self.destination_first, self.destination_end, tail=self.tail)
        if self.lost:
            del bench.disk.entries[-1:]
        bench.crash()
        return bench


class Sync:
    """Carries out effects one by one and crashes before number ``crash_at``."""

    def __init__(self, source: Bench, destination: Bench, crash_at: int | None = None) -> None:
        self.source, self.destination = source, destination
        self.crash_at = crash_at
        self.count = 0
        self.cases: Counter[SyncCase] = Counter()

    def hand_over(self, event: object) -> list[AskSync]:
        asks = []
        for effect in self.destination.replica.handle(event):  # type: ignore[arg-type]
            if self.count == self.crash_at:
                raise Crashed
            self.count += 1
            self.destination.disk.carry_out(effect)
            if isinstance(effect, AskSync):
                asks.append(effect)
        return asks

    def settle(self) -> None:
        while self.destination.disk.unsynced:
            for event in self.destination.disk.sync():
                self.hand_over(event)

    def run(self, *, sync_late: bool) -> None:
        (ask,) = self.hand_over(learn(source=HEAD))
        for message in serve(self.source, ask.request):
            if isinstance(message, SyncBegin):
                self.cases[message.plan.case] += 1
            self.check_silent()
            self.hand_over(message)
            if not sync_late:
                self.settle()
        self.settle()

    def check_silent(self) -> None:
        report = self.destination.replica.report()
        assert report is None or report.state is ReplicaState.LEARNING


def check_equal(source: Bench, destination: Bench) -> None:
    """The destination holds what the source holds, entry by entry and GLSN by GLSN."""
    ours, theirs = destination.replica.report(), source.replica.report()
    assert ours is not None
    assert theirs is not None
    assert ours.state is ReplicaState.SEALING
    assert (ours.high_watermark, ours.committed_end, ours.durable_end) == (
        theirs.high_watermark,
        theirs.committed_end,
        theirs.committed_end,
    )
    assert not destination.replica.hard_state.learning
    assert destination.replica.hard_state.trimmed_before >= source.replica.hard_state.trimmed_before
    held = {e.first_llsn: e for e in destination.disk.entries}
    assert destination.replica.extent.first == destination.disk.first_llsn
    for e in source.disk.entries:
        if e.first_llsn >= destination.disk.first_llsn:
            assert held[e.first_llsn] == e
            for llsn in range(e.first_llsn, e.last_llsn + 1):
                expected = glsn_of_llsn(source.disk.contexts, LLSN(llsn))
                assert glsn_of_llsn(destination.disk.contexts, LLSN(llsn)) == expected
    end = theirs.committed_end
    assert destination.replica.dedup.checkpoint(end) == source.replica.dedup.checkpoint(end)


def cases() -> list[Case]:
    made = []
    for source_first, destination_end in product(FIRSTS, COMMIT_ENDS):
        for destination_first in FIRSTS:
            if destination_first <= destination_end + 1:
                made.append(Case(source_first, destination_first, destination_end))
        made.append(Case(source_first, 1, destination_end, tail=True))
        if destination_end:
            made.append(Case(source_first, 1, destination_end, lost=True))
    return made


@pytest.mark.parametrize("sync_late", [False, True])
def test_a_sync_makes_equal_in_every_case(sync_late: bool) -> None:
    seen: Counter[SyncCase] = Counter()
    for case in cases():
        source, destination = replica_with(HEAD, case.source_first, 10), case.destination()
        sync = Sync(source, destination)
        sync.run(sync_late=sync_late)
        check_equal(source, destination)
        destination.crash()
        check_equal(source, destination)
        seen += sync.cases
    assert set(seen) == set(SyncCase)


@pytest.mark.parametrize("survives", [False, True], ids=["unsynced-lost", "unsynced-kept"])
@pytest.mark.parametrize("sync_late", [False, True])
def test_a_crash_at_any_effect_leaves_a_replica_that_never_counts_until_synced(sync_late: bool, survives: bool) -> None:
    crashes = 0
    for case in cases():
        source = replica_with(HEAD, case.source_first, 10)
        whole = Sync(source, case.destination())
        whole.run(sync_late=sync_late)
        for crash_at in range(whole.count):
            destination = case.destination()
            interrupted = Sync(source, destination, crash_at)
            with pytest.raises(Crashed):
                interrupted.run(sync_late=sync_late)
            if survives:
                destination.disk.sync()
            destination.crash()
            crashes += 1
            check_interrupted(case, destination)
            if case.destination_end < 10 and destination.replica.committed_end == 10 and destination.replica.trusted:
                check_equal(source, destination)
            Sync(source, destination).run(sync_late=sync_late)
            check_equal(source, destination)
    assert crashes > 1_000


def check_interrupted(case: Case, destination: Bench) -> None:
    """Silent, or exactly as before the sync touched the files, or done."""
    report, hard = destination.replica.report(), destination.disk.hard_state
    assert hard is not None
    if hard.learning:
        assert report is None
    elif report is not None:
        assert report.state is ReplicaState.SEALING
        assert report.committed_end in ({10} if case.lost else {case.destination_end, 10})


def test_the_first_thing_that_a_sync_changes_on_disk_is_the_mark_that_it_is_under_way() -> None:
    for case in cases():
        source, destination = replica_with(HEAD, case.source_first, 10), case.destination()
        (ask,) = (e for e in destination.do(learn(source=HEAD)) if isinstance(e, AskSync))
        effects = destination.do(next(serve(source, ask.request)))
        assert isinstance(effects[0], SaveHardState)
        assert effects[0].hard_state.learning
        assert all(isinstance(effect, (Restart, SaveHardState, Truncate)) for effect in effects[1:])
