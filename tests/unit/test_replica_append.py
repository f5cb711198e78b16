"""Sequencing, the chain, durability and reports, rule by rule (docs/protocol.md)."""

from __future__ import annotations

import pytest

from cutwater.core.replica.events import (
    Acked,
    EntriesDurable,
    Forward,
    RefuseEntry,
    ReportNow,
    SaveHardState,
    WriteEntry,
)
from cutwater.core.replica.pending import UNCOMMITTED_BATCHES_MAX
from cutwater.errors import (
    ConditionFailed,
    InvalidArgument,
    Refused,
    ResourceExhausted,
    StreamSealed,
    WrongEpoch,
)
from cutwater.types import GLSN, LLSN, Ack, Epoch, ReplicaState, Sequence, UncommitReport
from tests.unit.replica_bench import (
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
    new_disk,
    replicate,
    running,
    seal,
    unseal,
)


def report(state: ReplicaState, hwm: int, first: int, count: int, *, epoch: int = 1) -> UncommitReport:
    return UncommitReport(STREAM, Epoch(epoch), state, GLSN(hwm), LLSN(first), count)


# "The client picks an appendable log stream of the topic and sends a batch, naming the stream's epoch, to its head."


def test_the_head_gives_the_next_llsns_then_writes_and_forwards() -> None:
    """“The head gives the batch the next LLSNs, registers who waits for them, *then* writes it and forwards it down
    the chain.”"""
    head = running()
    assert head.do(append(7, batch(3, b"a"))) == [
        WriteEntry(entry(1, 3, body=b"a"), 0),
        Forward(MIDDLE, replicate(entry(1, 3, body=b"a"))),
    ]
    assert head.do(append(8, batch(2, b"b"))) == [
        WriteEntry(entry(4, 2, body=b"b"), 0),
        Forward(MIDDLE, replicate(entry(4, 2, body=b"b"))),
    ]


def test_who_waits_is_registered_before_anything_is_written() -> None:
    """The effects of the append are not carried out at all here, as if the write took for ever: whoever waits is known
    all the same."""
    head = running()
    effects = head.replica.handle(append(7))
    assert [type(effect) for effect in effects] == [WriteEntry, Forward]
    head.replica.handle(EntriesDurable(0, LLSN(1)))
    acked = Acked(7, Ack(GLSN(1), LLSN(1), STREAM, 1), Sequence(0))
    assert acked in head.replica.handle(commit(1, 1))


@pytest.mark.parametrize("epoch", [0, 2])
def test_another_epoch_is_refused(epoch: int) -> None:
    """“… naming the stream's epoch, to its head (another epoch is refused).”"""
    head = running()
    with pytest.raises(WrongEpoch) as caught:
        head.do(append(7, epoch=epoch))
    assert (caught.value.given, caught.value.current) == (epoch, 1)
    assert head.numbers() == (0, 0, 0, 0)


def test_only_the_head_takes_appends() -> None:
    with pytest.raises(Refused, match="not the head"):
        running(MIDDLE).do(append(7))


def test_an_append_is_refused_unless_running() -> None:
    """“A replica always starts in SEALING: joining and restarting nodes never take appends by accident.”"""
    bench = Bench()
    with pytest.raises(StreamSealed):
        bench.do(append(7, epoch=0))
    bench.do(seal(0, epoch=0))
    assert bench.replica.state is ReplicaState.SEALED
    with pytest.raises(StreamSealed):
        bench.do(append(7, epoch=0))
    bench.do(unseal(0))
    assert bench.replica.state is ReplicaState.RUNNING
    bench.do(append(7))
    bench.crash()
    assert bench.replica.state is ReplicaState.SEALING
    with pytest.raises(StreamSealed):
        bench.do(append(7))


@pytest.mark.parametrize("count", [0, -1])
def test_an_empty_batch_is_refused(count: int) -> None:
    head = running()
    with pytest.raises(InvalidArgument):
        head.do(append(7, batch(count)))
    assert head.numbers() == (0, 0, 0, 0)


def test_uncommitted_batches_are_bounded() -> None:
    """Guarantee 16: memory and queues are bounded. Room comes back with a commit."""
    head = running(chain=(HEAD,))
    for waiter in range(UNCOMMITTED_BATCHES_MAX):
        head.do(append(waiter))
    with pytest.raises(ResourceExhausted) as caught:
        head.do(append(-1))
    assert caught.value.retriable
    assert caught.value.retry_ms > 0
    assert head.replica.written_end == UNCOMMITTED_BATCHES_MAX
    head.sync()
    head.do(commit(1, 1))
    assert head.do(append(-1)) == [WriteEntry(entry(UNCOMMITTED_BATCHES_MAX + 1), 0)]


def test_a_conditional_append_is_taken_only_at_its_llsn() -> None:
    """``if_llsn`` counts what is written, committed or not: the first record would get exactly this LLSN."""
    head = running(chain=(HEAD,))
    head.do(append(7, batch(2)))
    for wrong in (1, 2, 4):
        with pytest.raises(ConditionFailed) as caught:
            head.do(append(8, if_llsn=wrong))
        assert (caught.value.expected, caught.value.actual) == (wrong, 3)
    assert head.do(append(8, if_llsn=3)) == [WriteEntry(entry(3), 0)]


# "… one chain per log stream: head first, each forwards once."


def test_a_backup_writes_and_forwards_to_the_next_and_the_last_forwards_to_nobody() -> None:
    assert running(MIDDLE).do(replicate(entry(1, 2))) == [
        WriteEntry(entry(1, 2), 0),
        Forward(LAST, replicate(entry(1, 2))),
    ]
    assert running(LAST).do(replicate(entry(1, 2))) == [WriteEntry(entry(1, 2), 0)]


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_backup_refuses_an_entry_of_another_epoch(epoch: int) -> None:
    backup = running(MIDDLE)
    with pytest.raises(WrongEpoch):
        backup.do(replicate(entry(1, epoch=epoch)))
    assert backup.replica.state is ReplicaState.RUNNING
    assert backup.numbers() == (0, 0, 0, 0)


def test_a_backup_that_misses_a_batch_refuses_the_next_and_goes_sealing() -> None:
    """“any write/replicate/commit error” leads from RUNNING to SEALING."""
    backup = running(MIDDLE)
    backup.do(replicate(entry(1, 2)))
    assert backup.do(replicate(entry(4))) == [RefuseEntry("expected LLSN 3, got 4"), ReportNow()]
    assert backup.replica.state is ReplicaState.SEALING
    assert backup.numbers() == (0, 0, 0, 2)


def test_a_backup_that_is_sealing_takes_no_entry() -> None:
    backup = running(MIDDLE)
    backup.do(replicate(entry(2)))
    with pytest.raises(StreamSealed):
        backup.do(replicate(entry(1)))


def test_a_repeated_entry_is_harmless() -> None:
    backup = backup_with(2, 1, 2, committed=2)
    for repeated in (entry(1, 2), entry(3), entry(4, 2)):
        assert backup.do(replicate(repeated)) == []
    assert backup.numbers() == (2, 2, 5, 5)
    assert backup.replica.state is ReplicaState.RUNNING


def test_other_bytes_at_a_place_that_is_taken_are_refused() -> None:
    """Guarantee 1: one value per position, byte-identical on every replica."""
    backup = backup_with(2, 1)
    assert backup.do(replicate(entry(3, body=b"other"))) == [
        RefuseEntry("expected LLSN 4, got 3"),
        ReportNow(),
    ]
    assert backup.replica.state is ReplicaState.SEALING


def test_an_entry_that_overlaps_the_end_is_refused() -> None:
    backup = backup_with(2)
    assert backup.do(replicate(entry(2, 2))) == [RefuseEntry("expected LLSN 3, got 2"), ReportNow()]


def test_other_batch_boundaries_are_not_a_repetition() -> None:
    """“all replicas share batch boundaries”, so a batch of another size at the same place is another batch."""
    backup = running(MIDDLE)
    backup.do(replicate(entry(1, 3)))
    assert backup.do(replicate(entry(1, 2))) == [RefuseEntry("expected LLSN 4, got 1"), ReportNow()]


# "A replica's durable end advances only after the bytes are on disk (`fdatasync`, group commit)."


def test_the_durable_end_waits_for_the_disk() -> None:
    head = running()
    head.do(append(7, batch(2)))
    head.do(append(8, batch(1)))
    assert head.replica.report() == report(ReplicaState.RUNNING, 0, 1, 0)
    assert head.do(EntriesDurable(0, LLSN(2))) == [ReportNow()]
    assert head.replica.report() == report(ReplicaState.RUNNING, 0, 1, 2)
    assert head.do(EntriesDurable(0, LLSN(3))) == [ReportNow()]
    assert head.replica.report() == report(ReplicaState.RUNNING, 0, 1, 3)


def test_the_durable_end_never_goes_back() -> None:
    head = running()
    head.do(append(7, batch(2)))
    head.do(append(8))
    head.do(EntriesDurable(0, LLSN(3)))
    head.do(EntriesDurable(0, LLSN(2)))
    assert head.replica.durable_end == 3


def test_durability_of_what_was_truncated_since_is_ignored() -> None:
    """A write of an earlier generation of the files says nothing of the present ones."""
    head = running()
    head.do(append(7, batch(2)))
    head.do(seal(0))
    head.do(unseal(0, epoch=2))
    head.do(append(8, batch(1, b"new"), epoch=2))
    assert head.do(EntriesDurable(0, LLSN(2))) == []
    assert head.replica.report() == report(ReplicaState.RUNNING, 0, 1, 0, epoch=2)
    assert head.do(EntriesDurable(1, LLSN(1))) == [ReportNow()]
    assert head.replica.report() == report(ReplicaState.RUNNING, 0, 1, 1, epoch=2)


def test_durability_of_what_was_never_written_is_a_bug_of_the_driver() -> None:
    head = running()
    head.do(append(7))
    with pytest.raises(AssertionError):
        head.do(EntriesDurable(0, LLSN(2)))


# "A report never includes a byte that a power cut could take back, and the HWM it carries is the durably applied one."


def test_a_report_tells_of_durable_commits_only() -> None:
    backup = backup_with(2, 1)
    assert backup.replica.report() == report(ReplicaState.RUNNING, 0, 1, 3)
    backup.do(commit(1, 2, glsn=11))
    assert backup.replica.report() == report(ReplicaState.RUNNING, 0, 1, 3)
    backup.sync()
    assert backup.replica.report() == report(ReplicaState.RUNNING, 12, 3, 1)


def test_after_a_power_cut_the_replica_reports_exactly_what_it_reported_before() -> None:
    """“Durable but uncommitted entries of the current epoch are kept and reported again.”"""
    backup = backup_with(2, 1, 3, committed=2)
    backup.do(replicate(entry(7)))
    backup.do(commit(3, 1))
    before = backup.replica.report()
    backup.crash()
    assert before == report(ReplicaState.RUNNING, 2, 3, 4)
    assert backup.replica.report() == report(ReplicaState.SEALING, 2, 3, 4)


def test_a_new_log_stream_starts_at_the_high_watermark_of_its_creation() -> None:
    """“A new log stream starts at the HWM of its creation (the command that creates a replica carries it).”"""
    assert Bench(HEAD, new_disk(40)).replica.report() == report(ReplicaState.SEALING, 40, 1, 0, epoch=0)


def test_a_new_replica_of_an_existing_stream_has_nothing() -> None:
    """A new replica of an existing stream reports (HWM 0, first LLSN 1, nothing)."""
    assert Bench().replica.report() == report(ReplicaState.SEALING, 0, 1, 0, epoch=0)


def test_opening_an_epoch_is_on_disk_before_anyone_hears_of_it() -> None:
    bench = Bench()
    bench.do(seal(0, epoch=0))
    effects = bench.do(unseal(0))
    assert effects == [SaveHardState(bench.replica.hard_state), ReportNow()]


# "Records of one batch are committed by one cut, contiguous in LLSN and GLSN … Assert it."


def test_a_cut_through_a_batch_is_refused_by_assertion() -> None:
    backup = backup_with(2, 3)
    with pytest.raises(AssertionError):
        backup.do(commit(1, 3))


def test_a_seal_through_a_batch_is_refused_by_assertion() -> None:
    with pytest.raises(AssertionError):
        backup_with(2, 3).do(seal(3))


def test_one_cut_may_commit_several_batches() -> None:
    head = running(chain=(HEAD,))
    for waiter, count in ((7, 2), (8, 3), (9, 1)):
        head.do(append(waiter, batch(count)))
    head.sync()
    effects = head.do(commit(1, 5, glsn=101))
    assert effects[1:] == [
        Acked(7, Ack(GLSN(101), LLSN(1), STREAM, 2), Sequence(0)),
        Acked(8, Ack(GLSN(103), LLSN(3), STREAM, 3), Sequence(0)),
    ]
    assert effects[0].context == context(1, 5, glsn=101)  # type: ignore[union-attr]
