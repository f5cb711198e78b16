"""Seal, unseal and being left out, rule by rule (docs/protocol.md)."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutwater.core.replica.events import (
    AppendFailed,
    CommitDurable,
    ReplicaEffect,
    ReplicateFailed,
    ReportNow,
    SaveHardState,
    Truncate,
    Unsettled,
    WriteEntry,
)
from cutwater.core.replica.recovery import HardState
from cutwater.errors import ContradictoryCommand, LeaderFenced, NotSealed, StreamSealed, WrongEpoch
from cutwater.types import GLSN, LLSN, Epoch, LeaderEpoch, ReplicaState, UncommitReport
from tests.unit.replica_bench import (
    CHAIN,
    HEAD,
    LAST,
    MIDDLE,
    STREAM,
    Bench,
    append,
    backup_with,
    batch,
    commit,
    context,
    entry,
    exclude,
    learn,
    replicate,
    running,
    seal,
    unseal,
)


def hard(**changes: object) -> HardState:
    """The hard state of a replica that was opened in epoch 1 on the whole chain."""
    opened = HardState(epoch=Epoch(1), leader_epoch=LeaderEpoch(1), chain=CHAIN)
    return structs.replace(opened, **changes)


def head_with_waiters() -> Bench:
    """Two batches committed (LLSN 1 to 3), two on disk (4 to 6), one written (7); waiters 1 to 5."""
    head = running()
    for waiter, count in ((1, 2), (2, 1), (3, 2), (4, 1)):
        head.do(append(waiter, batch(count)))
    head.sync()
    head.do(commit(1, 3))
    head.sync()
    head.do(append(5))
    assert head.numbers() == (3, 3, 6, 7)
    return head


def told(effects: list[ReplicaEffect]) -> list[tuple[type, object]]:
    """Effects as they are, but a definite failure by the kind of its error: errors do not compare."""
    return [
        (AppendFailed, (effect.waiter, type(effect.error)))
        if isinstance(effect, AppendFailed)
        else (type(effect), effect)
        for effect in effects
    ]


# "Behind L: SEALING, catches up."


def test_a_replica_behind_the_sealed_position_stays_sealing_until_its_commits_are_on_disk() -> None:
    backup = backup_with(2, 1, 1, committed=2)
    assert backup.do(seal(4)) == [SaveHardState(hard(sealed_at=LLSN(4))), ReportNow()]
    assert backup.replica.state is ReplicaState.SEALING
    backup.do(commit(3, 1))
    assert backup.sync() == [ReportNow()]
    assert backup.replica.state is ReplicaState.SEALING
    backup.do(commit(4, 1))
    assert backup.replica.state is ReplicaState.SEALING, "the commit is not on disk yet"
    assert backup.sync() == [ReportNow()]
    assert backup.replica.state is ReplicaState.SEALED


def test_a_replica_that_lacks_entries_stays_sealing() -> None:
    backup = backup_with(2, committed=2)
    assert backup.do(seal(9)) == [SaveHardState(hard(sealed_at=LLSN(9))), ReportNow()]
    assert backup.replica.report() == UncommitReport(STREAM, Epoch(1), ReplicaState.SEALING, GLSN(2), LLSN(3), 0)


# "At L: SEALED."


def test_a_replica_at_the_sealed_position_is_sealed_at_once() -> None:
    backup = backup_with(2, committed=2)
    assert backup.do(seal(2)) == [SaveHardState(hard(sealed_at=LLSN(2))), ReportNow()]
    assert backup.replica.state is ReplicaState.SEALED


def test_a_replica_whose_last_commit_is_not_on_disk_is_not_yet_at_the_sealed_position() -> None:
    backup = backup_with(2)
    backup.do(commit(1, 2))
    backup.do(seal(2))
    assert backup.replica.state is ReplicaState.SEALING
    backup.do(CommitDurable(0, context(1, 2)))
    assert backup.replica.state is ReplicaState.SEALED


# "Beyond L: the uncommitted tail is durably truncated and its waiters get a definite failure (once L is stored, never
# before)."


def test_beyond_the_sealed_position_first_hard_state_then_truncation_then_the_waiters() -> None:
    head = head_with_waiters()
    assert told(head.do(seal(3))) == [
        (SaveHardState, SaveHardState(hard(sealed_at=LLSN(3)))),
        (Truncate, Truncate(LLSN(3), 1)),
        (AppendFailed, (5, StreamSealed)),
        (AppendFailed, (4, StreamSealed)),
        (AppendFailed, (3, StreamSealed)),
        (ReportNow, ReportNow()),
    ]
    assert head.replica.state is ReplicaState.SEALED
    assert head.numbers() == (3, 3, 3, 3)
    assert head.disk.end == 3


def test_waiters_at_or_below_the_sealed_position_go_on_waiting_for_their_commit() -> None:
    head = head_with_waiters()
    assert [effect.waiter for effect in head.do(seal(5)) if isinstance(effect, AppendFailed)] == [5, 4]
    assert head.replica.state is ReplicaState.SEALING
    answered = head.do(commit(4, 2))
    assert [type(effect).__name__ for effect in answered] == ["WriteCommit", "Acked"]
    head.sync()
    assert head.replica.state is ReplicaState.SEALED


def test_a_fault_alone_tells_waiters_nothing() -> None:
    """“… once L is stored, never before.” Until then the other replicas may hold it and a cut may commit it."""
    head = head_with_waiters()
    effects = head.do(ReplicateFailed(MIDDLE, Epoch(1), "gone"))
    assert not [effect for effect in effects if isinstance(effect, (AppendFailed, Unsettled))]
    assert [type(effect).__name__ for effect in head.do(commit(4, 2))] == ["WriteCommit", "Acked"]


def test_a_commit_that_was_being_written_when_the_tail_was_cut_still_counts() -> None:
    """The last cut and the seal arrive together, and the head has taken more batches meanwhile. Truncation concerns
    entries; the commit context was written before it and becomes durable as any other."""
    head = running()
    head.do(append(1, batch(2)))
    head.sync()
    head.do(commit(1, 2))
    head.do(append(2))
    assert Truncate(LLSN(2), 1) in head.do(seal(2))
    assert head.replica.state is ReplicaState.SEALING
    assert head.sync() == [ReportNow()]
    assert head.replica.state is ReplicaState.SEALED
    assert head.numbers() == (2, 2, 2, 2)


def test_a_commit_that_was_being_written_when_the_replica_was_left_out_still_counts() -> None:
    backup = backup_with(2, 1)
    backup.do(commit(1, 2))
    backup.do(exclude())
    backup.sync()
    report = backup.replica.report()
    assert report is not None
    assert (report.high_watermark, report.committed_end, report.durable_end) == (2, 2, 2)


@pytest.mark.parametrize("carried_out", [1, 2])
def test_a_crash_within_a_seal_leaves_nothing_beyond_the_sealed_position(carried_out: int) -> None:
    """“After seal nothing beyond L ever commits in that epoch, on any replica, after any restart.”"""
    backup = backup_with(2, 1, 3, committed=2)
    for effect in backup.replica.handle(seal(3))[:carried_out]:
        backup.disk.carry_out(effect)
    backup.crash()
    assert backup.numbers() == (2, 2, 3, 3)
    assert backup.replica.state is ReplicaState.SEALING
    backup.do(seal(3))
    backup.do(commit(3, 1))
    backup.sync()
    assert backup.replica.state is ReplicaState.SEALED


def test_a_sealed_replica_starts_in_sealing_and_is_sealed_again_where_it_was() -> None:
    """“A replica always starts in SEALING.”"""
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    backup.crash()
    assert backup.replica.state is ReplicaState.SEALING
    assert backup.do(seal(2))[-1] == ReportNow()
    assert backup.replica.state is ReplicaState.SEALED


# "A replica refuses a seal from an older leader epoch or with L below its committed LLSN."


def test_a_seal_from_an_older_leader_is_refused() -> None:
    backup = backup_with(2, 1, committed=2)
    backup.do(seal(3, leader=5))
    with pytest.raises(LeaderFenced):
        backup.do(seal(3, leader=4))
    backup.crash()
    with pytest.raises(LeaderFenced):
        backup.do(seal(3, leader=4))
    backup.do(seal(3, leader=5))


def test_a_newer_leader_is_remembered_also_when_it_says_nothing_new() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2, leader=5))
    backup.do(seal(2, leader=7))
    with pytest.raises(LeaderFenced):
        backup.do(seal(2, leader=6))


@pytest.mark.parametrize("event", [unseal(2, epoch=2, leader=4), exclude(epoch=2, leader=4), learn(leader=4)])
def test_other_commands_of_an_older_leader_are_refused_too(event: object) -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2, leader=5))
    with pytest.raises(LeaderFenced):
        backup.do(event)  # type: ignore[arg-type]
    assert backup.replica.state is ReplicaState.SEALED


def test_a_seal_below_the_committed_llsn_is_refused() -> None:
    backup = backup_with(2, 1, 1, committed=3)
    with pytest.raises(ContradictoryCommand) as caught:
        backup.do(seal(2))
    assert caught.value.history
    assert backup.replica.state is ReplicaState.RUNNING
    assert backup.disk.hard_state == hard()
    assert backup.disk.end == 4


def test_a_second_position_for_one_epoch_is_refused() -> None:
    backup = backup_with(2, 1, 1, committed=2)
    backup.do(seal(4))
    for other in (2, 3, 5):
        with pytest.raises(ContradictoryCommand):
            backup.do(seal(other))
    backup.crash()
    with pytest.raises(ContradictoryCommand):
        backup.do(seal(3))
    assert backup.numbers() == (2, 2, 4, 4)


def test_a_seal_of_an_older_epoch_is_refused() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    backup.do(unseal(2, epoch=2))
    with pytest.raises(WrongEpoch):
        backup.do(seal(2, epoch=1))
    assert backup.replica.state is ReplicaState.RUNNING


def test_a_repeated_seal_is_harmless() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    assert backup.do(seal(2)) == []
    assert backup.replica.state is ReplicaState.SEALED


def test_a_seal_of_an_epoch_that_went_on_without_the_replica_leaves_only_what_it_committed() -> None:
    """What it holds uncommitted of an older epoch may differ from what the others committed at the same LLSNs."""
    head = head_with_waiters()
    assert head.do(seal(6, epoch=2)) == [
        SaveHardState(hard(epoch=Epoch(2), sealed_at=LLSN(6), chain=())),
        Truncate(LLSN(3), 1),
        Unsettled(5),
        Unsettled(4),
        Unsettled(3),
        ReportNow(),
    ]
    assert head.replica.state is ReplicaState.SEALING
    assert head.numbers() == (3, 3, 3, 3)


# "Unseal opens a new epoch (stored in the MR and in every entry header), with the replica list in chain order."


def test_unseal_opens_the_next_epoch_and_its_number_is_in_every_entry() -> None:
    head = running()
    head.do(append(1, batch(2)))
    head.sync()
    head.do(commit(1, 2))
    head.sync()
    head.do(seal(2))
    chain = (HEAD, LAST)
    assert head.do(unseal(2, epoch=2, chain=chain)) == [
        SaveHardState(hard(epoch=Epoch(2), chain=chain)),
        ReportNow(),
    ]
    assert head.replica.state is ReplicaState.RUNNING
    assert head.do(append(2, epoch=2))[0] == WriteEntry(entry(3, epoch=2), 0)
    with pytest.raises(WrongEpoch):
        head.do(append(3, epoch=1))


def test_a_repeated_unseal_is_harmless() -> None:
    assert running().do(unseal(0, epoch=1)) == []


@pytest.mark.parametrize(("epoch", "start"), [(2, 1), (2, 3), (3, 2)])
def test_unseal_needs_the_next_epoch_at_the_sealed_position(epoch: int, start: int) -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    with pytest.raises(NotSealed):
        backup.do(unseal(start, epoch=epoch))
    assert backup.replica.state is ReplicaState.SEALED


@pytest.mark.parametrize("epoch", [0, 1])
def test_unseal_of_an_epoch_that_is_over_is_refused(epoch: int) -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    with pytest.raises(WrongEpoch):
        backup.do(unseal(2, epoch=epoch))


def test_unseal_is_refused_unless_sealed() -> None:
    with pytest.raises(NotSealed):
        backup_with(2, committed=2).do(unseal(2, epoch=2))
    behind = backup_with(2)
    behind.do(seal(2))
    with pytest.raises(NotSealed):
        behind.do(unseal(2, epoch=2))


def test_unseal_for_others_is_an_alarm() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    with pytest.raises(ContradictoryCommand):
        backup.do(unseal(2, epoch=2, chain=(HEAD, LAST)))


# "A replica outside the newest epoch's list first truncates durably to its own committed LLSN."


def test_a_replica_that_is_left_out_truncates_to_what_it_committed_and_cannot_tell_the_outcome() -> None:
    head = head_with_waiters()
    assert head.do(exclude()) == [
        SaveHardState(hard(epoch=Epoch(2), chain=())),
        Truncate(LLSN(3), 1),
        Unsettled(5),
        Unsettled(4),
        Unsettled(3),
        ReportNow(),
    ]
    assert head.replica.state is ReplicaState.SEALING
    assert head.numbers() == (3, 3, 3, 3)


@pytest.mark.parametrize("carried_out", [1, 2])
def test_a_crash_while_being_left_out_leaves_nothing_uncommitted(carried_out: int) -> None:
    backup = backup_with(2, 1, 3, committed=2)
    for effect in backup.replica.handle(exclude())[:carried_out]:
        backup.disk.carry_out(effect)
    backup.crash()
    assert backup.numbers() == (2, 2, 2, 2)
    assert backup.replica.hard_state.epoch == 2


def test_a_sealed_replica_that_is_left_out_goes_sealing() -> None:
    backup = backup_with(2, committed=2)
    backup.do(seal(2))
    assert backup.do(exclude()) == [SaveHardState(hard(epoch=Epoch(2), chain=())), ReportNow()]
    assert backup.replica.state is ReplicaState.SEALING


def test_being_left_out_again_is_harmless_and_of_an_older_epoch_refused() -> None:
    backup = backup_with(2, committed=2)
    backup.do(exclude(epoch=3))
    assert backup.do(exclude(epoch=3)) == []
    with pytest.raises(WrongEpoch):
        backup.do(exclude(epoch=2))


def test_being_left_out_of_the_epoch_in_which_it_runs_is_an_alarm() -> None:
    with pytest.raises(ContradictoryCommand):
        running().do(exclude(epoch=1))


def test_a_replica_that_was_left_out_takes_no_entry() -> None:
    backup = backup_with(2, committed=2)
    backup.do(exclude())
    with pytest.raises(StreamSealed):
        backup.do(replicate(entry(3, epoch=2)))
