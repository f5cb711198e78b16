"""Plans which storage nodes hold which log streams, and how many streams a topic has.

``repair.py`` repairs a stream with the replicas that it has. This module chooses the replicas: for new streams, when
nodes have been dead for long, and when streams are lost for longer than their topic can wait.
"""

from __future__ import annotations

from collections.abc import Callable

from cutwater.core.order import decisions as d
from cutwater.core.order.planning.cluster_view import Outlook
from cutwater.core.order.state import LogStream, OrderState, TopicState
from cutwater.core.text import nodes_in_words
from cutwater.types import CutTime, Instant, LogStreamId, StorageNodeId

ReplicaCounts = dict[StorageNodeId, int]
"""Number of replicas on each node that can take more."""


def reassign(
    stream: LogStream, wanted: int, outlook: Outlook, now: Instant, load: Callable[[], ReplicaCounts]
) -> d.AssignReplicas | None:
    """Give the places of nodes that have been dead for long to others, as long as there is a replica to learn from.

    A node whose replica is damaged keeps its place, since its copy may be needed for a repair, and a spare node joins
    it. When there are enough members again, replicas that are not members lose their places. If more copies are wanted
    than there are places, places are added one after another: the next when no copy is being made.
    """
    surplus = _without_surplus(stream, wanted, outlook, now)
    if surplus is not None:
        return surplus
    leaving = stream.leaving
    gone = {node for node in stream.replicas if node not in leaving and outlook.is_gone(node, now)}
    others = [node for node in stream.replicas if node not in stream.members and node not in leaving]
    unfit = [node for node in others if outlook.is_unfit(node, stream.stream, now)]
    if not gone and not unfit and len(stream.replicas) - len(leaving) >= wanted:
        return None
    if stream.is_open:
        gone -= set(stream.members)
    elif not any(outlook.is_ready(stream, node, now) for node in stream.replicas if node not in gone):
        return None
    staying = tuple(node for node in stream.replicas if node not in leaving)
    copying = any(outlook.is_usable(node, now) for node in others)
    places = wanted + len(unfit) if gone or unfit else min(wanted, len(staying) + (not copying))
    free = {node: count for node, count in load().items() if node not in leaving}
    replicas = (*substitute(staying, gone, places, free), *leaving)
    if replicas == stream.replicas:
        return None
    are = "are" if len(gone) > 1 else "is"
    if gone:
        reason = f"{nodes_in_words(sorted(gone))} {are} dead for long"
    elif unfit:
        reason = f"the copy on {nodes_in_words(unfit)} is damaged"
    else:
        reason = f"{wanted} copies are wanted"
    return d.AssignReplicas(stream.stream, replicas, reason, leaving)


def _without_surplus(stream: LogStream, wanted: int, outlook: Outlook, now: Instant) -> d.AssignReplicas | None:
    """Remove replicas that are not members once there are enough members. This undoes the addition of a spare node for
    a damaged copy, and lets replaced replicas go. A finished stream also loses one of its complete copies if there are
    more than wanted. An open one loses its members by a short seal, see ``repair.py``."""
    if not (stream.is_open or stream.final):
        return None
    # The members of a finished stream may be dead. A complete copy does not go while one of them is missed.
    complete = [node for node in stream.staying if stream.is_open or outlook.is_ready(stream, node, now)]
    if len(complete) < wanted:
        return None
    # An open stream keeps all of its members.
    needed = stream.members if stream.is_open else stream.staying
    rest = [node for node in stream.replicas if node not in needed]
    if not rest and stream.final and len(complete) > wanted:
        rest = complete[-1:]
        needed = tuple(node for node in needed if node not in rest)
    if not rest:
        return None
    copies = "is one copy" if len(needed) == 1 else f"are {len(needed)} copies"
    reason = f"there {copies} without {nodes_in_words(rest)}"
    kept = tuple(node for node in stream.replicas if node in needed)
    leaving = tuple(node for node in stream.leaving if node in needed)
    return d.AssignReplicas(stream.stream, kept, reason, leaving)


def survivors(stream: LogStream, outlook: Outlook, now: Instant) -> list[d.AddSurvivor]:
    """Add the replicas that have learned everything to a stream that stays sealed, since no unseal would add them."""
    if not (stream.final or stream.held):
        return []
    learned = [node for node in stream.replicas if node not in stream.members and outlook.is_ready(stream, node, now)]
    return [d.AddSurvivor(stream.stream, node) for node in learned]


def replacements(
    state: OrderState,
    topic: TopicState,
    outlook: Outlook,
    now: Instant,
    loads_now: Callable[[], ReplicaCounts],
    time: CutTime,
    *,
    min_replication: int,
) -> list[d.CreateStream]:
    """Create log streams until the topic has enough that take appends, or soon will."""
    live = [s for s in state.streams_of(topic.topic) if not s.final]
    active = sum(1 for s in live if s.is_open or s.held or not outlook.is_given_up(s, now))
    reason = f"only {active} of {topic.streams} log streams of topic {topic.name!r} take appends"
    created: list[d.CreateStream] = []
    if active >= topic.streams:
        return created
    load = loads_now()
    copies = min(topic.replication, max(1, len(state.nodes)))
    for _ in range(topic.streams - active):
        nodes = place(load, copies)
        if nodes is None and not any(s.is_open for s in live) and len(load) >= min_replication:
            # Too few copies for now are better than a topic that takes no appends. Repair adds the others later.
            nodes = place(load, len(load)) or None
        if nodes is None:
            break
        for node in nodes:
            load[node] += 1
        lsid = LogStreamId(state.last_stream + 1 + len(created))
        created.append(d.CreateStream(lsid, topic.topic, nodes, state.high_watermark, time, reason))
    return created


def loads(state: OrderState, usable: Callable[[StorageNodeId], bool]) -> ReplicaCounts:
    """Return the number of replicas on each usable node."""
    load = {node: 0 for node in sorted(state.nodes) if usable(node)}
    for stream in state.streams.values():
        for node in stream.replicas:
            if node in load:
                load[node] += 1
    return load


def place(load: ReplicaCounts, replication: int) -> tuple[StorageNodeId, ...] | None:
    """Return the least loaded nodes for a new log stream, never two replicas on one; None if there are too few."""
    nodes = sorted((count, node) for node, count in load.items())
    if len(nodes) < replication:
        return None
    return tuple(node for _, node in nodes[:replication])


def substitute(
    replicas: tuple[StorageNodeId, ...], gone: set[StorageNodeId], wanted: int, load: ReplicaCounts
) -> tuple[StorageNodeId, ...]:
    """Replace as many gone replicas as there are free nodes, and add nodes if there are fewer replicas than wanted. A
    gone node without a substitute keeps its place: it may come back."""
    free = [node for _, node in sorted((count, node) for node, count in load.items() if node not in replicas)]
    result = [free.pop(0) if node in gone and free else node for node in replicas]
    while len(result) < wanted and free:
        result.append(free.pop(0))
    return tuple(result)
