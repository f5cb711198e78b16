"""A name that has published is guarded: a new checkpoint under it would publish the same rows a second time."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs
from test_runs import LS3, T2, ask, cluster, opened, part, published

from cutwater.core import requests as r
from cutwater.core.order import decisions as d
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.publish import runs
from cutwater.errors import InvalidArgument, NotFound, OutputExists, Refused, RunFenced
from cutwater.types import GLSN, BatchNumber, RunId, TopicId


def publish(state: OrderState, run: int, batch: int, *, position: int | None, rows: int = 2, glsn: int = 0) -> None:
    """Decide a batch, and publish it."""
    state.high_watermark = GLSN(10_000)
    parts = (part(f"{run} {batch}", rows=rows),) if rows else ()
    ask(state, r.PublishRequest(RunId(run), BatchNumber(batch), parts, None if position is None else GLSN(position)))
    if rows:
        published(state, run, batch, glsn=glsn or position or 1, count=rows)


def start(state: OrderState, key: str, name: str = "query", **where: object) -> r.RunAnswer:
    answer = ask(state, r.OpenRunRequest(name, key, False, r.RunStart(**where)))  # type: ignore[arg-type]
    assert isinstance(answer, r.RunAnswer)
    return answer


def refused(state: OrderState, key: str = "new", name: str = "query", **where: object) -> OutputExists:
    index = state.index
    with pytest.raises(OutputExists) as refusal:
        start(state, key, name, **where)
    assert state.index == index, "nothing is decided"
    return refusal.value


def test_a_new_checkpoint_under_a_name_that_has_published_is_refused_and_fences_nobody() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70, rows=100, glsn=201)
    error = refused(state)
    assert (error.name, error.rows, error.glsn, error.position) == ("query", 100, 300, 70)
    for told in (
        "100 rows",
        "GLSN 300",
        "GLSN 70",
        "--start 71), without the state of earlier input: open windows, timers",
        "replay_output=True",
        "--replay-output",
        "forget query",
    ):
        assert told in error.message
    publish(state, 1, 1, position=71)
    assert opened(state).last_batch == 1, "the run of before goes on"


def test_a_question_opens_and_fences_nobody() -> None:
    state = cluster()
    assert ask(state, r.OpenRunRequest("query", "k1", is_question=True)) == r.RunAnswer(RunId(0), 1, BatchNumber(-1))
    assert state.runs.last == 0
    opened(state)
    publish(state, 1, 0, position=3)
    with pytest.raises(OutputExists):
        ask(state, r.OpenRunRequest("query", "k2", is_question=True))
    answer = ask(state, r.OpenRunRequest("query", "k2", start=r.RunStart(replay=True), is_question=True))
    assert (answer, state.runs.last) == (r.RunAnswer(RunId(0), 1, BatchNumber(-1)), 1)


def test_a_name_is_reused_on_purpose() -> None:
    """By replay, or at a start beyond the input of the output; a start in the midst of it is refused."""
    for where in ({"replay": True}, {"position": GLSN(70)}, {"position": GLSN(500)}):
        state = cluster()
        opened(state)
        publish(state, 1, 0, position=70)
        assert start(state, "new", **where).run == 2
        with pytest.raises(RunFenced):
            opened(state)
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70)
    refused(state, position=GLSN(69))
    refused(state, position=GLSN(0))


def test_an_operator_lets_a_name_begin_anew() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70)
    assert ask(state, r.ForgetOutputRequest("query")) == r.Done()
    assert "query" in state.events[-1].what
    for known in (OrderState(state.snapshot()), state):
        assert start(known, "new").run == 2
        with pytest.raises(NotFound, match="under the name 'query'; names that have: none"):
            ask(known, r.ForgetOutputRequest("query"))
    publish(state, 2, 0, position=70)
    refused(state, "third")


def test_where_no_rows_were_published_nothing_is_guarded() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70, rows=0)
    assert start(state, "new").run == 2
    publish(state, 2, 0, position=70, rows=0)
    publish(state, 2, 1, position=80, rows=3)
    publish(state, 2, 2, position=90, rows=0)
    error = refused(state, "newer", position=GLSN(79))
    assert (error.rows, error.position) == (3, 80), "what came after the last rows repeats none"
    assert start(state, "later", position=GLSN(80)).run == 3


def test_runs_without_a_name_and_for_a_single_batch_are_not_guarded() -> None:
    state = cluster()
    opened(state, "", "a")
    publish(state, 1, 0, position=None)
    opened(state, "", "b")
    opened(state, "job", "c", once=True)
    publish(state, 3, 0, position=None)
    opened(state, "job", "d", once=True)
    assert start(state, "e", "job").run == 5
    assert state.runs.outputs == ()


def test_a_batch_write_under_the_name_of_a_query_is_refused_and_fences_nobody() -> None:
    state = cluster()
    opened(state)
    request = r.OpenRunRequest("query", "single", once=True)
    for known in (state, OrderState(state.snapshot())):
        with pytest.raises(Refused, match=r"'query' is that of a query with a checkpoint, run 1.*under another name"):
            ask(known, request)
    publish(state, 1, 0, position=70)
    opened(state, "job", "c", once=True)
    opened(state, "job", "d", once=True)
    # What older versions have decided stands: there the batch write has taken the name over, and the next one may.
    state.apply(d.OpenRun(RunId(4), "query", "single", once=True))
    assert opened(state, "query", "next", once=True).run == 5


def test_a_savepoint_of_a_run_that_has_published_nothing_is_judged_by_its_position() -> None:
    """A run that replays the output, and has not come so far as to publish, does not hide what was published before."""
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70)
    assert start(state, "again", replay=True).run == 2
    publish(state, 2, 0, position=None, rows=0)
    savepoint = r.RunStart(GLSN(30), "again", BatchNumber(0))
    for position in (30, 70):
        with pytest.raises(OutputExists):
            ask(state, r.OpenRunRequest("query", "third", start=structs.replace(savepoint, position=GLSN(position))))
    # The savepoint of one that began past the output is past it as well.
    further = r.OpenRunRequest("query", "third", start=structs.replace(savepoint, position=GLSN(71)))
    assert ask(OrderState(state.snapshot()), further) == r.RunAnswer(RunId(3), 1, BatchNumber(-1))


def test_a_savepoint_goes_on_after_the_output_and_not_behind_it() -> None:
    state = cluster()
    opened(state)
    for batch in (0, 1):
        publish(state, 1, batch, position=None)
    error = refused(state)
    assert "an unknown position" in error.message
    assert "--start" not in error.message
    with pytest.raises(OutputExists):
        ask(state, r.OpenRunRequest("query", "new", start=r.RunStart(key="k1", batch=BatchNumber(0))))
    with pytest.raises(OutputExists):
        ask(state, r.OpenRunRequest("query", "new", start=r.RunStart(key="never seen", batch=BatchNumber(9))))
    goes_on = r.RunStart(key="k1", batch=BatchNumber(1))
    ask(state, r.OpenRunRequest("query", "new", start=goes_on))
    # Only once: as soon as that one publishes, the output is past the savepoint.
    ask(state, r.OpenRunRequest("query", "newer", start=goes_on))
    publish(state, 3, 0, position=None)
    with pytest.raises(OutputExists):
        ask(state, r.OpenRunRequest("query", "newest", start=goes_on))
    # Whether a run that has published nothing is past what was published before it, only positions tell.
    opened(state, key="silent", replay=True)
    with pytest.raises(OutputExists):
        ask(state, r.OpenRunRequest("query", "last", start=r.RunStart(key="silent", batch=BatchNumber(0))))


def test_the_furthest_input_counts_whoever_read_it() -> None:
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=100)
    opened(state, key="again", replay=True)
    publish(state, 2, 0, position=40)
    assert refused(state, position=GLSN(40)).position == 100
    # One that does not say makes it unknown, and its own later batches known again.
    publish(state, 2, 1, position=None)
    assert refused(state, position=GLSN(1000)).position == -1
    publish(state, 2, 2, position=50)
    assert refused(state, position=GLSN(50)).position == 100
    publish(state, 2, 3, position=120)
    assert refused(state, position=GLSN(119)).position == 120


def test_a_run_that_did_not_say_leaves_the_input_unknown() -> None:
    """However many batches a later run publishes: how far the earlier one had read, nobody can know."""
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=None)
    opened(state, key="again", replay=True)
    for batch in (0, 1):
        publish(state, 2, batch, position=40 + batch)
        for known in (state, OrderState(state.snapshot())):
            assert refused(known, position=GLSN(1000)).position == -1


def test_a_savepoint_where_the_input_ended_is_behind_what_the_end_has_published() -> None:
    """At the end of the input windows and timers fire without another position."""
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70)
    savepoint = r.OpenRunRequest("query", "new", start=r.RunStart(GLSN(70), "k1", BatchNumber(0)), is_question=True)
    assert ask(state, savepoint)
    publish(state, 1, 1, position=70)
    for key in ("k1", "of another name"):
        with pytest.raises(OutputExists):
            ask(state, structs.replace(savepoint, start=structs.replace(savepoint.start, key=key)))
    # One without state repeats nothing.
    assert start(state, "new", position=GLSN(70)).run == 2


def test_rows_that_will_never_be_published_do_not_count() -> None:
    state = cluster()
    opened(state)
    state.high_watermark = GLSN(9)
    parts = (part("a", rows=5), part("b", topic=T2, hint=LS3, rows=7))
    ask(state, r.PublishRequest(RunId(1), BatchNumber(0), parts, GLSN(9)))
    assert refused(state).rows == 12, "decided rows will be published"
    published(state, 1, 0, glsn=10, count=5)
    before = state.snapshot()
    ask(state, r.DropRunRequest(RunId(1)))
    assert refused(state).rows == 5
    state = OrderState(before)
    state.runs.delete_topic(TopicId(2))
    assert refused(state).rows == 5


def test_outputs_are_never_pushed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FINISHED_RUNS_MAX", 2)
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70)
    for number in range(2, 8):
        opened(state, key=f"k{number}", replay=True)
    assert state.runs.get(RunId(1)) is None, "the run is forgotten"
    for known in (state, OrderState(state.snapshot())):
        assert refused(known).position == 70


def test_what_was_stored_before_outputs_were_kept_is_guarded_too() -> None:
    """An old snapshot and old decisions lack the new fields: rows and input are unknown, and the guard holds."""
    state = cluster()
    opened(state)
    publish(state, 1, 0, position=70, rows=3, glsn=11)
    opened(state, "other", "o1")
    opened(state, "single", "s1", once=True)
    publish(state, 3, 0, position=None)
    old = structs.replace(state.snapshot(), outputs=None)
    plain = msgspec.to_builtins(old)
    del plain["outputs"]
    known = OrderState(msgspec.convert(plain, Snapshot))
    error = refused(known, position=GLSN(5_000))
    assert (error.rows, error.glsn, error.position) == (-1, 13, -1)
    assert "an unknown number of rows" in error.message
    assert start(known, "o2", "other").run == 4
    assert start(known, "s2", "single").run == 5
    # Its own next batch says where it is.
    publish(known, 1, 1, position=90)
    assert refused(known, position=GLSN(89)).position == 90
    assert start(known, "new", position=GLSN(90)).run == 6


def test_a_decision_of_before_is_read() -> None:
    stored = msgspec.to_builtins(d.DecideBatch(RunId(1), BatchNumber(0), ()))
    del stored["position"]
    assert msgspec.convert(stored, d.DecideBatch).position is None


def test_a_position_beyond_the_log_is_no_input() -> None:
    state = cluster()
    opened(state)
    for position in (-1, state.high_watermark + 1):
        with pytest.raises(InvalidArgument, match=f"up to GLSN {position}, but the log ends at"):
            ask(state, r.PublishRequest(RunId(1), BatchNumber(0), (part("a"),), GLSN(position)))
