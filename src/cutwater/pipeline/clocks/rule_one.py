"""Implements rule 1 of the watermark, only to replay micro-batches that were planned under it, and to go on from there.

Offsets and savepoints without a rule number were made under rule 1. Under rule 1, a watermark is one minimum over the
streams that are not idle, of all sources of an operator. If all streams are idle, nothing moves. Every position of any
of these sources evaluates all their streams. All times are first rounded down to milliseconds. Later micro-batches
follow rule 2 (``converted``).

Nothing here is fast: it runs once, for one micro-batch per pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, overload

from msgspec import Struct
from msgspec.structs import replace

from cutwater.core.read.watermark import (
    MAX_WATERMARK,
    NO_WATERMARK,
    Punctuated,
    Strategy,
    StreamSnapshot,
    WatermarkClock,
    WatermarkSnapshot,
    own_watermark,
)
from cutwater.pipeline.clocks.clock import (
    ClockSnapshot,
    KnownStream,
    LogClock,
    OperatorSnapshot,
    Seen,
    Sources,
    SourceSnapshot,
    strategies_of,
)
from cutwater.pipeline.clocks.clock_steps import NO_TIME, Steps, Ticks, shown_ms
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.rows import Row
from cutwater.types import GLSN, MILLISECOND, CutTime, LogStreamId


class RuleOneStream(Struct, frozen=True, forbid_unknown_fields=True):
    log_stream_id: int
    strategy: Strategy
    last_commit: int
    watermark: int = NO_WATERMARK


class RuleOneClock(Struct, frozen=True, forbid_unknown_fields=True):
    """The clock of one set of sources: one minimum over streams, recomputed at every position."""

    glsn: int
    time: int
    watermark: int
    ended: bool
    streams: tuple[RuleOneStream, ...]

    def seen(self, number: int, time: int) -> Seen:
        (own,) = (stream.watermark for stream in self.streams if stream.log_stream_id == number)
        return self.watermark, min(self._active(time, number), default=MAX_WATERMARK), own

    def spoke(self, number: int, glsn: int, time: int, most: int | None, declared: int | None) -> RuleOneClock:
        """Return the clock after an entry of a stream that ends at a position."""
        streams = list(self.streams)
        for i, stream in enumerate(streams):
            if stream.log_stream_id == number:
                own = max(stream.watermark, own_watermark(stream.strategy, most, declared))
                streams[i] = replace(stream, last_commit=time, watermark=own)
        return replace(self, streams=tuple(streams)).tick(glsn, time)

    def tick(self, glsn: int, time: int) -> RuleOneClock:
        watermark = max(self.watermark, min(self._active(time), default=NO_WATERMARK))
        return replace(self, glsn=glsn, time=time, watermark=watermark)

    def _active(self, time: int, without: int = -1) -> list[int]:
        """Return the watermarks of the streams that are not idle."""
        return [
            stream.watermark
            for stream in self.streams
            if stream.log_stream_id != without and time <= stream.last_commit + stream.strategy.idle_after_us
        ]


_FRESH: Final = RuleOneClock(0, 0, NO_WATERMARK, False, ())


class RuleOneSnapshot(Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=1):
    """All clocks after a position. ``streams`` are (topic, stream) in the order of their numbers in the clocks, and
    ``ended`` are the numbers of streams that no longer count."""

    time_ms: int
    streams: tuple[tuple[str, int], ...]
    clocks: tuple[tuple[tuple[str, ...], RuleOneClock], ...]
    ended: tuple[int, ...] = ()

    @property
    def strategies(self) -> dict[str, Strategy]:
        return {
            self.streams[stream.log_stream_id][0]: stream.strategy for _, own in self.clocks for stream in own.streams
        }

    @property
    def operators(self) -> tuple[OperatorSnapshot, ...]:
        return tuple(OperatorSnapshot(topics, own.watermark) for topics, own in self.clocks)


AnyClock: TypeAlias = ClockSnapshot | RuleOneSnapshot
"""Stored clocks, under the rule that made them."""


def with_rule(clock: Any) -> Any:
    """Add the rule number to stored clocks: earlier versions wrote none."""
    return {"rule": 1, **clock} if isinstance(clock, dict) else clock


def current(clock: AnyClock | None) -> ClockSnapshot | None:
    """Return stored clocks as clocks of rule 2."""
    return converted(clock) if isinstance(clock, RuleOneSnapshot) else clock


class RuleOneLogClock:
    """All clocks of one pipeline, with the methods of ``LogClock`` that a planner calls. Pipelines round all times down
    to milliseconds, and plain queries of Spark do not (``unit_us``)."""

    def __init__(self, sources: Sources, sets: Iterable[frozenset[str]], unit_us: int = MILLISECOND) -> None:
        self._unit_us, self._all = unit_us, frozenset(sources)
        self._sources = {topic: given or Watermark.ascending() for topic, given in sources.items()}
        self._strategies = strategies_of(self._sources)
        self._clocks = dict.fromkeys((*sets, self._all), _FRESH)
        self._streams: dict[tuple[str, int], int] = {}
        self._ended: set[int] = set()
        self._time = NO_TIME
        self._ticks = self._fresh()

    @classmethod
    def restore(
        cls, sources: Sources, sets: Iterable[frozenset[str]], snapshot: RuleOneSnapshot, unit_us: int = MILLISECOND
    ) -> RuleOneLogClock:
        clock = cls(sources, sets, unit_us)
        clock._clocks |= {frozenset(topics): own for topics, own in snapshot.clocks}
        clock._streams = {place: number for number, place in enumerate(snapshot.streams)}
        clock._ended = set(snapshot.ended)
        clock._time = snapshot.time_ms
        clock._ticks = clock._fresh()
        return clock

    @classmethod
    def resumed(
        cls,
        sources: Sources,
        sets: Iterable[frozenset[str]],
        glsn: int,
        streams: Sequence[KnownStream],
        unit_us: int = MILLISECOND,
    ) -> RuleOneLogClock:
        """Return clocks after a position without a walk to it. The effect of idle streams on the watermarks is not
        known."""
        clock = cls(sources, sets, unit_us)
        for topics in clock._clocks:
            clock._clocks[topics] = replace(_FRESH, glsn=glsn)
        for known in streams:
            most, declared = clock._rounded(known.most_us), clock._rounded(known.declared_us)
            reached = own_watermark(clock._strategies[known.topic], most, declared)
            clock.add_stream(known.topic, known.stream, known.last_commit_us, reached)
        return clock

    def snapshot(self) -> RuleOneSnapshot:
        clocks = tuple((tuple(sorted(topics)), own) for topics, own in self._clocks.items())
        return RuleOneSnapshot(self._time, tuple(self._streams), clocks, tuple(sorted(self._ended)))

    def is_settled(self, now: RuleOneSnapshot) -> bool:
        """Report whether clocks that were resumed like this one show the true watermarks by now."""
        return all(
            own.watermark >= max((s.watermark for s in self._clocks[frozenset(topics)].streams), default=NO_WATERMARK)
            for topics, own in now.clocks
        )

    def knows(self, topic: str, stream: int) -> bool:
        return (topic, stream) in self._streams

    def add_stream(self, topic: str, stream: int, created_us: int, watermark: int = NO_WATERMARK) -> None:
        number = self._streams[topic, stream] = len(self._streams)
        added = RuleOneStream(number, self._strategies[topic], self._rounded(created_us), watermark)
        for topics, clock in self._clocks.items():
            if topic in topics:
                self._clocks[topics] = replace(clock, streams=(*clock.streams, added))

    def end_stream(self, topic: str, stream: int) -> None:
        number = self._streams[topic, stream]
        self._ended.add(number)
        for topics, clock in self._clocks.items():
            left = tuple(own for own in clock.streams if own.log_stream_id != number)
            self._clocks[topics] = replace(clock, streams=left)

    def record(
        self, topic: str, stream: int, glsn: int, cut_us: int, row: Row, time_ms: int,
        declared_us: int | None = None, *, idle: bool = False, is_mark: bool = False,
    ) -> None:  # fmt: skip
        given = self._sources[topic]
        assert isinstance(given, Watermark), "only pipelines report records"
        self._entry(topic, stream, glsn, glsn, cut_us, given.said_us(row, time_ms), declared_us)
        for topics in self._clocks:
            self._step(topics, glsn)
        self._pass_time(glsn, cut_us)

    def batch(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False, is_noted: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        is_declared, last = isinstance(self._strategies[topic], Punctuated), glsn + count - 1
        if is_declared and count > 1:
            # Time passes at the first record, and a declaration takes effect at the last one.
            self._entry(topic, stream, glsn, last - 1, cut_us, None, None)
            for topics in self._clocks:
                self._step(topics, glsn)
        found = self._entry(topic, stream, glsn, last, cut_us, most_us, declared_us)
        if most_us is None or is_declared:
            found = {}
        for topics in self._clocks:
            if topic not in topics:
                self._step(topics, glsn)
            elif topics not in found or is_noted:
                self._step(topics, last)
        self._pass_time(glsn, cut_us)
        return found

    def seen(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        return self._entry(topic, stream, glsn, glsn + count - 1, cut_us, most_us, declared_us)

    def _entry(
        self, topic: str, stream: int, glsn: int, last: int, cut_us: int, most_us: int | None, declared_us: int | None
    ) -> dict[frozenset[str], Seen]:
        number, time = self._streams[topic, stream], self._rounded(cut_us)
        most, declared = self._rounded(most_us), self._rounded(declared_us)
        found: dict[frozenset[str], Seen] = {}
        for topics, clock in self._clocks.items():
            if topic in topics:
                found[topics] = clock.seen(number, time)
                self._clocks[topics] = clock.spoke(number, last, time, most, declared)
            else:
                self._clocks[topics] = clock.tick(glsn, time)
        return found

    def tick(self, glsn: int, cut_us: int) -> None:
        if glsn <= self.glsn:
            return
        for topics, clock in self._clocks.items():
            self._clocks[topics] = clock.tick(glsn, self._rounded(cut_us))
            self._step(topics, glsn)
        self._pass_time(glsn, cut_us)

    def ticks(self) -> Ticks:
        taken, self._ticks = self._ticks, self._fresh()
        return taken

    @property
    def watermark_us(self) -> int:
        return self._clocks[self._all].watermark

    @property
    def glsn(self) -> int:
        return self._clocks[self._all].glsn

    def _step(self, topics: frozenset[str], glsn: int) -> None:
        self._ticks.rise(topics, glsn, self._clocks[topics].watermark)

    @overload
    def _rounded(self, time_us: int) -> int: ...

    @overload
    def _rounded(self, time_us: int | None) -> int | None: ...

    def _rounded(self, time_us: int | None) -> int | None:
        return None if time_us is None else time_us // self._unit_us * self._unit_us

    def _pass_time(self, glsn: int, cut_us: int) -> None:
        self._ticks.pass_time(glsn, cut_us)
        self._time = cut_us // MILLISECOND

    def _fresh(self) -> Ticks:
        watermarks = {topics: Steps(shown_ms(clock.watermark)) for topics, clock in self._clocks.items()}
        return Ticks(watermarks, Steps(self._time))


AnyLogClock: TypeAlias = LogClock | RuleOneLogClock


def converted(old: RuleOneSnapshot) -> ClockSnapshot:
    """Convert clocks of rule 1 to clocks of rule 2 that go on where they ended. The watermark of an operator keeps the
    value that it has reached. The watermark of a source begins with the clock of that source alone, if there was one,
    and otherwise with its streams."""
    places = dict(enumerate(old.streams))
    topics = sorted({topic for names, _ in old.clocks for topic in names})
    sources = []
    for topic in topics:
        own = next((clock for names, clock in old.clocks if names == (topic,)), None)
        any_clock = next(clock for names, clock in old.clocks if topic in names)
        streams = tuple(
            StreamSnapshot(
                LogStreamId(places[stream.log_stream_id][1]),
                stream.strategy,
                CutTime(stream.last_commit),
                stream.watermark,
            )
            for stream in any_clock.streams
            if places[stream.log_stream_id][0] == topic
        )
        streams = tuple(sorted(streams, key=lambda stream: stream.log_stream_id))
        reached = NO_WATERMARK if own is None else own.watermark
        clock = WatermarkClock.restore(WatermarkSnapshot(GLSN(0), CutTime(0), reached, False, streams))
        if any_clock.glsn > 0:
            clock.tick(GLSN(any_clock.glsn), CutTime(any_clock.time))
        sources.append(SourceSnapshot(topic, clock.snapshot()))
    time_us = NO_TIME if old.time_ms == NO_TIME else old.time_ms * MILLISECOND
    return ClockSnapshot(time_us, tuple(sources), old.operators)
