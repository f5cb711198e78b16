"""Implements ``Pipeline.test``: runs a pipeline on rows, in one thread, and shows the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import CutwaterError, InvalidArgument, NotFound, PipelineFailed
from cutwater.pipeline.clocks.clock import ClockSnapshot, LogClock
from cutwater.pipeline.clocks.clock_steps import MAX_TIME, check_drain_firings
from cutwater.pipeline.failures import located
from cutwater.pipeline.graph import SinkNode, SourceNode, TransformNode
from cutwater.pipeline.local.cut_check import MicroBatch, failed_in_pieces, in_pieces, require_same
from cutwater.pipeline.local.run_checks import check_runnable
from cutwater.pipeline.local.spark_import import elsewhere, on_spark
from cutwater.pipeline.operators.executor import Machine
from cutwater.pipeline.pickling import pickled_graph
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import LOG_TIME, Row, RowType, inferred, reader
from cutwater.pipeline.values import check_times, to_milliseconds
from cutwater.types import GLSN, MILLISECOND

if TYPE_CHECKING:
    from cutwater.pipeline.stream import Pipeline

RESERVED: Final = ("_stream", "_watermark", "_time", "_idle", "_glsn")
SLICES: Final = 4
BATCHES: Final = 4
"""The default number of pieces over which a test runs a second time."""
PIECES_MAX: Final = 1_000
UNNAMED: Final = -1
"""The log stream of a row that names none, until the log streams are known."""
_PLAIN_RECORD: Final = RowType.of("key binary, value binary, timestamp timestamp, headers map<string, binary>")


class Timer(NamedTuple):
    """A timer that has not fired. ``clock`` is ``event`` or ``processing``."""

    time: int
    key: Any
    clock: str = "event"


@dataclass(slots=True)
class _Position:
    topic: str
    stream: int
    cut_ms: int
    declared_ms: int | None
    idle: bool
    speaks: bool
    glsn: int | None
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LocalStart:
    """How a test begins: by default with the log. ``streams`` has, by topic, the log streams that the clocks know.
    ``state`` has chunks by uid, as ``Machine`` takes them."""

    glsn: int = 0
    clock: ClockSnapshot | None = None
    streams: Mapping[str, list[int]] = field(default_factory=dict)
    state: Mapping[str, pa.Table] = field(default_factory=dict)
    dropped_late: Mapping[str, int] = field(default_factory=dict)


class TestResult:
    """The result of a test run. ``result["topic"]`` are the rows that a sink's topic would get, in order."""

    __test__ = False  # Despite its name, this is not a test.

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        rows: dict[str, list[dict[str, Any]]],
        watermark: int,
        dropped_late: Mapping[str, int],
        clock: LogClock,
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._dropped_late = dropped_late
        self._plan = plan
        self._rows = rows
        self.watermark = watermark

    def __getitem__(self, topic: str) -> list[dict[str, Any]]:
        if topic not in self._rows:
            raise NotFound(f"no sink writes to {topic!r}: there are {', '.join(self._rows) or 'none'}")
        return self._rows[topic]

    def state(self, uid: str) -> dict[Any, dict[str, Any]]:
        """Return what an operator keeps, by key and name. Keys and names without a value are left out."""
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
        """Return the broadcast state of an operator, by name."""
        self._plan.graph.operator(uid)
        operator = self._machine.operators(uid)[0]
        values = zip(operator.spec.states, operator.store.broadcast.values, strict=True)
        return {state.name: state.plain(raw, operator.watermark()) for state, raw in values if raw is not None}

    def timers(self, uid: str) -> list[Timer]:
        """Return the timers that an operator has not fired, in the order in which they would fire; processing time
        comes last."""
        self._plan.graph.operator(uid)
        entries = [entry for operator in self._machine.operators(uid) for entry in operator.store.entries()]
        event = sorted((time, e.data, e.key) for e in entries for time in e.event_timers or ())
        processing = sorted((time, e.data, e.key) for e in entries for time in e.processing_timers or ())
        return [
            *(Timer(time, key) for time, _, key in event),
            *(Timer(time, key, "processing") for time, _, key in processing),
        ]

    def left_timers(self, uid: str) -> int:
        """Return how many timers of an operator did not fire at the end, because their keys had reached the limit."""
        self._plan.graph.operator(uid)
        return sum(operator.left_timers for operator in self._machine.operators(uid))

    def dropped_late(self, uid: str) -> int:
        """Return how many rows an operator dropped because they came too late."""
        self._plan.graph.operator(uid)
        return sum(operator.dropped_late for operator in self._machine.operators(uid)) + self._dropped_late.get(uid, 0)


def run_test(
    pipeline: Pipeline,
    topics: Mapping[str, Sequence[Mapping[str, Any]]],
    drain: bool,
    drain_firings: int,
    streams: Mapping[str, int | Sequence[int]] | None,
    slices: int,
    batches: int,
    from_savepoint: Any,
    allow_non_restored_state: bool,
) -> TestResult:
    """Run the pipeline in one piece, and then in pieces, unless ``slices`` and ``batches`` are 1."""
    check_drain_firings(drain_firings)
    _check_pieces(slices, batches)
    sources = {node.topic: node for node in pipeline.graph.of_type(SourceNode)}
    _require_rows(pipeline.name, topics, sources)
    if from_savepoint is None and allow_non_restored_state:
        raise InvalidArgument("allow_non_restored_state is about a savepoint: give from_savepoint=…")
    positions = _positions(topics, sources)
    rows = {topic: _row_type(node, positions) for topic, node in sources.items()}
    plan = Plan(pipeline.name, pipeline.graph, rows)
    check_runnable(plan)
    begin = LocalStart()
    if from_savepoint is not None:
        start: Any = elsewhere("savepoints.local_start")
        begin = start.local_start(from_savepoint, plan, allow_non_restored_state=allow_non_restored_state)
    _place_after(begin, positions)
    numbers = _streams(streams or {}, sources, positions, begin)
    pickled = pickled_graph(pipeline.name, pipeline.graph)
    firings = drain_firings if drain else None

    def walk(pieces: int) -> tuple[LogClock, Iterator[MicroBatch]]:
        clock = _clock(sources, plan, numbers, positions, begin)
        add = {topic: partial(_walk, plan, node, rows[topic], clock) for topic, node in sources.items()}
        return clock, _ranges(clock, positions, pieces, firings, add, begin.glsn)

    clock, ranges = walk(1)
    machine = Machine(plan, state=begin.state, transform=partial(_transformed_on_spark, plan))
    whole = machine.run(*next(ranges))
    if slices > 1 or batches > 1:
        try:
            pieces = in_pieces(plan, pickled, rows, walk(batches)[1], slices, begin.state, _transformed_on_spark)
        except PipelineFailed as error:
            raise failed_in_pieces(plan, error, machine, pickled) from error
        require_same(plan, whole, pieces, machine, pickled)
    watermark = MAX_TIME if drain else clock.watermark
    return TestResult(machine, plan, _by_topic(plan, whole), watermark, begin.dropped_late, clock)


def _place_after(begin: LocalStart, positions: Sequence[_Position]) -> None:
    """Place the rows after a savepoint. Cut times never go back, as in the log: a topic that comes after another one
    continues at its time. A row without ``_stream`` goes to the first log stream that the savepoint knows."""
    latest = 0 if begin.clock is None else begin.clock.time_ms
    for position in positions:
        if position.glsn is not None and position.glsn <= begin.glsn:
            raise InvalidArgument(
                f"_glsn is {position.glsn} in a row of topic {position.topic!r}: the savepoint is at GLSN "
                f"{begin.glsn}, and rows come after it"
            )
        latest = position.cut_ms = max(position.cut_ms, latest)
        known = begin.streams.get(position.topic)
        if position.stream == UNNAMED:
            position.stream = known[0] if known else 1


def _check_pieces(slices: Any, batches: Any) -> None:
    for name, given in (("slices", slices), ("batches", batches)):
        if type(given) is not int or not 1 <= given <= PIECES_MAX:
            raise InvalidArgument(
                f"{name} is {given!r}: give how many {name} the test runs over as well, from 1 to {PIECES_MAX}"
            )


def _streams(
    given: Mapping[str, int | Sequence[int]],
    sources: Mapping[str, SourceNode],
    positions: Sequence[_Position],
    begin: LocalStart,
) -> dict[str, list[int]]:
    """Return the log streams of each topic: the given ones, or those that its rows name, and those of a savepoint."""
    found: dict[str, list[int]] = {}
    for topic, said in given.items():
        if topic not in sources:
            raise InvalidArgument(f"streams= names the topic {topic!r}, which is no source: {', '.join(sources)}")
        numbers = list(range(1, said + 1)) if type(said) is int else said
        if not isinstance(numbers, Sequence) or not numbers or not all(type(n) is int and n >= 1 for n in numbers):
            raise InvalidArgument(
                f"streams= says that the topic {topic!r} has {said!r} log streams: give how many, 1 or more, or their "
                "numbers"
            )
        found[topic] = sorted(set(numbers))
    for position in positions:
        topic = position.topic
        if position.stream < 1 or (topic in given and position.stream not in found[topic]):
            known = ", ".join(map(str, found.get(topic, ()))) or "from 1 on"
            raise InvalidArgument(
                f"_stream is {position.stream} in a row of topic {topic!r}: its log streams are {known}; streams= says "
                "which ones there are"
            )
        if topic not in given and (position.speaks or position.idle):
            found[topic] = sorted({*found.get(topic, ()), position.stream})
    begun = begin.streams
    return {topic: sorted({*found.get(topic, ()), *begun.get(topic, ())}) or [1] for topic in sources}


def _require_rows(name: str, topics: Any, sources: Mapping[str, SourceNode]) -> None:
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
    made: Records = on_spark("pipeline.transform", plan.name).transformed_locally(plan, node, records)
    return made


def _by_topic(plan: Plan, written: Mapping[str, Records]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each topic. If several sinks write to one topic, the rows are in the order of positions."""
    parts: dict[str, list[Records]] = {}
    for sink in plan.graph.of_type(SinkNode):
        parts.setdefault(sink.topic, []).append(written[sink.uid])
    return {topic: [row._asdict() for row in Records.merged(own).rows] for topic, own in parts.items()}


def _positions(topics: Mapping[str, Sequence[Mapping[str, Any]]], sources: Mapping[str, SourceNode]) -> list[_Position]:
    """Return all rows in the order of the log. A row without a time has the time of the row before."""
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
                    _integer(row, "_stream", UNNAMED) or 0,
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
    return found


def _require_known(row: Mapping[str, Any], source: SourceNode) -> None:
    """Refuse a mistyped reserved key: it would become a column, and the mistake would go unnoticed."""
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


def _integer(row: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = row.get(name, default)
    if value is not None and type(value) is not int:
        raise InvalidArgument(f"{name} is {value!r} in the row {dict(row)!r}: give an integer")
    return value


def _row_type(node: SourceNode, positions: list[_Position]) -> RowType:
    if node.rows is not None:
        return node.rows
    own = [position.payload for position in positions if position.topic == node.topic and position.payload]
    if not own:
        return _PLAIN_RECORD
    schema = inferred(own)
    if LOG_TIME in schema.names:
        # In every topic this column is a time.
        try:
            check_times(schema.field(LOG_TIME).type, _PLAIN_RECORD.schema.field(LOG_TIME).type)
        except InvalidArgument as error:
            raise InvalidArgument(f"the column {LOG_TIME!r} of topic {node.topic!r}: {error.message}") from None
    return RowType(schema)


def _clock(
    sources: Mapping[str, SourceNode],
    plan: Plan,
    streams: Mapping[str, Sequence[int]],
    positions: Sequence[_Position],
    begin: LocalStart,
) -> LogClock:
    """Return the clock before the first position. All log streams exist there."""
    given = {topic: node.watermark for topic, node in sources.items()}
    if begin.clock is None:
        clock = LogClock(given, plan.source_sets)
    else:
        clock = LogClock.restore(given, plan.source_sets, begin.clock)
    created = positions[0].cut_ms if positions else 0
    for topic, numbers in streams.items():
        for number in numbers:
            if begin.clock is not None and clock.knows(topic, number):
                continue
            clock.add_stream(topic, number, created * MILLISECOND)
    return clock


def _ranges(
    clock: LogClock,
    positions: Sequence[_Position],
    pieces: int,
    firings: int | None,
    add: Mapping[str, Callable[[_Position, int, Records], None]],
    glsn: int,
) -> Iterator[MicroBatch]:
    """Yield the log in ``pieces`` micro-batches; the end of the input is a separate one, unless there is one piece.
    ``firings`` is None if the input does not end. ``glsn`` is the position before the first."""
    size = max(1, -(-len(positions) // pieces))
    for first in range(0, max(1, len(positions)), size):
        batch = {topic: Records() for topic in add}
        for position in positions[first : first + size]:
            glsn = position.glsn or glsn + 1
            add[position.topic](position, glsn, batch[position.topic])
        ticks = clock.ticks()
        if pieces == 1 and firings is not None:
            ticks.end(glsn, firings)
        yield batch, ticks
    if pieces > 1 and firings is not None:
        ticks = clock.ticks()
        ticks.end(glsn, firings)
        yield {topic: Records() for topic in add}, ticks


def _walk(
    plan: Plan, node: SourceNode, rows: RowType, clock: LogClock, position: _Position, glsn: int, records: Records
) -> None:
    """Report a position to the clock, and add its record, if it has one."""
    place = (node.topic, position.stream, glsn, position.cut_ms * MILLISECOND)
    declared_us = None if position.declared_ms is None else position.declared_ms * MILLISECOND
    if not position.payload:
        if position.speaks or position.idle:
            clock.heartbeat(*place, declared_us, idle=position.idle)
        else:
            # A row with only a time is a mark of the log's clock.
            clock.tick(glsn, position.cut_ms * MILLISECOND)
        return
    try:
        row, time = _made(node, rows, position, glsn)
        clock.record(*place, row, time, declared_us, idle=position.idle)
    except CutwaterError:
        raise
    except Exception as error:
        raise PipelineFailed(
            f"{located(error)}, in the function of event_time or watermark, on the record "
            f"{dict(position.payload)!r}. Without a time a record has no place: repair the function",
            pipeline=plan.name,
            uid=node.label,
            glsn=GLSN(glsn),
        ) from error
    records.append(moment(glsn, RECORD), b"", time, row)


def _made(node: SourceNode, rows: RowType, position: _Position, glsn: int) -> tuple[Row, int]:
    """Return a row of the source's type and its event time: from a function, from a column, or else the time of the
    append."""
    try:
        row = rows.make(dict(position.payload))
        if callable(node.event_time):
            return row, to_milliseconds(node.event_time(row))
        name = node.event_time or LOG_TIME
        if name in rows.names:
            return row, to_milliseconds(reader(name)(row))
        if node.event_time is not None:
            rows.type_of(name, f"event_time of {node.label}")
    except InvalidArgument as error:
        raise InvalidArgument(f"topic {node.topic!r}, row {glsn}: {error.message}") from None
    return row, position.cut_ms
