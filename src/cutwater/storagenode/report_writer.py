"""Writes the reports of a storage node: whole, or as changes to a whole one that the leader holds (ADR 0049).

1. A report builds only on a *base*: a whole report of this incarnation that named the present leader, that was offered
   as a base, and of which this leader has said that it holds it. The last report offered is the only one kept.
2. It lists every replica that differs from the base. So it needs no report in between.
3. A report that covers other replicas than the base, or names another leader, is whole.
4. Once a base was offered, every report of the incarnation says what it builds on. A whole one that is no offer says 0.
   A metadata node of an earlier version passes reports on without that, so the leader knows that it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType, structs

from cutwater.core.messages import LeaderHello
from cutwater.types import (
    GLSN,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    MemberList,
    NodeState,
    Report,
    StorageNodeId,
    UncommitReport,
)

BASE_REPLICAS_MIN = 16
"""For fewer replicas, a whole report costs no more than one of changes."""
OFFER_AGAIN_REPORTS = 20
"""Number of whole reports without a word of the leader about the last offer, after which another one is offered."""
NODES_PER_TICK, TICKS_MAX = 200, 5
"""Of how many storage nodes each reports at every tick though nothing has changed, and the most ticks between two such
reports. The leader calls a node dead after four times as long."""
LISTED_PER_REPLICA_MAX = 4
"""A new base is offered when the reports on the last one have listed this many replicas for each that it covers. Until
then they have cost less than whole ones, and after that a new base makes them shorter."""


class NodeCondition(Struct, frozen=True):
    """What a report says besides the state of replicas. See ``Report``."""

    leader_epoch: LeaderEpoch
    node_state: NodeState
    applied_high_watermark: GLSN = GLSN(0)
    invalid: tuple[LogStreamId, ...] = ()
    is_followed: bool = False
    members: MemberList | UnsetType = UNSET


class ReportWriter:
    """Numbers and writes the reports of a storage node."""

    def __init__(
        self, node: StorageNodeId, incarnation: Incarnation, base_replicas_min: int = BASE_REPLICAS_MIN
    ) -> None:
        self._node, self._incarnation, self._replicas_min = node, incarnation, base_replicas_min
        self._has_offered = False
        """Whether a base was offered in this incarnation."""
        self.sequence = 0
        """The number of the last report."""
        self._base: dict[LogStreamId, UncommitReport] = {}
        self._base_sequence = 0
        self._base_leader = LeaderEpoch(0)
        self._is_held = False
        """Whether the leader has said that it holds the base."""
        self._since_offer = 0
        """While the base is not held, the number of reports since it was offered; then, of replicas listed since."""

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    @incarnation.setter
    def incarnation(self, incarnation: Incarnation) -> None:
        """Report as another incarnation, which has offered nothing yet."""
        if incarnation != self._incarnation:
            self._incarnation, self._has_offered = incarnation, False
            self._base, self._base_sequence, self._base_leader = {}, 0, LeaderEpoch(0)
            self._is_held, self._since_offer = False, 0

    @property
    def is_waiting(self) -> bool:
        """Whether the next reports must tell the leader of a base, which it does not hold yet."""
        return self._has_offered and not self._is_held

    def hear(self, hello: LeaderHello) -> None:
        """Note which base the leader holds. A leader never goes back to an earlier base, so what names one, or another
        incarnation, is late."""
        if isinstance(hello.holds, UnsetType) or hello.leader_epoch != self._base_leader:
            return
        incarnation, sequence = hello.holds
        if incarnation != self._incarnation or 0 < sequence < self._base_sequence:
            return
        was_held = self._is_held
        self._is_held = sequence == self._base_sequence
        if self._is_held != was_held:
            self._since_offer = 0 if self._is_held else OFFER_AGAIN_REPORTS

    def write(self, reports: Sequence[UncommitReport], condition: NodeCondition) -> Report:
        self.sequence += 1
        if len(reports) < self._replicas_min:
            self._is_held = False
            return self._report(tuple(reports), condition, 0)
        if self._is_held and self._base_leader == condition.leader_epoch and self._covers(reports):
            changes = self._changes(reports)
            self._since_offer += len(changes)
            if self._since_offer <= LISTED_PER_REPLICA_MAX * len(reports):
                return self._report(changes, condition, self._base_sequence)
            return self._offer(reports, condition)
        self._since_offer += 1
        is_waiting = self._since_offer <= OFFER_AGAIN_REPORTS and not self._is_held
        if is_waiting and self._base_leader == condition.leader_epoch and self._covers(reports):
            return self._report(tuple(reports), condition, 0)
        return self._offer(reports, condition)

    def _covers(self, reports: Sequence[UncommitReport]) -> bool:
        """Whether the base covers exactly these replicas."""
        return len(reports) == len(self._base) and all(ur.log_stream_id in self._base for ur in reports)

    def _changes(self, reports: Sequence[UncommitReport]) -> tuple[UncommitReport, ...]:
        base = self._base
        return tuple(ur for ur in reports if ur is not base[ur.log_stream_id] and ur != base[ur.log_stream_id])

    def _offer(self, reports: Sequence[UncommitReport], condition: NodeCondition) -> Report:
        self._base = {ur.log_stream_id: ur for ur in reports}
        self._base_sequence, self._base_leader = self.sequence, condition.leader_epoch
        self._is_held, self._since_offer, self._has_offered = False, 0, True
        return self._report(tuple(reports), condition, self.sequence)

    def _report(self, reports: tuple[UncommitReport, ...], condition: NodeCondition, base: int) -> Report:
        return Report(
            self._node,
            self._incarnation,
            self.sequence,
            condition.leader_epoch,
            condition.node_state,
            reports,
            condition.applied_high_watermark,
            condition.invalid,
            condition.is_followed,
            base if self._has_offered else UNSET,
            condition.members,
        )


class Cadence:
    """Decides how often a node reports that nothing has changed: at every tick, or less often if it is one of many, so
    that the leader is not busy with signs of life. How far cuts were applied is no change: a leader of so many nodes
    takes no cut for lost before it is told that, too."""

    def __init__(self) -> None:
        self.nodes = 1
        """Number of storage nodes in the cluster."""
        self._ticks = 0
        """Ticks since the last report."""
        self._reports: list[UncommitReport] = []
        self._condition: NodeCondition | None = None

    @property
    def every_ticks(self) -> int:
        return max(1, min(self.nodes // NODES_PER_TICK, TICKS_MAX))

    def is_due(self, reports: list[UncommitReport], condition: NodeCondition) -> bool:
        """Return at a tick whether to report this."""
        self._ticks += 1
        return (
            self._ticks >= self.every_ticks
            or condition != self._without_position(condition)
            or reports != self._reports
        )

    def note(self, reports: list[UncommitReport], condition: NodeCondition) -> None:
        """Note what is reported."""
        self._ticks, self._reports, self._condition = 0, reports, condition

    def _without_position(self, condition: NodeCondition) -> NodeCondition | None:
        """Return the last condition, with the position of this one."""
        last = self._condition
        return last and structs.replace(last, applied_high_watermark=condition.applied_high_watermark)


class MemberLists:
    """The newest list of the streams of which this node is a member. Every message that refers to it names it."""

    def __init__(self) -> None:
        self.name: MemberList | UnsetType = UNSET
        self._streams: dict[LogStreamId, None] = {}

    def learn(self, name: MemberList, streams: Sequence[LogStreamId]) -> None:
        """Keep a list, unless it is older than the one that is known: messages may arrive late."""
        if isinstance(self.name, UnsetType) or name > self.name:
            self.name, self._streams = name, dict.fromkeys(streams)

    def others(self, name: MemberList, committed: Sequence[LogStreamId]) -> list[LogStreamId]:
        """Return the streams of this list without those that have commits; none if the list is not the one here."""
        if name != self.name:
            return []
        without = set(committed)
        return [stream for stream in self._streams if stream not in without]
