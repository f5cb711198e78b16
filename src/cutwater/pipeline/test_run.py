"""``Pipeline.test``: runs a pipeline on rows, in one thread, and shows what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cutwater.errors import CutwaterError, InvalidArgument, NotFound, PipelineFailed
from cutwater.pipeline.clock import LogClock
from cutwater.pipeline.failures import located
from cutwater.pipeline.graph import SinkNode, SourceNode, TransformNode
from cutwater.pipeline.machine import Machine
from cutwater.pipeline.on_spark import on_spark
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import Row, RowType, inferred, reader
from cutwater.pipeline.steps import MAX_TIME
from cutwater.pipeline.values import to_milliseconds
from cutwater.types import GLSN

if TYPE_CHECKING:
    from cutwater.pipeline.stream import Pipeline

RESERVED: Final = ("_stream", "_watermark", "_time", "_idle", "_glsn")
_PLAIN_RECORD: Final = RowType.of("key binary, value binary, timestamp timestamp, headers map<string, binary>")


class Timer(NamedTuple):
    """A timer that has not fired. ``clock`` is ``event`` or ``processing``."""

    time: int
    key: Any
    clock: str = "event"


@dataclass(slots=True)
class _Position:
    """A row at its place in the log."""

    topic: str
    stream: int
    cut_ms: int
    declared_ms: int | None
    idle: bool
    speaks: bool
    glsn: int | None
    payload: Mapping[str, Any]


class TestResult:
    """What a test run gave: ``result["topic"]`` are the rows that a sink's topic would get, in order."""

    __test__ = False  # It is not a test, whatever its name suggests to a test runner.

    def __init__(self, machine: Machine, plan: Plan, rows: dict[str, list[dict[str, Any]]], watermark: int) -> None:
        self._machine = machine
        self._plan = plan
        self._rows = rows
        self.watermark = watermark

    def __getitem__(self, topic: str) -> list[dict[str, Any]]:
        if topic not in self._rows:
            raise NotFound(f"no sink writes to {topic!r}: there are {', '.join(self._rows) or 'none'}")
        return self._rows[topic]

    def state(self, uid: str) -> dict[Any, dict[str, Any]]:
        """What an operator keeps, by key and name; keys without a value and names without one are left out."""
        self._plan.graph.operator(uid)
        found: dict[Any, dict[str, Any]] = {}
        for operator in self._machine.operators(uid):
            watermark = operator.watermark()
            for entry in operator.store.entries():
                plain = {
                    state.name: value
                    for state, raw in zip(operator.spec.states, entry.values, strict=True)
                    if (value := state.plain(raw, watermark)) is not None
                }
                if plain:
                    found[entry.key] = plain
        return found

    def broadcast_state(self, uid: str) -> dict[str, Any]:
        """The broadcast state of an operator, by name."""
        self._plan.graph.operator(uid)
        operator = self._machine.operators(uid)[0]
        values = zip(operator.spec.states, operator.store.broadcast.values, strict=True)
        return {state.name: state.plain(raw, operator.watermark()) for state, raw in values if raw is not None}

    def timers(self, uid: str) -> list[Timer]:
        """The timers that an operator has not fired, in the order in which they would fire; processing time last."""
        self._plan.graph.operator(uid)
        entries = [entry for operator in self._machine.operators(uid) for entry in operator.store.entries()]
        event = sorted((time, e.data, e.key) for e in entries for time in e.event_timers or ())
        processing = sorted((time, e.data, e.key) for e in entries for time in e.processing_timers or ())
        return [
            *(Timer(time, key) for time, _, key in event),
            *(Timer(time, key, "processing") for time, _, key in processing),
        ]

    def dropped_late(self, uid: str) -> int:
        """How many rows an operator dropped because they came too late."""
        self._plan.graph.operator(uid)
        return self._machine.dropped_late(uid)


def run_test(pipeline: Pipeline, topics: Mapping[str, Sequence[Mapping[str, Any]]], *, drain: bool) -> TestResult:
    sources = {node.topic: node for node in pipeline.graph.of_type(SourceNode)}
    _require_rows(pipeline.name, topics, sources)
    positions = _positions(topics, sources)
    rows = {topic: _row_type(node, positions) for topic, node in sources.items()}
    plan = Plan(pipeline.name, pipeline.graph, rows)
    clock, batch, last = _replayed(sources, rows, positions, plan)
    ticks = clock.ticks()
    if drain:
        ticks.end(last)
    machine = Machine(plan, transform=partial(_transformed_on_spark, plan))
    written = machine.run(batch, ticks)
    watermark = MAX_TIME if drain else clock.watermark
    return TestResult(machine, plan, _by_topic(plan, written), watermark)


def _require_rows(name: str, topics: Any, sources: Mapping[str, SourceNode]) -> None:
    """Whether rows were given, as they have to be, and of topics that are read."""
    if not sources:
        raise InvalidArgument(f"pipeline {name!r} has no source: begin it with p.source(topic)")
    form = f"p.test({{{next(iter(sources))!r}: [{{column: value, ...}}, ...]}})"
    if not isinstance(topics, Mapping):
        raise InvalidArgument(f"rows are given by topic: {form}, not {topics!r} ({type(topics).__name__})")
    if not topics:
        raise InvalidArgument(
            f"there is nothing to run pipeline {name!r} on: give the rows of its sources ({', '.join(sources)}), each "
            f"row a dict: {form}. A list without rows is an empty topic"
        )
    for topic, rows in topics.items():
        if topic not in sources:
            raise InvalidArgument(f"pipeline {name!r} has no source {topic!r}: its sources are {', '.join(sources)}")
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise InvalidArgument(
                f"the rows of topic {topic!r} are a list of dicts: {form}, not {rows!r} ({type(rows).__name__})"
            )


def _transformed_on_spark(plan: Plan, node: TransformNode, records: Records) -> Records:
    made: Records = on_spark("pipeline_transform", plan.name).transformed_locally(plan, node, records)
    return made


def _by_topic(plan: Plan, written: Mapping[str, Records]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each topic; where several sinks write to one, in the order of positions."""
    parts: dict[str, list[Records]] = {}
    for sink in plan.graph.of_type(SinkNode):
        parts.setdefault(sink.topic, []).append(written[sink.uid])
    return {topic: [row._asdict() for row in Records.merged(own).rows] for topic, own in parts.items()}


def _positions(topics: Mapping[str, Sequence[Mapping[str, Any]]], sources: Mapping[str, SourceNode]) -> list[_Position]:
    """All rows in the order of the log. A time that is left out is the one before."""
    found = []
    for topic, rows in topics.items():
        cut_ms = 0
        for row in rows:
            if not isinstance(row, Mapping):
                raise InvalidArgument(f"a row of topic {topic!r} is a dict of its columns, not {row!r}")
            _require_known(row, sources[topic])
            cut_ms = _integer(row, "_time", cut_ms) or 0
            payload = {name: value for name, value in row.items() if name not in RESERVED}
            found.append(
                _Position(
                    topic,
                    _integer(row, "_stream", 1) or 0,
                    cut_ms,
                    _integer(row, "_watermark", None),
                    bool(row.get("_idle", False)),
                    bool(payload) or "_stream" in row or "_watermark" in row,
                    _integer(row, "_glsn", None),
                    payload,
                )
            )
    if any(position.glsn is not None for position in found):
        found = _by_glsn(found)
    return _with_rising_times(found)


def _require_known(row: Mapping[str, Any], source: SourceNode) -> None:
    """A key that is meant to be a reserved one, and is not, would be a column that nobody misses."""
    declared = () if source.rows is None else source.rows.names
    for name in row:
        if name.startswith("_") and name not in RESERVED and name not in declared:
            raise InvalidArgument(
                f"{name!r} in the row {dict(row)!r} is no reserved key: those are {', '.join(RESERVED)}. If it is a "
                f"column, declare it with schema= at {source.label}"
            )


def _by_glsn(positions: list[_Position]) -> list[_Position]:
    given = [position.glsn for position in positions if position.glsn is not None]
    if len(given) < len(positions) or len(set(given)) < len(given) or min(given) < 1:
        raise InvalidArgument(
            "_glsn orders the rows of all topics: give each row one of its own, from 1 on, or none at all"
        )
    return sorted(positions, key=lambda position: position.glsn or 0)


def _with_rising_times(positions: list[_Position]) -> list[_Position]:
    """Cut time never goes back in the log, so a topic that comes after another continues at its time."""
    latest = 0
    for position in positions:
        latest = position.cut_ms = max(position.cut_ms, latest)
    return positions


def _integer(row: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = row.get(name, default)
    if value is not None and type(value) is not int:
        raise InvalidArgument(f"{name} is {value!r} in the row {dict(row)!r}: give an integer")
    return value


def _row_type(node: SourceNode, positions: list[_Position]) -> RowType:
    if node.rows is not None:
        return node.rows
    own = [position.payload for position in positions if position.topic == node.topic and position.payload]
    return RowType(inferred(own)) if own else _PLAIN_RECORD


def _replayed(
    sources: Mapping[str, SourceNode], rows: Mapping[str, RowType], positions: list[_Position], plan: Plan
) -> tuple[LogClock, dict[str, Records], int]:
    """Walks the log: records by topic, and the clock that has seen all positions."""
    clock = LogClock({topic: node.watermark for topic, node in sources.items()}, plan.source_sets)
    created = positions[0].cut_ms if positions else 0
    for topic, stream in dict.fromkeys((p.topic, p.stream) for p in positions if p.speaks or p.idle):
        clock.add_stream(topic, stream, created)
    batch: dict[str, Records] = {topic: Records() for topic in sources}
    glsn = 0
    for position in positions:
        glsn = position.glsn or glsn + 1
        place = (position.topic, position.stream, glsn, position.cut_ms)
        if position.idle:
            clock.idle(*place)
        elif position.payload:
            try:
                row, time = _made(sources[position.topic], rows[position.topic], position, glsn)
                clock.record(*place, row, time, position.declared_ms)
            except CutwaterError:
                raise
            except Exception as error:
                raise PipelineFailed(
                    f"{located(error)}, in the function of event_time or watermark, on the record "
                    f"{dict(position.payload)!r}. Without a time a record has no place: repair the function",
                    pipeline=plan.name,
                    uid=sources[position.topic].label,
                    glsn=GLSN(glsn),
                ) from error
            batch[position.topic].append(moment(glsn, RECORD), b"", time, row)
        elif position.speaks:
            clock.heartbeat(*place, position.declared_ms)
        else:
            clock.tick(glsn, position.cut_ms)
    return clock, batch, glsn


def _made(node: SourceNode, rows: RowType, position: _Position, glsn: int) -> tuple[Row, int]:
    """A row of the source's type, and its event time: by function, by column, or else the time it was appended."""
    try:
        row = rows.make(dict(position.payload))
        if callable(node.event_time):
            return row, to_milliseconds(node.event_time(row))
        name = node.event_time or "timestamp"
        if name in rows.names:
            return row, to_milliseconds(reader(name)(row))
        if node.event_time is not None:
            rows.type_of(name, f"event_time of {node.label}")
    except InvalidArgument as error:
        raise InvalidArgument(f"topic {node.topic!r}, row {glsn}: {error.message}") from None
    return row, position.cut_ms
