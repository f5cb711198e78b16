"""Implements ``Pipeline.explain``: the graph as text."""

from __future__ import annotations

from collections.abc import Iterator

from cutwater.durations import shown
from cutwater.pipeline.context import MAIN
from cutwater.pipeline.graph import Graph, GraphNode, OperatorNode, Port, RowNode, SinkNode, SourceNode, WindowNode


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
    """Yield the nodes in the order of the program. Row functions that follow one another without a branch form one
    chain."""
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
