"""Makes a plan: the graph with its schemas filled in, ready to run. Every task of a run makes the same plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.clocks.watermarks import WAYS
from cutwater.pipeline.context import DEAD_LETTERS, LATE, MAIN
from cutwater.pipeline.failures import stopped
from cutwater.pipeline.graph import (
    Graph,
    GraphNode,
    OperatorNode,
    Port,
    RowNode,
    SinkNode,
    SourceNode,
    TransformNode,
    WindowNode,
)
from cutwater.pipeline.operators.keyed_operator import DEAD_LETTER_ROWS, OperatorSpec, dead_letter
from cutwater.pipeline.position import number
from cutwater.pipeline.records import Records, missing_columns
from cutwater.pipeline.rows import LOG_TIME, Row, RowType, untyped
from cutwater.pipeline.values import from_milliseconds
from cutwater.pipeline.windowing import aggregates
from cutwater.pipeline.windowing.window_function import WindowFunction, WindowState
from cutwater.pipeline.windowing.windows import Global
from cutwater.schema_text import shown

Destination: TypeAlias = tuple[int, int]
"""Where records wait for the next level: the order of an operator, a sink or code on Spark, and the number of its
input."""


class Plan:
    """What runs: specs of operators by level, and the row functions between them."""

    def __init__(
        self, name: str, graph: Graph, source_rows: Mapping[str, RowType | None], *, breaks_chains: bool = False
    ) -> None:
        """``breaks_chains``: records wait before an unchained row function, for another worker."""
        self.name, self._breaks_chains = name, breaks_chains
        self.graph = graph
        self.consumers = graph.consumers()
        self.sources = graph.sources()
        self.node_levels = graph.levels()
        self._rows: dict[Port, RowType | None] = {}
        self._time_types: list[pa.DataType | None] = []
        self.specs: dict[int, OperatorSpec] = {}
        for node in graph.nodes:
            try:
                self._time_types.append(self._time_type(node, source_rows))
                self._bind(node, source_rows)
            except InvalidArgument as error:
                raise InvalidArgument(f"pipeline {name!r}, {node.label}: {error.message}") from None
        self.levels: list[list[OperatorSpec]] = [
            [self.specs[order] for order, own in enumerate(self.node_levels) if own == level and order in self.specs]
            for level in range(1, max(self.node_levels, default=0) + 1)
        ]

    @property
    def source_sets(self) -> set[frozenset[str]]:
        """The sets of sources whose watermarks operators need."""
        return {spec.sources for spec in self.specs.values()}

    def rows_at(self, port: Port) -> RowType | None:
        """Return the row type of an output, or None if its rows are untyped."""
        return self._rows[port]

    def rows_for(self, destination: Destination) -> RowType | None:
        node, index = destination
        return self._rows[self.graph.nodes[node].inputs[index]]

    def require_schemas(self) -> None:
        """Refuse streams whose rows are untyped, because rows travel between workers as Arrow."""
        for port, rows in self._rows.items():
            if rows is None and port in self.consumers:
                raise InvalidArgument(
                    f"pipeline {self.name!r}: the output of {self.graph.nodes[port.node].label} has no schema, which a "
                    "run needs: declare schema='…' there, and give windows columns as keys, not a function"
                )

    # --------------------------------------------------------------------------------------------------------- binding

    def _time_type(self, node: Any, source_rows: Mapping[str, RowType | None]) -> pa.DataType | None:
        """Return the type of the event-time column of the first source of a node that has one."""
        if not isinstance(node, SourceNode):
            return next((kind for port in node.inputs if (kind := self._time_types[port.node]) is not None), None)
        rows = source_rows[node.topic]
        if rows is None or callable(node.event_time):
            return None
        if node.event_time is None and LOG_TIME not in rows.names:
            return None
        return _checked_time(rows, node.event_time or LOG_TIME, node.label)

    def _bind(self, node: Any, source_rows: Mapping[str, RowType | None]) -> None:
        first = self._rows[node.inputs[0]] if node.inputs else None
        if isinstance(node, SourceNode):
            self._rows[Port(node.order)] = source_rows[node.topic]
        elif isinstance(node, RowNode):
            self._rows[Port(node.order)] = first if node.kind == "filter" else node.rows
            self._rows[Port(node.order, DEAD_LETTERS)] = DEAD_LETTER_ROWS
        elif isinstance(node, OperatorNode):
            self._bind_operator(node, first)
        elif isinstance(node, TransformNode):
            self._rows[Port(node.order)] = node.rows
        elif not isinstance(node, SinkNode):
            self._bind_union(node)

    def _bind_union(self, node: Any) -> None:
        types = [self._rows[port] for port in node.inputs]
        for other in types[1:]:
            if types[0] is not None and other is not None and types[0] != other:
                raise InvalidArgument(f"a union joins rows of different schemas: {types[0]} and {other}; map one first")
        self._rows[Port(node.order)] = None if None in types else types[0]

    def _bind_operator(self, node: OperatorNode, first: RowType | None) -> None:
        inputs = [self._rows[port] for port in node.inputs]
        keys = [None if key is None else key.bind(rows) for key, rows in zip(node.keys, inputs, strict=True)]
        function, states, rows = node.function, list(node.states), node.rows
        if isinstance(node, WindowNode):
            function, rows = self._window(node, first)
            states = [WindowState(function.aggregates)]
        has_clock = self.graph.has_clock(self.sources[node.order])
        if not has_clock:
            self._require_no_event_time(node)
        self._rows[Port(node.order)] = rows
        outputs = {MAIN: _maker(rows)}
        for tag, side in node.sides.items():
            side_rows = {LATE: first, DEAD_LETTERS: DEAD_LETTER_ROWS}.get(tag, side)
            self._rows[Port(node.order, tag)] = side_rows
            # Late rows and dead letters are already rows; other rows are made when they are emitted.
            outputs[tag] = (lambda row: row) if tag.startswith(".") else _maker(side_rows)
        self.specs[node.order] = OperatorSpec(
            self.name, node.uid, node.order, function, node.methods, keys, states, outputs, self.sources[node.order],
            node.dead_letters, node.max_parallelism, node.partitions, inputs, rows, has_clock,
        )  # fmt: skip

    def _require_no_event_time(self, node: OperatorNode) -> None:
        """Refuse what would never end without a watermark if none of the operator's sources has a clock."""
        topics = ", ".join(sorted(self.sources[node.order]))
        given = f"none of its sources ({topics}) has a clock: give one of them {WAYS}"
        if isinstance(node, WindowNode) and not isinstance(node.window, Global):
            raise InvalidArgument(f"a window of event time ends when the watermark passes its end, and {given}")
        for state in node.states:
            if state.ttl_ms is not None:
                raise InvalidArgument(f"the ttl of the state {state.name!r} runs on event time, and {given}")

    def _window(self, node: WindowNode, rows: RowType | None) -> tuple[WindowFunction, RowType | None]:
        bound = {name: aggregates.bind(name, given, rows) for name, given in node.aggregates.items()}
        key = node.keys[0]
        assert key is not None, "a window has a key"
        time_type = self._time_types[node.inputs[0].node]
        key_fields, made = key.fields(rows), None
        if key_fields is not None:
            times = [pa.field(name, time_type or pa.int64()) for name in ("window_start", "window_end")]
            results = [pa.field(name, part.result_type) for name, part in bound.items()]
            made = RowType(pa.schema([*key_fields, *times, *results]))
        names = (*key.columns, "window_start", "window_end", *bound)
        function = WindowFunction(
            node.window,
            node.trigger,
            node.lateness_ms,
            bound,
            key.values,
            from_milliseconds(time_type),
            made.of_values if made else lambda values: untyped(dict(zip(names, values, strict=True))),
            LATE in node.sides,
        )
        return function, made

    # ------------------------------------------------------------------------------------------------- row functions

    def waits(self, node: GraphNode) -> bool:
        """Report whether records wait before a node for the runner of the plan."""
        if isinstance(node, TransformNode):
            return node.is_on_spark
        if isinstance(node, RowNode):
            return self._breaks_chains and not node.chained
        return isinstance(node, OperatorNode | SinkNode)

    def push(self, port: Port, records: Records, arrived: dict[Destination, list[Records]]) -> None:
        """Send records from an output through row functions to where they wait for the next level."""
        readers = self.consumers.get(port, [])
        for index, (node, number_of_input) in enumerate(readers):
            part = records if len(readers) == 1 else records.branch(index)
            self.deliver(node, number_of_input, part, arrived)

    def deliver(
        self, node: GraphNode, number_of_input: int, records: Records, arrived: dict[Destination, list[Records]]
    ) -> None:
        """Send records to one of the readers of an output."""
        if self.waits(node):
            arrived.setdefault((node.order, number_of_input), []).append(records)
        elif isinstance(node, RowNode):
            self.apply(node, records, arrived)
        elif isinstance(node, TransformNode):
            self.push(Port(node.order), self._transformed(node, records), arrived)
        else:
            self.push(Port(node.order), records, arrived)

    def apply(self, node: RowNode, records: Records, arrived: dict[Destination, list[Records]]) -> None:
        """Run a row function on records, and send its results on."""
        call = (
            node.function if node.kind == "filter" else partial(_make_all, node.function, _maker(node.rows), node.kind)
        )
        dead = Records()
        results = self._results(node, call, records, dead)
        if node.kind == "filter":
            kept = records.pick([i for i, keep in results if keep])
        elif node.kind == "map":
            kept = records.pick([i for i, _ in results])
            kept.rows = [made for _, made in results]
        else:
            kept = Records()
            for i, made in results:
                for n, row in enumerate(made):
                    kept.append(records.moments[i], records.paths[i] + number(n), records.times[i], row)
        self.push(Port(node.order), kept, arrived)
        if node.dead_letters:
            self.push(Port(node.order, DEAD_LETTERS), dead, arrived)

    def _results(
        self, node: RowNode, call: Callable[[Row], Any], records: Records, dead: Records
    ) -> list[tuple[int, Any]]:
        """Return the results of a row function by record. Records that it fails on become dead letters or errors."""
        results: list[tuple[int, Any]] = []
        for i, row in enumerate(records.rows):
            try:
                results.append((i, call(row)))
            except Exception as error:
                when = records.moments[i]
                if not node.dead_letters:
                    on = f"the record {row!r}"
                    raise stopped(error, on, pipeline=self.name, uid=node.label, when=when) from error
                what = f"{type(error).__name__}: {error}"
                letter = dead_letter(node.label, when, what, key=None, time=records.times[i], row=row)
                dead.append(when, records.paths[i], records.times[i], letter)
        return results

    def _transformed(self, node: TransformNode, records: Records) -> Records:
        rows = self._rows[node.inputs[0]]
        if node.rows is None or rows is None:
            raise InvalidArgument(
                f"pipeline {self.name!r}, {node.label}: a transform needs columns with types: declare its "
                "schema='…', and that of the stream that it gets"
            )
        assert node.arrow is not None, "what runs on Spark waits for it"
        if not len(records):
            return records
        try:
            table = node.arrow(pa.Table.from_batches([records.to_arrow(rows)]))
            if not isinstance(table, pa.Table | pa.RecordBatch):
                raise InvalidArgument(f"the function returned {table!r}: return a pyarrow.Table")
            lacking = missing_columns(table, node.rows)
            made = Records() if lacking else Records.returned(table, node.rows)
        except Exception as error:
            on, when = f"a table of {len(records)} records", records.moments[0]
            raise stopped(error, on, pipeline=self.name, uid=node.label, when=when, letters=False) from error
        if lacking:
            raise InvalidArgument(
                f"{node.label} of pipeline {self.name!r} returned a table without {', '.join(lacking)}: keep "
                "the reserved column _cw and give every column of the schema"
            )
        return made


def _checked_time(rows: RowType, name: str, source: str) -> pa.DataType:
    kind = rows.type_of(name, f"event_time of {source}")
    # A column without any value, in the rows of a test, has no type yet.
    if not pa.types.is_timestamp(kind) and not pa.types.is_integer(kind) and not pa.types.is_null(kind):
        raise InvalidArgument(
            f"event time is the column {name!r}, whose type is {shown(kind)}: it must be a timestamp, or an integer in "
            f"milliseconds since 1970. Name such a column of {rows}, or give a function of a row: event_time=lambda "
            "row: …"
        )
    return kind


def _maker(rows: RowType | None) -> Callable[[Any], Row]:
    return untyped if rows is None else rows.make


def _make_all(function: Callable[[Row], Any], make: Callable[[Any], Row], kind: str, row: Row) -> Any:
    result = function(row)
    return make(result) if kind == "map" else [make(item) for item in result or ()]
