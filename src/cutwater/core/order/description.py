"""Describes the cluster in words, for operators: what is wrong, since when, and what happens next."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET

from cutwater.core.order.planning.first_reports import FirstReports
from cutwater.core.order.planning.liveness import Liveness
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.publish.publishing import Publisher
from cutwater.core.requests import Description, NodeDescription, OutputDescription, StreamDescription
from cutwater.errors import OrderLayerLostMemory
from cutwater.types import Instant, LeaderEpoch, LogStreamId, StorageNodeId


class Leader(Protocol):
    """The parts of one leader's term that are described."""

    leader_epoch: LeaderEpoch
    state: OrderState
    explanations: dict[LogStreamId, str]
    halted: OrderLayerLostMemory | None
    publisher: Publisher
    first_reports: FirstReports


def describe(leader: Leader, book: ReportBook, liveness: Liveness, now: Instant) -> Description:
    state = leader.state
    return Description(
        state.cluster,
        state.cluster_key,
        leader.leader_epoch,
        state.high_watermark,
        state.cut_time,
        "" if leader.halted is None else leader.halted.message,
        tuple(_node(state, node, book, liveness, now) for node in sorted(state.nodes)),
        tuple(_stream(leader, stream) for stream in sorted(state.streams.values(), key=lambda s: s.stream)),
        leader.publisher.describe(),
        state.runs.last,
        leader.first_reports.missing,
        tuple(
            OutputDescription(output.name, output.run, output.batch, output.glsn, output.rows, output.position)
            for output in state.runs.outputs
        ),
        UNSET if state.access.is_untouched else state.access.summary(),
    )


def _node(
    state: OrderState, node: StorageNodeId, book: ReportBook, liveness: Liveness, now: Instant
) -> NodeDescription:
    known, report = state.nodes[node], book.newest(node)
    is_alive = report is not None and liveness.is_alive(node, now)
    return NodeDescription(
        node,
        known.address,
        known.volumes,
        is_alive,
        # The last reported state of a dead node is useless.
        report.node_state if report is not None and is_alive else None,
        None if report is None else liveness.silence(node, now),
        len(state.streams_on(node)),
        not is_alive and liveness.is_lost(node),
    )


def _stream(leader: Leader, stream: LogStream) -> StreamDescription:
    state = leader.state
    missing = tuple(node for node in stream.replicas if node not in stream.members)
    wanted = state.wanted(stream.topic)
    is_well = stream.is_open and len(stream.members) == len(stream.staying) == wanted and not missing
    next_step = "" if is_well else leader.explanations.get(stream.stream, "")
    more = wanted - (len(stream.replicas) - len(stream.leaving))
    if not stream.final and more > 0:
        copies = "one more copy is" if more == 1 else f"{more} more copies are"
        # Copies are made one after another.
        first = f"{next_step}; then " if missing and next_step else ""
        next_step = f"{first}{copies} made as soon as other storage nodes can be used"
    return StreamDescription(
        stream.stream,
        state.topics[stream.topic].name,
        stream.epoch,
        stream.is_open,
        stream.final,
        stream.held,
        stream.members,
        stream.replicas,
        missing,
        stream.committed_end,
        stream.last_glsn,
        len(state.histories[stream.stream]),
        "" if is_well else stream.reason,
        stream.since,
        next_step,
        wanted,
    )


def lost_memory(state: OrderState, what: str) -> OrderLayerLostMemory:
    """Say that storage nodes know more than the store. ``what`` shows it."""
    return OrderLayerLostMemory(
        f"no more cuts at decision {state.index}, high watermark {state.high_watermark}: {what}. "
        "The store of the metadata repository is older than what storage nodes hold: was an old copy put back? "
        "Stop the metadata nodes and start them on the newest one"
    )
