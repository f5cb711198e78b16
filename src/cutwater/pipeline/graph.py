"""Defines the graph that a pipeline describes: nodes as data in the order of the program, and their text.

The inputs of a node exist before the node, so this order is topological. It is also the order in which operators fire
timers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cutwater.durations import shown
from cutwater.errors import AlreadyExists, InvalidArgument
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.context import MAIN
from cutwater.pipeline.keyed_state.keys import MAX_PARALLELISM, KeyReader
from cutwater.pipeline.keyed_state.state import State
from cutwater.pipeline.rows import Row, RowType
from cutwater.pipeline.windowing.aggregates import Aggregator
from cutwater.pipeline.windowing.windows import Trigger, Window


@dataclass(frozen=True, slots=True)
class Port:
    """One of the outputs of a node: the main one, or the side output with a tag."""

    node: int
    tag: str = MAIN


@dataclass(slots=True)
class GraphNode:
    """Common part of all nodes. ``order`` is the place in the program."""

    order: int
    inputs: tuple[Port, ...]

    @property
    def label(self) -> str:
        """The name of the node in errors and in ``explain``."""
        return f"{type(self).__name__.removesuffix('Node').lower()}-{self.order}"


@dataclass(slots=True)
class SourceNode(GraphNode):
    topic: str
    rows: RowType | None
    event_time: str | Callable[[Row], Any] | None
    watermark: Watermark | None
    """None if the source has no clock. Then it neither holds the watermark of others back nor advances it."""
    skips_malformed: bool = False
    """Whether old batches that are intact and hold no records of their topic are skipped; otherwise they fail."""

    @property
    def label(self) -> str:
        return f"source {self.topic}"


@dataclass(slots=True)
class RowNode(GraphNode):
    """A row function: ``map``, ``filter`` or ``flat_map``."""

    kind: str
    function: Callable[[Row], Any]
    rows: RowType | None
    dead_letters: bool
    chained: bool

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.order}"


@dataclass(slots=True)
class TransformNode(GraphNode):
    """Stateless code on whole tables: ``arrow`` on Arrow tables, or else ``function`` on Spark's data frames."""

    function: Callable[[Any], Any] | None
    arrow: Callable[[Any], Any] | None
    rows: RowType | None

    @property
    def is_on_spark(self) -> bool:
        """Whether records leave the workers' Python processes for it."""
        return self.arrow is None


@dataclass(slots=True)
class UnionNode(GraphNode):
    pass


@dataclass(slots=True)
class OperatorNode(GraphNode):
    """An operator with state. ``methods`` and ``keys`` have one element per input; key None is a broadcast input."""

    uid: str
    kind: str
    function: Any
    methods: tuple[str, ...]
    keys: tuple[KeyReader | None, ...]
    states: Sequence[State]
    rows: RowType | None
    dead_letters: bool
    max_parallelism: int = MAX_PARALLELISM
    partitions: int = 0
    sides: dict[str, RowType | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.uid}"


@dataclass(slots=True)
class WindowNode(OperatorNode):
    window: Window = field(kw_only=True)
    trigger: Trigger = field(kw_only=True)
    lateness_ms: int = field(kw_only=True)
    aggregates: Mapping[str, str | Aggregator] = field(kw_only=True)


@dataclass(slots=True)
class SinkNode(GraphNode):
    topic: str
    uid: str

    @property
    def label(self) -> str:
        return f"sink {self.uid}"


def is_name(given: Any) -> bool:
    return isinstance(given, str) and bool(given)


AnyNode = TypeVar("AnyNode", bound=GraphNode)


class Graph:
    """All nodes of a pipeline and their connections."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self._uids: dict[str, GraphNode] = {}

    def add(self, node: AnyNode) -> AnyNode:
        assert node.order == len(self.nodes), "a node's place is where it is added"
        if isinstance(node, OperatorNode | SinkNode):
            self._take_uid(node)
        self.nodes.append(node)
        return node

    def remove_last(self) -> None:
        """Remove the node that was added last, because it turned out to be wrong."""
        node = self.nodes.pop()
        self._uids = {uid: owner for uid, owner in self._uids.items() if owner is not node}

    def _take_uid(self, node: OperatorNode | SinkNode) -> None:
        uid = node.uid
        if not is_name(uid):
            what = "a sink" if isinstance(node, SinkNode) else f"{node.kind}"
            raise InvalidArgument(
                f"{what} has no uid: give it uid='…', a name that stays when the program changes; state and output "
                "belong to it, and none is made up"
            )
        if uid in self._uids:
            raise AlreadyExists(
                f"the uid {uid!r} is used twice, by {self._uids[uid].label} and {node.label}: choose another"
            )
        self._uids[uid] = node

    def operator(self, uid: str) -> OperatorNode:
        node = self._uids.get(uid)
        if not isinstance(node, OperatorNode):
            known = [uid for uid, node in self._uids.items() if isinstance(node, OperatorNode)]
            raise InvalidArgument(f"no operator has the uid {uid!r}: there are {', '.join(known) or 'none'}")
        return node

    def of_type(self, kind: type[AnyNode]) -> Iterator[AnyNode]:
        return (node for node in self.nodes if isinstance(node, kind))

    def consumers(self) -> dict[Port, list[tuple[GraphNode, int]]]:
        """Return the nodes that read each output, with the number of the input, in the order of the program."""
        found: dict[Port, list[tuple[GraphNode, int]]] = {}
        for node in self.nodes:
            for index, port in enumerate(node.inputs):
                found.setdefault(port, []).append((node, index))
        return found

    def sources(self) -> list[frozenset[str]]:
        """Return the topics that feed each node; its watermark is made of theirs."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = {node.topic} if isinstance(node, SourceNode) else ()
            found.append(frozenset(own).union(*(found[port.node] for port in node.inputs)))
        return found

    def has_clock(self, topics: frozenset[str]) -> bool:
        """Report whether one of these sources has a watermark strategy."""
        return any(node.topic in topics and node.watermark is not None for node in self.of_type(SourceNode))

    def levels(self) -> list[int]:
        """Return, for each node, the number of operators with state on the longest path to it, including itself."""
        found: list[int] = []
        for node in self.nodes:
            above = max((found[port.node] for port in node.inputs), default=0)
            found.append(above + isinstance(node, OperatorNode))
        return found


# -------------------------------------------------------------------------------------------------------- as text


def explained(name: str, graph: Graph) -> str:
    """Return one line per node, by level. A chain of row functions is one line."""
    levels, sources = graph.levels(), graph.sources()
    lines = [f"pipeline {name}"]
    for level in range(max(levels, default=0) + 1):
        lines.append(f"  level {level}: " + ("sources" if level == 0 else "one stateful operator per slice"))
        for chain in _chains(graph):
            if levels[chain[0].order] == level:
                lines.append(f"    {' → '.join(node.label for node in chain)}{_inputs(graph, chain[0])}")
                lines += [f"      {line}" for line in _details(chain[0], sources[chain[0].order])]
    return "\n".join(lines)


def _chains(graph: Graph) -> Iterator[list[GraphNode]]:
    """Yield the nodes in the order of the program. Row functions without a branch between them form one chain."""
    consumers = graph.consumers()
    taken: set[int] = set()
    for node in graph.nodes:
        if node.order in taken:
            continue
        chain = [node]
        while isinstance(chain[-1], RowNode):
            readers = consumers.get(Port(chain[-1].order), [])
            following = readers[0][0] if len(readers) == 1 else None
            if not isinstance(following, RowNode) or not following.chained:
                break
            chain.append(following)
            taken.add(following.order)
        yield chain


def _inputs(graph: Graph, node: GraphNode) -> str:
    if not node.inputs:
        return ""
    named = [graph.nodes[port.node].label + ("" if port.tag == MAIN else f" [{port.tag}]") for port in node.inputs]
    return f" ← {', '.join(named)}"


def _details(node: GraphNode, sources: frozenset[str]) -> Iterator[str]:
    if isinstance(node, SourceNode):
        time = (
            node.event_time if isinstance(node.event_time, str) else "function" if node.event_time else "of the topic"
        )
        yield f"watermark: {node.watermark or 'none'}; event time: {time}; schema: {node.rows or 'of the topic'}"
        if node.skips_malformed:
            yield "malformed batches are skipped"
    elif isinstance(node, SinkNode):
        yield f"topic: {node.topic}"
    elif isinstance(node, OperatorNode):
        if node.partitions:
            yield f"partitions: {node.partitions}"
        else:
            keys = [", ".join(key.columns) if key.function is None else "function" for key in node.keys if key]
            fed_from = ", ".join(sorted(sources))
            yield f"key: {' / '.join(keys)}; {node.max_parallelism} key groups; watermark: of {fed_from}"
        if isinstance(node, WindowNode):
            yield f"window: {node.window}, {node.trigger}, allowed lateness {shown(node.lateness_ms)}"
            yield f"aggregates: {', '.join(f'{name} = {given}' for name, given in node.aggregates.items())}"
        for state in node.states:
            yield f"state {state}"
        if node.sides:
            yield f"side outputs: {', '.join(tag.removeprefix('.') for tag in sorted(node.sides))}"
