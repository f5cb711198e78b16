"""The leader publishes: it tells heads what was decided until it has heard the end of it, whoever dies meanwhile."""

from __future__ import annotations

import pytest
from msgspec import structs
from order_driver import LS1, LS2, N1, N2, ORDERS, RUNNING, SEALED, T1, Leader, cluster_of, sends, stores, ur

from cutwater.core import requests as r
from cutwater.core.messages import GroupOutcome, GroupState, PublishGroup
from cutwater.core.order import decisions as d
from cutwater.core.order.events import GroupOutcomeArrived, OrderEffect, Reply, Store, StoreRefused
from cutwater.core.order.options import OrderOptions
from cutwater.errors import NotLeader, ResourceExhausted, RunFenced, Unavailable
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    SECOND,
    BatchNumber,
    DecisionIndex,
    Epoch,
    LogStreamId,
    Part,
    RunId,
    StorageNodeId,
)

NODES = (N1, N2)
CLUSTER = cluster_of({LS1: NODES, LS2: (N2, N1)}, high_watermark=20, nodes=NODES)
OPTIONS = OrderOptions(
    node_dead_after_us=3_600 * SECOND, replace_stream_after_us=5 * SECOND, tick_us_min=3_600 * SECOND
)


def part(name: str = "a", *, hint: LogStreamId = LS1, rows: int = 3) -> Part:
    return Part(T1, hint, NODES, name, 1, 1, rows, 10)


def leads(decisions: list[d.Decision] | None = None, options: OrderOptions = OPTIONS) -> Leader:
    leader = Leader(CLUSTER if decisions is None else decisions, options=options)
    everyone_reports(leader)
    return leader


def everyone_reports(leader: Leader, *, epoch: int = 1, state=RUNNING) -> list[OrderEffect]:  # type: ignore[no-untyped-def]
    """All replicas are where the cluster says they are."""
    effects: list[OrderEffect] = []
    for node in NODES:
        reports = [ur(lsid, end=0, epoch=epoch if lsid == LS1 else 1, state=state if lsid == LS1 else RUNNING)
                   for lsid in (LS1, LS2)]  # fmt: skip
        effects += leader.run(leader.report(node, *reports))
    return effects


def open_run(leader: Leader, key: str = "k") -> None:
    assert isinstance(leader.answer(r.OpenRunRequest("query", key, start=r.RunStart(replay=True))), r.RunAnswer)


def publish(batch: int = 0, *parts: Part, run: int = 1) -> r.PublishRequest:
    return r.PublishRequest(RunId(run), BatchNumber(batch), parts)


def said(
    state: GroupState,
    *,
    stream: LogStreamId = LS1,
    node: StorageNodeId = N1,
    epoch: int = 1,
    batch: int = 0,
    glsn: int = 0,
    count: int = 0,
    problem: str = "",
) -> GroupOutcomeArrived:
    outcome = GroupOutcome(
        node, stream, Epoch(epoch), RunId(1), BatchNumber(batch), state, LLSN(1), count, GLSN(glsn), problem
    )
    return GroupOutcomeArrived(outcome)


def orders(effects: list[OrderEffect]) -> list[tuple[int, PublishGroup]]:
    return [(send.node, send.message) for send in sends(effects, PublishGroup)]  # type: ignore[misc]


def replies(effects: list[OrderEffect]) -> list[object]:
    return [effect.outcome for effect in effects if isinstance(effect, Reply)]


def decided(leader: Leader, *parts: Part) -> tuple[int, list[OrderEffect]]:
    asked = leader.ask(publish(0, *(parts or (part(),))))
    return asked.request_id, leader.run(asked)


def test_nobody_hears_of_a_batch_before_it_is_stored() -> None:
    leader = leads()
    open_run(leader)
    effects = leader.raw(leader.ask(publish(0, part())))
    (store,) = effects
    assert isinstance(store, Store)
    assert isinstance(store.decisions[0], d.DecideBatch)
    ((node, message),) = orders(leader.confirm(store))
    index = DecisionIndex(store.after + 1)
    assert (node, message) == (
        N1,
        PublishGroup(LS1, Epoch(1), RunId(1), BatchNumber(0), T1, (part(),), 3, index, index),
    )


def test_a_node_without_a_replica_says_nothing_of_what_is_published() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    stranger = StorageNodeId(77)
    leader.answer(r.AddNodeRequest(stranger))
    for state in GroupState:
        assert replies(leader.run(said(state, node=stranger, glsn=5, count=3))) == []
    assert replies(leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))) != []


def test_the_answer_leaves_when_all_is_published_and_that_is_stored() -> None:
    leader = leads()
    open_run(leader)
    _, effects = decided(leader)
    assert replies(effects) == []
    effects = leader.raw(said(GroupState.PUBLISHED, glsn=5, count=3))
    (store,) = effects
    assert isinstance(store, Store)
    assert store.decisions == (d.GroupPublished(RunId(1), BatchNumber(0), T1, GLSN(5), 3),)
    assert replies(leader.confirm(store)) == [r.PublishAnswer((r.PublishedGroup(T1, LS1, GLSN(5), 3),))]


def test_a_head_is_told_again_until_it_answers() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    again = OPTIONS.publish_again_us
    assert orders(leader.wake_after(again - 1)) == []
    assert [node for node, _ in orders(leader.wake_after(1))] == [N1]
    assert orders(leader.wake_after(again // 2)) == []
    assert [node for node, _ in orders(leader.wake_after(again))] == [N1]
    leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))
    assert orders(leader.wake_after(10 * again)) == []


def test_the_next_leader_goes_on() -> None:
    before = leads()
    open_run(before)
    decided(before)
    after = Leader(before.stored, options=OPTIONS)
    effects = everyone_reports(after)
    ((node, message),) = orders(effects)
    assert (node, message.parts, message.decided) == (N1, (part(),), before.state.runs.publishing[0].decided)


def test_the_next_leader_goes_on_from_a_snapshot() -> None:
    before = leads()
    open_run(before)
    decided(before)
    after = Leader((), options=OPTIONS, snapshot=before.state.snapshot())
    assert [node for node, _ in orders(everyone_reports(after))] == [N1]


def test_a_stream_that_was_opened_again_is_told_at_once_in_its_new_epoch() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.answer(r.SealRequest(LS1))
    leader.answer(r.UnsealRequest(LS1))
    effects = everyone_reports(leader, state=SEALED)
    assert any(isinstance(decision, d.Unseal) for decision in stores(effects))
    ((node, message),) = orders(everyone_reports(leader, epoch=2))
    assert (node, message.epoch, message.stream) == (N1, 2, LS1)


def reopen(leader: Leader, epoch: int) -> list[OrderEffect]:
    leader.answer(r.SealRequest(LS1))
    leader.answer(r.UnsealRequest(LS1))
    effects = everyone_reports(leader, epoch=epoch - 1, state=SEALED)
    return [*effects, *everyone_reports(leader, epoch=epoch)]


def test_a_group_for_which_its_stream_is_sealed_again_and_again_is_not_told_at_once_each_time() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    assert [message.epoch for _, message in orders(reopen(leader, 2))] == [2]
    assert orders(reopen(leader, 3)) == []
    assert [message.epoch for _, message in orders(leader.wake_after(OPTIONS.publish_again_us))] == [3]
    assert orders(reopen(leader, 4)) == []
    leader.run(said(GroupState.PUBLISHED, epoch=4, glsn=5, count=3))
    asked = leader.ask(publish(1, part("b")))
    assert [message.batch for _, message in orders(leader.run(asked))] == [1], "this concerns the one group only"


def test_a_group_that_has_problems_is_told_ever_less_often_also_in_new_epochs() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    again = OPTIONS.publish_again_us
    pause = again
    for _ in range(7):
        leader.run(said(GroupState.PROBLEM, problem="a part is damaged"))
        leader.run(said(GroupState.PROBLEM, problem="a part is damaged, said twice"))
        pause = min(2 * pause, OPTIONS.retry_us_max)
        assert orders(leader.wake_after(pause - 1)) == []
        assert [node for node, _ in orders(leader.wake_after(1))] == [N1]
    leader.run(said(GroupState.PROBLEM, problem="a part is damaged"))
    assert orders(reopen(leader, 2)) == []
    assert orders(leader.wake_after(OPTIONS.retry_us_max - 1)) == []
    assert [message.epoch for _, message in orders(leader.wake_after(1))] == [2]


def test_a_head_that_does_not_run_yet_is_not_told() -> None:
    leader = Leader(CLUSTER, options=OPTIONS)
    open_run(leader)
    assert orders(decided(leader)[1]) == []


@pytest.mark.parametrize("final", [True, False])
def test_a_group_moves_when_its_stream_is_sealed_for_good_or_held_and_does_not_have_it(final: bool) -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.answer(r.SealRequest(LS1, final=final))
    effects = leader.wake_after(OPTIONS.publish_again_us)
    assert [(node, message.epoch) for node, message in orders(effects)] == [(N1, 1), (N2, 1)], "any survivor knows"
    effects = leader.run(said(GroupState.ABSENT, node=N2))
    (move,) = [decision for decision in stores(effects) if isinstance(decision, d.MoveGroup)]
    assert (move.topic, move.stream) == (T1, LS2)
    ((node, message),) = orders(effects)
    assert (node, message.stream, message.parts) == (N2, LS2, (part(),))
    leader.run(said(GroupState.PUBLISHED, stream=LS2, node=N2, glsn=5, count=3))
    assert leader.answer(publish(0)) == r.PublishAnswer((r.PublishedGroup(T1, LS2, GLSN(5), 3),))


def test_a_group_that_is_in_a_finished_stream_stays_there() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.answer(r.SealRequest(LS1, final=True))
    effects = leader.run(said(GroupState.PUBLISHED, node=N2, glsn=5, count=3))
    assert [type(decision) for decision in stores(effects)] == [d.GroupPublished]


def test_a_group_waits_for_a_stream_that_is_sealed_for_a_moment_only() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.run(leader.report(N1, ur(LS1, end=0, state=RUNNING), ur(LS2, end=0)))
    stream = leader.state.streams[LS1]
    leader.layer._want_seal(stream, "a test")
    effects = leader.wake_after(MILLISECOND)
    assert not stream.is_open
    leader.run(said(GroupState.ABSENT))
    effects = leader.wake_during(2 * SECOND)
    assert [decision for decision in stores(effects) if isinstance(decision, d.MoveGroup)] == []
    effects = leader.wake_during(4 * SECOND)
    assert [type(decision) for decision in stores(effects) if isinstance(decision, d.MoveGroup)] == [d.MoveGroup]


def test_what_is_said_of_an_earlier_epoch_or_another_stream_moves_nothing() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    for wrong in (
        said(GroupState.ABSENT),
        said(GroupState.ABSENT, epoch=0),
        said(GroupState.ABSENT, stream=LS2),
        said(GroupState.ABSENT, batch=1),
        said(GroupState.PUBLISHED, glsn=19, count=3),
        said(GroupState.PUBLISHED, glsn=5, count=2),
        said(GroupState.PUBLISHED, stream=LS2, glsn=5, count=3),
        said(GroupState.PUBLISHED, stream=LogStreamId(99), glsn=5, count=3),
    ):
        assert stores(leader.run(wrong)) == []
    leader.answer(r.SealRequest(LS1, final=True))
    assert stores(leader.run(said(GroupState.ABSENT, epoch=0))) == []


def test_a_deleted_topic_ends_the_wait() -> None:
    leader = leads()
    open_run(leader)
    request_id, _ = decided(leader)
    effects = leader.run(leader.ask(r.DeleteTopicRequest(ORDERS)))
    assert [e.outcome for e in effects if isinstance(e, Reply) and e.request_id == request_id] == [r.PublishAnswer()]
    assert orders(leader.wake_after(10 * SECOND)) == []


# Who waits.


def test_the_next_batch_is_decided_as_soon_as_the_one_before_is_published() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    assert stores(leader.run(leader.ask(publish(1, part("b"))))) == []
    effects = leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))
    assert [type(decision) for decision in stores(effects)] == [d.GroupPublished, d.DecideBatch]
    assert [message.batch for _, message in orders(effects)] == [1]


def test_who_waits_too_long_is_told_what_for() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.run(said(GroupState.PROBLEM, problem="a part is nowhere"))
    (outcome,) = replies(leader.wake_during(OPTIONS.publish_wait_us + SECOND, every_us=SECOND))
    assert isinstance(outcome, Unavailable)
    assert outcome.retriable
    assert "batch 0 of run 1 is decided" in outcome.message
    assert "a part is nowhere" in outcome.message
    assert leader.state.runs.publishing, "it is published all the same"


def test_those_behind_many_that_only_wait_have_their_turn() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    (store,) = leader.raw(leader.ask(r.CommitCursorRequest("c", GLSN(1))))
    assert isinstance(store, Store)
    for _ in range(2 * OPTIONS.requests_per_turn_max):
        assert leader.raw(leader.ask(publish(1, part("b")))) == []
    last = leader.ask(r.CommitCursorRequest("c", GLSN(2)))
    assert leader.raw(last) == [], "a write is in flight"
    effects = leader.confirm(store)
    (following,) = [effect for effect in effects if isinstance(effect, Store)]
    assert d.CommitCursor("c", GLSN(2)) in following.decisions


def test_only_so_many_wait() -> None:
    leader = leads(options=structs.replace(OPTIONS, requests_max=2))
    open_run(leader)
    decided(leader)
    leader.run(leader.ask(publish(0)))
    (outcome,) = replies(leader.run(leader.ask(publish(0))))
    assert isinstance(outcome, ResourceExhausted)
    assert len(replies(leader.run(said(GroupState.PUBLISHED, glsn=5, count=3)))) == 2


def test_who_waits_hears_when_the_run_is_fenced_or_the_leader_goes() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    effects = leader.run(leader.ask(r.OpenRunRequest("query", "other", start=r.RunStart(replay=True))))
    assert [type(outcome) for outcome in replies(effects)] == [r.RunAnswer, RunFenced]
    leader = leads()
    open_run(leader)
    decided(leader)
    (outcome,) = replies(leader.raw(StoreRefused("someone else leads")))
    assert isinstance(outcome, NotLeader)


def test_a_halted_leader_lets_nobody_wait() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    effects = leader.run(leader.report(N1, ur(LS1, end=0, epoch=9), ur(LS2, end=0)))
    assert [getattr(outcome, "code", None) for outcome in replies(effects)] == ["order_layer_lost_memory"]


def test_a_fenced_runs_decided_batch_is_still_published() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    open_run(leader, "other")
    assert [message.run for _, message in orders(leader.wake_after(OPTIONS.publish_again_us))] == [1]
    assert stores(leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))) != []


def test_large_batches_are_decided_one_per_write() -> None:
    leader = leads()
    for key in ("a", "b"):
        leader.answer(r.OpenRunRequest("", key))
    many = tuple(part(str(i)) for i in range(1_000))
    first = leader.raw(leader.ask(publish(0, *many)))
    leader.raw(leader.ask(publish(0, *(structs.replace(p, part=f"other {p.part}") for p in many), run=2)))
    leader.raw(leader.ask(publish(1, part("third"), run=2)))
    (store,) = first
    assert isinstance(store, Store)
    effects = leader.confirm(store)
    assert [type(decision) for decision in stores(effects)] == [d.DecideBatch]


def test_the_oldest_decision_under_way_is_told_with_each_group() -> None:
    leader = leads()
    for key in ("a", "b"):
        leader.answer(r.OpenRunRequest("", key))
    leader.run(leader.ask(publish(0, part("a"))))
    effects = leader.run(leader.ask(publish(0, part("b", hint=LS2), run=2)))
    first, second = leader.state.runs.publishing
    ((_, message),) = orders(effects)
    assert (message.decided, message.oldest) == (second.decided, first.decided)
    leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))
    ((_, message),) = orders(leader.wake_after(OPTIONS.publish_again_us))
    assert (message.decided, message.oldest) == (second.decided, second.decided)


def test_operators_see_what_is_under_way_and_why() -> None:
    leader = leads()
    open_run(leader)
    decided(leader)
    leader.run(said(GroupState.PROBLEM, problem="a part is nowhere"))
    description = leader.answer(r.DescribeRequest())
    assert isinstance(description, r.Description)
    why = "storage node 1 cannot publish it: a part is nowhere"
    group = r.GroupDescription(ORDERS, LS1, 3, 1, why)
    (run,) = leader.state.runs
    told = r.RunDescription(RunId(1), "query", "k", 1, BatchNumber(0), RunId(0), (group,), run.decided)
    assert (description.runs, description.last_run) == ((told,), 1)
    leader.run(said(GroupState.PUBLISHED, glsn=5, count=3))
    description = leader.answer(r.DescribeRequest())
    assert isinstance(description, r.Description)
    (told,) = description.runs
    assert (told.unpublished, told.published) == ((), (r.PublishedGroup(run.groups[0].topic, LS1, GLSN(5), 3),))


def test_of_each_name_the_last_run_that_has_published_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is over, and however many came after it."""
    monkeypatch.setattr("cutwater.core.publish.publishing.DESCRIBED_RUNS_MAX", 2)
    leader = leads()
    for key in "abcdef":
        open_run(leader, key)
        if key in "ab":
            leader.answer(publish(run=1 + "abcdef".index(key)))
    described = leader.answer(r.DescribeRequest())
    assert isinstance(described, r.Description)
    assert [run.key for run in described.runs] == ["b", "e", "f"]


def test_staged_rows_expire_after_the_time_in_the_options() -> None:
    leader = leads(options=structs.replace(OPTIONS, staged_expire_after_us=SECOND))
    open_run(leader)
    old = r.StagedBatch(RunId(1), BatchNumber(0), 1, 2 * SECOND)
    assert leader.answer(r.StagedRequest(N1, (old,))) == r.StagedAnswer((old,))
    assert leader.answer(r.OpenRunRequest("query", "k")) == r.RunAnswer(RunId(1), 2, BatchNumber(-1))
