"""The clocks of a savepoint for a program whose sources, or the operators behind them, are others.

All topics are read on from the one position of the savepoint. What is known of the streams of a topic that stays goes
along, under the strategy that the program has now. The streams of a topic that is new count from the first position
after the savepoint. An operator's watermark never goes back: a minimum over other topics than before begins where the
operator was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from cutwater.core.watermark import NO_WATERMARK, StreamSnapshot, WatermarkSnapshot
from cutwater.pipeline.clock import ClockSnapshot
from cutwater.pipeline.watermarks import Watermark
from cutwater.savepoints.program import OperatorInfo
from cutwater.types import LogStreamId


def migrated(
    snapshot: ClockSnapshot | None,
    sources: Mapping[str, Watermark],
    operators: Iterable[OperatorInfo],
    before: Iterable[OperatorInfo],
) -> ClockSnapshot | None:
    """``operators`` are those of the program, ``before`` those of the savepoint."""
    if snapshot is None:
        return None
    kept = [number for number, (topic, _) in enumerate(snapshot.streams) if topic in sources]
    renumbered = {number: LogStreamId(place) for place, number in enumerate(kept)}
    old = {frozenset(topics): own for topics, own in snapshot.clocks}
    known = {number: stream for own in old.values() for number, stream in _by_number(own).items()}
    was = {operator.uid: frozenset(operator.sources) for operator in before}
    floors: dict[frozenset[str], int] = {frozenset(sources): NO_WATERMARK}
    for operator in operators:
        topics = frozenset(operator.sources)
        reached = old.get(was.get(operator.uid, topics))
        floors[topics] = max(floors.get(topics, NO_WATERMARK), NO_WATERMARK if reached is None else reached.watermark)
    glsn, time = max((own.glsn, own.time) for own in old.values())
    clocks = []
    for topics, floor in floors.items():
        streams = tuple(
            replace(
                known[number],
                log_stream_id=renumbered[number],
                strategy=sources[snapshot.streams[number][0]].strategy,
            )
            for number in kept
            if number in known and snapshot.streams[number][0] in topics
        )
        watermark = max(floor, old[topics].watermark) if topics in old else floor
        clocks.append((tuple(sorted(topics)), WatermarkSnapshot(glsn, time, watermark, False, streams)))
    ended = tuple(int(renumbered[number]) for number in snapshot.ended if number in renumbered)
    places = tuple(snapshot.streams[number] for number in kept)
    return replace(snapshot, streams=places, clocks=tuple(clocks), ended=ended)


def _by_number(snapshot: WatermarkSnapshot) -> dict[int, StreamSnapshot]:
    return {int(stream.log_stream_id): stream for stream in snapshot.streams}
