"""The recovery matrix (docs/recovery.md), row by row.

“Matrix: nothing → fresh, but only when the replica is being created (an empty mount is not a fresh replica); CC only
(all trimmed) → valid; CC end = last committed entry → valid; anything else → invalid: never reports, waits for sync.”
"""

from __future__ import annotations

import pytest
from msgspec import structs

from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.recovery import FoundFiles, HardState, Invalid, Valid, judge
from cutwater.core.replica.replica import Replica
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch, ReplicaState
from tests.unit.replica_bench import HEAD, STREAM, context, entry

HARD = HardState(epoch=Epoch(2))


def found(
    *,
    hard: HardState | None = HARD,
    last_commit: CommitContext | None = None,
    first: int = 1,
    end: int = 0,
    tail: tuple[Entry, ...] = (),
    damaged: int | None = None,
) -> FoundFiles:
    return FoundFiles(hard, last_commit, LLSN(first), LLSN(end), tail, None if damaged is None else LLSN(damaged))


def valid(committed_end: int, high_watermark: int, keep_end: int, *, lacks_commits: bool = False) -> Valid:
    return Valid(LLSN(committed_end), GLSN(high_watermark), LLSN(keep_end), lacks_commits)


# "nothing → fresh, but only when the replica is being created (an empty mount is not a fresh replica)". Whoever creates
# one saves its hard state first, so nothing at all is never a fresh one.


def test_nothing_is_invalid_where_a_replica_used_to_be() -> None:
    verdict = judge(found(hard=None))
    assert isinstance(verdict, Invalid)
    assert verdict.kept is None


def test_records_without_a_hard_state_are_invalid_and_what_is_committed_is_kept() -> None:
    for there, committed in (
        (found(hard=None, end=2, tail=(entry(1, 2),)), 0),
        (found(hard=None, last_commit=context(1, 2), end=2), 2),
        (found(hard=None, last_commit=context(1, 2), end=3, tail=(entry(3),)), 2),
        (found(hard=None, last_commit=context(1, 2), first=3, end=2), 2),
    ):
        verdict = judge(there)
        assert isinstance(verdict, Invalid)
        assert verdict.forgot_epochs
        assert verdict.kept is not None
        assert (verdict.kept.committed_end, verdict.kept.keep_end) == (committed, committed)


def test_a_member_whose_commits_are_missing_keeps_the_entries_that_they_committed() -> None:
    """Entries of an older epoch than the one it is a member of were committed, on disk: they are not cut off."""
    hard = HardState(epoch=Epoch(2), chain=(HEAD,))
    verdict = judge(found(hard=hard, end=4, tail=(entry(1, 2, epoch=1), entry(3, 2, epoch=2))))
    assert isinstance(verdict, Invalid)
    assert "the commits from LLSN 1 on are missing" in verdict.reason
    assert not verdict.forgot_epochs
    left_out = HardState(epoch=Epoch(2), chain=())
    assert judge(found(hard=left_out, end=2, tail=(entry(1, 2, epoch=1),))) == valid(0, 0, 0, lacks_commits=True)


def test_a_replica_that_has_trimmed_and_lost_its_deduplication_state_learns_it() -> None:
    """The entries that it came from are gone. What is committed is kept meanwhile."""
    there = found(last_commit=context(3, 2), first=3, end=4)
    assert isinstance(judge(there), Valid)
    verdict = judge(structs.replace(there, lacks_dedup=True))
    assert isinstance(verdict, Invalid)
    assert "its deduplication state is missing" in verdict.reason
    assert verdict.kept == valid(4, 4, 4)


def test_a_replica_that_was_created_but_got_nothing_is_valid_at_its_creation() -> None:
    created = HardState(base_glsn=GLSN(40))
    assert judge(found(hard=created)) == valid(0, 40, 0, lacks_commits=True)


# "CC only (all trimmed) → valid"


def test_commits_without_entries_are_valid_when_all_entries_are_trimmed() -> None:
    trimmed = HardState(epoch=Epoch(2), trimmed_before=GLSN(15))
    there = found(hard=trimmed, last_commit=context(1, 4, glsn=11), first=5, end=4)
    assert judge(there) == valid(4, 14, 4)


def test_commits_without_entries_that_nobody_trimmed_are_invalid() -> None:
    """Somebody removed the entries, but it was not trim: these records are missing."""
    there = found(last_commit=context(1, 4, glsn=11), first=5, end=4)
    assert isinstance(judge(there), Invalid)


def test_an_empty_replica_that_took_over_a_position_is_valid() -> None:
    """After a sync from a source that was itself trimmed to the end."""
    moved = HardState(epoch=Epoch(2), base_llsn=LLSN(4), base_glsn=GLSN(14), trimmed_before=GLSN(15))
    assert judge(found(hard=moved, first=5, end=4)) == valid(4, 14, 4, lacks_commits=True)


# "CC end = last committed entry → valid"


def test_entries_that_reach_the_end_of_the_last_commit_are_valid() -> None:
    assert judge(found(last_commit=context(1, 4, glsn=11), end=4)) == valid(4, 14, 4)


def test_entries_that_begin_after_trimmed_ones_are_valid() -> None:
    trimmed = HardState(epoch=Epoch(2), trimmed_before=GLSN(13))
    there = found(hard=trimmed, last_commit=context(1, 4, glsn=11), first=3, end=4)
    assert judge(there) == valid(4, 14, 4)


# "anything else → invalid: never reports, waits for sync"


def test_entries_that_end_below_the_last_commit_are_invalid_and_nothing_is_kept() -> None:
    verdict = judge(found(last_commit=context(1, 4), end=3))
    assert isinstance(verdict, Invalid)
    assert verdict.kept is None


def test_entries_that_begin_above_the_last_commit_are_invalid() -> None:
    """A segment between is missing: committed to 4, then nothing, then entries from 7 on."""
    there = found(last_commit=context(1, 4), first=7, end=8, tail=(entry(7, 2, epoch=2),))
    verdict = judge(there)
    assert isinstance(verdict, Invalid)
    assert verdict.kept is None


def test_entries_that_do_not_begin_at_the_first_llsn_are_invalid_without_commits() -> None:
    """The commit contexts are gone, and so are the entries that they covered."""
    there = found(first=7, end=8, tail=(entry(7, 2, epoch=2),))
    assert isinstance(judge(there), Invalid)


def test_a_commit_that_ends_within_a_batch_is_invalid() -> None:
    """“CC end = last committed entry”, and a batch is committed by one cut: either file is not what was written."""
    there = found(last_commit=context(1, 4), end=5, tail=(entry(4, 2, epoch=2),))
    assert isinstance(judge(there), Invalid)


def test_an_interrupted_sync_is_invalid_and_keeps_what_is_committed() -> None:
    """“An interrupted sync leaves a replica that never counts until synced again.”"""
    learning = HardState(epoch=Epoch(2), learning=True)
    there = found(hard=learning, last_commit=context(1, 4), end=6, tail=(entry(5, 2, epoch=2),))
    verdict = judge(there)
    assert isinstance(verdict, Invalid)
    assert verdict.kept == valid(4, 4, 4)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("damaged", [1, 3, 4])
def test_damage_among_committed_entries_is_invalid_and_they_are_not_kept(damaged: int, learning: bool) -> None:
    """“A bad checksum below it is damage: … never truncated, never skipped, never served.” If the prefix that holds it
    were kept as complete, a sync would find nothing to copy and the damage would count as good again."""
    hard = HardState(epoch=Epoch(2), learning=learning)
    verdict = judge(found(hard=hard, last_commit=context(1, 4), end=4, damaged=damaged))
    assert isinstance(verdict, Invalid)
    assert verdict.kept is None or verdict.kept.committed_end < damaged


def test_damage_above_the_last_commit_is_invalid() -> None:
    """Below the mark, an uncommitted entry was once reported as durable: a cut may count on it."""
    verdict = judge(found(last_commit=context(1, 4), end=6, damaged=5))
    assert isinstance(verdict, Invalid)
    assert verdict.kept == valid(4, 4, 4)


# "Durable but uncommitted entries of the current epoch are kept and reported again."


@pytest.mark.parametrize(
    ("tail", "sealed_at", "keep_end"),
    [
        pytest.param((), None, 4, id="none"),
        pytest.param((entry(5, 2, epoch=2), entry(7, epoch=2)), None, 7, id="all-of-the-open-epoch"),
        pytest.param((entry(5, 2, epoch=2), entry(7, epoch=2)), 7, 7, id="up-to-the-sealed-position"),
        pytest.param((entry(5, 2, epoch=2), entry(7, epoch=2)), 6, 6, id="not-beyond-the-sealed-position"),
        pytest.param((entry(5, 2, epoch=2), entry(7, epoch=2)), 4, 4, id="sealed-at-the-committed-end"),
        pytest.param((entry(5, 2, epoch=1), entry(7, epoch=1)), None, 4, id="not-of-an-older-epoch"),
        pytest.param((entry(5, 2, epoch=2), entry(7, epoch=1)), None, 6, id="not-after-a-change-of-epoch"),
        pytest.param((entry(5, 2, epoch=2),), 9, 6, id="sealed-ahead"),
    ],
)
def test_what_is_kept_of_the_tail(tail: tuple[Entry, ...], sealed_at: int | None, keep_end: int) -> None:
    hard = HardState(epoch=Epoch(2), sealed_at=None if sealed_at is None else LLSN(sealed_at))
    end = tail[-1].last_llsn if tail else 4
    there = found(hard=hard, last_commit=context(1, 4, glsn=11), end=end, tail=tail)
    assert judge(there) == valid(4, 14, keep_end)


def test_a_tail_without_any_commit_is_kept() -> None:
    """“discarding them lost data when all replicas stopped between a cut and its application”."""
    there = found(end=3, tail=(entry(1, 2, epoch=2), entry(3, epoch=2)))
    assert judge(there) == valid(0, 0, 3, lacks_commits=True)


def test_an_invalid_replica_is_silent_and_a_valid_one_starts_sealing() -> None:
    silent = Replica(HEAD, STREAM, HARD, Invalid("lost"), first_llsn=LLSN(1), tail=(), dedup=Deduplicator())
    assert silent.state is ReplicaState.SEALING
    assert silent.report() is None
    good = Replica(HEAD, STREAM, HARD, valid(0, 0, 0), first_llsn=LLSN(1), tail=(), dedup=Deduplicator())
    assert good.state is ReplicaState.SEALING
    assert good.report() is not None
