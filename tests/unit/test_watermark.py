"""The rule of docs/watermarks.md as examples. Times in the examples are milliseconds, converted at the edge."""

from __future__ import annotations

import msgspec
import pytest

from cutwater.core.read.watermark import (
    MAX_WATERMARK,
    NO_WATERMARK,
    BoundedOutOfOrderness,
    Punctuated,
    Strategy,
    StreamSnapshot,
    WatermarkClock,
    WatermarkSnapshot,
    ascending,
)
from cutwater.errors import CutwaterError, InvalidArgument, ProtocolViolation
from cutwater.types import GLSN, MILLISECOND, SECOND, CutTime, EventTime, LogStreamId
from tests.clock_kit import report

S0, S1, S2 = LogStreamId(0), LogStreamId(1), LogStreamId(2)


def ms(value: int) -> int:
    return value * MILLISECOND


def bounded_ms(bound: int, idle_after_s: int = 30) -> BoundedOutOfOrderness:
    return BoundedOutOfOrderness(bound_us=ms(bound), idle_after_us=idle_after_s * SECOND)


class Log:
    """Appends to a log at the next GLSN and tells the clock; every number that comes back is in milliseconds."""

    def __init__(self, streams: dict[LogStreamId, Strategy]) -> None:
        self.clock = WatermarkClock()
        for lsid, strategy in streams.items():
            self.clock.add_stream(lsid, strategy, CutTime(0))

    def batch(self, lsid: LogStreamId, times: list[int], *, at_s: float = 0, declared: int | None = None) -> list[int]:
        seen = report(
            self.clock,
            lsid,
            self.clock.glsn + 1,
            CutTime(int(at_s * SECOND)),
            [ms(time) for time in times],
            None if declared is None else ms(declared),
        )
        return [_in_ms(watermark) for watermark in seen]

    def say(self, lsid: LogStreamId, time: int, *, at_s: float = 0) -> int:
        """One record; the watermark after it."""
        self.batch(lsid, [time], at_s=at_s)
        return self.watermark

    def declare(self, lsid: LogStreamId, declared: int, *, at_s: float = 0) -> int:
        """One record with a declared watermark; the watermark after it."""
        self.batch(lsid, [0], at_s=at_s, declared=declared)
        return self.watermark

    def tick(self, at_s: float) -> int:
        return _in_ms(self.clock.tick(GLSN(self.clock.glsn + 1), CutTime(int(at_s * SECOND))))

    @property
    def watermark(self) -> int:
        return _in_ms(self.clock.watermark)


def _in_ms(watermark: int) -> int:
    if watermark in (NO_WATERMARK, MAX_WATERMARK):
        return watermark
    assert watermark % MILLISECOND == 0
    return watermark // MILLISECOND


# "Per log stream, event time has come as far as the running maximum of its records' event times, or as far as its
# producer declared in a batch header (punctuated; a smaller declaration than the last is ignored)."


def test_event_time_is_the_running_maximum_of_the_records() -> None:
    """Reference: tumbling window, bound 3, a1 a7 a12 a9 a13 a8 b9 a25 b14."""
    log = Log({S0: bounded_ms(3)})
    after_each = [log.say(S0, time) for time in (1, 7, 12, 9, 13, 8, 9, 25, 14)]
    assert after_each == [-3, 3, 8, 8, 9, 9, 9, 21, 21]


def test_the_same_records_in_one_batch_see_the_same_watermarks() -> None:
    log = Log({S0: bounded_ms(3)})
    assert log.batch(S0, [1, 7, 12, 9, 13, 8, 9, 25, 14]) == [NO_WATERMARK, -3, 3, 8, 8, 9, 9, 9, 21]
    assert log.watermark == 21


def test_a_smaller_declaration_than_the_last_is_ignored() -> None:
    log = Log({S0: Punctuated()})
    assert [log.declare(S0, declared) for declared in (10, 7, 12)] == [10, 10, 12]


def test_a_declaration_takes_effect_at_the_last_position_of_its_batch() -> None:
    log = Log({S0: Punctuated()})
    assert log.batch(S0, [1, 2, 3], declared=10) == [NO_WATERMARK, NO_WATERMARK, NO_WATERMARK]
    assert log.batch(S0, [11, 12], declared=20) == [10, 10]
    assert log.watermark == 20


def test_punctuated_streams_heed_declarations_only_and_the_others_event_times_only() -> None:
    punctuated = Log({S0: Punctuated()})
    assert punctuated.say(S0, 100) == NO_WATERMARK
    bounded = Log({S0: bounded_ms(3)})
    bounded.batch(S0, [7], declared=100)
    assert bounded.watermark == 3


# "A strategy makes a watermark of it, per stream: bounded out-of-orderness = maximum − bound − 1 ms; ascending =
# bound 0; punctuated = as declared."


@pytest.mark.parametrize(
    ("strategy", "watermark_us"),
    [
        (BoundedOutOfOrderness(bound_us=2_500), 10_000 - 2_500 - 1_000),
        (ascending(), 10_000 - 1_000),
        (Punctuated(), 4_321),
    ],
)
def test_a_strategy_makes_a_watermark_of_it(strategy: Strategy, watermark_us: int) -> None:
    clock = WatermarkClock()
    clock.add_stream(S0, strategy, CutTime(0))
    clock.seen(S0, GLSN(1), 1, CutTime(1), EventTime(10_000), EventTime(4_321))
    assert clock.watermark == watermark_us


def test_ascending_is_bound_0_and_idle_after_is_30_s_unless_said() -> None:
    assert ascending() == BoundedOutOfOrderness(bound_us=0, idle_after_us=30_000_000)
    assert Punctuated() == Punctuated(idle_after_us=30_000_000)


def test_each_stream_has_the_strategy_of_its_topic() -> None:
    """Several topics or inputs: the minimum."""
    log = Log({S0: bounded_ms(3), S1: ascending(), S2: Punctuated()})
    after = [log.say(S0, 100), log.say(S1, 90), log.declare(S2, 95), log.say(S1, 200), log.declare(S2, 300)]
    assert after == [NO_WATERMARK, NO_WATERMARK, 89, 95, 96]


# "The watermark seen by a record is the minimum, over the topic's non-idle streams, of what the records with smaller
# GLSN say."


def test_a_record_sees_the_minimum_of_what_the_records_with_smaller_glsn_say() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    assert log.batch(S0, [10, 20, 30]) == [NO_WATERMARK, NO_WATERMARK, NO_WATERMARK]
    # The second stream moves inside its batch, up to where the first one holds it.
    assert log.batch(S1, [5, 15, 12, 40, 50]) == [NO_WATERMARK, 4, 14, 14, 29]
    assert log.watermark == 29
    # Now the first stream is the lowest and moves up to where the second one holds it.
    assert log.batch(S0, [35, 60, 70]) == [29, 34, 49]
    assert log.watermark == 49


def test_a_stream_above_the_others_moves_nothing() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    log.batch(S0, [10])
    log.batch(S1, [20])
    assert log.batch(S1, [30, 40, 50]) == [9, 9, 9]
    assert log.watermark == 9


# "A stream is idle at a position if its last commit (or its creation) lies more than idle_after (default 30 s) of cut
# time before it"


def test_a_stream_is_idle_when_its_last_commit_lies_more_than_idle_after_before() -> None:
    log = Log({S0: ascending(), S1: ascending(idle_after_us=60 * SECOND)})
    log.say(S0, 10, at_s=1)
    log.say(S1, 20, at_s=1)
    assert log.tick(31) == 9
    assert log.tick(31.000001) == 19


def test_a_stream_is_idle_when_its_creation_lies_more_than_idle_after_before() -> None:
    log = Log({S0: ascending()})
    log.clock.add_stream(S1, ascending(), CutTime(5 * SECOND))
    assert log.say(S0, 10, at_s=6) == NO_WATERMARK
    assert log.say(S0, 20, at_s=35) == NO_WATERMARK
    assert log.say(S0, 30, at_s=35.000001) == 29


def test_a_commit_with_a_larger_glsn_in_the_same_cut_does_not_count_yet() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    log.say(S0, 10, at_s=1)
    log.say(S1, 20, at_s=1)
    # In the cut at 40 s both speak. After the first record of S0 only S0 has: S1 is idle there and holds nothing back.
    assert log.batch(S0, [100, 110], at_s=40) == [9, 99]
    assert log.watermark == 109
    # S1 sees that, and its own old event time cannot take it back.
    assert log.batch(S1, [50, 60], at_s=40) == [109, 109]
    assert log.watermark == 109


def test_time_is_that_of_the_position_before_when_a_record_is_delivered() -> None:
    """A record at g is delivered under W(g − 1); the time of its own cut counts from W(g) on."""
    log = Log({S0: ascending(), S1: ascending(idle_after_us=90 * SECOND)})
    log.say(S0, 10, at_s=1)
    log.say(S1, 20, at_s=1)
    assert log.batch(S1, [30, 40], at_s=60) == [9, 29]


# "until then a stream that has not spoken holds the watermark back; one that speaks again counts again; a reader's
# watermark never goes back."


def test_a_stream_that_has_not_spoken_holds_the_watermark_back() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    assert log.say(S0, 100) == NO_WATERMARK
    assert log.say(S1, 50) == 49


def test_a_stream_that_speaks_again_counts_again() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    log.say(S0, 10, at_s=0)
    log.say(S1, 20, at_s=20)
    assert log.tick(31) == 19
    assert log.say(S0, 15, at_s=32) == 19, "14 would be less than before"
    assert log.say(S1, 50, at_s=33) == 19, "held back by S0"
    assert log.say(S0, 40, at_s=34) == 39


def test_when_all_streams_are_idle_the_highest_counts() -> None:
    """Nothing is expected from any of them, so the one that had come furthest tells the time."""
    log = Log({S0: ascending(), S1: ascending()})
    log.say(S0, 10)
    log.say(S1, 20)
    assert log.watermark == 9
    assert log.tick(100) == 19
    assert log.tick(200) == 19
    assert log.say(S0, 15, at_s=201) == 19, "14 would be less than before"
    assert log.say(S0, 30, at_s=202) == 29, "alone, as S1 is idle"


def test_three_streams_with_declared_watermarks() -> None:
    """Reference: s0:10 s1:20 s2:15 → 10; s0:30 → 15; s2 idle → 20; s1:25 → 25; s0:40 s1:50 s2:60 → 40."""
    log = Log({S0: Punctuated(), S1: Punctuated(), S2: Punctuated(idle_after_us=10 * SECOND)})
    steps = [log.declare(S0, 10, at_s=1), log.declare(S1, 20, at_s=1), log.declare(S2, 15, at_s=1)]
    steps += [log.declare(S0, 30, at_s=2), log.tick(12), log.declare(S1, 25, at_s=13)]
    steps += [log.declare(S0, 40, at_s=14), log.declare(S1, 50, at_s=14), log.declare(S2, 60, at_s=14)]
    assert steps == [NO_WATERMARK, NO_WATERMARK, 10, 15, 20, 25, 25, 40, 40]
    assert log.declare(S2, 1, at_s=15) == 40


def test_a_new_stream_holds_the_watermark_but_never_takes_it_back() -> None:
    log = Log({S0: ascending()})
    assert log.say(S0, 10, at_s=1) == 9
    log.clock.add_stream(S1, ascending(), CutTime(2 * SECOND))
    assert log.say(S0, 20, at_s=3) == 9
    assert log.say(S1, 5, at_s=4) == 9
    assert log.say(S1, 15, at_s=5) == 14


def test_a_creation_ahead_of_the_first_commit_is_no_obstacle() -> None:
    """Once the stream has spoken, its commit counts and not the creation."""
    log = Log({S0: ascending(idle_after_us=90 * SECOND)})
    log.clock.add_stream(S1, ascending(), CutTime(20 * SECOND))
    log.say(S0, 50, at_s=1)
    assert log.say(S1, 10, at_s=2) == 9
    assert log.tick(32) == 9
    assert log.tick(33) == 49


def test_a_removed_stream_leaves_the_minimum_at_the_next_position() -> None:
    log = Log({S0: ascending(), S1: ascending()})
    log.say(S0, 10)
    log.say(S1, 20)
    log.clock.remove_stream(S0)
    assert log.watermark == 9
    assert log.batch(S1, [30, 40]) == [9, 29]
    log.clock.remove_stream(S1)
    assert log.tick(1) == 39, "without any stream the watermark stays"


# "Time moves only at positions": ticks, and positions of topics that the reader does not follow.


def test_one_tick_stands_for_a_run_of_positions_in_a_cut() -> None:
    each, run = Log({S0: ascending(), S1: ascending()}), Log({S0: ascending(), S1: ascending()})
    for log in (each, run):
        log.say(S0, 10, at_s=0)
        log.say(S1, 20, at_s=5)
    assert [each.tick(31), each.tick(31), each.tick(31)] == [19, 19, 19]
    assert run.clock.tick(GLSN(5), CutTime(31 * SECOND)) == ms(19)
    assert run.clock.snapshot() == each.clock.snapshot()


def test_a_fence_is_a_commit_that_says_nothing_of_event_time() -> None:
    log = Log({S0: ascending(), S1: ascending(idle_after_us=90 * SECOND)})
    log.say(S0, 10, at_s=0)
    log.say(S1, 20, at_s=0)
    log.clock.seen(S0, GLSN(3), 1, CutTime(25 * SECOND), None)
    assert log.clock.watermark == ms(9)
    assert log.tick(55) == 9
    assert log.tick(56) == 19


def test_a_header_leaves_the_same_state_as_its_batch() -> None:
    whole, header = Log({S0: bounded_ms(3), S1: Punctuated()}), Log({S0: bounded_ms(3), S1: Punctuated()})
    whole.batch(S1, [1, 2], at_s=1, declared=50)
    whole.batch(S0, [10, 40, 30], at_s=2)
    header.clock.seen(S1, GLSN(1), 2, CutTime(SECOND), EventTime(ms(2)), EventTime(ms(50)))
    header.clock.seen(S0, GLSN(3), 3, CutTime(2 * SECOND), EventTime(ms(40)))
    assert header.clock.watermark == ms(36)
    assert header.clock.snapshot() == whole.clock.snapshot()


def test_event_times_at_the_edge_of_the_range_stay_in_it() -> None:
    clock = WatermarkClock()
    clock.add_stream(S0, BoundedOutOfOrderness(bound_us=5), CutTime(0))
    clock.seen(S0, GLSN(1), 1, CutTime(1), EventTime(-(2**63)))
    assert clock.watermark == NO_WATERMARK
    clock.seen(S0, GLSN(2), 1, CutTime(1), EventTime(2**63 - 1))
    assert clock.watermark == MAX_WATERMARK - 5 - MILLISECOND


def test_a_snapshot_is_a_plain_value_that_survives_encoding() -> None:
    log = Log({S1: Punctuated(), S0: bounded_ms(3, idle_after_s=60)})
    log.declare(S1, 20, at_s=1)
    log.batch(S0, [10, 12], at_s=2)
    snapshot = log.clock.snapshot()
    assert snapshot == WatermarkSnapshot(
        glsn=GLSN(3),
        time=CutTime(2 * SECOND),
        watermark=ms(8),
        ended=False,
        streams=(
            StreamSnapshot(S0, bounded_ms(3, idle_after_s=60), CutTime(2 * SECOND), ms(8)),
            StreamSnapshot(S1, Punctuated(), CutTime(SECOND), ms(20)),
        ),
        idle=False,
    )
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=WatermarkSnapshot) == snapshot


# Misuse.


def _clock_at_glsn_7() -> WatermarkClock:
    clock = WatermarkClock()
    clock.add_stream(S0, ascending(), CutTime(0))
    clock.seen(S0, GLSN(6), 2, CutTime(100), EventTime(2))
    return clock


@pytest.mark.parametrize(
    ("first_glsn", "time", "lsid", "event_times", "error", "message"),
    [
        (7, 100, S0, [1], ProtocolViolation, "GLSN 7 comes after 7: positions never go back"),
        (8, 99, S0, [1], ProtocolViolation, "GLSN 8 has cut time 99, GLSN 7 before it has 100: cut time never"),
        (8, 100, S1, [1], InvalidArgument, "log stream 1 is not part of this watermark: add it first"),
        (8, 100, S0, [], InvalidArgument, "the batch at GLSN 8 has 0 records: it needs at least one"),
    ],
)
def test_a_refused_batch_changes_nothing(
    first_glsn: int,
    time: int,
    lsid: LogStreamId,
    event_times: list[int],
    error: type[CutwaterError],
    message: str,
) -> None:
    clock = _clock_at_glsn_7()
    before = clock.snapshot()
    time_max = EventTime(max(event_times, default=0))
    with pytest.raises(error, match=message):
        clock.seen(lsid, GLSN(first_glsn), len(event_times), CutTime(time), time_max)
    assert clock.snapshot() == before


def test_a_refused_tick_changes_nothing() -> None:
    clock = _clock_at_glsn_7()
    before = clock.snapshot()
    with pytest.raises(ProtocolViolation, match="positions never go back"):
        clock.tick(GLSN(6), CutTime(100))
    with pytest.raises(ProtocolViolation, match="cut time never goes back"):
        clock.tick(GLSN(8), CutTime(99))
    assert clock.snapshot() == before


def test_streams_are_added_once_and_removed_once() -> None:
    clock = _clock_at_glsn_7()
    with pytest.raises(InvalidArgument, match="log stream 0 is already part of this watermark"):
        clock.add_stream(S0, ascending(), CutTime(0))
    clock.remove_stream(S0)
    with pytest.raises(InvalidArgument, match="log stream 0 is not part of this watermark"):
        clock.remove_stream(S0)


def test_a_strategy_refuses_negative_spans() -> None:
    with pytest.raises(InvalidArgument, match="bound of out-of-orderness is -1 µs"):
        BoundedOutOfOrderness(bound_us=-1)
    with pytest.raises(InvalidArgument, match="idle_after is -1 µs"):
        Punctuated(idle_after_us=-1)
    with pytest.raises(InvalidArgument, match="idle_after is -1 µs"):
        ascending(idle_after_us=-1)


def test_a_fresh_clock_knows_nothing() -> None:
    clock = WatermarkClock()
    assert (clock.glsn, clock.watermark) == (0, NO_WATERMARK)
