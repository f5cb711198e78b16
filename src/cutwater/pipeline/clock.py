"""The clocks of a pipeline: walks the log in the order of its positions and tells where watermark and time step.

There is one watermark per set of sources that feeds some operator: the minimum over the streams of all of them that
are not idle. The rule is that of ``cutwater.core.watermark``, which counts in microseconds; pipelines count in
milliseconds, rounded down, so a watermark never promises more than the log does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from cutwater.core.watermark import (
    MAX_WATERMARK,
    NO_WATERMARK,
    Punctuated,
    StreamSnapshot,
    WatermarkClock,
    WatermarkSnapshot,
    own_watermark,
)
from cutwater.pipeline.rows import Row
from cutwater.pipeline.steps import MAX_TIME, NO_TIME, Steps, Ticks, time_step, watermark_step
from cutwater.pipeline.watermarks import Watermark
from cutwater.types import GLSN, MILLISECOND, CutTime, EventTime, LogStreamId

Seen: TypeAlias = tuple[int, int, int]
"""Of a batch: the watermark before it, the least of the other streams during it, its own stream's before it; µs."""


class ClockSnapshot(Struct, frozen=True):
    """All clocks after a position. ``streams`` are (topic, stream) in the order of their numbers in the clocks, and
    ``ended`` the numbers of those that count no more.
    """

    time_ms: int
    streams: tuple[tuple[str, int], ...]
    clocks: tuple[tuple[tuple[str, ...], WatermarkSnapshot], ...]
    ended: tuple[int, ...] = ()


class KnownStream(Struct, frozen=True):
    """A stream as the log remembers it: the largest event time and the largest declaration that it has had."""

    topic: str
    stream: int
    last_commit_ms: int
    most_ms: int | None
    declared_ms: int | None


_LONG_AGO: Final = CutTime(-(2**63))


class LogClock:
    """All clocks of one pipeline. Report every position once, in order, then take the ``ticks`` of the range."""

    def __init__(self, sources: Mapping[str, Watermark], sets: Iterable[frozenset[str]]) -> None:
        self._sources = dict(sources)
        self._clocks = {topics: WatermarkClock() for topics in (*sets, frozenset(sources))}
        self._streams: dict[tuple[str, int], LogStreamId] = {}
        self._ended: set[LogStreamId] = set()
        self._time = NO_TIME
        self._ticks = self._fresh()

    @classmethod
    def restore(
        cls, sources: Mapping[str, Watermark], sets: Iterable[frozenset[str]], snapshot: ClockSnapshot
    ) -> LogClock:
        """Clocks that go on as those that made the snapshot."""
        clock = cls(sources, sets)
        for topics, own in snapshot.clocks:
            clock._clocks[frozenset(topics)] = WatermarkClock.restore(own)
        clock._streams = {place: LogStreamId(number) for number, place in enumerate(snapshot.streams)}
        clock._ended = {LogStreamId(number) for number in snapshot.ended}
        clock._time = snapshot.time_ms
        clock._ticks = clock._fresh()
        return clock

    @classmethod
    def resumed(
        cls,
        sources: Mapping[str, Watermark],
        sets: Iterable[frozenset[str]],
        glsn: int,
        streams: Sequence[KnownStream],
    ) -> LogClock:
        """Clocks after a position to which nobody has walked. Of the watermarks nothing is known, but that none is
        above the highest of its streams: what they owe to streams that were idle, the log does not remember.
        """
        clock = cls(sources, sets)
        clock._streams = {(known.topic, known.stream): LogStreamId(i) for i, known in enumerate(streams)}
        for topics in clock._clocks:
            own = tuple(
                StreamSnapshot(
                    LogStreamId(i),
                    sources[known.topic].strategy,
                    CutTime(known.last_commit_ms * MILLISECOND),
                    own_watermark(
                        sources[known.topic].strategy, _event_time(known.most_ms), _event_time(known.declared_ms)
                    ),
                )
                for i, known in enumerate(streams)
                if known.topic in topics
            )
            begun = WatermarkSnapshot(GLSN(glsn), CutTime(0), NO_WATERMARK, False, own)
            clock._clocks[topics] = WatermarkClock.restore(begun)
        clock._ticks = clock._fresh()
        return clock

    def snapshot(self) -> ClockSnapshot:
        clocks = tuple((tuple(sorted(topics)), clock.snapshot()) for topics, clock in self._clocks.items())
        return ClockSnapshot(self._time, tuple(self._streams), clocks, tuple(sorted(self._ended)))

    def knows(self, topic: str, stream: int) -> bool:
        return (topic, stream) in self._streams

    def add_stream(self, topic: str, stream: int, created_ms: int) -> None:
        """A stream of a topic counts from the next position on."""
        lsid = LogStreamId(len(self._streams))
        self._streams[topic, stream] = lsid
        for topics, clock in self._clocks.items():
            if topic in topics:
                clock.add_stream(lsid, self._sources[topic].strategy, CutTime(created_ms * MILLISECOND))

    def end_stream(self, topic: str, stream: int) -> None:
        """A stream that is sealed for good does not count from the next position on; nothing if that is known."""
        lsid = self._streams[topic, stream]
        if lsid in self._ended:
            return
        self._ended.add(lsid)
        for topics, clock in self._clocks.items():
            if topic in topics:
                clock.remove_stream(lsid)

    def record(
        self, topic: str, stream: int, glsn: int, cut_ms: int, row: Row, time_ms: int, declared_ms: int | None = None
    ) -> None:
        """A record of one of the sources."""
        said = self._sources[topic].said_us(row, time_ms)
        self._report(topic, stream, glsn, cut_ms, said, declared_ms)

    def heartbeat(self, topic: str, stream: int, glsn: int, cut_ms: int, declared_ms: int | None = None) -> None:
        """A stream speaks without a record, and may declare a watermark."""
        self._report(topic, stream, glsn, cut_ms, None, declared_ms)

    def batch(
        self, topic: str, stream: int, glsn: int, count: int, cut_ms: int, most_ms: int | None, declared_ms: int | None
    ) -> dict[frozenset[str], Seen]:
        """Records of one batch, of which only the largest event time is known here.

        Gives what whoever knows the event time of each record needs to tell where inside the batch the watermarks rise,
        for those that the batch counts for. All other steps are noted: those of other clocks and of cut time, and all
        of a stream whose watermarks are declared, because these rise at the first and the last record only.
        """
        lsid, time = self._streams[topic, stream], CutTime(cut_ms * MILLISECOND)
        most = None if most_ms is None else EventTime(most_ms * MILLISECOND)
        declared = None if declared_ms is None else EventTime(declared_ms * MILLISECOND)
        is_declared = isinstance(self._sources[topic].strategy, Punctuated)
        found: dict[frozenset[str], Seen] = {}
        for topics, clock in self._clocks.items():
            if topic not in topics:
                clock.tick(GLSN(glsn), time)
                self._step(topics, glsn)
            elif is_declared and count > 1:
                # The declaration takes effect at the last record, the passing of time at the first.
                clock.header(lsid, GLSN(glsn), count - 1, time, None)
                self._step(topics, glsn)
                clock.header(lsid, GLSN(glsn + count - 1), 1, time, None, declared)
                self._step(topics, glsn + count - 1)
            else:
                seen = clock.seen(lsid, GLSN(glsn), count, time, most, declared)
                if most is None or is_declared:
                    self._step(topics, glsn + count - 1)
                else:
                    found[topics] = seen
        self._pass_time(glsn, cut_ms)
        return found

    def idle(self, topic: str, stream: int, glsn: int, cut_ms: int) -> None:
        """A stream is idle from this position on, until it speaks again."""
        lsid = self._streams[topic, stream]
        for topics, clock in self._clocks.items():
            if topic in topics:
                snapshot = clock.snapshot()
                streams = tuple(
                    replace(known, last_commit=_LONG_AGO) if known.log_stream_id == lsid else known
                    for known in snapshot.streams
                )
                self._clocks[topics] = WatermarkClock.restore(replace(snapshot, streams=streams))
        self.tick(glsn, cut_ms)

    def tick(self, glsn: int, cut_ms: int) -> None:
        """A position without a record of any source: only time moves."""
        for topics, clock in self._clocks.items():
            clock.tick(GLSN(glsn), CutTime(cut_ms * MILLISECOND))
            self._step(topics, glsn)
        self._pass_time(glsn, cut_ms)

    def ticks(self) -> Ticks:
        """The steps since the last call; the next range begins where this one ends."""
        taken, self._ticks = self._ticks, self._fresh()
        return taken

    @property
    def glsn(self) -> int:
        """The last position that was reported."""
        return self._clocks[frozenset(self._sources)].glsn

    @property
    def watermark(self) -> int:
        """The minimum over all sources, in milliseconds."""
        return _milliseconds(self._clocks[frozenset(self._sources)].watermark)

    def _report(
        self, topic: str, stream: int, glsn: int, cut_ms: int, said_us: int | None, declared_ms: int | None
    ) -> None:
        lsid, time = self._streams[topic, stream], CutTime(cut_ms * MILLISECOND)
        said = None if said_us is None else EventTime(said_us)
        declared = None if declared_ms is None else EventTime(declared_ms * MILLISECOND)
        for topics, clock in self._clocks.items():
            if topic in topics:
                clock.header(lsid, GLSN(glsn), 1, time, said, declared)
            else:
                clock.tick(GLSN(glsn), time)
            self._step(topics, glsn)
        self._pass_time(glsn, cut_ms)

    def _step(self, topics: frozenset[str], glsn: int) -> None:
        steps = self._ticks.watermarks[topics]
        value = _milliseconds(self._clocks[topics].watermark)
        if value > steps.last:
            steps.add(watermark_step(glsn), value)

    def _pass_time(self, glsn: int, cut_ms: int) -> None:
        if cut_ms > self._ticks.times.last:
            self._ticks.times.add(time_step(glsn), cut_ms)
        self._time = cut_ms

    def _fresh(self) -> Ticks:
        watermarks = {topics: Steps(_milliseconds(clock.watermark)) for topics, clock in self._clocks.items()}
        return Ticks(watermarks, Steps(self._time))


def is_settled(begun: ClockSnapshot, now: ClockSnapshot) -> bool:
    """Whether clocks that were ``resumed`` show the true watermarks by now: a watermark is never above the highest of
    its streams, so one that has come there owes nothing to what was before.
    """
    ceilings = {
        topics: max((known.watermark for known in own.streams), default=NO_WATERMARK) for topics, own in begun.clocks
    }
    return all(own.watermark >= ceilings[topics] for topics, own in now.clocks)


def _event_time(time_ms: int | None) -> EventTime | None:
    return None if time_ms is None else EventTime(time_ms * MILLISECOND)


def _milliseconds(watermark_us: int) -> int:
    if watermark_us in (NO_WATERMARK, MAX_WATERMARK):
        return NO_TIME if watermark_us == NO_WATERMARK else MAX_TIME
    return watermark_us // MILLISECOND
