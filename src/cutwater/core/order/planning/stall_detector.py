"""Detects what keeps an open log stream from going on with all its members, at every wake of the leader.

Nodes are checked as a whole; streams only while something changes there. So a thousand idle streams cost only as much
as the check of the storage nodes.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.order.planning.liveness import Liveness
from cutwater.core.order.planning.membership_index import Roster
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import LLSN, Instant, LogStreamId, StorageNodeId


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
        self.moving = set(state.streams)
        """Streams in which a member may be behind the others, or may have yet to report. The leader adds a stream when
        something is reported, committed or opened there."""

    def troubles(self, now: Instant) -> list[Trouble]:
        found: dict[tuple[LogStreamId, StorageNodeId], TroubleKind] = {}
        for node, streams in self._roster.member_of.items():
            if not streams:
                continue
            if not self._liveness.is_alive(node, now):
                found |= {(stream, node): TroubleKind.SILENT for stream in streams}
                continue
            found |= {(stream, node): TroubleKind.LEFT_OUT for stream in self._book.left_out(node, streams)}
            if self._book.newest(node) is not None and not self._book.is_writable(node):
                found = {(stream, node): TroubleKind.FULL for stream in streams} | found
        for lsid in sorted(self.moving):
            stream = self._state.streams.get(lsid)
            if stream is None or not stream.is_open:
                self.moving.discard(lsid)
            else:
                self._look_at(stream, found, now)
        return sorted(
            Trouble(lsid, self._state.streams[lsid].members.index(node), node, kind)
            for (lsid, node), kind in found.items()
        )

    def _look_at(
        self, stream: LogStream, found: dict[tuple[LogStreamId, StorageNodeId], TroubleKind], now: Instant
    ) -> None:
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
        if rests:
            self.moving.discard(stream.stream)
