"""Detects what keeps an open log stream from going on with all its members, at every wake of the leader.

Nodes are checked as a whole; streams only while something changes there. So a thousand idle streams cost only as much
as the check of the storage nodes.
"""

from __future__ import annotations

import enum
from itertools import islice

from msgspec import Struct

from cutwater.core.order.planning.liveness import Liveness
from cutwater.core.order.planning.membership_index import Roster
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import LLSN, Instant, LogStreamId, NodeState, StorageNodeId

LOOKED_AT_MAX = 512
"""Number of streams that are looked at in one wake. If more are moving, they take turns, and a stuck member is noticed
a few wakes later."""


class TroubleKind(enum.IntEnum):
    """Kinds of trouble, by precedence: if one member has several, only the first is told."""

    SILENT = 1
    LEFT_OUT = 2
    STUCK = 3
    FULL = 4


class Trouble(Struct, frozen=True, order=True):
    stream: LogStreamId
    place: int
    """Position of the member in its chain."""
    node: StorageNodeId
    kind: TroubleKind


class Watch:
    def __init__(self, state: OrderState, book: ReportBook, liveness: Liveness, roster: Roster) -> None:
        self._state, self._book, self._liveness, self._roster = state, book, liveness, roster
        self.moving = dict.fromkeys(state.streams)
        """Streams in which a member may be behind the others, or may have yet to report. The one that was looked at
        longest ago comes first. The leader adds a stream when something is reported, committed or opened there."""
        self._covered: dict[StorageNodeId, tuple[tuple[LogStreamId, ...], frozenset[LogStreamId]]] = {}
        """The streams of which a node was a member, and those that it reported, when none was left out."""

    def troubles(self, now: Instant) -> list[Trouble]:
        found: dict[tuple[LogStreamId, StorageNodeId], TroubleKind] = {}
        book, covered = self._book, self._covered
        for node, streams in self._roster.member_of.items():
            if not streams:
                continue
            if not self._liveness.is_alive(node, now):
                found |= {(stream, node): TroubleKind.SILENT for stream in streams}
                continue
            report = book.newest(node)
            if report is None:
                continue
            seen = covered.get(node)
            if seen is None or seen[0] is not streams or seen[1] is not book.reported(node):
                found |= {(stream, node): TroubleKind.LEFT_OUT for stream in self._left_out(node, streams)}
            if report.node_state is not NodeState.READY:
                found = {(stream, node): TroubleKind.FULL for stream in streams} | found
        if self.moving:
            self._look_at_moving(found, now)
        if not found:
            return []
        return sorted(
            Trouble(lsid, self._state.streams[lsid].members.index(node), node, kind)
            for (lsid, node), kind in found.items()
        )

    def _left_out(self, node: StorageNodeId, streams: tuple[LogStreamId, ...]) -> list[LogStreamId]:
        """Compare the streams with those that the node reports, and note if none is left out."""
        left_out = self._book.left_out(node, streams)
        if left_out:
            self._covered.pop(node, None)
        else:
            self._covered[node] = streams, self._book.reported(node)
        return left_out

    def _look_at_moving(self, found: dict[tuple[LogStreamId, StorageNodeId], TroubleKind], now: Instant) -> None:
        for lsid in sorted(islice(self.moving, LOOKED_AT_MAX)):
            stream = self._state.streams.get(lsid)
            del self.moving[lsid]
            if stream is not None and stream.is_open and not self._rests(stream, found, now):
                self.moving[lsid] = None

    def _rests(
        self, stream: LogStream, found: dict[tuple[LogStreamId, StorageNodeId], TroubleKind], now: Instant
    ) -> bool:
        """Find members that are stuck. Return whether no member is behind."""
        reports = [self._book.of(stream.stream, node) for node in stream.members]
        # Inside a large group the durable end stands still, but the disks do not.
        reached = [max(ur.durable_end, ur.progress) if ur is not None else LLSN(0) for ur in reports]
        end = max(reached)
        rests = True
        before = end
        for node, ur, here in zip(stream.members, reports, reached, strict=True):
            is_behind = ur is None or here < end or ur.committed_end < stream.committed_end
            rests = rests and not is_behind
            if ur is not None and before <= here < end and ur.committed_end >= stream.committed_end:
                # This member has all that its predecessor has. The predecessor, or its link, keeps both from going on.
                is_behind = False
            before = here
            if found.get((stream.stream, node), TroubleKind.FULL) < TroubleKind.STUCK:
                # The reason why this member is behind is known.
                continue
            where = (stream.epoch, here, ur.committed_end if ur is not None else LLSN(0))
            if self._liveness.is_stuck(stream.stream, node, where, now, is_behind=is_behind):
                found[stream.stream, node] = TroubleKind.STUCK
        return rests
