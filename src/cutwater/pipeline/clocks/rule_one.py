"""Implements rule 1 of the watermark, only to replay micro-batches that were planned under it, and to go on from there.

Offsets and savepoints without a rule number were made under rule 1. Under rule 1, a watermark is one minimum over the
streams that are not idle, of all sources of an operator. If all streams are idle, nothing moves. Every position of any
of these sources evaluates all their streams. All times are first rounded down to milliseconds. Later micro-batches
follow rule 2 (``converted``).

Nothing here is fast: it runs once, for one micro-batch per pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, overload

from msgspec import Struct

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
    shown_ms,
    strategies_of,
)
from cutwater.pipeline.clocks.clock_steps import NO_TIME, Steps, Ticks, time_step, watermark_step
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.rows import Row
from cutwater.types import GLSN, MILLISECOND, CutTime, LogStreamId


class RuleOneStream(Struct, frozen=True, forbid_unknown_fields=True):
    log_stream_id: int
    strategy: Strategy
    last_commit: int
    watermark: int = NO_WATERMARK


class RuleOneClock(Struct, frozen=True, forbid_unknown_fields=True):
    """The clock of one set of sources."""

    glsn: int
    time: int
    watermark: int
    ended: bool
    streams: tuple[RuleOneStream, ...]


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

    @property
    def watermark_ms(self) -> int:
        whole = max((own for _, own in self.clocks), key=lambda own: len(own.streams), default=None)
        return NO_TIME if whole is None else shown_ms(whole.watermark)


AnyClock: TypeAlias = ClockSnapshot | RuleOneSnapshot
"""Stored clocks, under the rule that made them."""


def with_rule(clock: Any) -> Any:
    """Add the rule number to stored clocks: earlier versions wrote none."""
    return {"rule": 1, **clock} if isinstance(clock, dict) else clock


def current(clock: AnyClock | None) -> ClockSnapshot | None:
    """Return stored clocks as clocks of rule 2."""
    return converted(clock) if isinstance(clock, RuleOneSnapshot) else clock


class _Stream(Struct, eq=False):
    strategy: Strategy
    last_commit: int
    watermark: int


class _Clock(Struct, eq=False):
    """One minimum over streams, recomputed at every position."""

    streams: dict[int, _Stream] = {}
    glsn: int = 0
    time: int = 0
    watermark: int = NO_WATERMARK

    def seen(
        self, lsid: int, glsn: int, count: int, time: int, most: int | None, declared: int | None
    ) -> tuple[int, int, int]:
        stream, before = self.streams[lsid], self.watermark
        own = stream.watermark
        others = min(
            (s.watermark for number, s in self.streams.items() if number != lsid and not _is_idle(s, time)),
            default=MAX_WATERMARK,
        )
        stream.watermark, stream.last_commit = max(own, own_watermark(stream.strategy, most, declared)), time
        self.watermark = max(before, min(stream.watermark, others))
        self.glsn, self.time = glsn + count - 1, time
        return before, others, own

    def tick(self, glsn: int, time: int) -> None:
        active = [stream.watermark for stream in self.streams.values() if not _is_idle(stream, time)]
        self.watermark = max(self.watermark, min(active, default=NO_WATERMARK))
        self.glsn, self.time = glsn, time


def _is_idle(stream: _Stream, time: int) -> bool:
    return time > stream.last_commit + stream.strategy.idle_after_us


class RuleOneLogClock:
    """All clocks of one pipeline, with the methods of ``LogClock`` that a planner calls. Pipelines round all times down
    to milliseconds, and plain queries of Spark do not (``unit_us``)."""

    def __init__(self, sources: Sources, sets: Iterable[frozenset[str]], unit_us: int = MILLISECOND) -> None:
        self._unit_us = unit_us
        self._sources = {topic: given or Watermark.ascending() for topic, given in sources.items()}
        self._strategies = strategies_of(self._sources)
        self._clocks = {topics: _Clock() for topics in (*sets, frozenset(sources))}
        self._streams: dict[tuple[str, int], int] = {}
        self._ended: set[int] = set()
        self._time = NO_TIME
        self._ticks = self._fresh()

    @classmethod
    def restore(
        cls, sources: Sources, sets: Iterable[frozenset[str]], snapshot: RuleOneSnapshot, unit_us: int = MILLISECOND
    ) -> RuleOneLogClock:
        clock = cls(sources, sets, unit_us)
        for topics, own in snapshot.clocks:
            streams = {s.log_stream_id: _Stream(s.strategy, s.last_commit, s.watermark) for s in own.streams}
            clock._clocks[frozenset(topics)] = _Clock(streams, own.glsn, own.time, own.watermark)
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
        clock._streams = {(known.topic, known.stream): i for i, known in enumerate(streams)}
        for topics, own in clock._clocks.items():
            own.glsn = glsn
            for i, known in enumerate(streams):
                if known.topic in topics:
                    strategy = clock._strategies[known.topic]
                    reached = own_watermark(strategy, clock._rounded(known.most_us), clock._rounded(known.declared_us))
                    own.streams[i] = _Stream(strategy, clock._rounded(known.last_commit_us), reached)
        clock._ticks = clock._fresh()
        return clock

    def snapshot(self) -> RuleOneSnapshot:
        clocks = tuple(
            (
                tuple(sorted(topics)),
                RuleOneClock(
                    own.glsn,
                    own.time,
                    own.watermark,
                    False,
                    tuple(
                        RuleOneStream(number, s.strategy, s.last_commit, s.watermark)
                        for number, s in sorted(own.streams.items())
                    ),
                ),
            )
            for topics, own in self._clocks.items()
        )
        return RuleOneSnapshot(self._time, tuple(self._streams), clocks, tuple(sorted(self._ended)))

    def is_settled(self, now: RuleOneSnapshot) -> bool:
        """Report whether clocks that were resumed like this one show the true watermarks by now."""
        ceilings = {
            topics: max((stream.watermark for stream in own.streams.values()), default=NO_WATERMARK)
            for topics, own in self._clocks.items()
        }
        return all(own.watermark >= ceilings[frozenset(topics)] for topics, own in now.clocks)

    def knows(self, topic: str, stream: int) -> bool:
        return (topic, stream) in self._streams

    def add_stream(self, topic: str, stream: int, created_us: int) -> None:
        number = self._streams[topic, stream] = len(self._streams)
        for topics, clock in self._clocks.items():
            if topic in topics:
                clock.streams[number] = _Stream(self._strategies[topic], self._rounded(created_us), NO_WATERMARK)

    def end_stream(self, topic: str, stream: int) -> None:
        number = self._streams[topic, stream]
        self._ended.add(number)
        for clock in self._clocks.values():
            clock.streams.pop(number, None)

    def record(
        self, topic: str, stream: int, glsn: int, cut_us: int, row: Row, time_ms: int,
        declared_us: int | None = None, *, idle: bool = False, is_mark: bool = False,
    ) -> None:  # fmt: skip
        given, time = self._sources[topic], self._rounded(cut_us)
        assert isinstance(given, Watermark), "only pipelines report records"
        said = given.said_us(row, time_ms)
        for topics, clock in self._clocks.items():
            if topic in topics:
                clock.seen(self._streams[topic, stream], glsn, 1, time, said, self._rounded(declared_us))
            else:
                clock.tick(glsn, time)
            self._step(topics, glsn)
        self._pass_time(glsn, cut_us)

    def batch(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False, is_noted: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        number, time = self._streams[topic, stream], self._rounded(cut_us)
        most, declared = self._rounded(most_us), self._rounded(declared_us)
        is_declared = isinstance(self._strategies[topic], Punctuated)
        found: dict[frozenset[str], Seen] = {}
        for topics, clock in self._clocks.items():
            if topic not in topics:
                clock.tick(glsn, time)
                self._step(topics, glsn)
            elif is_declared and count > 1:
                clock.seen(number, glsn, count - 1, time, None, None)
                self._step(topics, glsn)
                clock.seen(number, glsn + count - 1, 1, time, None, declared)
                self._step(topics, glsn + count - 1)
            else:
                seen = clock.seen(number, glsn, count, time, most, declared)
                if most is None or is_declared:
                    self._step(topics, glsn + count - 1)
                else:
                    found[topics] = seen
                    if is_noted:
                        self._step(topics, glsn + count - 1)
        self._pass_time(glsn, cut_us)
        return found

    def seen(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        place = (self._streams[topic, stream], glsn, count, self._rounded(cut_us))
        said = (self._rounded(most_us), self._rounded(declared_us))
        return {topics: clock.seen(*place, *said) for topics, clock in self._clocks.items() if topic in topics}

    def tick(self, glsn: int, cut_us: int) -> None:
        if glsn <= self.glsn:
            return
        for topics, clock in self._clocks.items():
            clock.tick(glsn, self._rounded(cut_us))
            self._step(topics, glsn)
        self._pass_time(glsn, cut_us)

    def ticks(self) -> Ticks:
        taken, self._ticks = self._ticks, self._fresh()
        return taken

    @property
    def watermark_us(self) -> int:
        return self._clocks[frozenset(self._sources)].watermark

    @property
    def glsn(self) -> int:
        return self._clocks[frozenset(self._sources)].glsn

    def _step(self, topics: frozenset[str], glsn: int) -> None:
        steps, value = self._ticks.watermarks[topics], shown_ms(self._clocks[topics].watermark)
        if value > steps.last:
            steps.add(watermark_step(glsn), value)

    @overload
    def _rounded(self, time_us: int) -> int: ...

    @overload
    def _rounded(self, time_us: int | None) -> int | None: ...

    def _rounded(self, time_us: int | None) -> int | None:
        return None if time_us is None else time_us // self._unit_us * self._unit_us

    def _pass_time(self, glsn: int, cut_us: int) -> None:
        cut_ms = cut_us // MILLISECOND
        if cut_ms > self._ticks.times.last:
            self._ticks.times.add(time_step(glsn), cut_ms)
        self._time = cut_ms

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
