"""Assignments of a job share a run: only the newest one opens it, stages for it and publishes. A decided batch has one
range of the input."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET, structs
from test_runs import AROUND, ask, cluster, part, published

from cutwater.core import requests as r
from cutwater.core.order import decisions as d
from cutwater.core.order.request_handling import decide
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.publish.staged import StagedPart
from cutwater.errors import (
    BatchDiffers,
    ContradictoryCommand,
    InvalidArgument,
    OutputExists,
    Refused,
    RunFenced,
    StagedExpired,
)
from cutwater.storagenode.publish import run_epochs
from cutwater.storagenode.publish.run_epochs import RunEpochs
from cutwater.types import GLSN, BatchNumber, InputRange, JobEpoch, Part, RunId, StorageNodeId, TopicId

ANEW = r.RunStart(replay=True)


def opened(
    state: OrderState,
    epoch: int = 0,
    key: str = "k1",
    *,
    name: str = "job",
    start: r.RunStart = ANEW,
    is_question: bool = False,
) -> r.RunAnswer:
    given = JobEpoch(epoch) if epoch else UNSET
    answer = ask(state, r.OpenRunRequest(name, key, False, start, is_question, given))
    assert isinstance(answer, r.RunAnswer)
    return answer


def publish(
    state: OrderState, epoch: int, batch: int, *parts: Part, run: int = 1, read: tuple[int, int] | None = None
) -> r.Answer | None:
    given = UNSET if read is None else InputRange(GLSN(read[0]), GLSN(read[1]))
    return ask(
        state,
        r.PublishRequest(RunId(run), BatchNumber(batch), parts, None, JobEpoch(epoch) if epoch else UNSET, given),
    )


def reloaded(state: OrderState) -> OrderState:
    """The state as the next leader loads it."""
    return OrderState(msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()), type=Snapshot))


def both(state: OrderState) -> tuple[OrderState, OrderState]:
    return state, reloaded(state)


def test_a_later_assignment_opens_the_same_run_and_ends_those_before() -> None:
    state = cluster()
    assert opened(state, 3) == r.RunAnswer(RunId(1), 1, BatchNumber(-1), JobEpoch(3))
    index = state.index
    assert opened(state, 3).generation == 1
    assert state.index == index, "asking again decides nothing"
    assert opened(state, 7) == r.RunAnswer(RunId(1), 2, BatchNumber(-1), JobEpoch(7))
    for known in both(state):
        with pytest.raises(RunFenced, match=r"assignment 3 of job .job. is over, and assignment 7 publishes now"):
            opened(known, 3)
        with pytest.raises(RunFenced):
            publish(known, 3, 0, part("a", generation=2))
        assert opened(known, 7).generation == 2


def test_what_an_earlier_assignment_has_staged_is_not_published_by_a_later_one() -> None:
    state = cluster()
    opened(state, 3)
    opened(state, 4)
    with pytest.raises(StagedExpired):
        publish(state, 4, 0, part("old", generation=1))
    batch = r.StagedBatch(RunId(1), BatchNumber(0), 1)
    answer = ask(state, r.StagedRequest(StorageNodeId(1), (batch,)))
    assert answer == r.StagedAnswer((batch,), {RunId(1): JobEpoch(4)})


def test_a_request_that_waits_for_the_batch_before_is_refused_when_another_assignment_opens_the_run() -> None:
    state = cluster()
    opened(state, 3)
    publish(state, 3, 0, part("a"))
    assert publish(state, 3, 1, part("b")) is None, "it waits"
    assert opened(state, 4).last_batch == 0, "what was decided stands"
    published(state, 1, 0)
    with pytest.raises(RunFenced):
        publish(state, 3, 1, part("b"))
    with pytest.raises(RunFenced):
        publish(state, 3, 0, part("a"))
    assert isinstance(publish(state, 4, 0), r.PublishAnswer), "the successor gets the answer about it"


def test_a_run_of_a_job_is_for_the_job_alone() -> None:
    state = cluster()
    opened(state, 3)
    for attempt in (lambda: opened(state), lambda: publish(state, 0, 0, part("a"))):
        with pytest.raises(Refused, match=r"belongs to the job 'job'.*start from a savepoint with a new checkpoint"):
            attempt()
    with pytest.raises(InvalidArgument, match="assignment 4 has not opened run 1 yet"):
        publish(state, 4, 0, part("a"))


def test_a_job_continues_a_run_that_was_opened_without_one() -> None:
    state = cluster()
    assert opened(state).job_epoch is UNSET
    publish(state, 0, 0, part("a"))
    published(state, 1, 0)
    assert opened(state, 5) == r.RunAnswer(RunId(1), 2, BatchNumber(0), JobEpoch(5))
    with pytest.raises(Refused):
        publish(state, 0, 1, part("b"))


def test_no_earlier_assignment_takes_the_name_over_with_a_new_key() -> None:
    state = cluster()
    opened(state, 5, "k1")
    for known in both(state):
        with pytest.raises(RunFenced, match="and assignment 5 publishes now"):
            opened(known, 4, "k2")
        assert opened(known, 5, "k2").run == 2, "an assignment may begin anew"
        with pytest.raises(RunFenced):
            opened(known, 5, "k1")
        with pytest.raises(RunFenced):
            opened(known, 4, "k3")
        assert opened(known, 4, "k3", name="other").run == 3, "other names are not concerned"


def test_a_later_assignment_goes_on_with_a_run_after_another_that_decided_nothing() -> None:
    """The version of the job to which that one belonged did not come up."""
    state = cluster()
    opened(state, 3, "k1")
    publish(state, 3, 0, part("a"))
    published(state, 1, 0)
    opened(state, 4, "k2")
    with pytest.raises(RunFenced):
        publish(state, 3, 1, part("b"))
    for known in both(state):
        with pytest.raises(RunFenced):
            opened(known, 4, "k1")
        assert opened(known, 5, "k1", is_question=True).last_batch == 0
        assert opened(known, 5, "k1") == r.RunAnswer(RunId(1), 2, BatchNumber(0), JobEpoch(5))
        for again in both(known):
            with pytest.raises(RunFenced):
                publish(again, 4, 0, part("b"), run=2)
            with pytest.raises(RunFenced):
                opened(again, 4, "k2")
        assert publish(known, 5, 1, part("c", generation=2)) is None, "it is being published"


def test_no_assignment_goes_on_with_a_run_after_another_that_decided_a_batch() -> None:
    state = cluster()
    opened(state, 3, "k1")
    opened(state, 4, "k2")
    publish(state, 4, 0, run=2)
    opened(state, 5, "k3")
    for known in both(state):
        with pytest.raises(RunFenced):
            opened(known, 6, "k1")
        assert not known.runs.problem(d.RaiseRunEpoch(RunId(2), JobEpoch(6)), lambda stream: None)
        assert known.runs.problem(d.RaiseRunEpoch(RunId(1), JobEpoch(6)), lambda stream: None) == "the run is over"


def test_no_assignment_goes_on_with_a_run_after_one_without_a_job() -> None:
    state = cluster()
    opened(state, 3, "k1")
    opened(state, 0, "k2")
    with pytest.raises(RunFenced):
        opened(state, 4, "k1")


def test_assignments_before_a_start_without_a_job_are_over() -> None:
    """The job is gone, and its pipeline runs by itself, with a new checkpoint. Then there is a job again."""
    state = cluster()
    opened(state, 5, "k1")
    assert opened(state, 0, "k2").job_epoch is UNSET
    assert opened(state, 0, "k3").job_epoch is UNSET
    for known in both(state):
        for key in ("k3", "k4"):
            with pytest.raises(RunFenced, match="assignment 5"):
                opened(known, 5, key)
        assert opened(known, 6, "k3").generation == 2


def test_the_name_keeps_its_epoch_when_its_run_was_dropped() -> None:
    state = cluster()
    opened(state, 5)
    publish(state, 5, 0, part("a"))
    state.apply(d.DropRun(RunId(1)))
    for known in both(state):
        with pytest.raises(RunFenced):
            opened(known, 4, "k2")
        assert opened(known, 6, "k2").run == 2


def test_a_question_raises_nothing() -> None:
    state = cluster()
    opened(state, 3)
    index = state.index
    assert opened(state, 4, is_question=True).generation == 1
    assert opened(state, 4, "new", is_question=True).run == 0
    assert state.index == index
    with pytest.raises(RunFenced):
        opened(state, 2, is_question=True)


def test_a_name_that_has_published_is_guarded_from_assignments_too() -> None:
    state = cluster()
    opened(state, 3)
    publish(state, 3, 0, part("a"))
    published(state, 1, 0)
    with pytest.raises(OutputExists):
        opened(state, 4, "k2", start=r.RunStart())
    assert publish(state, 3, 0, part("a")), "the refused one has ended nothing"


@pytest.mark.parametrize(("epoch", "name", "once"), [(-1, "job", False), (0, "job", False), (1, "", False)])
def test_assignments_have_a_number_and_a_name(epoch: int, name: str, once: bool) -> None:
    with pytest.raises(InvalidArgument, match="assignments are numbered from 1"):
        ask(cluster(), r.OpenRunRequest(name, "k", once, job_epoch=JobEpoch(epoch)))


def test_decisions_that_contradict_the_epoch_are_refused() -> None:
    state = cluster()
    opened(state, 3)
    for wrong in (
        d.RaiseRunEpoch(RunId(9), JobEpoch(4)),
        d.RaiseRunEpoch(RunId(1), JobEpoch(3)),
        d.RaiseRunEpoch(RunId(1), JobEpoch(2)),
        d.OpenRun(RunId(2), "job", "k2", job_epoch=JobEpoch(2)),
    ):
        with pytest.raises(ContradictoryCommand):
            state.apply(wrong)
    opened(state, 3, "k2")
    publish(state, 3, 0, run=2)
    with pytest.raises(ContradictoryCommand):
        state.apply(d.RaiseRunEpoch(RunId(1), JobEpoch(4)))


def test_runs_that_no_job_opens_are_stored_and_answered_as_before() -> None:
    state = cluster()
    opened(state)
    publish(state, 0, 0, part("a"))
    decisions, answer = decide(r.OpenRunRequest("other", "k9"), state, AROUND)
    plain = msgspec.to_builtins((decisions, answer, state.snapshot().runs, state.runs.get(RunId(1))))
    text = str(plain)
    for name in ("job_epoch", "after_epoch", "input"):
        assert name not in text


# The range of the input.


def test_a_decided_batch_has_one_range_of_the_input() -> None:
    state = cluster()
    state.high_watermark = GLSN(100)
    opened(state)
    publish(state, 0, 0, part("a"), read=(0, 20))
    published(state, 1, 0)
    for known in both(state):
        assert opened(known).input == InputRange(GLSN(0), GLSN(20))
        for read in ((0, 21), (0, 19), (1, 20)):
            with pytest.raises(BatchDiffers, match=r"from GLSN 1 to 20.*old copy") as refusal:
                publish(known, 0, 0, part("b"), read=read)
            assert (refusal.value.after, refusal.value.through) == (0, 20)
        for same in ((0, 20), None):
            assert isinstance(publish(known, 0, 0, part("b"), read=same), r.PublishAnswer)
    publish(state, 0, 1, part("c"), read=(20, 30))
    assert opened(state).input == InputRange(GLSN(20), GLSN(30))


def test_a_batch_without_a_range_takes_any() -> None:
    state = cluster()
    state.high_watermark = GLSN(100)
    opened(state)
    publish(state, 0, 0)
    assert isinstance(publish(state, 0, 0, read=(0, 5)), r.PublishAnswer)


@pytest.mark.parametrize("read", [(5, 4), (-1, 4), (0, 101)])
def test_a_range_lies_in_the_log(read: tuple[int, int]) -> None:
    state = cluster()
    state.high_watermark = GLSN(100)
    opened(state)
    with pytest.raises(InvalidArgument, match="the input of a batch cannot be"):
        publish(state, 0, 0, read=read)


# Storage nodes.

STAGED = StagedPart(RunId(1), BatchNumber(0), 1, TopicId(1), "0" * 32)


def staged(epoch: int, owner: str = "", run: int = 1) -> StagedPart:
    given = JobEpoch(epoch) if epoch else UNSET
    return structs.replace(STAGED, run=RunId(run), job_epoch=given, owner=owner or UNSET)


def test_a_storage_node_takes_no_parts_of_earlier_assignments() -> None:
    epochs = RunEpochs()
    epochs.check(staged(0))
    epochs.note_part(staged(3))
    epochs.check(staged(3))
    epochs.check(staged(4))
    epochs.check(staged(1, run=2))
    for older in (staged(2), staged(0)):
        with pytest.raises(RunFenced, match="of the job of run 1 is over, and assignment 3 publishes now"):
            epochs.check(older)
    epochs.note(RunId(1), JobEpoch(5))
    epochs.note(RunId(1), UNSET)
    with pytest.raises(RunFenced):
        epochs.check(staged(4))


def test_a_storage_node_does_not_believe_other_principals() -> None:
    epochs = RunEpochs()
    epochs.note_part(staged(9, "mallory"))
    epochs.check(staged(3, "job:job"))
    epochs.note(RunId(1), JobEpoch(4))
    with pytest.raises(RunFenced):
        epochs.check(staged(3, "job:job"))


def test_a_storage_node_remembers_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_epochs, "RUNS_MAX", 2)
    epochs = RunEpochs()
    for run in (1, 2, 3):
        epochs.note(RunId(run), JobEpoch(5))
    epochs.check(staged(4, run=1))
    with pytest.raises(RunFenced):
        epochs.check(staged(4, run=3))
