"""Defines ``Pipeline`` and ``Stream``, with which a program describes a pipeline. Nothing here contacts a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.durations import Duration, milliseconds
from cutwater.errors import AlreadyExists, InvalidArgument
from cutwater.pipeline import functions
from cutwater.pipeline.clocks.clock_steps import DRAIN_FIRINGS
from cutwater.pipeline.clocks.watermarks import WAYS, Watermark, WatermarkFunction, strategy_of
from cutwater.pipeline.context import DEAD_LETTERS, LATE, MAIN, valid_tag
from cutwater.pipeline.graph import (
    Graph,
    GraphNode,
    OperatorNode,
    Port,
    RowNode,
    SinkNode,
    SourceNode,
    TransformNode,
    UnionNode,
    WindowNode,
    explained,
    is_name,
)
from cutwater.pipeline.keyed_state.keys import MAX_PARALLELISM, KeyReader, KeySpec
from cutwater.pipeline.keyed_state.state import BroadcastState, declared_states
from cutwater.pipeline.local.local_runner import BATCHES, SLICES, TestResult, run_test
from cutwater.pipeline.local.spark_import import on_spark
from cutwater.pipeline.operators.partition_operator import OperatorListState, UnionListState
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.rows import Row, RowType
from cutwater.pipeline.windowing import aggregates
from cutwater.pipeline.windowing.aggregates import Aggregator
from cutwater.pipeline.windowing.windows import Global, Session, Sliding, Trigger, Window

Schema: TypeAlias = str | pa.Schema | RowType
NAME_BYTES_MAX = 200
"""Limit of a pipeline's name: directory names contain it and more characters after it."""


class Pipeline:
    """A program over the log, with a name that its runs and savepoints keep."""

    def __init__(self, name: str, log: str = "", *, max_parallelism: int = MAX_PARALLELISM) -> None:
        if not is_name(name) or not name.isprintable() or len(name.encode()) > NAME_BYTES_MAX:
            raise InvalidArgument(
                f"a pipeline's name is {name!r}: give a text that can be printed, of 1 to {NAME_BYTES_MAX} bytes, by "
                "which its runs, its checkpoints and its job are known"
            )
        if not 1 <= max_parallelism <= 2**15:
            raise InvalidArgument(f"max_parallelism is {max_parallelism}: it must be from 1 to {2**15}")
        self.name = name
        self.log = log
        self.max_parallelism = max_parallelism
        self.graph = Graph()

    def source(
        self,
        topic: str,
        *,
        schema: Schema | None = None,
        event_time: str | Callable[[Row], Any] | None = None,
        watermark: Watermark | WatermarkFunction | None = None,
        on_malformed: Literal["error", "skip"] = "error",
    ) -> Stream:
        """Read the records of a topic. Schema and event-time column are the topic's own unless they are declared here.
        With ``watermark`` the source has a clock: windows, event-time timers and ``ttl`` need one. ``on_malformed``
        concerns batches with a correct checksum and invalid content, which only older versions accepted: the run fails
        there, or skips them and reports their positions."""
        if on_malformed not in ("error", "skip"):
            raise InvalidArgument(f"on_malformed of the source {topic!r} is 'error' or 'skip', not {on_malformed!r}")
        if any(node.topic == topic for node in self.graph.of_type(SourceNode)):
            raise AlreadyExists(
                f"pipeline {self.name!r} reads the topic {topic!r} twice: read it once, use the stream several times"
            )
        rows = None if schema is None else RowType.of(schema)
        if rows is not None and isinstance(event_time, str):
            rows.type_of(event_time, f"event_time of the source {topic!r}")
        strategy = strategy_of(watermark)
        if event_time is not None and strategy is None:
            name = getattr(event_time, "__name__", event_time)
            raise InvalidArgument(
                f"the source {topic!r} has event_time={name!r} and no watermark=, so nothing tells how "
                f"far event time has come: give {WAYS}. A checkpoint or savepoint that was made without one goes on "
                "with Watermark.ascending(), which was the default"
            )
        skips = on_malformed == "skip"
        node = SourceNode(len(self.graph.nodes), (), topic, rows, event_time, strategy, skips)
        return self._stream(node)

    def test(
        self,
        topics: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        drain: bool = True,
        drain_firings: int = DRAIN_FIRINGS,
        streams: Mapping[str, int | Sequence[int]] | None = None,
        slices: int = SLICES,
        batches: int = BATCHES,
        from_savepoint: Any = None,
        allow_non_restored_state: bool = False,
    ) -> TestResult:
        """Run on rows, in one thread and without Spark. See ``docs/pipelines.md`` for the reserved keys of a row.

        With ``drain`` the input ends with the rows: the watermark becomes the maximum. Of the timers that a function
        registers then, ``drain_firings`` per key and operator fire. ``streams`` is the number of log streams of a
        topic, including silent ones, or their numbers; the default is those that its rows name, or one.

        After the run the same rows run again, in up to ``batches`` micro-batches over up to ``slices`` slices, each
        with newly pickled functions and state restored from a snapshot. If the results differ, a function keeps
        something outside its declared state, and the test fails.

        ``from_savepoint``, a directory, begins with the state, the clocks and the position of a savepoint. The rows
        come after it, and ``_stream`` is the number that a log stream has there.
        """
        return run_test(
            self, topics, drain, drain_firings, streams, slices, batches, from_savepoint, allow_non_restored_state
        )

    def run(self, **options: Any) -> Any:
        """Run on Spark."""
        return on_spark("pipeline.runner", self.name).run_pipeline(self, **options)

    def explain(self) -> str:
        """Return the graph as text: operators by level, chains, state, keys and watermarks."""
        return explained(self.name, self.graph)

    def _stream(self, node: GraphNode) -> Stream:
        self.graph.add(node)
        self._check()
        return Stream(self, Port(node.order))

    def _check(self) -> None:
        """Bind the nodes with declared schemas, so that a wrong column is reported where it is written."""
        declared = {node.topic: node.rows for node in self.graph.of_type(SourceNode)}
        try:
            Plan(self.name, self.graph, declared)
        except InvalidArgument:
            self.graph.remove_last()
            raise


class Stream:
    """Records between two operators. A stream may be used several times."""

    def __init__(self, pipeline: Pipeline, port: Port, chained: bool = True) -> None:
        self._pipeline = pipeline
        self._port = port
        self._chained = chained

    # -------------------------------------------------------------------------------------------------- row functions

    def map(
        self, function: Callable[[Row], Any], schema: Schema | None = None, *, dead_letters: bool = False
    ) -> Stream:
        """Emit one row for each row."""
        return self._row_function("map", function, schema, dead_letters)

    def filter(self, function: Callable[[Row], Any], *, dead_letters: bool = False) -> Stream:
        """Keep the rows for which the function returns true."""
        return self._row_function("filter", function, None, dead_letters)

    def flat_map(
        self, function: Callable[[Row], Any], schema: Schema | None = None, *, dead_letters: bool = False
    ) -> Stream:
        """Emit any number of rows for each row: the function returns or yields them."""
        return self._row_function("flat_map", function, schema, dead_letters)

    def unchained(self) -> Stream:
        """Return the same stream. The next row function starts a new chain, which on Spark is another worker process
        next to the one that the records come from: both work at the same time."""
        return Stream(self._pipeline, self._port, chained=False)

    def transform(
        self,
        function: Callable[[Any], Any] | None = None,
        *,
        schema: Schema | None = None,
        arrow: Callable[[Any], Any] | None = None,
    ) -> Stream:
        """Run stateless PySpark code on a data frame; or ``arrow``, a function of a ``pyarrow.Table``, which runs
        instead of it and needs no Spark."""
        _require_callable("transform", function if arrow is None else arrow)
        rows = None if schema is None else RowType.of(schema)
        return self._pipeline._stream(TransformNode(self._order, (self._port,), function, arrow, rows))

    def union(self, *others: Stream) -> Stream:
        """Merge the rows of several streams, in the order of their positions, then of the inputs."""
        if not others:
            raise InvalidArgument("union() takes at least one other stream")
        for other in others:
            self._require_same_pipeline(other)
        return self._pipeline._stream(UnionNode(self._order, (self._port, *(other._port for other in others))))

    # ------------------------------------------------------------------------------------------------------ operators

    def process(
        self,
        *,
        key: KeySpec,
        function: functions.ProcessFunction | functions.BatchFunction,
        uid: str = "",
        schema: Schema | None = None,
        dead_letters: bool = False,
    ) -> Stream:
        """Apply a function with state and timers per key."""
        _require_function("process", function, functions.ProcessFunction, functions.BatchFunction)
        batches = isinstance(function, functions.BatchFunction)
        if batches and dead_letters:
            raise InvalidArgument(f"{uid or 'process'}: a function of batches fails as a whole, it has no dead letters")
        method = "process_batch" if batches else "process"
        return self._operator("process", uid, function, (method,), (self,), (key,), schema, dead_letters)

    def connect(
        self,
        other: Stream,
        *,
        key: KeySpec | tuple[KeySpec, KeySpec],
        function: functions.CoProcessFunction,
        uid: str = "",
        schema: Schema | None = None,
        dead_letters: bool = False,
    ) -> Stream:
        """Apply a function of two streams with the same keys. ``key`` is for both streams, or is a pair with one for
        each."""
        self._require_same_pipeline(other)
        _require_function("connect", function, functions.CoProcessFunction)
        pair: Any = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
        return self._operator(
            "connect", uid, function, ("process1", "process2"), (self, other), pair, schema, dead_letters
        )

    def broadcast(
        self,
        rules: Stream,
        *,
        key: KeySpec,
        function: functions.BroadcastFunction,
        uid: str = "",
        schema: Schema | None = None,
        dead_letters: bool = False,
    ) -> Stream:
        """Apply a function of this stream, by key, and of ``rules``, which all keys see."""
        self._require_same_pipeline(rules)
        _require_function("broadcast", function, functions.BroadcastFunction)
        methods = ("process", "process_broadcast")
        return self._operator("broadcast", uid, function, methods, (self, rules), (key, None), schema, dead_letters)

    def process_partition(
        self,
        *,
        function: functions.PartitionFunction,
        parallelism: int,
        uid: str = "",
        schema: Schema | None = None,
        dead_letters: bool = False,
    ) -> Stream:
        """Apply a function to each of ``parallelism`` partitions, without keys. Its result may depend on that
        number."""
        _require_function("process_partition", function, functions.PartitionFunction)
        if type(parallelism) is not int or parallelism < 1:
            raise InvalidArgument(f"the parallelism of process_partition is {parallelism!r}: give a number from 1 on")
        for state in declared_states(function):
            if not isinstance(state, OperatorListState | UnionListState):
                raise InvalidArgument(
                    f"the state {state.name!r} of a PartitionFunction is a {state.kind} state, which needs a key: use "
                    "OperatorListState or UnionListState"
                )
        return self._operator(
            "process_partition", uid, function, ("process",), (self,), (None,), schema, dead_letters, parallelism
        )

    def window(
        self,
        *,
        key: KeySpec,
        window: Window,
        aggregate: Mapping[str, str | Aggregator],
        allowed_lateness: Duration | None = None,
        trigger: Trigger | None = None,
        uid: str = "",
        dead_letters: bool = False,
    ) -> Stream:
        """Aggregate per key and window. The result has the key's columns, window_start, window_end, and one column per
        aggregate."""
        if not isinstance(window, Sliding | Session | Global):
            raise InvalidArgument(f"the window of {uid!r} is {window!r}: give Tumbling, Sliding, Session or Global")
        if trigger is not None and not isinstance(trigger, Trigger):
            raise InvalidArgument(
                f"the trigger of the window {uid!r} is {trigger!r}: give Trigger.watermark(), Trigger.count(3) or "
                "Trigger.processing_time('5s')"
            )
        if isinstance(window, Global) and (trigger is None or trigger.kind == "watermark"):
            raise InvalidArgument(
                f"the global window of {uid!r} never ends: give trigger=Trigger.count or .processing_time"
            )
        if not aggregate:
            raise InvalidArgument(f"the window of {uid!r} has no aggregate: give aggregate={{'n': 'count(*)'}}")
        if not isinstance(aggregate, Mapping):
            raise InvalidArgument(
                f"aggregate of the window {uid!r} is {aggregate!r}: give each result a name, such as "
                "aggregate={'n': 'count(*)'}"
            )
        for name, given in aggregate.items():
            aggregates.check(name, given)
        reader = KeyReader(key, uid or "window")
        clash = {*reader.columns, "window_start", "window_end"} & set(aggregate)
        if clash or {"window_start", "window_end"} & set(reader.columns):
            raise InvalidArgument(f"two result columns of the window {uid!r} have one name: {', '.join(clash) or key}")
        node = WindowNode(
            self._order, (self._port,), uid, "window", None, ("process",), (reader,), (), None, dead_letters,
            self._pipeline.max_parallelism,
            window=window, trigger=trigger or Trigger.watermark(), aggregates=dict(aggregate),
            lateness_ms=0 if allowed_lateness is None else milliseconds(allowed_lateness, "allowed_lateness"),
        )  # fmt: skip
        return self._pipeline._stream(node)

    def sink(self, topic: str, *, uid: str = "") -> None:
        """Append the rows to a topic."""
        if not is_name(topic):
            raise InvalidArgument(f"the topic of a sink is {topic!r}: give a name")
        self._pipeline._stream(SinkNode(self._order, (self._port,), topic, uid))

    # --------------------------------------------------------------------------------------------------- side outputs

    def side(self, tag: str, schema: Schema | None = None) -> Stream:
        """Return what the operator emits with ``ctx.output(tag, row)``."""
        if not valid_tag(tag):
            raise InvalidArgument(f"the tag of a side output is {tag!r}: give a name that does not begin with a dot")
        return self._side(tag, None if schema is None else RowType.of(schema), "side outputs")

    @property
    def late(self) -> Stream:
        """The rows that came too late for every window."""
        if not isinstance(self._node, WindowNode):
            raise InvalidArgument(f"{self._node.label} has no late rows: only a window has")
        return self._side(LATE, None, "late rows")

    @property
    def dead_letters(self) -> Stream:
        """The records and timers that the function failed on, with the error."""
        if not getattr(self._node, "dead_letters", False):
            raise InvalidArgument(f"{self._node.label} has no dead letters: ask for them with dead_letters=True")
        if isinstance(self._node, RowNode):
            return Stream(self._pipeline, Port(self._node.order, DEAD_LETTERS))
        return self._side(DEAD_LETTERS, None, "dead letters")

    def _side(self, tag: str, rows: RowType | None, what: str) -> Stream:
        node = self._node
        if not isinstance(node, OperatorNode) or self._port.tag != MAIN:
            raise InvalidArgument(f"{node.label} has no {what}: take them from the operator's own stream")
        if node.sides.setdefault(tag, rows) != rows:
            raise InvalidArgument(
                f"{node.label}: the side output {tag!r} has two schemas: {node.sides[tag]} and {rows}"
            )
        return Stream(self._pipeline, Port(node.order, tag))

    # ---------------------------------------------------------------------------------------------------------- helpers

    @property
    def _node(self) -> GraphNode:
        return self._pipeline.graph.nodes[self._port.node]

    @property
    def _order(self) -> int:
        return len(self._pipeline.graph.nodes)

    def _row_function(
        self, kind: str, function: Callable[[Row], Any], schema: Schema | None, dead_letters: bool
    ) -> Stream:
        _require_callable(kind, function)
        rows = None if schema is None else RowType.of(schema)
        return self._pipeline._stream(
            RowNode(self._order, (self._port,), kind, function, rows, dead_letters, self._chained)
        )

    def _operator(
        self,
        kind: str,
        uid: str,
        function: Any,
        methods: tuple[str, ...],
        streams: tuple[Stream, ...],
        keys: Sequence[KeySpec | None],
        schema: Schema | None,
        dead_letters: bool,
        partitions: int = 0,
    ) -> Stream:
        states = declared_states(function)
        if kind != "broadcast" and any(isinstance(state, BroadcastState) for state in states):
            raise InvalidArgument(f"{uid or kind}: broadcast state exists only in broadcast()")
        readers = tuple(None if key is None else KeyReader(key, uid or kind) for key in keys)
        rows = None if schema is None else RowType.of(schema)
        ports = tuple(stream._port for stream in streams)
        node = OperatorNode(
            self._order, ports, uid, kind, function, methods, readers, states, rows, dead_letters,
            self._pipeline.max_parallelism, partitions,
        )  # fmt: skip
        return self._pipeline._stream(node)

    def _require_same_pipeline(self, other: Stream) -> None:
        if getattr(other, "_pipeline", None) is not self._pipeline:
            raise InvalidArgument(f"only streams of one pipeline can be joined: this one is of {self._pipeline.name!r}")


def _require_callable(kind: str, function: Any) -> None:
    if not callable(function):
        raise InvalidArgument(f"{kind} takes a function, not {function!r}")


def _require_function(kind: str, function: Any, *classes: type) -> None:
    names = " or ".join(cls.__name__ for cls in classes)
    if isinstance(function, type):
        raise InvalidArgument(
            f"{kind} takes an instance, not the class {function.__name__}: write {function.__name__}()"
        )
    if not isinstance(function, classes):
        raise InvalidArgument(f"{kind} takes a function derived from {names}, not {function!r}")
