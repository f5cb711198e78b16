"""The watermark clock against an oracle that recomputes every position from the whole log before it.

The oracle below follows the sentences of DESIGN §9 and shares no code with the module but its descriptions.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from cutwater.core.watermark import (
    NO_WATERMARK,
    BoundedOutOfOrderness,
    Punctuated,
    Strategy,
    WatermarkClock,
    WatermarkSnapshot,
)
from cutwater.types import GLSN, CutTime, EventTime, LogStreamId

EXAMPLES = settings(max_examples=300, deadline=None)


class Add(Struct, frozen=True):
    lsid: int
    strategy: Strategy
    created: int


class Remove(Struct, frozen=True):
    lsid: int


class Tick(Struct, frozen=True):
    glsn: int
    time: int


class Records(Struct, frozen=True):
    lsid: int
    glsn: int
    time: int
    event_times: tuple[int, ...]
    declared: int | None = None


class Fence(Struct, frozen=True):
    lsid: int
    glsn: int
    time: int


Event = Add | Remove | Tick | Records | Fence

# Small numbers, so that ties and the exact edges of idleness and of the bound are common.
spans_us = st.sampled_from([0, 1, 7, 1000, 3000])
idle_after_us = st.sampled_from([0, 5, 10, 25])
topic_strategies = st.one_of(
    st.builds(BoundedOutOfOrderness, bound_us=spans_us, idle_after_us=idle_after_us),
    st.builds(Punctuated, idle_after_us=idle_after_us),
)
event_times = st.one_of(st.integers(0, 40), st.integers(-20_000, 20_000))
time_steps_us = st.sampled_from([0, 0, 0, 1, 2, 5, 6, 10, 11, 26])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """A log as its reader meets it: 1 to 5 streams at a time, of 1 or 2 topics, with GLSNs that may be skipped."""
    topics = draw(st.lists(topic_strategies, min_size=1, max_size=2))
    glsn, time, next_lsid = 0, 100, 0
    live: list[int] = []
    log: list[Event] = []

    def add() -> None:
        nonlocal next_lsid
        created = time + draw(st.sampled_from([-11, -5, 0, 0, 3, 12]))
        log.append(Add(next_lsid, draw(st.sampled_from(topics)), created))
        live.append(next_lsid)
        next_lsid += 1

    for _ in range(draw(st.integers(1, 3))):
        add()
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["records"] * 6 + ["tick"] * 3 + ["fence", "add", "remove"]))
        if kind == "add":
            if len(live) < 5:
                add()
            continue
        if kind == "remove" and live:
            lsid = draw(st.sampled_from(live))
            live.remove(lsid)
            log.append(Remove(lsid))
            continue
        glsn += draw(st.sampled_from([1, 1, 1, 4]))
        time += draw(time_steps_us)
        if kind == "tick" or not live:
            log.append(Tick(glsn, time))
            continue
        lsid = draw(st.sampled_from(live))
        if kind == "fence":
            log.append(Fence(lsid, glsn, time))
            continue
        times = draw(st.lists(event_times, min_size=1, max_size=5))
        log.append(Records(lsid, glsn, time, tuple(times), draw(st.none() | event_times)))
        glsn += len(times) - 1
    return log


class Position(Struct, frozen=True):
    """One GLSN with all that the rule may look at: its time, what it holds, and which streams exist at it."""

    glsn: int
    time: int
    exists: dict[int, Add]
    lsid: int | None = None
    event_time: int | None = None
    declared: int | None = None


def positions_of(log: list[Event]) -> list[Position]:
    exists: dict[int, Add] = {}
    positions: list[Position] = []
    for event in log:
        match event:
            case Add():
                exists = {**exists, event.lsid: event}
            case Remove():
                exists = {lsid: add for lsid, add in exists.items() if lsid != event.lsid}
            case Tick():
                positions.append(Position(event.glsn, event.time, exists))
            case Fence():
                positions.append(Position(event.glsn, event.time, exists, event.lsid))
            case Records():
                for index, event_time in enumerate(event.event_times):
                    is_last = index == len(event.event_times) - 1
                    declared = event.declared if is_last else None
                    glsn = event.glsn + index
                    positions.append(Position(glsn, event.time, exists, event.lsid, event_time, declared))
    return positions


def minimum_at(prefix: list[Position]) -> int | None:
    """The minimum over the streams that are not idle at the last position of ``prefix``; None if all are."""
    here = prefix[-1]
    candidates: list[int] = []
    for lsid, stream in here.exists.items():
        own = [position for position in prefix if position.lsid == lsid]
        last_commit = own[-1].time if own else stream.created
        if here.time - last_commit > stream.strategy.idle_after_us:
            continue
        if isinstance(stream.strategy, Punctuated):
            said = [position.declared for position in own if position.declared is not None]
        else:
            lag = stream.strategy.bound_us + 1000
            said = [position.event_time - lag for position in own if position.event_time is not None]
        candidates.append(max(said) if said else NO_WATERMARK)
    return min(candidates) if candidates else None


def oracle(log: list[Event]) -> tuple[dict[int, int], dict[int, int]]:
    """By GLSN: the watermark seen by each record, and the watermark after each position."""
    positions = positions_of(log)
    minima = [minimum_at(positions[: index + 1]) for index in range(len(positions))]
    seen: dict[int, int] = {}
    after: dict[int, int] = {}
    for index, position in enumerate(positions):
        if position.event_time is not None:
            seen[position.glsn] = max([NO_WATERMARK, *(m for m in minima[:index] if m is not None)])
        after[position.glsn] = max([NO_WATERMARK, *(m for m in minima[: index + 1] if m is not None)])
    return seen, after


def apply(clock: WatermarkClock, event: Event) -> list[int]:
    """Tell the clock of one event; the watermarks seen by its records, if it has any."""
    match event:
        case Add():
            clock.add_stream(LogStreamId(event.lsid), event.strategy, CutTime(event.created))
        case Remove():
            clock.remove_stream(LogStreamId(event.lsid))
        case Tick():
            assert clock.tick(GLSN(event.glsn), CutTime(event.time)) == clock.watermark
        case Fence():
            clock.header(LogStreamId(event.lsid), GLSN(event.glsn), 1, CutTime(event.time), None)
        case Records():
            times = [EventTime(time) for time in event.event_times]
            declared = None if event.declared is None else EventTime(event.declared)
            return clock.batch(LogStreamId(event.lsid), GLSN(event.glsn), CutTime(event.time), times, declared)
    return []


class Walk(Struct, frozen=True):
    """What a reader learned: by GLSN what records saw, the watermark after each last position of an event, the end."""

    seen: dict[int, int]
    after: dict[int, int]
    end: WatermarkSnapshot


def walk(log: list[Event], *, restore_always: bool = False) -> Walk:
    clock = WatermarkClock()
    seen: dict[int, int] = {}
    after: dict[int, int] = {}
    for event in log:
        watermarks = apply(clock, event)
        if isinstance(event, Records):
            # Every record but the first of a batch also tells the watermark after the record before it.
            seen.update(enumerate(watermarks, start=event.glsn))
            after.update(enumerate(watermarks[1:], start=event.glsn))
        if not isinstance(event, Add | Remove):
            after[clock.glsn] = clock.watermark
        if restore_always:
            encoded = msgspec.msgpack.encode(clock.snapshot())
            clock = WatermarkClock.restore(msgspec.msgpack.decode(encoded, type=WatermarkSnapshot))
    return Walk(seen, after, clock.snapshot())


@EXAMPLES
@given(logs())
def test_every_position_has_the_watermark_of_the_oracle(log: list[Event]) -> None:
    reader = walk(log)
    assert (reader.seen, reader.after) == oracle(log)


@EXAMPLES
@given(logs(), st.data())
def test_the_result_is_the_same_however_batches_are_split(log: list[Event], data: st.DataObject) -> None:
    split: list[Event] = []
    for event in log:
        if not isinstance(event, Records) or len(event.event_times) == 1:
            split.append(event)
            continue
        at = data.draw(st.integers(1, len(event.event_times) - 1))
        # The declared watermark is a promise about what follows the whole batch, so it stays with the last piece.
        split.append(Records(event.lsid, event.glsn, event.time, event.event_times[:at]))
        split.append(Records(event.lsid, event.glsn + at, event.time, event.event_times[at:], event.declared))
    assert walk(split) == walk(log)


@EXAMPLES
@given(logs())
def test_a_snapshot_taken_and_restored_anywhere_changes_nothing(log: list[Event]) -> None:
    assert walk(log, restore_always=True) == walk(log)


@EXAMPLES
@given(logs())
def test_the_watermark_never_goes_back(log: list[Event]) -> None:
    after = walk(log).after
    assert all(earlier <= later for earlier, later in pairwise(after[glsn] for glsn in sorted(after)))


@EXAMPLES
@given(logs())
def test_headers_alone_give_the_watermark_after_every_batch(log: list[Event]) -> None:
    clock = WatermarkClock()
    after: dict[int, int] = {}
    for event in log:
        if isinstance(event, Records):
            clock.header(
                LogStreamId(event.lsid),
                GLSN(event.glsn),
                len(event.event_times),
                CutTime(event.time),
                EventTime(max(event.event_times)),
                None if event.declared is None else EventTime(event.declared),
            )
        else:
            apply(clock, event)
        after[clock.glsn] = clock.watermark
    reader = walk(log)
    assert clock.snapshot() == reader.end
    assert {glsn: after[glsn] for glsn in after if glsn} == {glsn: reader.after[glsn] for glsn in after if glsn}
