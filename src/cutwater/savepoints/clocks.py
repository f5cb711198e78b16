"""Converts the clocks of a savepoint for a program with other sources, or with other operators behind them.

All topics are read on from the one position of the savepoint. If a topic stays, the state of its streams is kept, under
the strategy that the program has now. If a topic is new, or has a clock only now, its streams count from the first
position after the savepoint. An operator's watermark never goes back: if its topics have changed, its watermark begins
where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from cutwater.core.read.watermark import NO_WATERMARK
from cutwater.pipeline.clocks.clock import ClockSnapshot, OperatorSnapshot, SourceSnapshot
from cutwater.pipeline.clocks.rule_one import AnyClock, current
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.savepoints.program import OperatorInfo


def migrated(
    snapshot: AnyClock | None,
    sources: Mapping[str, Watermark | None],
    operators: Iterable[OperatorInfo],
    before: Iterable[OperatorInfo],
) -> ClockSnapshot | None:
    """Convert the clocks. ``operators`` are those of the program, ``before`` those of the savepoint."""
    now = current(snapshot)
    if now is None:
        return None
    reached = {frozenset(own.topics): own for own in now.operators}
    was = {operator.uid: frozenset(operator.sources) for operator in before}
    made = {frozenset(sources): _as_reached(reached.get(frozenset(sources)), frozenset(sources))}
    for operator in operators:
        topics = frozenset(operator.sources)
        candidates = [made.get(topics), reached.get(topics), reached.get(was.get(operator.uid, topics))]
        highest = max((own for own in candidates if own is not None), key=lambda own: own.watermark, default=None)
        made[topics] = _as_reached(highest, topics)
    kept = tuple(_with_strategy(source, sources[source.topic]) for source in now.sources if sources.get(source.topic))
    return ClockSnapshot(now.time_us, kept, tuple(made.values()))


def _as_reached(known: OperatorSnapshot | None, topics: frozenset[str]) -> OperatorSnapshot:
    names = tuple(sorted(topics))
    return OperatorSnapshot(names, NO_WATERMARK) if known is None else replace(known, topics=names)


def _with_strategy(source: SourceSnapshot, given: Watermark | None) -> SourceSnapshot:
    assert given is not None, "a source without a clock has none to keep"
    streams = tuple(replace(stream, strategy=given.strategy) for stream in source.clock.streams)
    return replace(source, clock=replace(source.clock, streams=streams))
