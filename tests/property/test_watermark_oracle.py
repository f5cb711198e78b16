"""The clocks of the core and of pipelines against the oracle of rule 2, at every position, from every start."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import chain, combinations, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cutwater.core.read import watermark as core
from cutwater.core.read.watermark import BoundedOutOfOrderness, Punctuated, Strategy, WatermarkClock
from cutwater.pipeline.clocks import clock as pipeline_clock
from cutwater.pipeline.clocks.clock import ClockSnapshot, KnownStream, LogClock
from cutwater.pipeline.clocks.clock_steps import shown_ms
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.rows import untyped
from cutwater.types import GLSN, CutTime, EventTime, LogStreamId
from tests.clock_kit import report
from tests.property import watermark_oracle
from tests.property.watermark_oracle import CLOCKLESS, NONE, Entry, Log, Oracle, Source, Stream, logs

EXAMPLES = settings(max_examples=120, deadline=None)
NO_ROW = untyped({})


def strategy_of(source: Source) -> Strategy:
    if source.bound is None:
        return Punctuated(source.idle_after)
    return BoundedOutOfOrderness(source.bound, source.idle_after)


class Described(Watermark):
    """A strategy of a pipeline with microseconds, so that a test can have any."""

    def __init__(self, source: Source) -> None:
        super().__init__("bounded")
        object.__setattr__(self, "_given", strategy_of(source))

    __slots__ = ("_given",)

    @property
    def strategy(self) -> Strategy:
        found: Strategy = self._given  # type: ignore[attr-defined]
        return found


def sets_of(log: Log) -> list[frozenset[str]]:
    names = [source.name for source in log.sources]
    return [frozenset(s) for s in chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1))]


def events(log: Log) -> Iterator[tuple[int, Entry | None, bool, int]]:
    """In order: position, entry if one begins there, whether its last position (or this one) is a mark, cut time."""
    marks = dict(log.marks)
    ends = {entry.last for entry in log.entries}
    held = [(entry.first, entry, entry.last in marks, entry.cut) for entry in log.entries]
    alone = [(glsn, None, True, time) for glsn, time in log.marks if glsn not in ends]
    return iter(sorted(held + alone, key=lambda event: event[0]))


# ------------------------------------------------------------------------------------------------ the clock of a source


def walk_core(
    log: Log, source: Source, *, by_header: bool, restore_always: bool = False
) -> dict[int, tuple[int, bool]]:
    """By position: watermark and idleness after it, as far as the clock tells; it tells all but by header."""
    clock, after = WatermarkClock(), {}
    streams = [stream for stream in log.streams if stream.source == source.name]
    for glsn, entry, is_mark, time in events(log):
        place_streams(glsn, streams, clock.knows, clock.add_stream, clock.remove_stream, strategy_of(source))
        if entry is not None and entry.source == source.name:
            lsid, cut = LogStreamId(entry.stream), CutTime(time)
            declared = None if entry.declared is None else EventTime(entry.declared)
            if not entry.times or by_header:
                most = EventTime(max(entry.times)) if entry.times else None
                clock.seen(lsid, GLSN(glsn), entry.count, cut, most, declared, idle=entry.idle)
            else:
                times = [EventTime(t) for t in entry.times]
                seen = report(clock, lsid, glsn, cut, times, declared, idle=entry.idle)
                after.update({glsn + i: (value, False) for i, value in enumerate(seen[1:])})
        elif is_mark:
            clock.tick(GLSN(entry.last if entry is not None else glsn), CutTime(time))
        after[entry.last if entry is not None else glsn] = clock.watermark, clock.is_idle
        if restore_always:
            encoded = msgspec.json.encode(clock.snapshot())
            clock = WatermarkClock.restore(msgspec.json.decode(encoded, type=core.WatermarkSnapshot))
    return after


def place_streams(
    glsn: int, streams: list[Stream], knows: Callable[[LogStreamId], bool],
    add: Callable[..., None], remove: Callable[..., None], *strategy: Strategy,
) -> None:  # fmt: skip
    for stream in streams:
        lsid = LogStreamId(stream.number)
        if stream.counts(glsn) and not knows(lsid):
            add(lsid, *strategy, CutTime(stream.created))
        elif not stream.counts(glsn) and knows(lsid):
            remove(lsid)


@EXAMPLES
@given(logs(), st.booleans())
def test_every_source_has_the_watermark_of_the_oracle(log: Log, by_header: bool) -> None:
    compare_sources(log, by_header)


def compare_sources(log: Log, by_header: bool) -> None:
    oracle = Oracle(log)
    for source in log.sources:
        found = walk_core(log, source, by_header=by_header)
        expected = {g: (s[source.name].watermark, s[source.name].idle) for g, s in oracle.after.items() if g in found}
        assert found == expected
        assert walk_core(log, source, by_header=by_header, restore_always=True) == expected
        assert all(earlier <= later for earlier, later in pairwise(found[g][0] for g in sorted(found)))


# ------------------------------------------------------------------------------------------------- clocks of a pipeline


class Walk:
    """Leads a ``LogClock`` along a log, as a planner does, and notes what is known at each position, in µs."""

    def __init__(self, log: Log, clock: LogClock | None = None, start: int = 0) -> None:
        self.log, self.start = log, start
        self.sets = sets_of(log)
        self.sources: dict[str, Watermark | None] = {source.name: Described(source) for source in log.sources}
        self.sources[CLOCKLESS] = None
        self.clock = clock or LogClock(self.sources, self.sets)
        self.after: dict[int, dict[frozenset[str], int]] = {}
        self.steps: dict[frozenset[str], list[tuple[int, int]]] = {topics: [] for topics in self.sets}
        """Where watermarks rise, and to what, in ms: as the clock notes it, and as tasks compute it."""

    def run(self, end: int = 10**9, *, by_batch: bool = True, restore_always: bool = False) -> ClockSnapshot:
        for glsn, entry, is_mark, time in events(self.log):
            if not self.start < glsn <= end:
                continue
            self.place_streams(glsn)
            if entry is None:
                self.clock.tick(glsn, time)
            elif by_batch and entry.times:
                self._batch(entry, is_mark)
            else:
                self._records(entry, is_mark)
            self.after[entry.last if entry is not None else glsn] = self.reached()
            ticks = self.clock.ticks()
            for topics, noted in self.steps.items():
                steps = ticks.watermarks[topics]
                noted.extend(zip(map(glsn_of, steps.moments), steps.values, strict=True))
            if restore_always:
                encoded = msgspec.json.encode(self.clock.snapshot())
                decoded = msgspec.json.decode(encoded, type=ClockSnapshot)
                self.clock = LogClock.restore(self.sources, self.sets, decoded)
        return self.clock.snapshot()

    def place_streams(self, glsn: int) -> None:
        for stream in self.log.streams:
            knows = self.clock.knows(stream.source, stream.number)
            if stream.counts(glsn) and not knows:
                self.clock.add_stream(stream.source, stream.number, stream.created)
            elif not stream.counts(glsn) and knows:
                self.clock.end_stream(stream.source, stream.number)

    def reached(self) -> dict[frozenset[str], int]:
        found = {frozenset(operator.topics): operator.watermark for operator in self.clock.snapshot().operators}
        return {topics: found[topics] for topics in self.sets}

    def _batch(self, entry: Entry, is_mark: bool) -> None:
        """By header; inside of the batch a task computes the watermarks, from three numbers and the event times."""
        found = self.clock.batch(
            entry.source, entry.stream, entry.first, entry.count, entry.cut, max(entry.times), entry.declared,
            idle=entry.idle, is_mark=is_mark,
        )  # fmt: skip
        for topics in found.keys() & set(self.sets):
            before, least, own = found[topics]
            bound = self.log.source(entry.source).bound
            for glsn, time in enumerate(entry.times, entry.first):
                assert bound is not None
                own = max(own, time - bound - 1_000)
                after = max(before, min(own, least))
                self.steps[topics].append((glsn, shown_ms(after)))
                if glsn < entry.last:
                    self.after.setdefault(glsn, {})[topics] = after

    def _records(self, entry: Entry, is_mark: bool) -> None:
        """One after the other."""
        for glsn in range(entry.first, entry.last + 1):
            time, declared, idle = entry.at(glsn)
            place = (entry.source, entry.stream, glsn, entry.cut)
            is_last = glsn == entry.last and is_mark
            if is_last or time is not None:
                said = None if time is None else EventTime(time)
                self.clock._entry(*place, said, declared, idle, is_last)
            else:
                self.clock.heartbeat(*place, declared, idle=idle)
            self.after[glsn] = self.reached()


def expected_of(oracle: Oracle, found: dict[int, dict[frozenset[str], int]]) -> dict[int, dict[frozenset[str], int]]:
    return {glsn: {topics: oracle.watermark(topics, glsn) for topics in own} for glsn, own in found.items()}


@EXAMPLES
@given(logs(clockless=True), st.booleans(), st.booleans())
def test_every_operator_has_the_watermark_of_the_oracle(log: Log, by_batch: bool, restore_always: bool) -> None:
    compare_operators(log, by_batch, restore_always)


def compare_operators(log: Log, by_batch: bool, restore_always: bool) -> None:
    walk = Walk(log)
    walk.run(by_batch=by_batch, restore_always=restore_always)
    oracle = Oracle(log)
    assert walk.after == expected_of(oracle, walk.after)
    for topics, steps in walk.steps.items():
        rises, reached = dict.fromkeys(log.positions, NONE), NONE
        for glsn, value in steps:
            rises[glsn] = max(rises[glsn], value)
        for glsn, value in sorted(rises.items()):
            reached = max(reached, value)
            assert reached == shown_ms(oracle.watermark(topics, glsn)), (topics, glsn)


def test_a_mark_at_the_end_of_a_batch_without_a_clock_is_the_last_position() -> None:
    """However the producer has batched its records: a stream turns idle at the mark, not where the batch begins."""
    streams = (Stream("a", 1, 0, 0), Stream("a", 2, 0, 0), Stream(CLOCKLESS, 3, 0, 0))
    spoken = (Entry("a", 2, 1, 0, (10_000,)), Entry("a", 1, 2, 5, (100_000,)))
    alone = tuple(Entry(CLOCKLESS, 3, glsn, 12, (5,)) for glsn in range(3, 8))
    for last in ((Entry(CLOCKLESS, 3, 3, 12, (5,) * 5),), alone):
        log = Log((Source("a", 0, 10),), streams, (*spoken, *last), ((7, 12),))
        compare_operators(log, by_batch=True, restore_always=False)
        walk = Walk(log)
        walk.run()
        assert walk.steps[frozenset("a")][-1] == (7, 99)


def known_at(log: Log, glsn: int) -> list[KnownStream]:
    """What storage nodes remember of each log stream at a position."""
    found = []
    for stream in log.streams:
        if stream.created_at >= glsn:
            continue
        own = [e for e in log.entries if (e.source, e.stream) == (stream.source, stream.number) and e.last <= glsn]
        times = [time for entry in own for time in entry.times]
        declared = [entry.declared for entry in own if entry.declared is not None]
        found.append(
            KnownStream(
                stream.source, stream.number, own[-1].cut if own else stream.created, max(times, default=None),
                max(declared, default=None), bool(own) and own[-1].idle, ended=not stream.counts(glsn),
            )
        )  # fmt: skip
    return found


def states(snapshot: ClockSnapshot) -> tuple[object, ...]:
    """Without the time at which a watermark last rose, which is for people."""
    return snapshot.sources, tuple(msgspec.structs.replace(own, risen=0) for own in snapshot.operators)


@EXAMPLES
@given(logs(), st.data())
def test_a_start_anywhere_agrees_with_a_walk_from_the_beginning(log: Log, data: st.DataObject) -> None:
    """A reader that begins at a position looks back from mark to mark until its clocks are settled."""
    ends = sorted({entry.last for entry in log.entries} | {glsn for glsn, _ in log.marks})
    end = data.draw(st.sampled_from(ends or [0]), "start")
    whole = Walk(log)
    expected = whole.run(end)
    for glsn, time in reversed([mark for mark in log.marks if mark[0] <= end]):
        begun = LogClock.resumed(whole.sources, whole.sets, glsn, known_at(log, glsn), time)
        ceiling = LogClock.resumed(whole.sources, whole.sets, glsn, known_at(log, glsn), time)
        found = Walk(log, begun, glsn).run(end)
        if ceiling.is_settled(found):
            assert states(found) == states(expected)


# ------------------------------------------------------------------------------------------------- planted bugs

FIRST = settings(max_examples=300, deadline=None, phases=[Phase.generate], database=None, report_multiple_bugs=False)
"""Enough to see that the oracle disagrees somewhere; where is not looked for."""
sources_differ = FIRST(given(logs(), st.booleans())(compare_sources))
operators_differ = FIRST(given(logs(clockless=True), st.booleans(), st.booleans())(compare_operators))


def one_minimum(sources: Iterator[tuple[int, bool]]) -> int:
    """An idle source is not left out."""
    return min((watermark for watermark, _ in sources), default=NONE)


def highest(sources: Iterator[tuple[int, bool]]) -> int:
    """The fastest source decides."""
    return max((watermark for watermark, _ in sources), default=NONE)


def all_idle_stand_still(sources: Iterator[tuple[int, bool]]) -> int:
    """As rule 1: while all are idle, nothing moves."""
    return min((watermark for watermark, idle in sources if not idle), default=NONE)


@pytest.mark.parametrize("planted", [one_minimum, highest, all_idle_stand_still])
def test_the_oracle_finds_a_wrong_rule_for_several_sources(
    planted: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_clock, "combined", planted)
    with pytest.raises(AssertionError):
        operators_differ()


def test_the_oracle_finds_a_source_that_is_evaluated_at_entries_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rule 1: every position lets time pass for the streams of all sources."""
    entry = LogClock._entry

    def everywhere(self: LogClock, topic: str, stream: int, glsn: int, cut_us: int, *rest: object) -> None:
        for name, clock in self._clocks.items():
            if name != topic:
                clock.tick(GLSN(glsn), CutTime(cut_us))
        entry(self, topic, stream, glsn, cut_us, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LogClock, "_entry", everywhere)
    with pytest.raises(AssertionError):
        operators_differ()


def test_the_oracle_finds_idle_streams_that_hold_the_maximum_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rule 1: where all streams of a source are idle, its watermark stands still."""
    monkeypatch.setattr(
        WatermarkClock,
        "_value",
        property(lambda self: NONE if self._lowest is None else self._lowest.watermark),
    )
    with pytest.raises(AssertionError):
        sources_differ()


def test_the_oracle_shares_nothing_with_what_it_checks() -> None:
    tree = ast.parse(Path(watermark_oracle.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("cutwater", "tests", "."))]
