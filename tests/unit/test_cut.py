"""The cut and its time (docs/protocol.md), as examples."""

from __future__ import annotations

import pytest

from cutwater.core.order.cut import Candidate, StreamCommit, committable_end, make_cut, next_cut_time
from cutwater.errors import ProtocolViolation
from cutwater.types import GLSN, LLSN, SECOND, CommitContext, CutTime, Epoch, LogStreamId

LS1, LS2, LS3 = LogStreamId(1), LogStreamId(2), LogStreamId(3)
NOW = CutTime(1_700_000_000 * SECOND)


def stream(lsid: LogStreamId, committed: int, *uncommitted: int | None, epoch: int = 1) -> Candidate:
    """A stream that is committed to LLSN ``committed``, and how many more records each replica has on disk."""
    ends = tuple(None if n is None else LLSN(committed + n) for n in uncommitted)
    return Candidate(lsid, Epoch(epoch), LLSN(committed), ends)


def ranges(commits: tuple[StreamCommit, ...]) -> dict[LogStreamId, tuple[int, int]]:
    return {c.stream: (c.context.first_glsn, c.context.last_glsn) for c in commits}


def test_the_worked_example() -> None:
    """'HWM 10, LS1 reports 3,3,3 and LS2 reports 2,4,3 uncommitted → LS1 gets 11–13, LS2 gets 14–15, HWM 15.'"""
    commits = make_cut(GLSN(10), NOW, [stream(LS1, 4, 3, 3, 3), stream(LS2, 6, 2, 4, 3, epoch=5)])
    assert commits == (
        StreamCommit(LS1, CommitContext(Epoch(1), LLSN(5), GLSN(11), 3, GLSN(15), GLSN(10), NOW)),
        StreamCommit(LS2, CommitContext(Epoch(5), LLSN(7), GLSN(14), 2, GLSN(15), GLSN(10), NOW)),
    )
    assert ranges(commits) == {LS1: (11, 13), LS2: (14, 15)}


def test_glsns_go_by_stream_id_and_not_by_who_came_first() -> None:
    """'GLSNs are handed out in `lsid` order from HWM + 1.'"""
    commits = make_cut(GLSN(0), NOW, [stream(LS3, 0, 1), stream(LS1, 0, 2), stream(LS2, 0, 3)])
    assert [c.stream for c in commits] == [LS1, LS2, LS3]
    assert ranges(commits) == {LS1: (1, 2), LS2: (3, 5), LS3: (6, 6)}


@pytest.mark.parametrize("reports", [(None, 3, 3), (3, 3, None), (None, None, None), (None,)])
def test_a_replica_that_has_not_reported_keeps_its_stream_out(reports: tuple[int | None, ...]) -> None:
    """'to `end = min(durable end)` over *all* replicas of the current epoch, nothing if one has not reported.'"""
    assert make_cut(GLSN(10), NOW, [stream(LS1, 4, *reports)]) == ()
    assert committable_end(stream(LS1, 4, *reports)) == 4


def test_the_others_go_on_without_a_stream_that_waits() -> None:
    """'nothing if one has not reported': nothing of that stream; its number leaves no hole in the GLSNs."""
    commits = make_cut(GLSN(10), NOW, [stream(LS1, 0, 3, None), stream(LS2, 0, 2, 2), stream(LS3, 0, 0, 9)])
    assert ranges(commits) == {LS2: (11, 12)}
    assert commits[0].context.high_watermark == 12


def test_a_stream_without_replicas_has_nothing_to_commit() -> None:
    """A minimum over nobody is no reason to commit anything."""
    assert make_cut(GLSN(10), NOW, [stream(LS1, 4)]) == ()
    assert make_cut(GLSN(10), NOW, []) == ()


def test_the_begin_is_what_the_order_layer_stores() -> None:
    """'per log stream from `begin = the stream's committed LLSN + 1`, which the MR stores and never trims'."""
    (commit,) = make_cut(GLSN(100), NOW, [stream(LS2, 41, 1, 7, 2)])
    assert (commit.context.first_llsn, commit.context.last_llsn) == (42, 42)


@pytest.mark.parametrize("uncommitted", [(-1, 3, 3), (3, 3, -4), (-1,)])
def test_a_durable_end_that_shrank_is_never_believed(uncommitted: tuple[int, ...]) -> None:
    """'A durable end that shrinks below what was committed is an alarm'."""
    with pytest.raises(ProtocolViolation, match="quarantined"):
        make_cut(GLSN(10), NOW, [stream(LS1, 4, *uncommitted), stream(LS2, 4, 1)])


def test_every_commit_of_a_cut_carries_its_name_and_time() -> None:
    """'high watermark … names the cut (strictly increasing)'; 'A cut carries a time: the record's ingestion time'."""
    commits = make_cut(GLSN(7), NOW, [stream(LS1, 0, 2), stream(LS2, 0, 2)])
    assert {(c.context.high_watermark, c.context.prev_high_watermark, c.context.time) for c in commits} == {
        (GLSN(11), GLSN(7), NOW)
    }


class TestCutTime:
    """'Cut time never goes back and never stands still, over leader changes too (behind the last stored time, it
    advances at half speed).'"""

    def test_it_is_the_wall_clock_while_that_is_ahead(self) -> None:
        assert next_cut_time(CutTime(100), 90, 101) == 101
        assert next_cut_time(CutTime(0), 0, NOW) == NOW

    def test_it_never_stands_still(self) -> None:
        assert next_cut_time(CutTime(100), 100, 100) == 101
        assert next_cut_time(CutTime(100), 99, 100) == 101

    def test_it_never_goes_back_when_the_clock_does(self) -> None:
        assert next_cut_time(CutTime(1_000), 1_000, 400) == 1_001

    def test_behind_the_last_stored_time_it_advances_at_half_speed(self) -> None:
        assert next_cut_time(CutTime(1_000_000), 100, 100 + 60) == 1_000_030

    def test_a_clock_that_was_set_back_is_caught_up_with(self) -> None:
        """At half speed, a clock that is an hour behind has caught up after two hours."""
        last, last_wall = CutTime(3_600 * SECOND), 0
        for second in range(1, 7_300):
            time = next_cut_time(last, last_wall, second * SECOND)
            assert time > last
            if second < 7_200:
                assert time == (3_600 * SECOND + second * SECOND // 2)
            last, last_wall = time, second * SECOND
        assert last == 7_299 * SECOND

    def test_a_new_leader_whose_clock_is_behind_goes_on_after_the_stored_time(self) -> None:
        """A new leader has no previous cut of its own: it measures from when it began to lead."""
        stored = CutTime(NOW + 10 * SECOND)
        took_over = NOW
        assert next_cut_time(stored, took_over, took_over) == stored + 1
        assert next_cut_time(stored, took_over, took_over + 2 * SECOND) == stored + SECOND
