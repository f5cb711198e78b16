"""The destination side of a sync, step by step (docs/protocol.md). All ranges are in property/test_sync_ranges.py."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest, TrimReplica
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.events import (
    AskSync,
    Barrier,
    CommitDurable,
    DropBefore,
    EntriesDurable,
    FillEntry,
    Reopen,
    ReplicaEffect,
    ReplicateFailed,
    ReportNow,
    Restart,
    SaveDedup,
    SaveHardState,
    StorageFailed,
    Truncate,
    WriteCommit,
    WriteEntry,
)
from cutwater.core.replica.recovery import HardState
from cutwater.core.replica.sync_ranges import Extent, MissingEntries, SyncCase, SyncPlan
from cutwater.errors import Refused, WrongEpoch
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch, ReplicaState
from tests.unit.replica_bench import (
    LAST,
    MIDDLE,
    STREAM,
    Bench,
    Disk,
    append,
    backup_with,
    commit,
    context,
    entry,
    exclude,
    learn,
    replicate,
    seal,
    unseal,
)

LEARNING, SEALING, SEALED = ReplicaState.LEARNING, ReplicaState.SEALING, ReplicaState.SEALED
NO_DEDUP = DedupCheckpoint(LLSN(6), ())


def begin(first: int = 3, end: int = 6, *, attempt: int = 1, restart_at: int | None = None) -> SyncBegin:
    plan = SyncPlan(SyncCase.BEHIND, None if restart_at is None else LLSN(restart_at), Extent(LLSN(first), LLSN(end)))
    return SyncBegin(STREAM, attempt, plan, GLSN(first - 1))


def some(*entries: Entry, attempt: int = 1) -> SyncEntries:
    return SyncEntries(STREAM, attempt, entries)


def end(
    *contexts: CommitContext, attempt: int = 1, dedup: DedupCheckpoint = NO_DEDUP, trimmed_before: int = 1
) -> SyncEnd:
    return SyncEnd(STREAM, attempt, contexts, dedup, GLSN(trimmed_before))


def learning() -> Bench:
    """LLSN 1 and 2 are committed; the stream has gone on to 6; the source was asked."""
    bench = backup_with(2, committed=2)
    bench.do(exclude())
    assert bench.do(learn(epoch=2)) == [AskSync(MIDDLE, SyncRequest(STREAM, 1, Extent(LLSN(1), LLSN(2))))]
    assert bench.replica.state is LEARNING
    return bench


COPIED = (entry(3, 2, epoch=2), entry(5, 2, epoch=2))
CONTEXTS = (context(3, 2, epoch=2), context(5, 2, epoch=2))


def copied() -> Bench:
    """All entries are written, none is on disk, and the source has ended."""
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    assert bench.do(end(*CONTEXTS)) == []
    return bench


# "It copies committed entries in LLSN order, commit contexts last".


def test_a_sync_from_begin_to_end() -> None:
    bench = learning()
    (saved,) = bench.do(begin())
    assert isinstance(saved, SaveHardState)
    assert saved.hard_state.learning
    assert bench.do(some(COPIED[0])) == [WriteEntry(COPIED[0], 0)]
    assert bench.do(some(COPIED[1])) == [WriteEntry(COPIED[1], 0)]
    assert bench.do(end(*CONTEXTS)) == []
    assert bench.do(EntriesDurable(0, LLSN(4))) == []
    assert bench.do(EntriesDurable(0, LLSN(6))) == [WriteCommit(c, 0) for c in CONTEXTS]
    assert bench.do(CommitDurable(0, CONTEXTS[0])) == []
    assert bench.replica.state is LEARNING
    done = bench.do(CommitDurable(0, CONTEXTS[1]))
    assert done == [SaveDedup(NO_DEDUP), SaveHardState(bench.replica.hard_state), ReportNow()]
    assert not bench.replica.hard_state.learning
    assert bench.replica.state is SEALING
    assert bench.numbers() == (6, 6, 6, 6)


def test_nothing_is_finished_before_the_commit_contexts_are_on_disk() -> None:
    """Whatever is heard twice meanwhile."""
    bench = copied()
    bench.do(EntriesDurable(0, LLSN(6)))
    for again in (EntriesDurable(0, LLSN(6)), end(*CONTEXTS), begin(), some(*COPIED), SyncFailed(STREAM, 1, "late")):
        assert bench.do(again) == []
        assert bench.replica.state is LEARNING
        assert bench.replica.hard_state.learning


def test_a_commit_of_its_own_that_becomes_durable_late_does_not_end_the_sync() -> None:
    bench = backup_with(2)
    bench.do(commit(1, 2))
    bench.do(seal(2))
    bench.do(learn())
    nothing = SyncPlan(SyncCase.EQUAL, None, Extent(LLSN(3), LLSN(2)))
    bench.do(SyncBegin(STREAM, 1, nothing, GLSN(2)))
    for event in bench.disk.sync():
        bench.do(event)
    assert bench.replica.state is LEARNING
    bench.do(end(dedup=DedupCheckpoint(LLSN(2), ())))
    assert bench.replica.state is SEALED


def test_messages_of_another_attempt_are_ignored() -> None:
    bench = learning()
    for stale in (begin(attempt=0), some(*COPIED, attempt=2), end(attempt=2), SyncFailed(STREAM, 0, "old")):
        assert bench.do(stale) == []
    assert bench.numbers() == (2, 2, 2, 2)
    assert bench.do(begin()) != []


def fails(bench: Bench, effects: list[ReplicaEffect]) -> None:
    """The attempt is over, nothing was finished, and another one may begin."""
    assert not [effect for effect in effects if isinstance(effect, (SaveHardState, SaveDedup, ReportNow))]
    bench.sync()
    assert bench.replica.state is (LEARNING if bench.replica.hard_state.learning else SEALING)
    again = bench.do(learn(epoch=2, source=LAST))
    assert again[-1] == AskSync(LAST, SyncRequest(STREAM, 2, Extent(LLSN(1), LLSN(2))))


def test_a_sync_that_leaves_a_hole_fails() -> None:
    bench = learning()
    bench.do(begin())
    fails(bench, bench.do(some(COPIED[1])))


def test_entries_before_the_plan_fail_the_sync() -> None:
    bench = learning()
    fails(bench, bench.do(some(*COPIED)))


def test_an_end_before_all_entries_came_fails_the_sync() -> None:
    bench = learning()
    bench.do(begin())
    bench.do(some(COPIED[0]))
    fails(bench, bench.do(end(*CONTEXTS)))


def test_an_end_without_a_plan_fails_the_sync() -> None:
    bench = learning()
    fails(bench, bench.do(end(*CONTEXTS)))


@pytest.mark.parametrize(
    "contexts",
    [
        pytest.param((), id="none"),
        pytest.param(CONTEXTS[:1], id="last-missing"),
        pytest.param(CONTEXTS[1:], id="first-missing"),
        pytest.param((*CONTEXTS, context(7, 1, epoch=2)), id="beyond-the-entries"),
        pytest.param((context(3, 3, epoch=2), CONTEXTS[1]), id="overlapping"),
    ],
)
def test_commit_contexts_that_do_not_fit_the_entries_fail_the_sync(contexts: tuple[CommitContext, ...]) -> None:
    """“A commit context on disk implies that the entries it covers are on disk”, and the other way round nothing
    is called committed without one. What comes from the wire is checked."""
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    for event in bench.disk.sync():
        bench.do(event)
    fails(bench, bench.do(end(*contexts)))


@pytest.mark.parametrize("upto", [2, 5, 9])
def test_deduplication_state_of_another_position_fails_the_sync(upto: int) -> None:
    """It “travels with sync”: the state at the end of what was copied, not of what a running source has by now."""
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    for event in bench.disk.sync():
        bench.do(event)
    fails(bench, bench.do(end(*CONTEXTS, dedup=DedupCheckpoint(LLSN(upto), ()))))


def test_a_source_that_gives_up_leaves_a_learner_that_tries_again_from_what_it_committed() -> None:
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    bench.sync()
    assert bench.do(SyncFailed(STREAM, 1, "trimmed meanwhile")) == []
    assert bench.replica.state is LEARNING
    assert bench.do(learn(epoch=2, source=LAST)) == [AskSync(LAST, SyncRequest(STREAM, 2, Extent(LLSN(1), LLSN(2))))]
    assert bench.do(begin(attempt=2)) == [SaveHardState(bench.replica.hard_state)]
    assert bench.do(some(*COPIED, attempt=2)) == [], "what was copied before need not be written again"


def test_a_second_order_to_learn_does_not_disturb_the_first() -> None:
    bench = learning()
    bench.do(begin())
    assert bench.do(learn(epoch=2, source=LAST)) == []
    assert bench.do(some(*COPIED)) == [WriteEntry(e, 0) for e in COPIED]


# "An fsync error fails the replica: the unsynced range counts as lost", also that of a barrier.


def far_behind() -> Bench:
    """LLSN 1 and 2 are committed, 3 is durable and 4 is not; the source begins at LLSN 9."""
    bench = backup_with(2, 1, committed=2)
    bench.do(replicate(entry(4)))
    bench.do(ReplicateFailed(LAST, Epoch(1), "gone"))
    bench.do(learn())
    return bench


def without_entries() -> Bench:
    """A replica that lost what it had committed, but still holds something that a peer may need."""
    disk = Disk()
    disk.hard_state = HardState(epoch=Epoch(1))
    disk.entries = [entry(1, 2)]
    disk.contexts = [context(1, 2), context(3, 2)]
    bench = Bench(MIDDLE, disk)
    bench.do(learn())
    return bench


RESTART = begin(9, 12, restart_at=9)


def barrier_fails(bench: Bench, event: SyncBegin, failing: int) -> ReplicaEffect:
    """The effects of the event are carried out up to the one that fails, which leaves nothing on disk."""
    effects = bench.replica.handle(event)
    assert isinstance(effects[failing], Barrier)
    for effect in effects[:failing]:
        bench.disk.carry_out(effect)
    return bench.do(StorageFailed("input/output error"))[-1]


def test_hard_state_is_saved_once_before_anything_is_removed() -> None:
    for bench, removed in ((far_behind(), [Truncate, Restart]), (without_entries(), [Restart])):
        assert [type(effect) for effect in bench.do(RESTART)] == [SaveHardState, *removed]
        hard = bench.replica.hard_state
        assert (hard.learning, hard.base_llsn, hard.base_glsn) == (True, 8, 8)


def test_a_new_beginning_takes_the_commit_of_the_last_trimmed_record() -> None:
    bench = far_behind()
    bench.do(RESTART)
    bench.do(some(entry(9, 4, epoch=2)))
    contexts = (context(7, 2, epoch=2), context(9, 4, epoch=2))
    bench.sync()
    written = bench.do(end(*contexts, dedup=DedupCheckpoint(LLSN(12), ()), trimmed_before=9))
    assert [effect.context for effect in written if isinstance(effect, WriteCommit)] == list(contexts)
    bench.sync()
    assert bench.replica.learner is None
    assert bench.numbers() == (12, 12, 12, 12)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_new_beginning_that_was_broken_off_takes_that_commit_later(is_restarted: bool) -> None:
    bench = far_behind()
    bench.do(RESTART)
    bench.do(some(entry(9, 2, epoch=2)))
    bench.sync()
    bench.do(SyncFailed(STREAM, RESTART.attempt, "broken off"))
    if is_restarted:
        bench.crash()
    assert bench.replica.extent == Extent(LLSN(9), LLSN(8))
    assert bench.replica.lacks_commits
    (asked,) = bench.do(learn(epoch=2))
    assert isinstance(asked, AskSync)
    attempt = asked.request.attempt
    contexts = (context(7, 2, epoch=2), context(9, 4, epoch=2))
    bench.do(begin(9, 12, attempt=attempt))
    bench.do(some(entry(9, 2, epoch=2), entry(11, 2, epoch=2), attempt=attempt))
    bench.sync()
    dedup = DedupCheckpoint(LLSN(12), ())
    written = bench.do(end(*contexts, attempt=attempt, dedup=dedup, trimmed_before=9))
    assert [effect.context for effect in written if isinstance(effect, WriteCommit)] == list(contexts)
    bench.sync()
    assert bench.replica.learner is None
    assert not bench.replica.lacks_commits


@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_lost_entries_stays_so_when_a_barrier_fails(failing: int) -> None:
    """It must not become a valid and empty one, nor lose what is left of its files."""
    bench = without_entries()
    files = list(bench.disk.entries), list(bench.disk.contexts)
    assert barrier_fails(bench, RESTART, failing) == Reopen(None, None, "input/output error")
    assert (bench.disk.entries, bench.disk.contexts) == files
    assert not bench.replica.trusted
    assert bench.replica.has_lost_entries


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_counts_after_a_failed_barrier_is_what_was_durable_before(failing: int) -> None:
    """Not where the sync would have put the replica: an entry that was never synced is not called durable by it."""
    bench = far_behind()
    assert barrier_fails(bench, RESTART, failing) == Reopen(LLSN(3), LLSN(2), "input/output error")
    assert bench.replica.trusted == (failing == 0)
    # The tail of a replica that was trusted goes with the second one.
    assert bench.numbers() == ((2, 2, 3, 3) if failing < 2 else (2, 2, 2, 2))


def test_a_sync_that_cannot_be_finished_keeps_what_is_on_disk() -> None:
    """The last commit is durable and deduplication is saved up to it, but the mark ``learning`` cannot be removed. A
    checkpoint beyond what is committed would know of batches that are not there."""
    bench = copied()
    bench.do(EntriesDurable(0, LLSN(6)))
    *earlier, last = bench.disk.sync()
    for event in earlier:
        bench.do(event)
    saved, failing, *_ = bench.replica.handle(last)
    assert isinstance(failing, SaveHardState)
    bench.disk.carry_out(saved)
    assert bench.do(StorageFailed("input/output error"))[-1] == Reopen(LLSN(6), LLSN(6), "input/output error")
    assert bench.disk.dedup == NO_DEDUP
    assert (bench.replica.trusted, bench.replica.committed_end) == (False, 6)


def test_barriers_that_succeeded_are_behind() -> None:
    bench = far_behind()
    bench.do(RESTART)
    bench.do(some(entry(9, 4)))
    assert bench.do(StorageFailed("input/output error"))[-1] == Reopen(LLSN(8), LLSN(8), "input/output error")


# "The destination is LEARNING (silent towards cuts)".


def test_a_learner_applies_no_commit_takes_no_entry_and_is_not_sealed() -> None:
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    bench.sync()
    assert bench.do(commit(3, 2, epoch=2)) == []
    with pytest.raises(Refused):
        bench.do(seal(6, epoch=2))
    with pytest.raises(Refused):
        bench.do(append(1, epoch=2))
    with pytest.raises(Refused):
        bench.do(replicate(entry(7, epoch=2)))
    assert bench.do(TrimReplica(STREAM, GLSN(3))) == []
    report = bench.replica.report()
    assert report is None or report.state is LEARNING


def test_a_learner_that_is_left_out_again_goes_on_learning() -> None:
    bench = learning()
    bench.do(begin())
    (saved, now) = bench.do(exclude(epoch=3))
    assert isinstance(saved, SaveHardState)
    assert (saved.hard_state.epoch, saved.hard_state.learning) == (3, True)
    assert now == ReportNow()
    bench.do(some(*COPIED))
    bench.do(end(*CONTEXTS))
    bench.sync()
    assert (bench.replica.state, bench.replica.hard_state.epoch) == (SEALING, 3)


def test_a_learner_takes_over_the_trim_position_of_its_source() -> None:
    bench = learning()
    bench.do(begin())
    bench.do(some(*COPIED))
    bench.do(end(*CONTEXTS, trimmed_before=4))
    effects = bench.sync()
    assert bench.disk.hard_state is not None
    assert bench.disk.hard_state.trimmed_before == 4
    assert effects[-1] == DropBefore(GLSN(4), LLSN(6)), "it removes what the source has trimmed"


def test_a_learner_is_admitted_by_a_seal_at_exactly_its_position() -> None:
    """“… and is admitted by a short seal at exactly L.”"""
    bench = copied()
    bench.sync()
    assert bench.replica.state is SEALING
    bench.do(seal(6, epoch=2))
    assert bench.replica.state is SEALED
    bench.do(unseal(6, epoch=3, chain=(MIDDLE,)))
    assert bench.replica.state is ReplicaState.RUNNING


def test_a_late_commit_of_what_was_learned_is_a_repetition_like_any_other() -> None:
    """Several metadata nodes may send the same commit, and one of them after the sync has already brought it."""
    bench = backup_with(2)
    bench.do(commit(1, 2))
    bench.sync()
    bench.do(exclude())
    bench.do(learn(epoch=2))
    bench.do(begin())
    bench.do(some(*COPIED))
    bench.do(end(*CONTEXTS))
    bench.sync()
    assert bench.replica.committed_end == 6
    for late in (commit(5, 2, epoch=2), commit(3, 2, epoch=2), commit(1, 2)):
        assert bench.do(late) == []


# What it has is not thrown away before somebody else is known to have it.


def test_a_durable_tail_is_kept_until_a_source_has_answered() -> None:
    """Guarantee 3. A cut may count on these entries: “Durable but uncommitted entries of the current epoch are
    kept”. The order to learn may be late and its source gone; then this may be the last copy."""
    bench = backup_with(2, 1, 2, committed=2)
    bench.crash()
    bench.do(learn())
    bench.do(SyncFailed(STREAM, 1, "no answer"))
    assert bench.disk.end == 5
    assert bench.replica.state is SEALING
    bench.do(seal(5))
    bench.do(commit(3, 3))
    bench.sync()
    assert bench.replica.state is SEALED


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_order_to_learn_of_another_epoch_is_refused(epoch: int) -> None:
    bench = backup_with(2, 1, committed=2)
    bench.crash()
    with pytest.raises(WrongEpoch):
        bench.do(learn(epoch=epoch))
    assert (bench.replica.state, bench.disk.end) == (SEALING, 3)


# A replica that cannot be trusted keeps its tail until the source has shown what is committed.


def forgetful(*tail: Entry, files_end: int | None = None) -> Bench:
    """LLSN 1 and 2 are committed, what follows is in the files, and the hard state is lost."""
    disk = Disk()
    disk.hard_state = None
    disk.entries = [entry(1, 2), *tail]
    disk.contexts = [context(1, 2)]
    disk.sync()
    bench = Bench(MIDDLE, disk)
    assert bench.replica.state is LEARNING
    assert bench.replica.report() is None
    assert bench.do(learn(epoch=2)) == [AskSync(MIDDLE, SyncRequest(STREAM, 1, Extent(LLSN(1), LLSN(2))))]
    return bench


def test_a_tail_that_the_source_has_too_is_not_copied_again() -> None:
    bench = forgetful(*COPIED)
    (saved,) = bench.do(begin())
    assert isinstance(saved, SaveHardState)
    assert saved.hard_state.learning
    assert bench.do(some(*COPIED)) == []
    assert bench.do(end(*CONTEXTS)) == [WriteCommit(c, 0) for c in CONTEXTS]
    bench.sync()
    assert bench.numbers() == (6, 6, 6, 6)
    assert bench.replica.state is SEALING
    assert bench.replica.trusted


def test_what_the_source_cannot_read_is_taken_from_the_tail() -> None:
    """Equal LLSNs and an equal epoch are equal bytes; the commits come from the source, at its end."""
    bench = forgetful(*COPIED)
    bench.do(begin())
    assert bench.do(SyncEntries(STREAM, 1, COPIED[:1], (MissingEntries(LLSN(5), LLSN(6), Epoch(2)),))) == []
    assert bench.do(end(*CONTEXTS)) == [WriteCommit(c, 0) for c in CONTEXTS]


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param((5, 6, 3), id="of another epoch"),
        pytest.param((5, 7, 2), id="longer than what is here"),
        pytest.param((5, 5, 2), id="shorter than what is here"),
        pytest.param((6, 6, 2), id="not what comes next"),
    ],
)
def test_what_is_not_exactly_what_was_committed_does_not_count(missing: tuple[int, int, int]) -> None:
    first, last, epoch = missing
    bench = forgetful(*COPIED)
    bench.do(begin())
    lacking = MissingEntries(LLSN(first), LLSN(last), Epoch(epoch))
    assert bench.do(SyncEntries(STREAM, 1, COPIED[:1], (lacking,))) == []
    assert bench.replica.learner is None, "the sync has failed"
    assert bench.disk.end == 6, "and the tail is as it was"
    assert not bench.replica.trusted


def test_a_tail_of_an_epoch_that_went_on_without_it_goes_when_the_source_says_so() -> None:
    old = (entry(3, 1, epoch=1), entry(4, 4, epoch=1))
    bench = forgetful(*old)
    bench.do(begin())
    assert bench.disk.end == 7
    written = [WriteEntry(e, 1) for e in COPIED]
    assert bench.do(some(*COPIED)) == [Truncate(LLSN(2), 1), *written]


def test_what_lies_beyond_all_that_is_committed_goes_last() -> None:
    bench = forgetful(*COPIED, entry(7, 3, epoch=2))
    bench.do(begin())
    assert bench.do(some(*COPIED)) == []
    assert bench.do(end(*CONTEXTS)) == [Truncate(LLSN(6), 1), *(WriteCommit(c, 0) for c in CONTEXTS)]


def test_a_tail_that_reaches_beyond_the_round_waits_for_the_next_one() -> None:
    bench = forgetful(*COPIED)
    bench.do(begin(end=4))
    bench.do(some(COPIED[0]))
    partial = SyncEnd(STREAM, 1, CONTEXTS[:1], DedupCheckpoint(LLSN(4), ()), GLSN(1), more=True)
    assert bench.do(partial) == [WriteCommit(CONTEXTS[0], 0)]
    asked = bench.do(CommitDurable(0, CONTEXTS[0]))
    assert asked == [AskSync(MIDDLE, SyncRequest(STREAM, 2, Extent(LLSN(1), LLSN(4))))]
    assert bench.replica.state is LEARNING
    assert not bench.replica.trusted
    assert bench.disk.end == 6


def test_a_sync_that_breaks_off_and_a_restart_leave_the_tail() -> None:
    bench = forgetful(*COPIED)
    bench.do(begin())
    bench.do(some(COPIED[0]))
    bench.do(SyncFailed(STREAM, 1, "the source died"))
    bench.do(exclude(epoch=3))
    again = Bench(MIDDLE, bench.disk)
    assert again.replica.hard_state.learning
    assert again.replica.report() is None
    assert again.disk.end == 6


def test_whatever_an_untrusted_replica_is_told_it_does_not_count_after_a_restart() -> None:
    """Its newest commits are lost. Left out of the chain, it would otherwise pass for one that never had them."""
    disk = Disk()
    disk.hard_state = HardState(epoch=Epoch(2), chain=(MIDDLE,))
    disk.entries = [entry(1, 2, epoch=1), entry(3, 2, epoch=1)]
    bench = Bench(MIDDLE, disk)
    assert not bench.replica.trusted
    bench.do(exclude(epoch=3))
    again = Bench(MIDDLE, bench.disk)
    assert again.replica.hard_state.learning
    assert again.replica.report() is None
    assert again.disk.end == 4, "they may be the last intact copies"


def test_orders_for_an_epoch_before_that_of_what_was_learned_come_too_late() -> None:
    bench = learning()
    bench.do(begin())
    bench.do(some(entry(3, 2, epoch=4), entry(5, 2, epoch=4)))
    bench.do(end(context(3, 2, epoch=4), context(5, 2, epoch=4)))
    bench.sync()
    assert bench.replica.trusted
    assert bench.replica.hard_state.epoch == 4
    with pytest.raises(WrongEpoch):
        bench.do(seal(2, epoch=2))


# A new beginning: the source has trimmed further than the learner has committed.

TAIL = (entry(3, 2, epoch=2), entry(5, 2, epoch=2), entry(7, 2, epoch=2))


def test_a_new_beginning_inside_the_tail_keeps_what_follows() -> None:
    """The source has yet to show whether it can read all of that."""
    bench = forgetful(*TAIL)
    saved, restart = bench.do(begin(5, 8, restart_at=5))
    assert isinstance(saved, SaveHardState)
    assert (saved.hard_state.base_llsn, saved.hard_state.learning) == (4, True)
    assert restart == Restart(LLSN(5), 1, LLSN(8))
    assert bench.disk.entries == list(TAIL[1:])
    assert bench.numbers() == (4, 4, 8, 8)
    missing = (MissingEntries(LLSN(7), LLSN(8), Epoch(2)),)
    assert bench.do(SyncEntries(STREAM, 1, TAIL[1:2], missing)) == []
    contexts = (context(5, 2, epoch=2), context(7, 2, epoch=2))
    assert bench.do(end(*contexts, dedup=DedupCheckpoint(LLSN(8), ()))) == [WriteCommit(c, 1) for c in contexts]
    bench.sync()
    assert bench.replica.trusted
    assert bench.numbers() == (8, 8, 8, 8)


def test_a_new_beginning_that_breaks_off_and_a_restart_leave_the_tail() -> None:
    bench = forgetful(*TAIL)
    bench.do(begin(5, 8, restart_at=5))
    bench.do(SyncFailed(STREAM, 1, "the source died"))
    bench.crash()
    assert bench.replica.kept.end == 8
    assert bench.do(learn(epoch=2)) == [AskSync(MIDDLE, SyncRequest(STREAM, 1, Extent(LLSN(5), LLSN(4))))]
    assert bench.do(begin(5, 8)) == [SaveHardState(bench.replica.hard_state)]
    assert bench.do(some(*TAIL[1:])) == []


@pytest.mark.parametrize("restart_at", [4, 9, 20])
def test_a_new_beginning_where_no_kept_entry_begins_keeps_none(restart_at: int) -> None:
    """Either all of the tail is trimmed where the source is, or something else was committed in its place."""
    bench = forgetful(*TAIL)
    assert bench.do(begin(restart_at, 30, restart_at=restart_at))[-1] == Restart(
        LLSN(restart_at), 1, LLSN(restart_at - 1)
    )
    assert bench.disk.entries == []
    assert bench.replica.kept.end == restart_at - 1


LONG_TAIL = (*TAIL, entry(9, 2, epoch=2))


def with_damage_in_the_tail(*damaged: int) -> Bench:
    """Entries that begin with these LLSNs cannot be read."""
    bench = forgetful(*LONG_TAIL)
    found = bench.disk.find()
    tail = tuple(e for e in LONG_TAIL if e.first_llsn not in damaged)
    found = structs.replace(found, tail=tail, damaged=LLSN(min(damaged)))
    bench.disk.find = lambda: found  # type: ignore[method-assign]
    bench.crash()
    bench.do(learn(epoch=2))
    return bench


def test_a_hole_in_the_tail_is_filled_and_what_lies_behind_it_counts() -> None:
    """The source cannot read what is intact here behind the hole."""
    bench = with_damage_in_the_tail(5)
    assert bench.do(begin(3, 10)) == [SaveHardState(bench.replica.hard_state)]
    assert bench.do(some(*LONG_TAIL[:2])) == [FillEntry(LONG_TAIL[1])]
    missing = (MissingEntries(LLSN(7), LLSN(8), Epoch(2)),)
    assert bench.do(SyncEntries(STREAM, 1, (), missing)) == []
    assert bench.do(some(LONG_TAIL[3])) == []
    contexts = tuple(context(first, 2, epoch=2) for first in (3, 5, 7, 9))
    assert bench.do(end(*contexts, dedup=DedupCheckpoint(LLSN(10), ()))) == [WriteCommit(c, 0) for c in contexts]
    bench.sync()
    assert bench.replica.trusted


def test_a_hole_of_several_entries_is_filled_one_after_the_other() -> None:
    bench = with_damage_in_the_tail(5, 7)
    bench.do(begin(3, 10))
    assert bench.do(some(*LONG_TAIL)) == [FillEntry(LONG_TAIL[1]), FillEntry(LONG_TAIL[2])]
    bench.do(SyncFailed(STREAM, 1, "the source died"))
    bench.do(learn(epoch=2))
    bench.do(begin(3, 10, attempt=2))
    assert bench.do(some(*LONG_TAIL, attempt=2)) == [], "what was filled is as good as the rest"


def test_what_cannot_be_read_in_both_places_fails_the_sync_and_leaves_the_tail() -> None:
    bench = with_damage_in_the_tail(5)
    bench.do(begin(3, 10))
    missing = (MissingEntries(LLSN(5), LLSN(6), Epoch(2)),)
    assert bench.do(SyncEntries(STREAM, 1, LONG_TAIL[:1], missing)) == []
    assert bench.replica.learner is None
    assert bench.disk.end == 10


def test_another_entry_than_fits_into_the_hole_takes_the_place_of_all_that_follows() -> None:
    bench = with_damage_in_the_tail(5)
    bench.do(begin(3, 10))
    other = entry(5, 3, epoch=3)
    assert bench.do(some(LONG_TAIL[0], other)) == [Truncate(LLSN(4), 1), WriteEntry(other, 1)]


def test_what_lies_behind_damage_goes_if_it_is_not_committed() -> None:
    bench = with_damage_in_the_tail(5)
    bench.do(begin(3, 4))
    bench.do(some(TAIL[0]))
    ended = bench.do(end(context(3, 2, epoch=2), dedup=DedupCheckpoint(LLSN(4), ())))
    assert ended == [Truncate(LLSN(4), 1), WriteCommit(context(3, 2, epoch=2), 0)]


def test_a_damaged_end_of_the_tail_goes_when_something_is_written_there() -> None:
    bench = with_damage_in_the_tail(7, 9)
    assert bench.do(begin(3, 10)) == [SaveHardState(bench.replica.hard_state)]
    assert bench.disk.end == 10
    assert bench.do(some(*LONG_TAIL)) == [Truncate(LLSN(6), 1), *(WriteEntry(e, 1) for e in LONG_TAIL[2:])]


def test_a_new_beginning_keeps_the_tail_up_to_a_hole() -> None:
    bench = with_damage_in_the_tail(7)
    assert bench.do(begin(5, 10, restart_at=5))[-1] == Restart(LLSN(5), 1, LLSN(6))


def test_what_it_has_of_an_earlier_epoch_is_removed_when_it_is_left_out_before_its_source_has_answered() -> None:
    """The chain of the new epoch may give the same LLSN to another record, so the replica must not report that it has
    it. It was found by storm seed 91000 of the simulator."""
    bench = backup_with(2, 1, committed=2)
    bench.crash()
    assert bench.disk.end == 3
    bench.do(learn())
    assert bench.replica.state is LEARNING
    effects = bench.do(exclude())
    assert Truncate(LLSN(2), 1) in effects
    bench.do(SyncFailed(STREAM, 1, "the source died"))
    assert (bench.replica.state, bench.disk.end, bench.replica.written_end) == (SEALING, 2, 2)
    # The others have committed another record in epoch 2, and are sealed after it.
    bench.do(seal(3, epoch=2))
    bench.do(commit(3, 1, epoch=2))
    bench.sync()
    assert bench.replica.state is SEALING, "it has to learn the record"
    assert bench.replica.committed_end == 2
    # A copy that has begun removes the rest by itself, as before.
    bench.do(learn(epoch=2))
    bench.do(begin(3, 3, attempt=2))
    bench.do(some(entry(3, epoch=2), attempt=2))
    bench.do(end(context(3, 1, epoch=2), attempt=2, dedup=DedupCheckpoint(LLSN(3), ())))
    bench.sync()
    assert (bench.replica.state, bench.replica.committed_end) == (SEALED, 3)
    assert bench.disk.entries[-1] == entry(3, epoch=2)
