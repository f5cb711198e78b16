"""A test that begins with a savepoint goes on as if it had never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from kit import ROWS, Last, payments, pipeline, taken

from cutwater.errors import InvalidArgument, NotFound, Refused
from cutwater.pipeline import Pipeline, Watermark

MORE = [{"user": f"u{i % 9}", "amount": i % 13, "at": 1_000 * i} for i in range(30, 75)]


def tail(whole: Any, part: Any, topic: str) -> list[dict[str, Any]]:
    """What a topic gets after the savepoint, by the test that did not stop."""
    rows = whole[topic]
    return rows[len(rows) - len(part[topic]) :]


@pytest.mark.parametrize("seed", range(3))
def test_rows_state_timers_and_clocks_go_on(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    p, rows = pipeline(), payments(30) + MORE
    rows = [{**row, "_stream": choice.choice((1, 2)), "_time": 100 * i} for i, row in enumerate(rows)]
    cut = choice.randint(5, 60)
    whole = p.test({"payments": rows})
    before = p.test({"payments": rows[:cut]}, drain=False)
    savepoint = taken(tmp_path / "sp", cut, p, rows[:cut], with_clock=True)
    after = p.test({"payments": rows[cut:]}, from_savepoint=savepoint.path)
    for topic in ("out", "windows"):
        assert before[topic] + after[topic] == whole[topic], f"seed {seed}"
    paused = p.test({"payments": rows[cut:]}, from_savepoint=savepoint, drain=False)
    unbroken = p.test({"payments": rows}, drain=False)
    assert paused.watermark == unbroken.watermark
    for uid in ("last", "w"):
        assert paused.state(uid) == unbroken.state(uid)
        assert paused.timers(uid) == unbroken.timers(uid)
    # Without a word, rows are in the first log stream of the savepoint, and positions and time go on.
    one = p.test({"payments": [{"user": "x", "amount": 1, "at": 75_000}]}, from_savepoint=savepoint, drain=False)
    assert one.state("last")["x"]["last"] == 1


def test_what_a_run_refuses_to_start_from_a_test_refuses(tmp_path: Path) -> None:
    savepoint = taken(tmp_path / "sp", with_clock=True)
    p, row = pipeline(), {"user": "u1", "amount": 1, "at": 99_000}
    with pytest.raises(InvalidArgument, match=r"_glsn is 30 .*: the savepoint is at GLSN 30, and rows come after it"):
        p.test({"payments": [{**row, "_glsn": 30}]}, from_savepoint=savepoint)
    with pytest.raises(NotFound, match="there is no directory"):
        p.test({"payments": [row]}, from_savepoint=tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="allow_non_restored_state is about a savepoint"):
        p.test({"payments": [row]}, allow_non_restored_state=True)
    other = Pipeline("pays")
    pay = other.source("payments", schema=ROWS, event_time="at", watermark=Watermark.ascending())
    pay.process(key="user", function=Last(), uid="renamed", schema=ROWS).sink("out", uid="out")
    with pytest.raises(Refused, match="has state of 'last', 'w', and the program has no operator with that uid"):
        other.test({"payments": [row]}, from_savepoint=savepoint)
    assert other.test({"payments": [row]}, from_savepoint=savepoint, allow_non_restored_state=True).state("renamed")
    ended = taken(tmp_path / "ended", ended=True)
    with pytest.raises(Refused, match="was taken after the input of 'pays' had ended"):
        p.test({"payments": [row]}, from_savepoint=ended)
