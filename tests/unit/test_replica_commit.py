"""Commits, rule by rule (docs/protocol.md)."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutwater.core.messages import CatchUp
from cutwater.core.replica.events import Acked, Commit, CommitDurable, ReportNow, WriteCommit, WriteEntry
from cutwater.errors import ContradictoryCommand
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    CommitContext,
    CutTime,
    Epoch,
    ReplicaState,
    Revision,
    Sequence,
    UncommitReport,
)
from tests.unit.replica_bench import (
    HEAD,
    MIDDLE,
    STREAM,
    append,
    backup_with,
    batch,
    commit,
    context,
    entry,
    exclude,
    quiet,
    replicate,
    running,
    seal,
    unseal,
)


def catch_up(*contexts: CommitContext, committed_end: int, high_watermark: int, revision: int = 1) -> CatchUp:
    return CatchUp(STREAM, contexts, LLSN(committed_end), GLSN(high_watermark), Revision(revision))


def in_cut(first_llsn: int, first_glsn: int, count: int, *, previous: int, high_watermark: int) -> CommitContext:
    """The part of a cut that also gave GLSNs to other streams."""
    return CommitContext(
        Epoch(1),
        LLSN(first_llsn),
        GLSN(first_glsn),
        count,
        GLSN(high_watermark),
        GLSN(previous),
        CutTime(high_watermark),
    )


# "A commit names its first LLSN and applies only at the replica's first uncommitted LLSN."


def test_a_commit_is_written_and_applied_at_the_first_uncommitted_llsn() -> None:
    backup = backup_with(2, 1, 3)
    assert backup.do(commit(1, 2, glsn=11)) == [WriteCommit(context(1, 2, glsn=11), 0)]
    assert backup.numbers() == (0, 2, 6, 6)
    assert backup.do(commit(3, 4, glsn=20)) == [WriteCommit(context(3, 4, glsn=20), 0)]
    assert backup.numbers() == (0, 6, 6, 6)


def test_an_early_commit_is_ignored_and_applies_when_it_comes_again_in_turn() -> None:
    backup = backup_with(2, 1)
    assert backup.do(commit(3, 1, glsn=13)) == []
    assert backup.numbers() == (0, 0, 3, 3)
    backup.do(commit(1, 2, glsn=11))
    assert backup.do(commit(3, 1, glsn=13)) == [WriteCommit(context(3, 1, glsn=13), 0)]


def test_high_watermark_and_first_uncommitted_llsn_change_together() -> None:
    """“(HWM, first uncommitted LLSN) change together.” Both when the commit is on disk, neither before."""
    backup = backup_with(2, 1)
    seen = [(0, 1)]
    for event in (commit(1, 2, glsn=11), CommitDurable(0, context(1, 2, glsn=11)), commit(3, 1, glsn=13)):
        backup.do(event)
        report = backup.replica.report()
        assert report is not None
        seen.append((report.high_watermark, report.uncommitted_llsn_offset))
    assert seen == [(0, 1), (0, 1), (12, 3), (12, 3)]


def test_a_durable_commit_is_reported_at_once() -> None:
    """The metadata repository may then forget the range."""
    backup = backup_with(2)
    backup.do(commit(1, 2))
    assert backup.do(CommitDurable(0, context(1, 2))) == [ReportNow()]


# "Duplicates are normal (several MR nodes may send the same commit) and harmless."


@pytest.mark.parametrize("durable", [False, True])
def test_a_repeated_commit_is_harmless(durable: bool) -> None:
    backup = backup_with(2, 1, 1)
    backup.do(commit(1, 2))
    backup.do(commit(3, 1))
    if durable:
        backup.sync()
    before = backup.numbers()
    assert backup.do(commit(3, 1)) == []
    assert backup.do(commit(1, 2)) == []
    assert backup.numbers() == before


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_commit_of_another_epoch_is_ignored(epoch: int) -> None:
    """“Only the newest report of the current epoch counts”, so no cut for another epoch can be meant for this tail."""
    backup = backup_with(2, 1)
    assert backup.do(commit(1, 2, epoch=epoch)) == []
    assert backup.numbers() == (0, 0, 3, 3)


def test_a_repeated_commit_does_no_harm_after_a_restart_or_a_seal() -> None:
    backup = backup_with(2, committed=2)
    backup.crash()
    assert backup.do(commit(1, 2)) == []
    backup.do(seal(2))
    assert backup.replica.state is ReplicaState.SEALED
    assert backup.do(commit(1, 2)) == []
    backup.do(unseal(2, epoch=2))
    assert backup.do(commit(1, 2)) == []
    assert backup.replica.state is ReplicaState.RUNNING


# What cannot be is an alarm that tells how it came to it.


def test_a_commit_that_overlaps_the_committed_end_is_an_alarm_with_history() -> None:
    backup = backup_with(2, 1, 1, committed=2)
    with pytest.raises(ContradictoryCommand) as caught:
        backup.do(commit(2, 2))
    assert any("applied 1 to 2 as 1" in line for line in caught.value.history)
    assert any("SEALED -> RUNNING" in line for line in caught.value.history)
    assert backup.numbers() == (2, 2, 4, 4)


def test_one_cut_with_two_contents_is_an_alarm() -> None:
    """Guarantee 12: one cut sequence, whoever leads."""
    backup = backup_with(2, 1)
    backup.do(commit(1, 2, glsn=11))
    other = structs.replace(context(1, 2, glsn=11), first_glsn=GLSN(10), time=CutTime(1))
    with pytest.raises(ContradictoryCommand) as caught:
        backup.do(Commit(GLSN(0), GLSN(12), Revision(1), other))
    assert caught.value.history


def test_other_glsns_for_records_just_committed_are_an_alarm() -> None:
    """Guarantee 1: one value per GLSN, and so one GLSN per value."""
    backup = backup_with(2, 1)
    backup.do(commit(1, 2, glsn=11))
    with pytest.raises(ContradictoryCommand):
        backup.do(commit(1, 2, glsn=21))


def test_a_commit_beyond_what_a_member_ever_reported_is_an_alarm() -> None:
    """A cut ends at the minimum of the durable ends of *all* members, so this one cannot be."""
    backup = backup_with(2)
    backup.do(replicate(entry(3)))
    with pytest.raises(ContradictoryCommand, match="durable end 2"):
        backup.do(commit(1, 3))
    assert backup.numbers() == (0, 0, 2, 3)


def test_a_replica_outside_the_epoch_ignores_commits_of_records_that_it_lacks() -> None:
    """“The MR answers a report with every later range of that stream.” A replica that was left out and learns
    again lacks the newest entries when the stream is sealed to let it in; being told their ranges is no contradiction,
    it has to learn a little more."""
    outside = backup_with(2, committed=2)
    outside.do(exclude(epoch=2))
    outside.do(seal(4, epoch=2))
    later = context(3, 2, epoch=2)
    assert outside.do(catch_up(later, committed_end=4, high_watermark=4)) == []
    assert outside.numbers() == (2, 2, 2, 2)
    assert outside.replica.state is ReplicaState.SEALING


def test_a_new_replica_of_an_old_stream_ignores_commits_of_records_that_it_lacks() -> None:
    new = backup_with()
    new.do(exclude(epoch=2))
    new.do(seal(4, epoch=2))
    assert new.do(catch_up(context(1, 4, epoch=2), committed_end=4, high_watermark=4)) == []


# "SEALING accepts commits; SEALED does not."


def test_sealing_accepts_commits_and_answers_who_waits() -> None:
    head = running(chain=(HEAD,))
    head.do(append(7, batch(2)))
    head.sync()
    head.crash()
    assert head.replica.state is ReplicaState.SEALING
    assert head.do(commit(1, 2)) == [WriteCommit(context(1, 2), 0)]


def test_a_sealing_replica_catches_up_to_its_seal_and_not_beyond() -> None:
    """“After seal nothing beyond L ever commits in that epoch, on any replica, after any restart.”"""
    backup = backup_with(2, 1)
    backup.do(seal(3))
    assert backup.replica.state is ReplicaState.SEALING
    assert backup.do(commit(1, 2)) == [WriteCommit(context(1, 2), 0)]
    with pytest.raises(ContradictoryCommand):
        backup.do(commit(3, 2))
    backup.do(commit(3, 1))
    backup.sync()
    assert backup.replica.state is ReplicaState.SEALED


def test_nothing_beyond_a_seal_commits_after_a_restart_either() -> None:
    backup = backup_with(2, 1, committed=2)
    backup.do(seal(2))
    backup.crash()
    with pytest.raises(ContradictoryCommand):
        backup.do(commit(3, 1))
    assert backup.numbers() == (2, 2, 2, 2)


def test_sealed_accepts_no_commit() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    assert backup.replica.state is ReplicaState.SEALED
    with pytest.raises(ContradictoryCommand):
        backup.do(commit(3, 1))
    assert backup.numbers() == (2, 2, 2, 2)


# "The append is acknowledged when its cut is stored and the head has applied it: (glsn, llsn, stream)."


def test_the_ack_says_glsn_llsn_stream_and_count() -> None:
    head = running(chain=(HEAD,))
    head.do(append(7, batch(2)))
    head.do(append(8, batch(1)))
    assert head.sync() == [ReportNow(), ReportNow()]
    assert head.do(commit(1, 3, glsn=41)) == [
        WriteCommit(context(1, 3, glsn=41), 0),
        Acked(7, Ack(GLSN(41), LLSN(1), STREAM, 2), Sequence(0)),
        Acked(8, Ack(GLSN(43), LLSN(3), STREAM, 1), Sequence(0)),
    ]


def test_an_append_is_answered_once() -> None:
    head = running(chain=(HEAD,))
    head.do(append(7))
    head.sync()
    head.do(commit(1, 1))
    assert head.do(commit(1, 1)) == []
    assert head.sync() == [ReportNow()]
    assert head.do(append(8)) == [WriteEntry(entry(2), 0)]


# "A replica may be behind by several cuts. The MR answers a report with every later range of that stream."


def test_the_example_of_three_cuts() -> None:
    """“cuts (HWM 4, 10, 16); a replica of LS1 that reports HWM 4 with 3 uncommitted gets ranges [5] and [11,12] and
    ends at HWM 16; one that reports HWM 10 with 2 gets [11,12].”"""
    first = in_cut(1, 1, 2, previous=0, high_watermark=4)
    second = in_cut(3, 5, 1, previous=4, high_watermark=10)
    third = in_cut(4, 11, 2, previous=10, high_watermark=16)
    behind = backup_with(2, 1, 2)
    behind.do(Commit(GLSN(0), GLSN(4), Revision(1), first))
    behind.sync()
    assert behind.replica.report() == UncommitReport(STREAM, Epoch(1), ReplicaState.RUNNING, GLSN(4), LLSN(3), 3)
    assert behind.do(catch_up(second, third, committed_end=5, high_watermark=16)) == [
        WriteCommit(second, 0),
        WriteCommit(third, 0),
    ]
    behind.sync()
    assert behind.replica.report() == UncommitReport(STREAM, Epoch(1), ReplicaState.RUNNING, GLSN(16), LLSN(6), 0)
    assert behind.replica.complete_through == 16


def test_a_catch_up_that_repeats_ranges_applies_the_rest() -> None:
    backup = backup_with(2, 1, committed=2)
    assert backup.do(catch_up(context(1, 2), context(3, 1), committed_end=3, high_watermark=3)) == [
        WriteCommit(context(3, 1), 0)
    ]


def test_a_replica_at_the_streams_end_is_current_whatever_its_high_watermark() -> None:
    """“A replica whose committed LLSN equals the stream's is current, whatever its HWM.”"""
    backup = backup_with(2, committed=2)
    assert backup.do(catch_up(committed_end=2, high_watermark=90, revision=5)) == []
    assert (backup.replica.complete_through, backup.replica.revision) == (90, 5)


# What a reader may be told: up to where the stream is complete here.


def test_complete_through_moves_with_cuts_that_follow_each_other() -> None:
    backup = backup_with(2)
    backup.do(commit(1, 2, revision=3))
    assert (backup.replica.complete_through, backup.replica.revision) == (2, 3)
    backup.do(quiet(2, 5, revision=4))
    assert (backup.replica.complete_through, backup.replica.revision) == (5, 4)


def test_complete_through_does_not_skip_a_lost_cut() -> None:
    backup = backup_with(2, 1)
    backup.do(commit(1, 2))
    backup.do(quiet(5, 7))
    assert backup.replica.complete_through == 2
    backup.do(commit(3, 1, glsn=9))
    assert backup.replica.complete_through == 9


def test_a_commit_that_was_not_applied_says_nothing_of_completeness() -> None:
    backup = backup_with(2, 1)
    backup.do(commit(3, 1, glsn=9))
    backup.do(catch_up(committed_end=3, high_watermark=9))
    assert backup.replica.complete_through == 0


def test_an_older_catch_up_does_not_take_completeness_back() -> None:
    backup = backup_with(2, 1)
    backup.do(commit(1, 3, revision=7))
    backup.do(catch_up(context(1, 3), committed_end=3, high_watermark=3, revision=6))
    backup.do(quiet(0, 2, revision=5))
    assert (backup.replica.complete_through, backup.replica.revision) == (3, 7)


def test_a_replica_that_was_left_out_hears_of_no_cut() -> None:
    left_out = backup_with(2, 1, committed=2)
    left_out.do(exclude())
    assert left_out.do(commit(3, 1)) == []
    assert left_out.node == MIDDLE
    assert left_out.replica.complete_through == 2
