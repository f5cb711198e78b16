"""Describes nodes and log streams for operators: their state, why and since when, what is missing, what comes next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from cutwater.core.requests import NodeDescription, StreamDescription
from cutwater.core.text import nodes_in_words, seconds
from cutwater.types import StorageNodeId


def tell_stream(found: StreamDescription) -> Iterator[str]:
    state = "open" if found.is_open else "sealed for good" if found.final else "sealed"
    yield f"log stream {found.stream} of topic {found.topic!r}: {state} in epoch {found.epoch}"
    yield f"  records: {found.committed_end}, the last at GLSN {found.last_glsn}"
    yield f"  copies:  {len(found.members)} of {max(found.wanted, len(found.replicas))}, on {_nodes(found.members)}"
    lacking = found.wanted - len(found.replicas)
    unplaced = [f"{lacking} without a storage node that could hold it"] if lacking > 0 and not found.final else []
    if found.missing or unplaced:
        yield f"  missing: {', and '.join([*([_nodes(found.missing)] if found.missing else []), *unplaced])}"
    yield f"  since:   {time_of(found.since)} UTC"
    yield f"  why:     {found.reason or 'all is well'}"
    if found.next_step:
        yield f"  next:    {found.next_step}"


def _nodes(nodes: tuple[StorageNodeId, ...]) -> str:
    return nodes_in_words(nodes) if nodes else "none"


def node_state(node: NodeDescription) -> str:
    if node.is_alive and node.state is not None:
        return node.state.name
    if node.silent_us is None:
        return "not heard of yet"
    return "dead, no server listens there" if node.is_gone else f"dead, silent for {seconds(node.silent_us)}"


def why_dead(node: NodeDescription) -> str:
    """Return the rest of a sentence about a storage node that is not alive."""
    if node.silent_us is None:
        return "has never reported to the present leader"
    if node.is_gone:
        return "is dead: its connection was lost, and no server listens there any more"
    return f"is dead: it has been silent for {seconds(node.silent_us)}"


def stream_row(stream: StreamDescription) -> tuple[object, ...]:
    state = "sealed for good" if stream.final else "sealed by an operator" if stream.held else "sealed"
    if stream.is_open:
        state = "open"
    lacking = stream.wanted - len(stream.members) - len(stream.missing)
    missing = (*stream.missing, *([f"{lacking} more"] if lacking > 0 and not stream.final else []))
    return stream.stream, stream.topic, state, stream.epoch, stream.members, missing, stream.committed_end


def time_of(microseconds: int) -> str:
    """Format a cut time for people."""
    if microseconds <= 0:
        return "-"
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
