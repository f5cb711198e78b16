"""Implements the clocks of a pipeline: walks the log in the order of its positions and finds where watermarks and time
step.

Each source with a watermark strategy has its own clock. The watermark of an operator follows from the clocks of the
sources that feed it. The rule is that of ``cutwater.core.read.watermark``, in microseconds. Pipelines count in
milliseconds, rounded down, so a watermark never promises more than the log does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from cutwater.core.read.watermark import (
    MAX_WATERMARK,
    NO_WATERMARK,
    Punctuated,
    Strategy,
    StreamSnapshot,
    WatermarkClock,
    WatermarkSnapshot,
    combined,
    own_watermark,
)
from cutwater.pipeline.clocks.clock_steps import NO_TIME, Steps, Ticks, shown_ms
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.rows import Row
from cutwater.types import GLSN, MILLISECOND, CutTime, LogStreamId

Sources: TypeAlias = Mapping[str, Watermark | Strategy | None]
"""The sources by topic. Records can be reported only to a ``Watermark``, which may have a function of them."""

Seen: TypeAlias = tuple[int, int, int]
"""Three watermarks for a batch, in µs: the operator's before the batch, the least of other streams and sources during
the batch, and the batch's own stream's before it. After a record that brings its stream to ``own``, the watermark is
max(before, min(own, least))."""


class SourceSnapshot(Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    clock: WatermarkSnapshot


class OperatorSnapshot(Struct, frozen=True, forbid_unknown_fields=True):
    """The watermark of the operators that are fed from these topics. ``risen`` is the cut time at which it last
    rose."""

    topics: tuple[str, ...]
    watermark: int
    risen: int = 0


class ClockSnapshot(Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=2):
    """All clocks after a position. ``time_us`` is its cut time."""

    time_us: int
    sources: tuple[SourceSnapshot, ...]
    operators: tuple[OperatorSnapshot, ...]

    @property
    def time_ms(self) -> int:
        return NO_TIME if self.time_us == NO_TIME else self.time_us // MILLISECOND

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategies by topic, of topics that have a stream."""
        return {source.topic: source.clock.streams[0].strategy for source in self.sources if source.clock.streams}

    @property
    def watermark_ms(self) -> int:
        """The watermark of all sources together."""
        whole = max(self.operators, key=lambda operator: len(operator.topics), default=None)
        return NO_TIME if whole is None else shown_ms(whole.watermark)


class KnownStream(Struct, frozen=True):
    """A stream as the log remembers it: its largest event time, its largest declaration, the time of its last entry (of
    its creation if it has none), and whether that entry declares idleness."""

    topic: str
    stream: int
    last_commit_us: int
    most_us: int | None
    declared_us: int | None
    idle: bool = False
    ended: bool = False
    """The stream was sealed permanently before: it no longer counts, but it may have counted earlier."""


class WatermarkHolder(Struct, frozen=True):
    """What holds a watermark back: the log stream of a source that is furthest behind. ``since_us`` is the cut time
    since which the watermark has stood still, and ``spoke_us`` that of the stream's last entry."""

    topic: str
    stream: int
    watermark: int
    since_us: int
    spoke_us: int


class LogClock:
    """All clocks of one pipeline. Report every position once, in order, then take the ``ticks`` of the range.

    A source without a strategy has no clock. Its positions must be reported as well, because cut time passes there.
    """

    def __init__(self, sources: Sources, sets: Iterable[frozenset[str]]) -> None:
        self._sources = dict(sources)
        self._strategies, self._all = strategies_of(sources), frozenset(sources)
        self._clocks = {topic: WatermarkClock() for topic in self._strategies}
        self._members = {
            topics: [topic for topic in sorted(topics) if topic in self._clocks] for topics in (*sets, self._all)
        }
        self._reached = dict.fromkeys(self._members, NO_WATERMARK)
        self._risen = dict.fromkeys(self._members, 0)
        self._glsn = 0
        self._time_us = NO_TIME
        self._ceilings: dict[frozenset[str], int] = {}
        self._ticks = self._fresh()

    @classmethod
    def restore(cls, sources: Sources, sets: Iterable[frozenset[str]], snapshot: ClockSnapshot) -> LogClock:
        """Return clocks that go on like those that made the snapshot."""
        clock = cls(sources, sets)
        for source in snapshot.sources:
            if source.topic in clock._clocks:
                clock._clocks[source.topic] = WatermarkClock.restore(source.clock)
                clock._glsn = max(clock._glsn, source.clock.glsn)
        for operator in snapshot.operators:
            topics = frozenset(operator.topics)
            if topics in clock._reached:
                clock._reached[topics], clock._risen[topics] = operator.watermark, operator.risen
        clock._time_us = snapshot.time_us
        clock._ticks = clock._fresh()
        return clock

    @classmethod
    def resumed(
        cls,
        sources: Sources,
        sets: Iterable[frozenset[str]],
        glsn: int,
        streams: Sequence[KnownStream],
        time_us: int,
    ) -> LogClock:
        """Return clocks at a mark of the log's clock, or where the log begins after a trim, without a walk to that
        position. Every source is evaluated there. The log does not remember how streams that were idle before have
        affected the watermark: see ``is_settled``."""
        clock = cls(sources, sets)
        highest = dict.fromkeys(clock._clocks, NO_WATERMARK)
        for topic, strategy in clock._strategies.items():
            known = []
            for stream in sorted((s for s in streams if s.topic == topic), key=lambda s: s.stream):
                own = own_watermark(strategy, stream.most_us, stream.declared_us)
                highest[topic] = max(highest[topic], own)
                if not stream.ended:
                    number, spoke = LogStreamId(stream.stream), CutTime(stream.last_commit_us)
                    known.append(StreamSnapshot(number, strategy, spoke, own, stream.idle))
            begun = WatermarkSnapshot(GLSN(0), CutTime(-(2**63)), NO_WATERMARK, False, tuple(known))
            clock._clocks[topic] = WatermarkClock.restore(begun)
        if glsn > 0:
            clock.tick(glsn, time_us)
        clock._ceilings = {
            topics: max((highest[topic] for topic in members), default=NO_WATERMARK)
            for topics, members in (*clock._members.items(), *((frozenset({t}), [t]) for t in clock._clocks))
        }
        clock._ticks = clock._fresh()
        return clock

    def is_settled(self, now: ClockSnapshot) -> bool:
        """Report whether clocks that began as this one was resumed show the true watermarks by now. No watermark was
        ever above the highest of its streams, so a watermark that has reached that level does not depend on anything
        earlier."""
        reached = [(frozenset(operator.topics), operator.watermark) for operator in now.operators]
        reached += [(frozenset({source.topic}), source.clock.watermark) for source in now.sources]
        return all(watermark >= self._ceilings.get(topics, NO_WATERMARK) for topics, watermark in reached)

    def snapshot(self) -> ClockSnapshot:
        return ClockSnapshot(
            self._time_us,
            tuple(SourceSnapshot(topic, clock.snapshot()) for topic, clock in sorted(self._clocks.items())),
            tuple(
                OperatorSnapshot(tuple(sorted(topics)), reached, self._risen[topics])
                for topics, reached in self._reached.items()
            ),
        )

    def knows(self, topic: str, stream: int) -> bool:
        clock = self._clocks.get(topic)
        return clock is None or clock.knows(LogStreamId(stream))

    def add_stream(self, topic: str, stream: int, created_us: int) -> None:
        """Add a stream of a topic. It counts from the next position on."""
        if topic in self._clocks:
            self._clocks[topic].add_stream(LogStreamId(stream), self._strategies[topic], CutTime(created_us))

    def end_stream(self, topic: str, stream: int) -> None:
        """Remove a stream that is sealed permanently. It does not count from the next position on. Does nothing if the
        stream is not known."""
        if topic in self._clocks and self.knows(topic, stream):
            self._clocks[topic].remove_stream(LogStreamId(stream))

    def recall(self, said: KnownStream) -> None:
        """Set what a stream had said by the next position, where its topic begins after a trim; see
        ``WatermarkClock``."""
        if said.topic in self._clocks and self.knows(said.topic, said.stream):
            own = own_watermark(self._strategies[said.topic], said.most_us, said.declared_us)
            spoke = CutTime(said.last_commit_us)
            self._clocks[said.topic].recall(LogStreamId(said.stream), own, spoke, idle=said.idle)

    def record(
        self, topic: str, stream: int, glsn: int, cut_us: int, row: Row, time_ms: int,
        declared_us: int | None = None, *, idle: bool = False, is_mark: bool = False,
    ) -> None:  # fmt: skip
        """Report a record of one of the sources. ``idle``: its stream is idle from here on, until its next entry.
        ``is_mark``: the position is also a mark of the log's clock."""
        given = self._sources[topic]
        said = given.said_us(row, time_ms) if isinstance(given, Watermark) else None
        self._entry(topic, stream, glsn, cut_us, said, declared_us, idle, is_mark)

    def heartbeat(
        self, topic: str, stream: int, glsn: int, cut_us: int, declared_us: int | None = None, *, idle: bool = False
    ) -> None:
        """Report an entry of a stream without a record. It may declare a watermark or idleness."""
        self._entry(topic, stream, glsn, cut_us, None, declared_us, idle, False)

    def batch(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False, is_noted: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        """Report the records of one batch, of which only the largest event time is known here. ``is_mark``: its last
        position is also a mark of the log's clock. ``is_noted``: record the step after its last position here in any
        case, because readers may skip the batch.

        Returns, for each watermark that the batch affects, the numbers from which a reader that knows the event time of
        each record computes where the watermark rises inside the batch. This method records all other steps: those of
        cut time, those after the last position if the batch declares idleness or is a mark, and all steps of a stream
        with declared watermarks, because these rise only at the first and the last record.
        """
        clock = self._clocks.get(topic)
        if clock is None or most_us is None or isinstance(self._strategies[topic], Punctuated):
            if clock is not None and count > 1:
                # A declaration takes effect at the last record, and the passing of time at the first.
                self._entry(topic, stream, glsn, cut_us, None, None, False, False, count - 1)
                glsn, count = glsn + count - 1, 1
            self._entry(topic, stream, glsn, cut_us, None, declared_us, idle, is_mark, count)
            return {}
        return self.seen(
            topic, stream, glsn, count, cut_us, most_us, None, idle=idle, is_mark=is_mark, is_noted=is_noted
        )

    def seen(
        self, topic: str, stream: int, glsn: int, count: int, cut_us: int, most_us: int | None,
        declared_us: int | None, *, idle: bool = False, is_mark: bool = False, is_noted: bool = False,
    ) -> dict[frozenset[str], Seen]:  # fmt: skip
        """Do the same for a source with a clock, and return the numbers also for declared watermarks and for entries
        without records. The steps of declared watermarks are not recorded."""
        self._pass_time(glsn, cut_us)
        last, time = glsn + count - 1, CutTime(cut_us)
        before, others, own = self._clocks[topic].seen(
            LogStreamId(stream), GLSN(glsn), count, time, most_us, declared_us, idle=idle
        )
        found: dict[frozenset[str], Seen] = {}
        for topics, members in self._members.items():
            if topic in members:
                least = MAX_WATERMARK
                for other in members:
                    if other != topic and not self._clocks[other].is_idle:
                        least = min(least, self._clocks[other].watermark)
                found[topics] = max(self._reached[topics], min(before, least)), min(others, least), own
        if is_mark:
            self._evaluate(last, time)
        self._rise(last, cut_us, None if is_mark else topic, is_noted=is_noted or is_mark or idle)
        return found

    def tick(self, glsn: int, cut_us: int) -> None:
        """Report a mark of the log's clock: every source is evaluated."""
        self._evaluate(glsn, CutTime(cut_us))
        self._rise(glsn, cut_us, None)
        self._pass_time(glsn, cut_us)

    def ticks(self) -> Ticks:
        """Return the steps since the last call. The next range begins where this one ends."""
        taken, self._ticks = self._ticks, self._fresh()
        return taken

    @property
    def glsn(self) -> int:
        """The last reported position."""
        return self._glsn

    @property
    def watermark_us(self) -> int:
        """The watermark of all sources together."""
        return self._reached[self._all]

    @property
    def watermark(self) -> int:
        """The same in the milliseconds of pipelines."""
        return shown_ms(self.watermark_us)

    def _entry(
        self, topic: str, stream: int, glsn: int, cut_us: int, said_us: int | None, declared_us: int | None,
        idle: bool, is_mark: bool, count: int = 1,
    ) -> None:  # fmt: skip
        clock, time, last = self._clocks.get(topic), CutTime(cut_us), glsn + count - 1
        self._pass_time(glsn, cut_us)
        if clock is not None:
            clock.seen(LogStreamId(stream), GLSN(glsn), count, time, said_us, declared_us, idle=idle)
        if is_mark:
            self._evaluate(last, time)
        if clock is not None or is_mark:
            # Time passes for a source at the first position of its entry, and for all sources at the mark, the last
            # position.
            self._rise(last if is_mark else glsn, cut_us, None if is_mark else topic)
        self._glsn = last

    def _evaluate(self, glsn: int, time: CutTime) -> None:
        for clock in self._clocks.values():
            clock.tick(GLSN(glsn), time)

    def _rise(self, glsn: int, cut_us: int, topic: str | None, *, is_noted: bool = True) -> None:
        """Raise the watermarks that a source affects, or all of them, after a position. ``is_noted``: record the step
        here."""
        self._glsn = max(self._glsn, glsn)
        for topics, members in self._members.items():
            if topic is not None and topic not in members:
                continue
            if len(members) == 1:
                reached = self._clocks[members[0]].watermark
            else:
                reached = combined((self._clocks[t].watermark, self._clocks[t].is_idle) for t in members)
            if reached > self._reached[topics]:
                self._reached[topics], self._risen[topics] = reached, cut_us
            if is_noted:
                self._ticks.rise(topics, glsn, self._reached[topics])

    def _pass_time(self, glsn: int, cut_us: int) -> None:
        self._ticks.pass_time(glsn, cut_us)
        self._time_us = cut_us

    def _fresh(self) -> Ticks:
        watermarks = {topics: Steps(shown_ms(reached)) for topics, reached in self._reached.items()}
        before = NO_TIME if self._time_us == NO_TIME else self._time_us // MILLISECOND
        return Ticks(watermarks, Steps(before))


def holder_of(snapshot: ClockSnapshot, topics: Iterable[str] | None = None) -> WatermarkHolder | None:
    """Return what holds the watermark of these topics back, or that of all topics. Returns None if nothing does: all
    sources are idle, or none has a clock."""
    wanted = None if topics is None else tuple(sorted(topics))
    operators = [own for own in snapshot.operators if wanted is None or own.topics == wanted]
    if not operators:
        return None
    operator = max(operators, key=lambda own: len(own.topics))
    sources = [s for s in snapshot.sources if s.topic in operator.topics and not s.clock.is_idle and s.clock.streams]
    if not sources:
        return None
    source = min(sources, key=lambda s: s.clock.watermark)
    clock = source.clock
    active = [s for s in clock.streams if not s.idle and clock.time - s.last_commit <= s.strategy.idle_after_us]
    if not active:
        return None
    stream = min(active, key=lambda s: s.watermark)
    return WatermarkHolder(
        source.topic, int(stream.log_stream_id), stream.watermark, operator.risen, stream.last_commit
    )


def strategies_of(sources: Sources) -> dict[str, Strategy]:
    """Return the strategies of the sources that have one."""
    return {
        topic: given.strategy if isinstance(given, Watermark) else given
        for topic, given in sources.items()
        if given is not None
    }
