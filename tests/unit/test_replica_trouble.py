"""Faults, trim, and producers as a replica meets them, rule by rule (docs/recovery.md, docs/producers.md)."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutwater.core.messages import DropReplica, TrimReplica
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.events import (
    Acked,
    AppendFailed,
    Complain,
    DropBefore,
    Dropped,
    Remove,
    Reopen,
    ReplicateFailed,
    ReportNow,
    SaveDedup,
    SaveHardState,
    StorageFailed,
    Tidy,
    Truncate,
    Unsettled,
    WriteCommit,
    WriteEntry,
)
from cutwater.core.replica.pending import WAITERS_PER_BATCH_MAX
from cutwater.core.replica.recovery import HardState, Invalid, Valid
from cutwater.core.replica.replica import Replica
from cutwater.errors import NotSealed, ProducerFenced, Refused, ResourceExhausted, SequenceGap, SequenceReused
from cutwater.types import GLSN, LLSN, Ack, Entry, Epoch, ReplicaState, Sequence, StorageNodeId
from tests.unit.replica_bench import (
    HEAD,
    LAST,
    MIDDLE,
    STREAM,
    Bench,
    Disk,
    append,
    backup_with,
    batch,
    commit,
    context,
    entry,
    exclude,
    fence,
    learn,
    replicate,
    running,
    seal,
    tag,
    unseal,
)


def trim(before: int) -> TrimReplica:
    return TrimReplica(STREAM, GLSN(before))


def loses_entries() -> Bench:
    """A replica whose commits reach further than its entries: it cannot be trusted."""
    disk = Disk()
    disk.hard_state = HardState(epoch=Epoch(1))
    disk.entries = [entry(1, 2)]
    disk.contexts = [context(1, 2), context(3, 2)]
    bench = Bench(MIDDLE, disk)
    assert bench.replica.report() is None
    return bench


# "any write/replicate/commit error"; "An fsync error fails the replica: the unsynced range counts as lost; it is
# never retried and acknowledged."


def test_a_failed_sync_loses_what_was_not_durable_and_opens_the_replica_anew() -> None:
    head = running(chain=(HEAD,))
    for waiter, count in ((1, 2), (2, 1), (3, 2)):
        head.do(append(waiter, batch(count)))
        if waiter == 2:
            head.sync()
            head.do(commit(1, 2))
            head.sync()
    assert head.do(StorageFailed("I/O error")) == [Unsettled(2), Unsettled(3), Reopen(LLSN(3), LLSN(2), "I/O error")]
    assert head.replica.state is ReplicaState.SEALING
    assert head.numbers() == (2, 2, 3, 3)


def test_a_commit_that_was_not_durable_is_not_known_after_a_failed_sync() -> None:
    backup = backup_with(2, 1)
    backup.do(commit(1, 2))
    assert backup.do(StorageFailed("I/O error")) == [Reopen(LLSN(3), LLSN(0), "I/O error")]
    assert backup.numbers() == (0, 0, 3, 3)
    assert backup.do(commit(1, 2)) == [WriteCommit(context(1, 2), 0)]


@pytest.mark.parametrize("state", list(ReplicaState))
def test_storage_may_fail_in_every_state(state: ReplicaState) -> None:
    bench = backup_with(2, committed=2)
    if state is not ReplicaState.RUNNING:
        bench.do(seal(4 if state is not ReplicaState.SEALED else 2))
    if state is ReplicaState.LEARNING:
        bench.do(learn())
    assert bench.replica.state is state
    assert bench.do(StorageFailed("I/O error")) == [Reopen(LLSN(2), LLSN(2), "I/O error")]
    assert bench.replica.state is ReplicaState.SEALING


def test_a_replica_that_cannot_be_trusted_is_not_trusted_after_another_fault() -> None:
    """“anything else → invalid: never reports, waits for sync.” A failed write makes nothing valid, and what is left
    of its data is not wiped before a peer has taken over."""
    bench = loses_entries()
    bench.do(StorageFailed("I/O error"))
    assert bench.disk.end == 2
    assert bench.replica.report() is None


@pytest.mark.parametrize("carried_out", [0, 1])
def test_whoever_waits_hears_something_also_when_a_seal_cannot_be_written(carried_out: int) -> None:
    """“if it fails, the rest of the list is dropped and the replica is told StorageFailed”: the waiters that the seal
    would have answered are not forgotten."""
    head = running(chain=(HEAD,))
    head.do(append(1))
    head.do(append(2))
    for effect in head.replica.handle(seal(0))[:carried_out]:
        head.disk.carry_out(effect)
    told = {e.waiter for e in head.do(StorageFailed("I/O error")) if isinstance(e, (AppendFailed, Unsettled))}
    assert told == {1, 2}


def test_a_replica_that_cannot_reach_the_next_one_complains_and_goes_sealing() -> None:
    """“A replicate error names the peer”."""
    head = running()
    head.do(append(1))
    assert head.do(ReplicateFailed(MIDDLE, Epoch(1), "gone")) == [Complain(MIDDLE), ReportNow()]
    assert head.replica.state is ReplicaState.SEALING
    assert head.do(ReplicateFailed(MIDDLE, Epoch(1), "gone")) == []


def test_only_the_replica_before_gives_entries_and_only_the_one_after_refuses_them() -> None:
    """Other storage nodes, also those of somebody who added one, have no say in the chain."""
    middle = running(MIDDLE)
    for sender in (LAST, MIDDLE, StorageNodeId(77)):
        with pytest.raises(Refused, match=f"storage node {sender} is not before"):
            middle.do(structs.replace(replicate(entry(1)), sender=sender))
        assert middle.replica.written_end == 0
    for peer in (HEAD, MIDDLE, StorageNodeId(77)):
        assert middle.do(ReplicateFailed(peer, Epoch(1), "gone")) == []
    assert middle.replica.state is ReplicaState.RUNNING
    middle.do(structs.replace(replicate(entry(1)), sender=HEAD))
    assert middle.replica.written_end == 1
    head = running(HEAD)
    with pytest.raises(Refused, match="is not before"):
        head.do(structs.replace(replicate(entry(1)), sender=LAST))


def test_a_replication_error_of_another_epoch_is_over() -> None:
    head = running()
    assert head.do(ReplicateFailed(MIDDLE, Epoch(0), "gone")) == []
    assert head.replica.state is ReplicaState.RUNNING


def test_entries_go_on_becoming_durable_while_sealing() -> None:
    head = running()
    head.do(append(1, batch(2)))
    head.do(ReplicateFailed(MIDDLE, Epoch(1), "gone"))
    assert head.sync() == [ReportNow()]
    assert head.numbers() == (0, 0, 2, 2)


# "Trim is one GLSN per topic … monotone; a later read below it answers trimmed …, also after restart."


def test_trim_is_remembered_with_deduplication_before_anything_is_dropped() -> None:
    backup = backup_with(2, 1, committed=2)
    effects = backup.do(trim(2))
    assert [type(effect) for effect in effects] == [SaveHardState, SaveDedup, DropBefore]
    assert effects[2] == DropBefore(GLSN(2), LLSN(2))
    assert backup.disk.hard_state is not None
    assert backup.disk.hard_state.trimmed_before == 2
    assert backup.disk.dedup is not None
    assert backup.disk.dedup.upto == 2


def test_trim_never_goes_back() -> None:
    backup = backup_with(2, 1, committed=3)
    backup.do(trim(3))
    assert backup.do(trim(3)) == []
    assert backup.do(trim(2)) == []
    backup.crash()
    assert backup.do(trim(2)) == []
    assert backup.replica.hard_state.trimmed_before == 3


def test_a_trim_that_was_interrupted_is_finished_after_the_restart() -> None:
    """The crash came after the trim was remembered and before anything was removed. Deduplication may not have been
    saved either."""
    backup = backup_with(2, 1, 1, committed=3)
    (saved, *_) = backup.replica.handle(trim(3))
    backup.disk.carry_out(saved)
    backup.crash()
    dedup, drop = backup.do(Tidy())
    assert isinstance(dedup, SaveDedup)
    assert dedup.checkpoint.upto == 3
    assert drop == DropBefore(GLSN(3), LLSN(3))


def test_opening_a_replica_from_which_nothing_is_to_be_removed_does_nothing() -> None:
    backup = backup_with(2, 1, committed=3)
    assert backup.do(Tidy()) == []
    backup.do(trim(4))
    backup.disk.first_llsn, backup.disk.entries = LLSN(4), []
    backup.crash()
    assert backup.replica.trusted
    assert backup.do(Tidy()) == []
    assert loses_entries().do(Tidy()) == []


def test_the_first_llsn_follows_what_was_dropped_and_never_goes_back() -> None:
    backup = backup_with(2, 1, committed=3)
    assert backup.do(Dropped(LLSN(3))) == []
    assert backup.do(Dropped(LLSN(1))) == []
    assert (backup.replica.extent.first, backup.replica.extent.end) == (3, 3)


def test_a_replica_that_has_lost_entries_does_not_trim() -> None:
    assert loses_entries().do(trim(2)) == []


def test_a_replica_that_cannot_read_an_entry_is_opened_anew_when_it_is_trimmed() -> None:
    """What it cannot read may be trimmed everywhere else, and then nobody has a copy of it."""
    kept = Invalid("damaged", Valid(LLSN(4), GLSN(4), LLSN(4)))
    hard = HardState(epoch=Epoch(1))
    replica = Replica(MIDDLE, STREAM, hard, kept, first_llsn=LLSN(1), tail=(), dedup=Deduplicator())
    trimmed = HardState(epoch=Epoch(1), trimmed_before=GLSN(3))
    assert replica.handle(trim(3)) == [SaveHardState(trimmed), Reopen(None, None, "trimmed before 3")]
    assert replica.handle(trim(3)) == []
    assert replica.report() is None


def test_a_deduplication_checkpoint_covers_only_commits_that_are_on_disk() -> None:
    """A power cut takes back a commit that was not synced; the checkpoint must not know it then."""
    head = running(chain=(HEAD,))
    head.do(append(1, fence()))
    head.sync()
    head.do(commit(1, 1))
    head.sync()
    head.do(append(2, batch(producer=tag(1))))
    for event in head.disk.sync():
        head.do(event)
    head.do(commit(2, 1))
    head.do(trim(2))
    head.crash()
    assert head.numbers() == (1, 1, 2, 2)
    head.do(exclude())
    assert head.replica.dedup.fate(tag(1).producer)[0] == 0
    assert head.disk.dedup is not None
    assert head.disk.dedup.upto == 1


# A deleted topic.


@pytest.mark.parametrize("node", [HEAD, MIDDLE])
def test_a_replica_of_a_deleted_topic_removes_itself(node: StorageNodeId) -> None:
    """Whoever waits learns nothing definite: a cut may have committed it before the topic was deleted."""
    bench = running(node)
    if node == HEAD:
        bench.do(append(1))
        bench.do(append(2))
    waiting = [Unsettled(1), Unsettled(2)] if node == HEAD else []
    assert bench.do(DropReplica(STREAM)) == [*waiting, Remove()]


def test_a_replica_that_cannot_be_trusted_is_removed_as_well() -> None:
    assert loses_entries().do(DropReplica(STREAM)) == [Remove()]


# Producers: "it retries on the same stream with the same (producer, sequence) and gets the same GLSN."


def producing() -> Bench:
    """A head with a fenced producer: LLSN 1 is its fence, committed."""
    head = running(chain=(HEAD,))
    head.do(append(1, fence()))
    head.sync()
    assert head.do(commit(1, 1))[1:] == [Acked(1, Ack(GLSN(1), LLSN(1), STREAM, 1), Sequence(0))]
    head.sync()
    return head


def test_a_retry_waits_together_with_the_first_attempt() -> None:
    head = producing()
    first = batch(2, b"one", producer=tag(1))
    assert head.do(append(2, first)) == [WriteEntry(Entry(LLSN(2), Epoch(1), first), 0)]
    assert head.do(append(3, first)) == []
    head.sync()
    ack = Ack(GLSN(9), LLSN(2), STREAM, 2)
    assert head.do(commit(2, 2, glsn=9))[1:] == [Acked(2, ack, Sequence(1)), Acked(3, ack, Sequence(1))]


def test_only_so_many_wait_for_one_batch() -> None:
    """Guarantee 16: a client that repeats a batch again and again while nothing is committed costs bounded memory."""
    head = producing()
    first = batch(1, b"one", producer=tag(1))
    for waiter in range(WAITERS_PER_BATCH_MAX):
        head.do(append(waiter, first))
    with pytest.raises(ResourceExhausted):
        head.do(append(-1, first))
    head.sync()
    acked = [effect.waiter for effect in head.do(commit(2, 1)) if isinstance(effect, Acked)]
    assert acked == list(range(WAITERS_PER_BATCH_MAX))
    assert len(head.do(append(-1, first))) == 1


def test_a_retry_after_the_commit_gets_the_same_ack_also_after_a_restart_in_a_later_epoch() -> None:
    head = producing()
    first = batch(2, b"one", producer=tag(1))
    head.do(append(2, first))
    head.sync()
    head.do(commit(2, 2, glsn=9))
    same = [Acked(3, Ack(GLSN(9), LLSN(2), STREAM, 2), Sequence(1))]
    assert head.do(append(3, first)) == same
    head.sync()
    head.crash()
    head.do(seal(3))
    head.do(unseal(3, epoch=2, chain=(HEAD,)))
    assert head.do(append(3, first, epoch=2)) == same


def test_a_retry_is_recognised_before_its_condition_is_checked() -> None:
    head = producing()
    first = batch(1, b"one", producer=tag(1))
    head.do(append(2, first, if_llsn=2))
    assert head.do(append(3, first, if_llsn=2)) == []


def test_a_new_head_recognises_what_it_got_as_a_backup() -> None:
    """Deduplication state “covers uncommitted entries”."""
    backup = running(MIDDLE)
    first = batch(1, b"one", producer=tag(1))
    backup.do(replicate(Entry(LLSN(1), Epoch(1), fence())))
    backup.do(replicate(Entry(LLSN(2), Epoch(1), first)))
    backup.sync()
    backup.do(seal(2))
    backup.do(commit(1, 2, glsn=5))
    backup.sync()
    backup.do(unseal(2, epoch=2, chain=(MIDDLE, LAST)))
    assert backup.do(append(3, first, epoch=2)) == [Acked(3, Ack(GLSN(6), LLSN(2), STREAM, 1), Sequence(1))]


def test_what_a_seal_removed_may_be_sent_again() -> None:
    """Deduplication state “is truncated with the tail”."""
    head = producing()
    first = batch(1, b"one", producer=tag(1))
    head.do(append(2, first))
    head.do(append(3, first))
    effects = head.do(seal(1))
    assert Truncate(LLSN(1), 1) in effects
    assert [effect.waiter for effect in effects if isinstance(effect, AppendFailed)] == [2, 3]
    head.do(unseal(1, epoch=2, chain=(HEAD,)))
    assert head.do(append(4, first, epoch=2)) == [WriteEntry(Entry(LLSN(2), Epoch(2), first), 1)]


def test_a_gap_and_other_bytes_are_errors_and_leave_nothing_behind() -> None:
    """“A gap, or the same sequence with other bytes, is an error”."""
    head = producing()
    with pytest.raises(SequenceGap):
        head.do(append(2, batch(producer=tag(2))))
    head.do(append(2, batch(1, b"one", producer=tag(1))))
    with pytest.raises(SequenceReused):
        head.do(append(3, batch(1, b"other", producer=tag(1))))
    assert head.replica.written_end == 2


def test_a_fence_tells_the_last_sequence_and_shuts_the_older_holder_out() -> None:
    """“commits a fence in its stream before the last sequence is returned, so an older holder of the name can do no
    more harm.”"""
    head = producing()
    head.do(append(2, batch(producer=tag(1))))
    head.do(append(3, batch(producer=tag(2))))
    head.do(append(4, fence(epoch=2)))
    with pytest.raises(ProducerFenced):
        head.do(append(5, batch(producer=tag(3))))
    head.sync()
    assert head.do(commit(2, 3))[-1] == Acked(4, Ack(GLSN(4), LLSN(4), STREAM, 1), Sequence(2))
    head.do(append(6, batch(producer=tag(3, epoch=2))))
    assert head.replica.written_end == 5


def test_the_fate_of_batches_is_told_only_where_nothing_more_can_come() -> None:
    """“… after the first stream is sealed and the fate of every sequence is known.”"""
    head = producing()
    head.do(append(2, batch(1, b"one", producer=tag(1))))
    producer = tag(1).producer
    for _ in range(2):
        with pytest.raises(NotSealed):
            head.replica.fate(Epoch(1), producer)
        head.do(seal(2))
    head.sync()
    head.do(commit(2, 1))
    head.sync()
    assert head.replica.state is ReplicaState.SEALED
    with pytest.raises(NotSealed):
        head.replica.fate(Epoch(2), producer)
    fate = head.replica.fate(Epoch(1), producer)
    assert (fate.stream, fate.stream_epoch, fate.last_sequence) == (STREAM, 1, 1)
    assert [known.glsn for known in fate.batches] == [1, 2]
