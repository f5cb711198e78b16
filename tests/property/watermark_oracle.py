"""Rule 2 of the watermark as a dumb oracle: every position is computed anew from the whole log before it.

It follows the sentences of the rule one by one and imports nothing of Cutwater. ``logs`` makes random logs of several
sources. Numbers are microseconds; ``NONE`` stands for a watermark that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

NONE = -(2**63)
CLOCKLESS = "z"
MILLISECOND = 1_000


@dataclass(frozen=True)
class Source:
    name: str
    bound: int | None
    """None: punctuated."""
    idle_after: int


@dataclass(frozen=True)
class Stream:
    """It counts at positions above ``created_at``, up to ``final_at`` if it was sealed for good."""

    source: str
    number: int
    created_at: int
    created: int
    final_at: int | None = None

    def counts(self, glsn: int) -> bool:
        return self.created_at < glsn and (self.final_at is None or glsn <= self.final_at)


@dataclass(frozen=True)
class Entry:
    """A batch of records; without ``times`` a fence or a declaration, which has one position."""

    source: str
    stream: int
    first: int
    cut: int
    times: tuple[int, ...] = ()
    declared: int | None = None
    idle: bool = False

    @property
    def count(self) -> int:
        return max(1, len(self.times))

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def at(self, glsn: int) -> tuple[int | None, int | None, bool]:
        """What the entry says at one of its positions: event time, declared watermark, idleness."""
        is_last = glsn == self.last
        time = self.times[glsn - self.first] if self.times else None
        return time, self.declared if is_last else None, self.idle and is_last


@dataclass(frozen=True)
class Log:
    """Streams and entries may be of ``CLOCKLESS`` as well, a source without a clock: its positions are there, and it
    counts for nothing.
    """

    sources: tuple[Source, ...]
    streams: tuple[Stream, ...]
    entries: tuple[Entry, ...]
    marks: tuple[tuple[int, int], ...]
    """GLSN and cut time; a mark may be the last position of an entry."""

    def source(self, name: str) -> Source:
        return next(source for source in self.sources if source.name == name)

    @property
    def positions(self) -> list[int]:
        held = [glsn for entry in self.entries for glsn in range(entry.first, entry.last + 1)]
        return sorted({*held, *(glsn for glsn, _ in self.marks)})


@dataclass(frozen=True)
class State:
    """Of a source after a position."""

    watermark: int
    idle: bool


class Oracle:
    """``after[g]`` has, by source, its state after position g; ``watermark(names, g)`` is that of an operator."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.after: dict[int, dict[str, State]] = {}
        self._operators: dict[frozenset[str], dict[int, int]] = {}
        reached = {source.name: NONE for source in log.sources}
        evaluated = {source.name: -1 for source in log.sources}
        was_idle = {source.name: True for source in log.sources}
        for glsn in log.positions:
            states = {}
            for source in log.sources:
                time = self._evaluated_at(source.name, glsn)
                if time is not None:
                    value, idle = self._evaluate(source, glsn, time)
                    reached[source.name] = max(reached[source.name], value)
                    was_idle[source.name] = idle
                    evaluated[source.name] = glsn
                elif self._has_new_stream(source.name, evaluated[source.name], glsn):
                    idle = False
                else:
                    idle = was_idle[source.name]
                states[source.name] = State(reached[source.name], idle)
            self.after[glsn] = states

    def watermark(self, names: frozenset[str], glsn: int) -> int:
        """W of an operator that is fed from these sources: the largest u so far."""
        if names not in self._operators:
            found, whole = NONE, {}
            for position in self.log.positions:
                found = whole[position] = max(found, self._operator(names, position))
            self._operators[names] = whole
        return self._operators[names][glsn]

    def _operator(self, names: frozenset[str], glsn: int) -> int:
        states = [state for name, state in self.after[glsn].items() if name in names]
        active = [state.watermark for state in states if not state.idle]
        return min(active) if active else max((state.watermark for state in states), default=NONE)

    def _evaluated_at(self, name: str, glsn: int) -> int | None:
        """The cut time, if the position is an entry of the source, or a mark."""
        for entry in self.log.entries:
            if entry.source == name and entry.first <= glsn <= entry.last:
                return entry.cut
        return next((time for mark, time in self.log.marks if mark == glsn), None)

    def _has_new_stream(self, name: str, evaluated: int, glsn: int) -> bool:
        """Whether a stream that counts was created since the source was last evaluated: creation is an entry."""
        own = [stream for stream in self.log.streams if stream.source == name and stream.counts(glsn)]
        return any(stream.created_at >= evaluated for stream in own)

    def _evaluate(self, source: Source, glsn: int, time: int) -> tuple[int, bool]:
        active, all_said = [], []
        for stream in self.log.streams:
            if stream.source != source.name or not stream.counts(glsn):
                continue
            said, spoke, declares_idle = self._stream(source, stream, glsn)
            all_said.append(said)
            if not declares_idle and time - spoke <= source.idle_after:
                active.append(said)
        return (min(active), False) if active else (max(all_said, default=NONE), True)

    def _stream(self, source: Source, stream: Stream, glsn: int) -> tuple[int, int, bool]:
        """Its own watermark, the time of its last entry, and whether that declares idleness."""
        own, spoke, idle = NONE, stream.created, False
        for entry in self.log.entries:
            if (entry.source, entry.stream) != (stream.source, stream.number) or entry.first > glsn:
                continue
            for position in range(entry.first, min(glsn, entry.last) + 1):
                time, declared, idle = entry.at(position)
                spoke = entry.cut
                if source.bound is None:
                    own = own if declared is None else max(own, declared)
                elif time is not None:
                    own = max(own, time - source.bound - MILLISECOND)
        return own, spoke, idle

    def seen(self, names: frozenset[str]) -> Iterator[tuple[int, int]]:
        """By position of a record: the watermark that it sees, which is that after the position before it."""
        positions = self.log.positions
        for entry in self.log.entries:
            for glsn in range(entry.first, entry.first + len(entry.times)):
                before = max((position for position in positions if position < glsn), default=0)
                yield glsn, self.watermark(names, before) if before else NONE


# Small numbers, so that ties and the exact edges of idleness and of the bound are common.
_idle_after = st.sampled_from([0, 5, 10, 25])
_bounds = st.sampled_from([0, 1, 7, 1_000, 3_000, None])
_event_times = st.one_of(st.integers(0, 40), st.integers(-20_000, 20_000))
_pauses = st.sampled_from([0, 0, 0, 1, 2, 5, 6, 10, 11, 26])


@st.composite
def logs(
    draw: st.DrawFn, sources_max: int = 3, steps_max: int = 18, same_strategy: bool = False, clockless: bool = False
) -> Log:
    """Cuts of several entries, the last position of some being a mark; streams come and go between cuts."""
    count = draw(st.integers(1, sources_max))
    given = [(draw(_bounds), draw(_idle_after)) for _ in range(count)]
    sources = tuple(Source("abc"[i], *given[0 if same_strategy else i]) for i in range(count))
    glsn, time, number = 0, 100, 0
    streams: dict[int, Stream] = {}
    entries: list[Entry] = []
    marks: list[tuple[int, int]] = []

    def create(name: str) -> None:
        nonlocal number
        number += 1
        streams[number] = Stream(name, number, glsn, time + draw(st.sampled_from([-11, -5, 0, 0, 3, 12])))

    for source in sources:
        for _ in range(draw(st.integers(0, 2))):
            create(source.name)
    if clockless:
        create(CLOCKLESS)
    for _ in range(draw(st.integers(1, steps_max))):
        live = [stream for stream in streams.values() if stream.final_at is None]
        kind = draw(st.sampled_from(["cut"] * 7 + ["mark"] * 3 + ["create", "final"]))
        if kind == "create" and len(live) < 5:
            create(draw(st.sampled_from(sources)).name)
        elif kind == "final" and live:
            gone = draw(st.sampled_from(live))
            streams[gone.number] = Stream(gone.source, gone.number, gone.created_at, gone.created, glsn)
        elif kind == "mark" or (kind == "cut" and not live):
            glsn, time = glsn + draw(st.sampled_from([1, 1, 4])), time + draw(_pauses)
            silent = [stream for stream in live if stream.source == CLOCKLESS]
            if silent and draw(st.booleans()):
                entries.append(Entry(CLOCKLESS, silent[0].number, glsn, time, (0,) * draw(st.integers(1, 4))))
                glsn = entries[-1].last
            marks.append((glsn, time))
        elif kind == "cut":
            glsn, time = glsn + draw(st.sampled_from([0, 0, 3])), time + draw(_pauses)
            for _ in range(draw(st.integers(1, 3))):
                stream = draw(st.sampled_from(live))
                times = tuple(draw(st.lists(_event_times, max_size=4)))
                declared = draw(st.none() | _event_times)
                idle = draw(st.sampled_from([False] * 4 + [True]))
                entries.append(Entry(stream.source, stream.number, glsn + 1, time, times, declared, idle))
                glsn = entries[-1].last
            if draw(st.sampled_from([False, False, True])):
                marks.append((glsn, time))
            # Cut time never stands still from one cut to the next.
        time += 1
    return Log(sources, tuple(streams.values()), tuple(entries), tuple(marks))
