"""Runs, batches and groups in the state of the cluster, and what requests about them lead to."""

from __future__ import annotations

import pytest
from msgspec import structs
from order_driver import LS1, LS2, N1, N2, T1, cluster_of

from cutwater.core import requests as r
from cutwater.core.order import decisions as d
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.request_handling import Surroundings, decide
from cutwater.core.order.state import OrderState
from cutwater.core.publish import finished_runs, run_requests, runs
from cutwater.errors import (
    ContradictoryCommand,
    InvalidArgument,
    NotFound,
    Refused,
    RunFenced,
    StagedExpired,
    Unavailable,
)
from cutwater.types import (
    GLSN,
    LLSN,
    SECOND,
    BatchNumber,
    CutTime,
    DecisionIndex,
    Epoch,
    LogStreamId,
    Part,
    RunId,
    StorageNodeId,
    TopicId,
)

HOUR = 3_600 * SECOND
AROUND = Surroundings(
    usable=lambda node: True,
    ready=lambda stream, node: True,
    describe=lambda: pytest.fail("nobody asked for it"),
    time=CutTime(1),
    staged_expire_after_us=HOUR,
)
T2, LS3 = TopicId(2), LogStreamId(3)


def part(
    name: str, *, topic: TopicId = T1, hint: LogStreamId = LS1, generation: int = 1, rows: int = 2, size: int = 10
) -> Part:
    return Part(topic, hint, (N1, N2), name, generation, 1, rows, size)


def cluster() -> OrderState:
    """Topic 1 with streams 1 and 2, topic 2 with stream 3, all open."""
    state = OrderState(None, cluster_of({LS1: (N1, N2), LS2: (N2, N1)}))
    state.apply(d.CreateTopic(T2, "second", 2, streams=0))
    state.apply(d.CreateStream(LS3, T2, (N1, N2), state.high_watermark, CutTime(1)))
    state.apply(d.Unseal(LS3, Epoch(1), LLSN(0), (N1, N2)))
    return state


def ask(state: OrderState, request: r.Request) -> r.Answer | None:
    """Decide and apply; None if the request has to wait."""
    decisions, answer = decide(request, state, AROUND)
    for decision in decisions:
        state.apply(decision)
    return answer


def opened(
    state: OrderState, name: str = "query", key: str = "k1", *, once: bool = False, replay: bool = False
) -> r.RunAnswer:
    answer = ask(state, r.OpenRunRequest(name, key, once, r.RunStart(replay=replay)))
    assert isinstance(answer, r.RunAnswer)
    return answer


def publish(state: OrderState, run: int, batch: int, *parts: Part) -> r.Answer | None:
    return ask(state, r.PublishRequest(RunId(run), BatchNumber(batch), parts))


def published(state: OrderState, run: int, batch: int, topic: TopicId = T1, *, glsn: int = 1, count: int = 2) -> None:
    state.apply(d.GroupPublished(RunId(run), BatchNumber(batch), topic, GLSN(glsn), count))


# Runs.


def test_a_key_has_one_run_for_ever() -> None:
    state = cluster()
    first = opened(state)
    assert first == r.RunAnswer(RunId(1), 1, BatchNumber(-1))
    index = state.index
    assert opened(state) == first
    assert state.index == index, "asking again decides nothing"


def test_a_new_key_under_the_same_name_fences_the_older_run() -> None:
    state = cluster()
    opened(state, key="k1")
    assert opened(state, key="k2").run == 2
    with pytest.raises(RunFenced) as opening:
        opened(state, key="k1")
    assert (opening.value.run, opening.value.by, opening.value.name) == (1, 2, "query")
    assert "another name" in opening.value.message
    assert not opening.value.retriable
    with pytest.raises(RunFenced):
        publish(state, 1, 0, part("a"))
    assert opened(state, key="k2").run == 2, "the new one goes on"


def test_a_fenced_key_stays_fenced_when_the_name_is_taken_again_and_after_a_snapshot() -> None:
    state = cluster()
    for key in ("k1", "k2", "k3"):
        opened(state, key=key)
    state = OrderState(state.snapshot())
    for key in ("k1", "k2"):
        with pytest.raises(RunFenced):
            opened(state, key=key)
    assert opened(state, key="k3").run == 3
    assert opened(state, key="k4").run == 4, "numbers are never given out twice"


def test_without_a_name_nobody_is_fenced() -> None:
    state = cluster()
    assert opened(state, name="", key="k1").run == 1
    assert opened(state, name="", key="k2").run == 2
    assert opened(state, name="", key="k1").run == 1


def test_a_run_keeps_its_name() -> None:
    state = cluster()
    opened(state)
    with pytest.raises(InvalidArgument, match="keep"):
        opened(state, name="other", key="k1")


@pytest.mark.parametrize(("name", "key"), [("query", ""), ("n" * 256, "k"), ("", "k" * 256)])
def test_a_run_needs_a_key_and_short_words(name: str, key: str) -> None:
    with pytest.raises(InvalidArgument):
        opened(cluster(), name, key)


# Deciding.


def test_a_batch_is_decided_and_its_answer_waits_until_all_of_it_is_published() -> None:
    state = cluster()
    opened(state)
    parts = (part("a"), part("b", topic=T2, hint=LS3), part("c", rows=1))
    assert publish(state, 1, 0, *parts) is None
    (run,) = state.runs.publishing
    assert [(group.topic, group.stream, group.rows) for group in run.groups] == [(T1, LS1, 3), (T2, LS3, 2)]
    assert [p.part for p in run.groups[0].parts] == ["a", "c"], "in the order in which they were given"
    published(state, 1, 0, T1, glsn=11, count=3)
    assert publish(state, 1, 0) is None, "one topic is missing"
    published(state, 1, 0, T2, glsn=14)
    assert publish(state, 1, 0) == r.PublishAnswer(
        (r.PublishedGroup(T1, LS1, GLSN(11), 3), r.PublishedGroup(T2, LS3, GLSN(14), 2))
    )
    assert state.runs.publishing == []
    assert all(not group.parts for group in run.groups), "nobody needs to know the parts any more"


def test_the_first_decision_stands_when_the_batch_is_repeated_with_other_parts() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("first"))
    index = state.index
    assert publish(state, 1, 0, part("second", rows=7), part("third", topic=T2, hint=LS3)) is None
    assert state.index == index
    (run,) = state.runs.publishing
    assert [p.part for group in run.groups for p in group.parts] == ["first"]
    published(state, 1, 0, glsn=5)
    assert publish(state, 1, 0, part("fourth")) == r.PublishAnswer((r.PublishedGroup(T1, LS1, GLSN(5), 2),))


def test_a_batch_below_the_last_is_done() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 7, part("a"))
    published(state, 1, 7)
    assert publish(state, 1, 6, part("b")) == r.PublishAnswer()
    assert state.runs.publishing == []


def test_the_next_batch_waits_until_the_one_before_is_published() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"))
    assert publish(state, 1, 1, part("b")) is None
    assert state.runs.publishing[0].batch == 0
    published(state, 1, 0)
    assert publish(state, 1, 1, part("b")) is None
    assert state.runs.publishing[0].batch == 1


def test_an_empty_batch_is_done_at_once() -> None:
    state = cluster()
    opened(state)
    assert publish(state, 1, 0) == r.PublishAnswer()
    assert publish(state, 1, 1, part("a", rows=0)) == r.PublishAnswer(), "parts without rows are none"
    assert opened(state).last_batch == 1


def test_a_deleted_topic_is_refused_clearly() -> None:
    state = cluster()
    opened(state)
    ask(state, r.DeleteTopicRequest("second"))
    with pytest.raises(NotFound, match="topic number 2"):
        publish(state, 1, 0, part("a"), part("b", topic=T2, hint=LS3))
    assert opened(state).last_batch == -1, "nothing of it was decided"


def test_what_is_decided_for_a_topic_goes_with_it() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"), part("b", topic=T2, hint=LS3))
    ask(state, r.DeleteTopicRequest("second"))
    published(state, 1, 0, glsn=3)
    assert publish(state, 1, 0) == r.PublishAnswer((r.PublishedGroup(T1, LS1, GLSN(3), 2),))


def test_a_group_goes_where_most_of_it_was_staged() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a", size=5), part("b", hint=LS2, size=9), part("c", size=3))
    assert state.runs.publishing[0].groups[0].stream == LS2


def test_a_group_goes_elsewhere_if_its_hint_is_not_open() -> None:
    state = cluster()
    opened(state)
    state.apply(d.Seal(LS1, Epoch(1), LLSN(0), (N1, N2), "test"))
    publish(state, 1, 0, part("a"))
    assert state.runs.publishing[0].groups[0].stream == LS2


def test_without_an_open_stream_nothing_is_decided() -> None:
    state = cluster()
    opened(state)
    for stream in (LS1, LS2):
        state.apply(d.Seal(stream, Epoch(1), LLSN(0), (N1, N2), "test"))
    with pytest.raises(Unavailable):
        publish(state, 1, 0, part("a"))
    assert opened(state).last_batch == -1


@pytest.mark.parametrize(
    "parts",
    [
        (part("a"), part("a")),
        (part(""),),
        (part("a", rows=-1),),
        (Part(T1, LS1, (), "a", 1, 1, 1, 1),),
        (Part(T1, LS1, tuple(StorageNodeId(n) for n in range(17)), "a", 1, 1, 1, 1),),
        tuple(part(str(i)) for i in range(run_requests.PARTS_MAX + 1)),
        # Staged for another batch, and for another run.
        (part("a"), structs.replace(part("b"), run=RunId(1), batch=BatchNumber(1))),
        (structs.replace(part("a"), run=RunId(2), batch=BatchNumber(0)),),
    ],
)
def test_what_cannot_be_parts_is_refused(parts: tuple[Part, ...]) -> None:
    state = cluster()
    opened(state)
    with pytest.raises(InvalidArgument):
        publish(state, 1, 0, *parts)
    assert state.runs.publishing == []


def test_an_unknown_run_and_a_negative_batch_are_refused() -> None:
    state = cluster()
    with pytest.raises(NotFound, match="no run 1"):
        publish(state, 1, 0, part("a"))
    opened(state)
    with pytest.raises(InvalidArgument):
        publish(state, 1, -2)


# The fold refuses what contradicts it.


def batch_of(run: int, batch: int, *groups: d.GroupPlan) -> d.DecideBatch:
    return d.DecideBatch(RunId(run), BatchNumber(batch), groups)


def test_decisions_that_cannot_be() -> None:
    state = cluster()
    opened(state)
    group = d.GroupPlan(T1, LS1, (part("a"),))
    wrong: list[d.Decision] = [
        d.OpenRun(RunId(3), "", "other"),
        d.OpenRun(RunId(2), "", "k1"),
        batch_of(2, 0, group),
        batch_of(1, 0, group, group),
        batch_of(1, 0, d.GroupPlan(T2, LS1, (part("a", topic=T2),))),
        batch_of(1, 0, d.GroupPlan(T1, LS1, ())),
        batch_of(1, 0, d.GroupPlan(T1, LS1, (part("a", generation=2),))),
        d.GroupPublished(RunId(1), BatchNumber(0), T1, GLSN(1), 2),
        d.MoveGroup(RunId(1), BatchNumber(0), T1, LS2),
        d.ExpireStaged(RunId(9)),
    ]
    for decision in wrong:
        with pytest.raises(ContradictoryCommand):
            state.apply(decision)
    state.apply(batch_of(1, 0, group))
    later: list[d.Decision] = [
        batch_of(1, 0, group),
        batch_of(1, 1, group),
        d.GroupPublished(RunId(1), BatchNumber(0), T1, GLSN(1), 3),
        d.GroupPublished(RunId(1), BatchNumber(1), T1, GLSN(1), 2),
        d.MoveGroup(RunId(1), BatchNumber(0), T1, LS2),
    ]
    for decision in later:
        with pytest.raises(ContradictoryCommand):
            state.apply(decision)
    opened(state, key="k2", replay=True)
    published(state, 1, 0)
    with pytest.raises(ContradictoryCommand, match="over"):
        state.apply(batch_of(1, 1, group))
    with pytest.raises(ContradictoryCommand):
        published(state, 1, 0)


def test_a_group_moves_only_from_a_stream_that_is_sealed_to_one_that_is_open() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"))
    state.apply(d.Seal(LS1, Epoch(1), LLSN(0), (N1, N2), "test", final=True))
    for target in (LS1, LS3):
        with pytest.raises(ContradictoryCommand):
            state.apply(d.MoveGroup(RunId(1), BatchNumber(0), T1, target))
    state.apply(d.MoveGroup(RunId(1), BatchNumber(0), T1, LS2))
    (run,) = state.runs.publishing
    assert run.groups[0].stream == LS2
    assert run.groups[0].parts, "the parts are the same"


def test_a_snapshot_knows_all_that_the_decisions_said() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 3, part("a"), part("b", topic=T2, hint=LS3))
    published(state, 1, 3, T2, glsn=9)
    again = OrderState(state.snapshot())
    assert again.snapshot() == state.snapshot()
    assert [run.run for run in again.runs.publishing] == [1]
    assert again.runs.oldest(T1) == state.runs.oldest(T1) == state.runs.publishing[0].decided


def test_the_oldest_decision_is_of_one_topic() -> None:
    """A batch that cannot be published to one topic does not hold up what is remembered of another."""
    state = cluster()
    opened(state, key="k1", name="one")
    opened(state, key="k2", name="two")
    publish(state, 1, 0, part("a", topic=T2, hint=LS3))
    publish(state, 2, 0, part("b"))
    first, second = state.runs.publishing
    assert (state.runs.oldest(T2), state.runs.oldest(T1)) == (first.decided, second.decided)
    assert first.decided < second.decided


# Expiry.


def staged(state: OrderState, *batches: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """From (run, batch, generation, age) to what may be dropped."""
    asked = tuple(r.StagedBatch(RunId(run), BatchNumber(batch), gen, age) for run, batch, gen, age in batches)
    answer = ask(state, r.StagedRequest(N1, asked))
    assert isinstance(answer, r.StagedAnswer)
    return [(batch.run, batch.batch, batch.generation) for batch in answer.drop]


def test_what_is_published_or_older_may_be_dropped_and_nothing_else() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 4, part("a"))
    young = [(1, batch, 1, 5) for batch in (3, 4, 5)]
    assert staged(state, *young) == [(1, 3, 1)], "batch 4 is decided and not published, 5 is not decided"
    published(state, 1, 4)
    assert staged(state, *young) == [(1, 3, 1), (1, 4, 1)]


def test_a_decided_batch_is_never_dropped_before_it_is_published_however_old() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"))
    assert staged(state, (1, 0, 1, 100 * HOUR)) == []
    opened(state, key="k2", replay=True)
    state.apply(d.ExpireStaged(RunId(1)))
    assert staged(state, (1, 0, 1, 100 * HOUR)) == [], "not even if its run is over"
    assert state.runs.get(RunId(1)).generation == 2  # type: ignore[union-attr]


def test_what_nobody_decides_on_expires_by_a_decision() -> None:
    state = cluster()
    opened(state)
    assert staged(state, (1, 0, 1, HOUR)) == []
    assert staged(state, (1, 0, 1, HOUR + 1), (1, 1, 1, 5)) == [(1, 0, 1), (1, 1, 1)]
    assert opened(state).generation == 2
    with pytest.raises(StagedExpired) as refusal:
        publish(state, 1, 0, part("a", generation=1))
    assert (refusal.value.given, refusal.value.current) == (1, 2)
    assert "stage" in refusal.value.message
    assert publish(state, 1, 0, part("b", generation=2)) is None
    assert staged(state, (1, 0, 1, 5)) == [], "the batch is decided now, so all of it waits"


def test_what_no_node_of_the_cluster_holds_is_not_decided_on() -> None:
    state = cluster()
    opened(state)
    away = structs.replace(part("a"), holders=(StorageNodeId(98), StorageNodeId(99)))
    with pytest.raises(StagedExpired, match=r"removed since \(98, 99\): stage the rows again"):
        publish(state, 1, 0, part("b"), away)
    assert state.runs.publishing == []
    assert publish(state, 1, 0, structs.replace(away, holders=(StorageNodeId(98), N1))) is None
    assert state.runs.publishing[0].batch == 0


def test_only_the_present_generation_expires() -> None:
    state = cluster()
    opened(state)
    state.apply(d.ExpireStaged(RunId(1)))
    assert staged(state, (1, 0, 1, 9 * HOUR)) == [(1, 0, 1)]
    assert opened(state).generation == 2, "the old parts are gone, the new ones are not concerned"


def test_what_a_fenced_run_staged_may_be_dropped() -> None:
    state = cluster()
    opened(state, key="k1")
    opened(state, key="k2")
    assert staged(state, (1, 0, 1, 5), (2, 0, 1, 5)) == [(1, 0, 1)]


def test_what_is_staged_for_a_run_that_was_never_opened_is_dropped_when_it_is_old() -> None:
    state = cluster()
    opened(state)
    before = state.index
    assert staged(state, (2, 0, 1, HOUR), (2, 1, 1, 9 * HOUR), (10**6, 0, 1, 5), (10**6, 1, 1, 9 * HOUR)) == [
        (2, 1, 1),
        (10**6, 1, 1),
    ]
    assert state.index == before, "there is nothing to decide"


def test_there_is_a_limit_to_what_can_be_asked_at_once() -> None:
    state = cluster()
    with pytest.raises(InvalidArgument):
        staged(state, *((1, i, 1, 0) for i in range(run_requests.STAGED_BATCHES_MAX + 1)))


# What is forgotten.


def test_runs_for_one_batch_are_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FINISHED_RUNS_MAX", 2)
    state = cluster()
    for i in range(1, 5):
        opened(state, name="", key=f"k{i}", once=True)
        publish(state, i, 0, part(f"p{i}"))
        if i != 1:
            published(state, i, 0, glsn=i)
    opened(state, name="", key="k5", once=True)
    assert [run.run for run in state.runs] == [1, 3, 4, 5], "the first one is still to be published"
    assert staged(state, (2, 0, 1, 5)) == [(2, 0, 1)]


def test_a_late_retry_of_a_single_batch_publishes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FINISHED_RUNS_MAX", 2)
    monkeypatch.setattr(finished_runs, "KEPT_MAX", 3)
    state = cluster()
    for i in range(1, 5):
        opened(state, name="", key=f"k{i}", once=True)
        publish(state, i, 0, part(f"p{i}"))
        published(state, i, 0, glsn=i)
    opened(state, name="", key="k5", once=True)
    assert [run.run for run in state.runs] == [3, 4, 5]
    for known in (state, OrderState(state.snapshot())):
        before = known.index
        assert publish(known, 2, 0, part("p2")) == r.PublishAnswer(), "it is recognised"
        for again in ("k1", "k2"):
            with pytest.raises(Refused, match="its single batch is in the log"):
                opened(known, name="", key=again, once=True)
        assert known.index == before
    # Only so many are kept.
    for i in range(5, 9):
        publish(state, i, 0, part(f"p{i}"))
        published(state, i, 0, glsn=i)
        opened(state, name="", key=f"k{i + 1}", once=True)
    assert [run.run for run in state.runs.finished.snapshot()] == [4, 5, 6]
    with pytest.raises(NotFound):
        publish(state, 2, 0, part("p2"))


def test_one_principal_does_not_use_up_what_is_kept_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_runs, "KEPT_MAX", 40)
    kept = finished_runs.FinishedRuns()
    kept.add(RunId(1), "k1", "ann")
    for number in range(2, 100):
        kept.add(RunId(number), f"k{number}", "mallory")
    assert [one.run for one in kept.snapshot()] == [1, 96, 97, 98, 99]
    assert kept.with_key("k1") == 1


def test_runs_of_queries_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FINISHED_RUNS_MAX", 1)
    monkeypatch.setattr(runs, "UNDECIDED_RUNS_MAX", 1)
    state = cluster()
    opened(state, name="", key="query")
    publish(state, 1, 0)
    for i in range(5):
        opened(state, name="", key=f"k{i}", once=True)
    assert opened(state, name="", key="query").last_batch == 0
    assert [run.run for run in state.runs if run.once] == [6]


def test_of_runs_without_a_name_those_that_published_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "UNNAMED_RUNS_MAX", 3)
    monkeypatch.setattr(runs, "UNDECIDED_RUNS_MAX", 2)
    state = cluster()
    opened(state, name="query", key="named")
    for i in range(2, 7):
        opened(state, name="", key=f"k{i}")
        # The second run is old and published last; the third is at rest, but has something to publish.
        publish(state, i, 0, *([part("a")] if i == 3 else []))
        publish(state, 2, i, part(f"p{i}"))
        published(state, 2, i, glsn=i)
    for i in range(7, 11):
        opened(state, name="", key=f"k{i}")
    assert [run.run for run in state.runs] == [1, 2, 3, 5, 6, 9, 10]
    assert opened(state, name="", key="k2").last_batch == 6
    with pytest.raises(NotFound):
        publish(state, 4, 1)


def test_only_so_many_fenced_runs_of_a_name_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FINISHED_RUNS_MAX", 2)
    state = cluster()
    for i in range(6):
        opened(state, key=f"k{i}")
    assert [run.run for run in state.runs] == [4, 5, 6]


def test_a_dropped_run_is_over_and_what_it_held_up_goes_on() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"), part("b", topic=T2, hint=LS3))
    published(state, 1, 0)
    before = state.snapshot()
    assert ask(state, r.DropRunRequest(RunId(1))) == r.Done()
    for known in (state, OrderState(state.snapshot())):
        run = known.runs.get(RunId(1))
        assert run is not None
        assert known.runs.publishing == []
        assert [group.topic for group in run.groups] == [T1]
        with pytest.raises(RunFenced, match="run 1 was dropped by an operator"):
            publish(known, 1, 1, part("c"))
        with pytest.raises(RunFenced, match="dropped"):
            opened(known)
        # The name is free, and the one that was dropped stays so.
        assert opened(known, key="k2", replay=True).run == 2
        assert run.fenced_by == 1
    told = state.events[-2]
    assert (told.kind, told.reason) == ("DropRun", "an operator gave up batch 0: 2 rows for topic 'second'")
    # A run that was fenced may hold things up as well.
    state = OrderState(before)
    opened(state, key="k2", replay=True)
    ask(state, r.DropRunRequest(RunId(1)))
    assert state.runs.publishing == []
    assert opened(state, key="k2").run == 2


def test_only_a_run_that_holds_something_up_can_be_dropped() -> None:
    state = cluster()
    opened(state)
    with pytest.raises(Refused, match="holds nothing up"):
        ask(state, r.DropRunRequest(RunId(1)))
    with pytest.raises(NotFound, match="no run 2"):
        ask(state, r.DropRunRequest(RunId(2)))


def test_operators_hear_of_runs_that_open_move_and_expire() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, part("a"))
    state.apply(d.Seal(LS1, Epoch(1), LLSN(0), (N1, N2), "test", final=True))
    state.apply(d.MoveGroup(RunId(1), BatchNumber(0), T1, LS2, "it is sealed"))
    state.apply(d.ExpireStaged(RunId(1), "too old"))
    told = [(event.kind, event.what) for event in state.events][-4:]
    assert told[0] == ("OpenRun", "run 1 opened under the name 'query'")
    assert told[2] == ("MoveGroup", "batch 0 of run 1 goes to log stream 2 of topic number 1")
    assert told[3][0] == "ExpireStaged"


def test_a_principal_cannot_make_runs_of_others_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "UNDECIDED_RUNS_MAX", 20)
    registry = runs.RunRegistry(RunId(0), ())
    for number in range(1, 42):
        by = RequestOrigin("victim" if number == 1 else "eve")
        registry.apply(d.OpenRun(RunId(number), "", f"key {number}", by=by), DecisionIndex(number))
    assert [run.run for run in registry] == [1, 40, 41]
