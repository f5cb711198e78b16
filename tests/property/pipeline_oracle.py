"""A dumb interpreter of what a pipeline means, to hold the real one against.

It reads the meaning literally: one thread takes the positions of the log one by one, delivers each record through the
graph depth first, then lets the operators advance in topological order and fires their timers by (time, key bytes). It
shares the description of the graph with the real thing, and nothing else: no batches, no paths, no packed state.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

from cutwater.pipeline.graph import GraphNode, OperatorNode, Port, RowNode, SinkNode, SourceNode, WindowNode
from cutwater.pipeline.keyed_state.keys import key_bytes
from cutwater.pipeline.keyed_state.state import BroadcastState, ListState, MapState, ValueState
from cutwater.pipeline.rows import Row, row_class
from cutwater.pipeline.stream import Pipeline
from cutwater.pipeline.windowing.windows import Session

LOWEST, HIGHEST = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Place:
    """One position of the log: a record, a heartbeat of a stream, or a tick (no stream)."""

    glsn: int
    cut_ms: int
    topic: str = ""
    stream: int = 0
    row: tuple[Any, ...] | None = None
    time: int = 0
    declared: int | None = None
    idle: bool = False


class DumbWatermark:
    """Rule 2 of the watermark for some topics, computed anew from the whole log so far at every position."""

    def __init__(self, sources: dict[str, SourceNode], topics: frozenset[str], streams: set[tuple[str, int]]) -> None:
        self.sources = {topic: sources[topic].watermark for topic in topics}
        self.streams = {topic: {stream for stream in streams if stream[0] == topic} for topic in topics}
        self.seen: list[Place] = []
        self.reached = dict.fromkeys(topics, LOWEST)
        # A source is not idle when its streams have just been created, and idle if it has none.
        self.idle_sources = {topic for topic in topics if not self.streams[topic]}
        self.value = LOWEST

    def after(self, place: Place) -> int:
        self.seen.append(place)
        for topic in self.sources if not place.topic else {place.topic} & set(self.sources):
            self.evaluate(topic, place.cut_ms)
        active = [value for topic, value in self.reached.items() if topic not in self.idle_sources]
        self.value = max(self.value, min(active) if active else max(self.reached.values()))
        return self.value

    def evaluate(self, topic: str, now: int) -> None:
        active = [self.own(stream) for stream in self.streams[topic] if not self.idle(stream, now)]
        highest = max((self.own(stream) for stream in self.streams[topic]), default=LOWEST)
        self.reached[topic] = max(self.reached[topic], min(active) if active else highest)
        self.idle_sources = self.idle_sources - {topic} if active else self.idle_sources | {topic}

    def own(self, stream: tuple[str, int]) -> int:
        strategy = self.sources[stream[0]]
        mine = [place for place in self.seen if (place.topic, place.stream) == stream]
        if strategy.kind == "punctuated":
            return max((place.declared for place in mine if place.declared is not None), default=LOWEST)
        return max((place.time - strategy.bound_ms - 1 for place in mine if place.row is not None), default=LOWEST)

    def idle(self, stream: tuple[str, int], now: int) -> bool:
        after = self.sources[stream[0]].idle_after_ms
        last = [place for place in self.seen if (place.topic, place.stream) == stream]
        if last and last[-1].idle:
            return True
        return after is not None and now - (last[-1].cut_ms if last else 0) > after


class DumbState:
    """A declared state: values per key in a plain dict, copied on every read and write."""

    def __init__(self, declared: Any, operator: DumbOperator) -> None:
        self.declared, self.operator = declared, operator

    @property
    def scope(self) -> dict[Any, Any]:
        key = None if isinstance(self.declared, BroadcastState) else self.operator.key
        return self.operator.kept.setdefault((key, isinstance(self.declared, BroadcastState)), {})

    def elements(self) -> list[Any]:
        """(written at, …) of what has not expired."""
        ttl = self.declared.ttl_ms
        kept = self.scope.get(self.declared.name, [])
        return [deepcopy(item) for item in kept if ttl is None or self.operator.watermark < item[0] + ttl]

    def store(self, items: list[Any]) -> None:
        self.scope[self.declared.name] = deepcopy(items)
        if not items:
            del self.scope[self.declared.name]

    def stamped(self, *parts: Any) -> tuple[Any, ...]:
        return max(self.operator.timestamp, self.operator.watermark), *parts


class DumbValue(DumbState):
    def get(self) -> Any:
        return self.elements()[0][1] if self.elements() else self.declared.default

    def set(self, value: Any) -> None:
        self.store([] if value is None else [self.stamped(value)])

    def clear(self) -> None:
        self.store([])


class DumbList(DumbState):
    def get(self) -> list[Any]:
        return [value for _, value in self.elements()]

    def append(self, value: Any) -> None:
        self.store([*self.scope.get(self.declared.name, []), self.stamped(value)])

    def clear(self) -> None:
        self.store([])


class DumbMap(DumbState):
    def get(self, key: Any, default: Any = None) -> Any:
        return next((value for _, own, value in self.elements() if own == key), default)

    def put(self, key: Any, value: Any) -> None:
        self.store(
            [item for item in self.scope.get(self.declared.name, []) if item[1] != key] + [self.stamped(key, value)]
        )

    def remove(self, key: Any) -> None:
        self.store([item for item in self.scope.get(self.declared.name, []) if item[1] != key])

    def items(self) -> list[tuple[Any, Any]]:
        return sorted((key, value) for _, key, value in self.elements())


class DumbOperator:
    """An operator with its state in dicts and its timers in a set. It is its own context."""

    def __init__(self, oracle: Oracle, node: OperatorNode) -> None:
        self.oracle, self.node = oracle, node
        self.watermark = LOWEST
        self.key: Any = None
        self.timestamp = 0
        self.kept: dict[Any, dict[str, Any]] = {}
        self.event_timers: set[tuple[int, bytes]] = set()
        self.processing_timers: set[tuple[int, bytes]] = set()
        self.names: dict[bytes, Any] = {}
        self.emitted: list[tuple[str, int, Any]] = []
        self.fresh: set[tuple[int, bytes]] = set()
        self.late = 0
        self.windows: dict[Any, dict[tuple[int, int], list[Row]]] = {}
        self.function = copy(node.function)
        for state in node.states:
            kind = {ValueState: DumbValue, ListState: DumbList, MapState: DumbMap, BroadcastState: DumbMap}[type(state)]
            self.function.__dict__[state.name] = kind(state, self)

    # What a function sees as its context.
    @property
    def timers(self) -> DumbOperator:
        return self

    @property
    def glsn(self) -> int:
        return self.oracle.glsn

    @property
    def processing_time(self) -> int:
        return self.oracle.now

    def at(self, time: int) -> None:
        timer = (time, key_bytes(self.key))
        if timer not in self.event_timers:
            self.fresh.add(timer)
        self.event_timers.add(timer)

    def delete(self, time: int) -> None:
        self.event_timers.discard((time, key_bytes(self.key)))

    def at_processing_time(self, time: int) -> None:
        self.processing_timers.add((time, key_bytes(self.key)))

    def output(self, tag: str, row: Any) -> None:
        if tag in self.node.sides:
            self.emitted.append((tag, self.timestamp, row))

    # What makes it work.
    def call(self, key: Any, timestamp: int, function: Any, *arguments: Any) -> None:
        self.key, self.timestamp = key, timestamp
        self.names[key_bytes(key)] = key
        before = deepcopy((self.kept, self.event_timers, self.processing_timers, self.windows))
        try:
            result = function(*arguments, self)
            for row in [result] if isinstance(result, dict) else result or ():
                self.emitted.append(("", self.timestamp, row))
        except ArithmeticError as error:
            self.kept, self.event_timers, self.processing_timers, self.windows = before
            letter = {"key": key, "time": timestamp, "source_glsn": self.glsn, "error": f"ArithmeticError: {error}"}
            self.emitted = [(".dead", timestamp, letter)]
        emitted, self.emitted = self.emitted, []
        for tag, time, row in emitted:
            self.oracle.deliver(Port(self.node.order, tag), row, time)

    def take(self, index: int, row: Row, time: int) -> None:
        reader = self.node.keys[index]
        if isinstance(self.node, WindowNode):
            self.call(row.k, time, self.into_windows, row)
        elif reader is None:
            self.call(None, time, getattr(self.function, self.node.methods[index]), row)
        else:
            self.call(row.k, time, getattr(self.function, self.node.methods[index]), row)

    def advance(self, watermark: int, last: bool) -> None:
        """At the end of the input, a key fires at most so many timers that were registered since the end began."""
        self.watermark = watermark
        self.fresh = set()
        spent: dict[bytes, int] = {}
        while due := [
            timer
            for timer in self.event_timers
            if timer[0] <= watermark
            and not (last and timer in self.fresh and spent.get(timer[1], 0) >= self.oracle.firings)
        ]:
            timer = min(due)
            if timer in self.fresh:
                spent[timer[1]] = spent.get(timer[1], 0) + 1
            self.event_timers.discard(timer)
            call = self.window_timer if isinstance(self.node, WindowNode) else self.function.on_timer
            self.call(self.names[timer[1]], timer[0], call, timer[0])

    def pass_time(self, now: int) -> None:
        while due := [timer for timer in self.processing_timers if timer[0] <= now]:
            timer = min(due)
            self.processing_timers.discard(timer)
            self.call(self.names[timer[1]], timer[0], self.function.on_processing_timer, timer[0])

    # Windows: the rows themselves are kept, and every result is computed anew from them.
    def into_windows(self, row: Row, _: Any) -> None:
        assert isinstance(self.node, WindowNode)
        own = self.windows.setdefault(self.key, {})
        late = True
        for span in self.node.window.spans(self.timestamp):
            if isinstance(self.node.window, Session):
                near = sorted(other for other in own if other[0] <= span[1] and span[0] <= other[1])
                rows = [old for other in near for old in own[other]]
                span = min(s for s, _ in [span, *near]), max(e for _, e in [span, *near])  # noqa: PLW2901
                if span[1] - 1 + self.node.lateness_ms <= self.watermark:
                    continue
                for other in near:
                    del own[other]
                own[span] = rows
            if span[1] - 1 + self.node.lateness_ms <= self.watermark:
                continue
            late = False
            own.setdefault(span, []).append(row)
            self.wake(own)
            if span[1] - 1 <= self.watermark:
                self.result(span)
        late = late and self.timestamp + self.node.lateness_ms <= self.watermark
        if late and ".late" in self.node.sides:
            self.emitted.append((".late", self.timestamp, row))
        elif late:
            self.late += 1

    def wake(self, own: dict[tuple[int, int], list[Row]]) -> None:
        assert isinstance(self.node, WindowNode)
        data = key_bytes(self.key)
        times = {time for _, end in own for time in (end - 1, end - 1 + self.node.lateness_ms) if time > self.watermark}
        self.event_timers = {timer for timer in self.event_timers if timer[1] != data} | {
            (time, data) for time in times
        }

    def window_timer(self, time: int, _: Any) -> None:
        assert isinstance(self.node, WindowNode)
        own = self.windows.get(self.key, {})
        for span in sorted(own):
            if span[1] - 1 == time:
                self.result(span)
            if span[1] - 1 + self.node.lateness_ms <= time:
                del own[span]

    def result(self, span: tuple[int, int]) -> None:
        rows = self.windows[self.key][span]
        values = [row.v for row in rows]
        made = {
            "k": self.key, "window_start": span[0], "window_end": span[1], "n": len(rows), "total": sum(values),
            "least": min(values), "most": max(values), "mean": sum(values) / len(values), "one": values[0],
            "other": values[-1], "all": values,
        }  # fmt: skip
        self.emitted.append(("", span[1] - 1, made))


class Oracle:
    """The whole pipeline, one position at a time."""

    def __init__(self, pipeline: Pipeline, streams: set[tuple[str, int]], firings: int = 10) -> None:
        self.firings = firings
        self.nodes: list[GraphNode] = pipeline.graph.nodes
        self.operators = {node.order: DumbOperator(self, node) for node in self.nodes if isinstance(node, OperatorNode)}
        self.written: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
        self.glsn, self.now = 0, LOWEST
        self.sources = {node.topic: node for node in self.nodes if isinstance(node, SourceNode)}
        self.fed_from = pipeline.graph.sources()
        self.watermarks = {
            topics: DumbWatermark(self.sources, topics, streams)
            for topics in map(self.fed_from.__getitem__, self.operators)
        }

    def position(self, place: Place) -> None:
        risen = place.cut_ms > self.now
        self.glsn, self.now = place.glsn, place.cut_ms
        if place.row is not None:
            rows = self.sources[place.topic].rows
            assert rows is not None
            self.deliver(Port(self.sources[place.topic].order), row_class(rows.names)(place.row), place.time)
        values = {topics: watermark.after(place) for topics, watermark in self.watermarks.items()}
        for order, operator in sorted(self.operators.items()):
            if values[self.fed_from[order]] > operator.watermark:
                operator.advance(values[self.fed_from[order]], last=False)
        for _, operator in sorted(self.operators.items()):
            if risen:
                operator.pass_time(self.now)

    def end(self) -> None:
        for _, operator in sorted(self.operators.items()):
            operator.advance(HIGHEST, last=True)

    def deliver(self, port: Port, row: Any, time: int) -> None:
        """Depth first: each reader in the order of the program, with all that follows from it."""
        for node in self.nodes:
            for index, used in enumerate(node.inputs):
                if used == port:
                    self.hand_to(node, index, row, time)

    def hand_to(self, node: GraphNode, index: int, row: Any, time: int) -> None:
        if isinstance(row, dict):
            row = row_class(tuple(row))(row.values())
        if isinstance(node, SinkNode):
            self.written.setdefault(node.uid, []).append((self.glsn, time, row))
        elif isinstance(node, OperatorNode):
            self.operators[node.order].take(index, row, time)
        elif isinstance(node, RowNode):
            result = node.function(row)
            made = {"filter": [row] if result else [], "map": [result], "flat_map": result}[node.kind]
            for item in made:
                self.deliver(Port(node.order), item, time)
        else:
            self.deliver(Port(node.order), row, time)
