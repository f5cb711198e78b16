"""Groups in one replica, which its durable end covers only as a whole (docs/publishing.md)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutwater.core.messages import DropReplica, GroupOutcome, GroupState, PublishGroup, SyncBegin, SyncEnd, SyncEntries
from cutwater.core.publish.groups import GroupBounds, GroupMemory, RememberedGroup
from cutwater.core.replica import chain_head
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.events import (
    Acked,
    AppendFailed,
    FeedGroup,
    Forward,
    GroupEntry,
    GroupFailed,
    ReplicaEffect,
    ReplicateFailed,
    ReportNow,
    StorageFailed,
    TellGroup,
    Unsettled,
    WriteEntry,
)
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.sync_ranges import Extent, SyncCase, SyncPlan
from cutwater.errors import InvalidArgument, Refused, ResourceExhausted, StreamSealed, WrongEpoch
from cutwater.storagenode.node import APPEND_BYTES_MAX
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    DecisionIndex,
    Entry,
    Epoch,
    GroupTag,
    LogStreamId,
    Part,
    ReplicaState,
    RunId,
    StorageNodeId,
    TopicId,
)
from tests.unit.replica_bench import (
    HEAD,
    LAST,
    MIDDLE,
    STREAM,
    Bench,
    append,
    batch,
    commit,
    context,
    entry,
    exclude,
    fence,
    learn,
    quiet,
    replicate,
    running,
    seal,
    tag,
    unseal,
)

PARTS = (Part(TopicId(1), STREAM, (HEAD,), "p", 1, 1, 1, 1),)


def order(
    batch_number: int = 0, *, run: int = 1, rows: int = 5, decided: int = 10, oldest: int | None = None, epoch: int = 1
) -> PublishGroup:
    return PublishGroup(
        STREAM,
        Epoch(epoch),
        RunId(run),
        BatchNumber(batch_number),
        TopicId(1),
        PARTS,
        rows,
        DecisionIndex(decided),
        DecisionIndex(decided if oldest is None else oldest),
    )


def feed(bench: Bench, group: PublishGroup, *counts: int, finish: bool = True) -> list[ReplicaEffect]:
    """Hand over entries of these sizes, the last one as the last one of the group."""
    effects: list[ReplicaEffect] = []
    for i, count in enumerate(counts):
        last = finish and i == len(counts) - 1
        effects += bench.do(GroupEntry(group.tag, batch(count, b"row %d" % i), last))
    return effects


def outcomes(effects: list[ReplicaEffect]) -> list[GroupOutcome]:
    return [effect.outcome for effect in effects if isinstance(effect, TellGroup)]


def published(
    first: int, count: int, glsn: int, *, run: int = 1, number: int = 0, node: StorageNodeId = HEAD, epoch: int = 1
) -> GroupOutcome:
    return GroupOutcome(
        node,
        STREAM,
        Epoch(epoch),
        RunId(run),
        BatchNumber(number),
        GroupState.PUBLISHED,
        LLSN(first),
        count,
        GLSN(glsn),
    )


def member(first: int, count: int, *, more: bool = True, group: GroupTag | None = None, epoch: int = 1) -> Entry:
    """An entry of a group, as a backup gets it."""
    plain = entry(first, count, epoch=epoch)
    return structs.replace(plain, batch=structs.replace(plain.batch, more=more, group=group))


def group_on(bench: Bench, group: PublishGroup, first: int, *counts: int) -> None:
    """A backup takes the entries of a whole group."""
    for i, count in enumerate(counts):
        last = i == len(counts) - 1
        bench.do(replicate(member(first, count, more=not last, group=group.tag if last else None)))
        first += count


def ends(bench: Bench) -> tuple[int, int]:
    ur = bench.replica.report()
    assert ur is not None
    return ur.durable_end, ur.progress


# Appending.


def test_the_head_asks_for_the_entries_and_marks_them() -> None:
    bench = running()
    group = order()
    assert bench.do(group) == [FeedGroup(group)]
    effects = feed(bench, group, 2, 3)
    written = [effect.entry for effect in effects if isinstance(effect, WriteEntry)]
    assert [(e.first_llsn, e.batch.count, e.batch.more, e.batch.group) for e in written] == [
        (1, 2, True, None),
        (3, 3, False, group.tag),
    ]
    assert [e.message.entry for e in effects if isinstance(e, Forward)] == written
    assert outcomes(effects) == [], "nothing is told before it is committed"


def test_its_commit_is_told_by_the_head() -> None:
    bench = running()
    bench.do(append(1))
    bench.do(order())
    feed(bench, order(), 2, 3)
    bench.sync()
    assert outcomes(bench.do(commit(1, 6, glsn=11))) == [published(2, 5, 12)]


def test_a_backup_tells_nobody() -> None:
    bench = running(MIDDLE)
    group_on(bench, order(), 1, 2, 3)
    bench.sync()
    assert outcomes(bench.do(commit(1, 5))) == []


def test_a_group_of_one_entry_is_like_any_batch() -> None:
    bench = running()
    bench.do(order())
    (write, *_) = feed(bench, order(), 5)
    assert isinstance(write, WriteEntry)
    assert (write.entry.batch.more, write.entry.batch.group) == (False, order().tag)
    bench.sync()
    assert ends(bench) == (5, 0)


def test_only_the_running_head_of_the_epoch_publishes() -> None:
    with pytest.raises(Refused):
        running(MIDDLE).do(order())
    with pytest.raises(WrongEpoch):
        running().do(order(epoch=2))
    bench = running()
    bench.do(ReplicateFailed(MIDDLE, Epoch(1), "gone"))
    with pytest.raises(StreamSealed):
        bench.do(order())


def test_a_client_cannot_append_what_looks_like_a_group() -> None:
    for wrong in (structs.replace(batch(), more=True), structs.replace(batch(), group=order().tag)):
        with pytest.raises(InvalidArgument, match="published"):
            running().do(append(1, wrong))


# The durable end.


def test_the_durable_end_is_never_inside_a_group() -> None:
    bench = running()
    bench.do(append(1))
    bench.do(order(rows=6))
    feed(bench, order(rows=6), 1, 2, finish=False)
    bench.sync()
    assert ends(bench) == (1, 4), "the group is not all there; only that the disk goes on is told"
    feed(bench, order(rows=6), 3)
    assert ends(bench) == (1, 4)
    bench.sync()
    assert ends(bench) == (7, 0)


def test_the_durable_end_is_never_inside_a_group_that_is_written_but_not_synced() -> None:
    bench = running(MIDDLE)
    bench.do(replicate(entry(1, 2)))
    group_on(bench, order(rows=4), 3, 1, 1, 2)
    bench.do(replicate(entry(7, 1)))
    seen = []
    for event in bench.disk.sync():
        bench.do(event)
        seen.append(ends(bench)[0])
    assert seen == [2, 2, 2, 6, 7]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=6), st.data())
def test_the_durable_end_against_a_dumb_oracle(groups: list[list[int]], data: st.DataObject) -> None:
    bounds = GroupBounds()
    llsn, boundaries, every = 1, [0], [0]
    for group in groups:
        for i, count in enumerate(group):
            bounds.add(member(llsn, count, more=i < len(group) - 1))
            llsn += count
            every.append(llsn - 1)
        boundaries.append(llsn - 1)
    for end in sorted(data.draw(st.lists(st.sampled_from(every), max_size=6))):
        assert bounds.whole(LLSN(end)) == max(b for b in boundaries if b <= end)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_after_a_restart_the_durable_end_is_not_inside_a_group_either(kept: int) -> None:
    bench = running(MIDDLE)
    bench.do(replicate(entry(1, 2)))
    group_on(bench, order(), 3, 2, 1, 2)
    bench.disk.unsynced = bench.disk.unsynced[: 1 + kept]
    bench.disk.sync()
    bench.crash()
    assert ends(bench) == (7 if kept == 3 else 2, 0)
    assert bench.disk.end == bench.replica.written_end, "what is left of the group is cut off"


def test_a_seal_removes_an_incomplete_group() -> None:
    bench = running()
    bench.do(append(1))
    bench.sync()
    bench.do(order())
    feed(bench, order(), 2, 1, finish=False)
    bench.sync()
    bench.do(seal(1))
    assert bench.numbers()[3] == 1
    assert ends(bench) == (1, 0)
    with pytest.raises(Refused):
        feed(bench, order(), 2)


def test_a_replica_that_is_left_out_drops_an_incomplete_group() -> None:
    bench = running(MIDDLE)
    bench.do(replicate(member(1, 2)))
    bench.sync()
    bench.do(exclude())
    assert (bench.numbers(), ends(bench)) == ((0, 0, 0, 0), (0, 0))


# What comes meanwhile.


def test_appends_wait_behind_an_open_group_in_their_order() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, finish=False)
    assert bench.do(append(1)) == []
    assert bench.do(append(2, batch(2))) == []
    effects = feed(bench, order(), 3)
    written = [e.entry for e in effects if isinstance(e, WriteEntry)]
    assert [(e.first_llsn, e.batch.count) for e in written] == [(3, 3), (6, 1), (7, 2)]
    bench.sync()
    acked = [e for e in bench.do(commit(1, 8)) if isinstance(e, Acked)]
    assert [(e.waiter, e.ack.llsn) for e in acked] == [(1, 6), (2, 7)]


def test_a_producers_batches_that_wait_are_taken_one_after_the_other() -> None:
    bench = running()
    bench.do(append(1, fence()))
    bench.do(order())
    for sequence in (1, 2, 2):
        assert bench.do(append(sequence + 1, batch(producer=tag(sequence)))) == []
    effects = feed(bench, order(rows=5), 5)
    assert len([e for e in effects if isinstance(e, WriteEntry)]) == 3, "the repeated one waits with the first"
    assert [e for e in effects if isinstance(e, AppendFailed)] == []


def test_one_that_cannot_be_taken_after_all_is_told() -> None:
    bench = running()
    bench.do(order())
    bench.do(append(1, if_llsn=1))
    (failed,) = [e for e in feed(bench, order(), 5) if isinstance(e, AppendFailed)]
    assert (failed.waiter, failed.error.code) == (1, "condition_failed")


def test_a_second_group_waits_for_the_first_and_appends_between_them_keep_their_place() -> None:
    bench = running()
    one, two = order(), order(run=2, decided=11, oldest=10)
    bench.do(one)
    bench.do(append(1))
    assert bench.do(two) == []
    assert bench.do(two) == [], "it waits already"
    bench.do(append(2))
    effects = feed(bench, one, 5)
    assert FeedGroup(two) in effects
    assert [e.entry.first_llsn for e in effects if isinstance(e, WriteEntry)] == [1, 6]
    effects = feed(bench, two, 5)
    assert [e.entry.first_llsn for e in effects if isinstance(e, WriteEntry)] == [7, 12]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_head, "WAITING_MAX", 2)
    monkeypatch.setattr(chain_head, "WAITING_BYTES_MAX", 10)
    bench = running()
    bench.do(order())
    bench.do(append(1, batch(1, b"x" * 6)))
    with pytest.raises(ResourceExhausted):
        bench.do(append(2, batch(1, b"x" * 5)))
    bench.do(append(3, batch(1, b"x" * 4)))
    with pytest.raises(ResourceExhausted):
        bench.do(append(4, batch(1, b"")))


def test_a_single_append_may_wait_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_head, "WAITING_BYTES_MAX", 10)
    bench = running()
    bench.do(order())
    assert bench.do(append(1, batch(1, b"x" * 11))) == []


def test_what_waits_behind_a_group_leaves_room_for_other_log_streams() -> None:
    assert chain_head.WAITING_BYTES_MAX <= APPEND_BYTES_MAX // 8


@pytest.mark.parametrize(
    "event",
    [
        seal(0),
        ReplicateFailed(MIDDLE, Epoch(1), "gone"),
        exclude(),
        StorageFailed("broken"),
        DropReplica(STREAM),
    ],
    ids=lambda event: type(event).__name__,
)
def test_who_waits_behind_a_group_that_is_given_up_hears_that_nothing_was_written(event) -> None:  # type: ignore[no-untyped-def]
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, finish=False)
    bench.do(append(7))
    effects = bench.replica.handle(event)
    assert [e.waiter for e in effects if isinstance(e, AppendFailed)] == [7]
    assert not any(isinstance(e, Unsettled) for e in effects)
    with pytest.raises(Refused):
        bench.replica.handle(GroupEntry(order().tag, batch(3), last=True))


# Trouble with the group itself.


def problem(reason: str) -> GroupOutcome:
    return GroupOutcome(HEAD, STREAM, Epoch(1), RunId(1), BatchNumber(0), GroupState.PROBLEM, problem=reason)


def test_a_group_that_cannot_be_begun_leaves_no_trace() -> None:
    bench = running()
    bench.do(order())
    bench.do(append(1))
    effects = bench.do(GroupFailed(order().tag, "no part is there"))
    assert outcomes(effects) == [problem("no part is there")]
    assert [type(e) for e in effects[1:]] == [WriteEntry, Forward], "who waited goes on"
    assert bench.replica.state is ReplicaState.RUNNING
    assert bench.do(order()) == [FeedGroup(order())], "and it may be tried again"


def test_a_group_that_cannot_be_finished_lets_the_stream_be_sealed() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, finish=False)
    bench.do(append(1))
    effects = bench.do(GroupFailed(order().tag, "a part is damaged"))
    assert outcomes(effects) == [problem("a part is damaged")]
    assert ReportNow() in effects
    assert [e.waiter for e in effects if isinstance(e, AppendFailed)] == [1]
    assert bench.replica.state is ReplicaState.SEALING


@pytest.mark.parametrize("counts", [(3, 3), (2, 2)])
def test_a_group_with_another_number_of_rows_than_decided_is_not_finished(counts: tuple[int, int]) -> None:
    bench = running()
    bench.do(order())
    effects = feed(bench, order(), *counts)
    (told,) = outcomes(effects)
    assert (told.state, bench.replica.state) == (GroupState.PROBLEM, ReplicaState.SEALING)


def test_an_entry_with_a_producer_is_no_part_of_a_group() -> None:
    bench = running()
    bench.do(order())
    effects = bench.do(GroupEntry(order().tag, batch(5, producer=tag(1)), last=True))
    assert outcomes(effects)[0].state is GroupState.PROBLEM
    assert bench.replica.state is ReplicaState.RUNNING


def test_entries_of_a_group_that_is_not_open_are_refused() -> None:
    bench = running()
    with pytest.raises(Refused):
        feed(bench, order(), 5)
    bench.do(order())
    with pytest.raises(Refused):
        feed(bench, order(decided=11), 5)
    assert bench.do(GroupFailed(order(decided=11).tag, "of another")) == []


# Deduplication.


def test_a_repeated_order_waits_for_the_first_and_then_gets_the_same_answer() -> None:
    bench = running()
    bench.do(order())
    assert bench.do(order()) == [], "it is being appended"
    feed(bench, order(), 2, 3)
    assert bench.do(order()) == [], "it is written"
    bench.sync()
    assert outcomes(bench.do(commit(1, 5, glsn=7))) == [published(1, 5, 7)]
    assert outcomes(bench.do(order())) == [published(1, 5, 7)]


def test_an_older_order_is_refused() -> None:
    bench = running()
    for number, decided in ((0, 10), (1, 12)):
        bench.do(order(number, decided=decided))
        feed(bench, order(number, decided=decided), 5)
    with pytest.raises(Refused, match="long ago"):
        bench.do(order(0, decided=10))
    with pytest.raises(Refused, match="long ago"):
        bench.do(order(7, run=9, decided=11))


def test_a_group_is_remembered_after_a_restart_and_until_then_not_taken_twice() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, 3)
    bench.sync()
    bench.do(commit(1, 5, glsn=7))
    bench.sync()
    bench.crash()
    assert outcomes(bench.do(order())) == [published(1, 5, 7)]


def test_an_uncommitted_group_is_remembered_after_a_restart() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, 3)
    bench.sync()
    bench.crash()
    assert outcomes(bench.do(commit(1, 5, glsn=7))) == [published(1, 5, 7)]
    bench.sync()
    bench.do(seal(5))
    assert outcomes(bench.do(order())) == [published(1, 5, 7)]


def test_a_group_that_a_seal_removed_may_come_again_in_the_next_epoch() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, 3)
    bench.sync()
    bench.do(seal(0))
    absent = GroupOutcome(HEAD, STREAM, Epoch(1), RunId(1), BatchNumber(0), GroupState.ABSENT)
    assert outcomes(bench.do(order())) == [absent]
    bench.do(unseal(0, epoch=2))
    with pytest.raises(WrongEpoch):
        bench.do(order())
    assert bench.do(order(epoch=2)) == [FeedGroup(order(epoch=2))]


def test_the_group_before_one_that_a_seal_removed_is_still_remembered() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 5)
    bench.sync()
    bench.do(commit(1, 5))
    bench.sync()
    second = order(1, decided=11, oldest=11)
    bench.do(second)
    feed(bench, second, 5)
    bench.sync()
    bench.do(seal(5))
    bench.do(unseal(5, epoch=2))
    assert outcomes(bench.do(order(epoch=2))) == [published(1, 5, 1, epoch=2)]


def test_a_sealed_backup_answers_too_but_not_one_that_is_only_sealing() -> None:
    bench = running(MIDDLE)
    group_on(bench, order(), 1, 2, 3)
    bench.sync()
    bench.do(commit(1, 5, glsn=7))
    bench.do(seal(5))
    assert bench.replica.state is ReplicaState.SEALING, "its commit is not on disk"
    with pytest.raises(StreamSealed):
        bench.do(order(3, run=4, decided=20))
    bench.sync()
    assert outcomes(bench.do(order())) == [published(1, 5, 7, node=MIDDLE)]
    (absent,) = outcomes(bench.do(order(3, run=4, decided=20)))
    assert (absent.state, absent.run, absent.batch, absent.node) == (GroupState.ABSENT, 4, 3, MIDDLE)


def test_memory_travels_with_a_sync() -> None:
    source = running(MIDDLE)
    group_on(source, order(), 1, 2, 3)
    source.sync()
    source.do(commit(1, 5, glsn=7))
    source.sync()
    bench = running(LAST)
    bench.do(exclude())
    bench.do(learn(epoch=2))
    plan = SyncPlan(SyncCase.EMPTY, LLSN(1), Extent(LLSN(1), LLSN(5)))
    bench.do(SyncBegin(STREAM, 1, plan, GLSN(0)))
    for one in source.disk.entries:
        bench.do(SyncEntries(STREAM, 1, (one,)))
        bench.sync()
    dedup = source.replica.dedup.checkpoint(LLSN(5))
    bench.do(SyncEnd(STREAM, 1, (context(1, 5, glsn=7),), dedup, GLSN(1)))
    bench.sync()
    assert ends(bench) == (5, 0)
    assert outcomes(bench.do(order())) == [published(1, 5, 7, node=LAST, epoch=2)]
    bench.crash()
    assert outcomes(bench.do(order())) == [published(1, 5, 7, node=LAST, epoch=2)]


def test_memory_outlives_the_entries_it_came_from() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, 3)
    bench.sync()
    bench.do(commit(1, 5, glsn=7))
    bench.sync()
    bench.disk.dedup = bench.replica.dedup.checkpoint(LLSN(5))
    bench.disk.entries, bench.disk.first_llsn = [], LLSN(6)
    bench.disk.hard_state = structs.replace(bench.replica.hard_state, trimmed_before=GLSN(12))
    opening = open_replica(HEAD, STREAM, bench.disk)
    assert opening.problem == ""
    assert outcomes(opening.replica.handle(order())) == [published(1, 5, 7)]


def test_a_checkpoint_of_before_there_were_groups_is_one_without_groups() -> None:
    assert DedupCheckpoint(LLSN(1), ()).groups == ()


# What is forgotten.


def remembered(memory: GroupMemory, end: int) -> list[tuple[int, int]]:
    return [(group.run, group.batch) for group in memory.checkpoint(LLSN(end))]


def record(memory: GroupMemory, llsn: int, run: int, number: int, decided: int, oldest: int) -> None:
    group = GroupTag(RunId(run), BatchNumber(number), 1, DecisionIndex(decided), DecisionIndex(oldest))
    memory.record(member(llsn, 1, more=False, group=group))
    memory.commit(context(llsn, 1))


def test_only_the_last_group_of_a_run_is_kept_and_none_that_is_finished() -> None:
    memory = GroupMemory()
    record(memory, 1, 1, 0, 10, 10)
    record(memory, 2, 2, 0, 11, 10)
    record(memory, 3, 1, 1, 12, 11)
    assert remembered(memory, 3) == [(2, 0), (1, 1)]
    record(memory, 4, 3, 0, 13, 12)
    assert remembered(memory, 4) == [(1, 1), (3, 0)]
    assert remembered(memory, 2) == [(1, 0), (2, 0)], "the state at an earlier place is still known"
    memory.settle(LLSN(4))
    assert remembered(memory, 4) == [(1, 1), (3, 0)]
    assert remembered(memory, 2) == [], "now it is not"


def test_what_is_forgotten_is_refused() -> None:
    memory = GroupMemory()
    record(memory, 1, 1, 0, 10, 10)
    record(memory, 2, 2, 0, 11, 11)
    memory.settle(LLSN(2))
    for copy in (memory, GroupMemory(memory.checkpoint(LLSN(2)))):
        with pytest.raises(Refused):
            copy.find(order().tag)
        assert copy.find(order(1, decided=12).tag) is None


def test_commits_that_are_not_on_disk_forget_nothing() -> None:
    memory = GroupMemory()
    record(memory, 1, 1, 0, 10, 10)
    record(memory, 2, 1, 1, 11, 11)
    memory.settle(LLSN(1))
    assert remembered(memory, 1) == [(1, 0)]
    assert memory.checkpoint(LLSN(1)) == (
        RememberedGroup(RunId(1), BatchNumber(0), DecisionIndex(10), DecisionIndex(10), LLSN(1), 1, GLSN(1)),
    )


def test_ticks_and_other_streams_change_nothing() -> None:
    bench = running()
    bench.do(order())
    feed(bench, order(), 2, finish=False)
    bench.sync()
    assert bench.do(quiet(0, 3)) == []
    assert ends(bench) == (0, 2)
    assert LogStreamId(1) == STREAM
