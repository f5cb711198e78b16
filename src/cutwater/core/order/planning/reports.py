"""Keeps the reports that count.

Only the newest report of a storage node counts, by (incarnation, sequence). A new incarnation voids all earlier
reports. A seal and an unseal void what replicas reported of that stream before: they have to report again, in the new
epoch. A new leader starts with an empty book and admits only reports that name it (see ``leader.py``).

A report may build on a *base*: an earlier whole report of the same incarnation. It stands for one whole report: the
base, with the replicas that it lists in place of the base's. The book admits it as it would admit that whole report, at
a cost that grows only with what it lists (ADR 0049):

1. The book holds at most one base per node: the newest one admitted that was offered as a base, as long as the node's
   whole reports cover the same replicas in the same incarnation. A report on any other base is not admitted.
2. A report lists everything that differs from its base, so no report between the two has to arrive.
3. A stream that was voided, or that a report no longer lists, is taken from the base with the node's next report.
4. A metadata node of an earlier version passes a report on without its ``base``. So a node that has offered a base says
   in every later report of the incarnation what it builds on, 0 meaning nothing, and one without ``base`` counts no
   more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, field

from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import (
    Incarnation,
    LogStreamId,
    MemberList,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)


class Admitted(Struct, frozen=True):
    """The news in a report."""

    changed: tuple[UncommitReport, ...]
    """Everything in the first report of an incarnation; later only what has changed, or was voided since."""
    is_other: bool
    """Whether this is the first report of an incarnation, or covers other streams or other invalid replicas."""
    is_restart: bool
    """Whether the node was restarted since its last report."""


class ReportBase(Struct):
    """The whole report number ``sequence`` of a node, on which later ones may build. ``since`` are the replicas in
    which the newest report differs from it. ``again`` are streams that were voided after the newest report."""

    sequence: int
    said: dict[LogStreamId, UncommitReport]
    since: dict[LogStreamId, UncommitReport] = field(default_factory=dict)
    again: set[LogStreamId] = field(default_factory=set)


def is_whole(report: Report) -> bool:
    """Whether the report lists all replicas. One that names itself as its base is whole, and offered as a base."""
    return isinstance(report.base, UnsetType) or report.base in (0, report.sequence)


def can_be(state: OrderState, stream: LogStream, ur: UncommitReport) -> bool:
    """Whether a replica reports only what was decided."""
    return (
        ur.high_watermark <= state.high_watermark
        and ur.epoch <= stream.epoch
        and ur.committed_end <= stream.committed_end
        and ur.trimmed_before <= state.topics[stream.topic].trimmed_before
    )


class ReportBook:
    """The newest report of every storage node, by log stream, as one leader received them."""

    def __init__(self) -> None:
        self._newest: dict[StorageNodeId, Report] = {}
        self._by_stream: dict[LogStreamId, dict[StorageNodeId, UncommitReport]] = {}
        self._reported: dict[StorageNodeId, frozenset[LogStreamId]] = {}
        self._bases: dict[StorageNodeId, ReportBase] = {}
        """Bases of the incarnation of the newest report, which covers the same replicas."""
        self._says_base: dict[StorageNodeId, Incarnation] = {}
        """Nodes that say in every report of this incarnation what it builds on."""

    def is_new(self, report: Report) -> bool:
        """Whether the report is newer than the last one of its node."""
        known = self._newest.get(report.storage_node_id)
        return known is None or (report.incarnation, report.sequence) > (known.incarnation, known.sequence)

    def is_complete(self, report: Report) -> bool:
        """Whether it is known what the report says of all replicas: it is whole, or its base is here."""
        node = report.storage_node_id
        if isinstance(report.base, UnsetType):
            return self._says_base.get(node) != report.incarnation
        if is_whole(report):
            return True
        base = self._bases.get(node)
        if base is None or (self._newest[node].incarnation, base.sequence) != (report.incarnation, report.base):
            return False
        return all(ur.log_stream_id in base.said for ur in report.uncommit_reports)

    def holds(self, node: StorageNodeId, incarnation: Incarnation) -> int:
        """Return the number of the base of this incarnation of the node that is held, or 0."""
        base = self._bases.get(node)
        return base.sequence if base is not None and self._newest[node].incarnation == incarnation else 0

    def admit(self, report: Report) -> Admitted | None:
        """Take in a report. Return None if it is not newer than the last one of its node, or is not complete."""
        node = report.storage_node_id
        known = self._newest.get(node)
        if known is not None and (report.incarnation, report.sequence) <= (known.incarnation, known.sequence):
            return None
        says_base = report.base is not UNSET or node in self._says_base
        if says_base and not self.is_complete(report):
            return None
        if says_base and not is_whole(report):
            return self._admit_changes(report)
        is_restart = known is not None and known.incarnation != report.incarnation
        is_first = known is None or is_restart
        is_other = known is None or is_restart or known.invalid != report.invalid
        reported = frozenset([ur.log_stream_id for ur in report.uncommit_reports])
        before = self._reported.get(node, frozenset())
        if known is None or before != reported:
            is_other = True
            for gone in before - reported:
                self._by_stream.get(gone, {}).pop(node, None)
            self._reported[node] = reported
        self._newest[node] = report
        changed = []
        for ur in report.uncommit_reports:
            by_node = self._by_stream.get(ur.log_stream_id)
            if by_node is None:
                by_node = self._by_stream[ur.log_stream_id] = {}
            if is_first or by_node.get(node) != ur:
                by_node[node] = ur
                changed.append(ur)
        if says_base:
            self._keep_base(report, is_other=is_other)
        return Admitted(tuple(changed), is_other, is_restart)

    def _keep_base(self, report: Report, *, is_other: bool) -> None:
        """Note what a whole report means for the node's base."""
        node = report.storage_node_id
        base = self._bases.get(node)
        if isinstance(report.base, UnsetType):
            del self._says_base[node]
        else:
            self._says_base[node] = report.incarnation
        if report.base == report.sequence:
            self._bases[node] = ReportBase(report.sequence, {ur.log_stream_id: ur for ur in report.uncommit_reports})
        elif is_other:
            self._bases.pop(node, None)
        elif base is not None:
            said = base.said
            base.since = {ur.log_stream_id: ur for ur in report.uncommit_reports if ur != said[ur.log_stream_id]}
            base.again.clear()

    def _admit_changes(self, report: Report) -> Admitted:
        node = report.storage_node_id
        base = self._bases[node]
        said = base.said
        since = {ur.log_stream_id: ur for ur in report.uncommit_reports}
        changed = []
        # A stream that is no longer listed is again as in the base, and so is a voided one that is not listed.
        for lsid in sorted(since.keys() | base.since.keys() | base.again):
            ur = since.get(lsid) or said[lsid]
            by_node = self._by_stream.setdefault(lsid, {})
            if by_node.get(node) != ur:
                by_node[node] = ur
                changed.append(ur)
        is_other = self._newest[node].invalid != report.invalid
        self._newest[node], base.since = report, since
        base.again.clear()
        return Admitted(tuple(changed), is_other, is_restart=False)

    def void(self, stream: LogStreamId) -> None:
        """Forget the reports of a stream that was sealed or opened since."""
        for node in self._by_stream.pop(stream, ()):
            base = self._bases.get(node)
            if base is not None:
                base.again.add(stream)

    def of(self, stream: LogStreamId, node: StorageNodeId) -> UncommitReport | None:
        reports = self._by_stream.get(stream)
        return None if reports is None else reports.get(node)

    def of_stream(self, stream: LogStreamId) -> Mapping[StorageNodeId, UncommitReport]:
        return self._by_stream.get(stream, {})

    def is_running(self, stream: LogStream, node: StorageNodeId) -> bool:
        """Whether the node's replica runs in the present epoch of the stream."""
        ur = self.of(stream.stream, node)
        return ur is not None and ur.epoch == stream.epoch and ur.state is ReplicaState.RUNNING

    def newest(self, node: StorageNodeId) -> Report | None:
        """Return the node's newest report. It may list only what differs from its base, see ``said_by``."""
        return self._newest.get(node)

    def said_by(self, node: StorageNodeId) -> Sequence[UncommitReport]:
        """Return what the node's newest report says of all its replicas, including streams that were voided since."""
        report = self._newest.get(node)
        if report is None:
            return ()
        if is_whole(report):
            return report.uncommit_reports
        base = self._bases[node]
        return [base.since.get(lsid, ur) for lsid, ur in base.said.items()]

    def reported(self, node: StorageNodeId) -> frozenset[LogStreamId]:
        """Return the streams that the node's newest report covers."""
        return self._reported.get(node, frozenset())

    def left_out(self, node: StorageNodeId, streams: Iterable[LogStreamId]) -> list[LogStreamId]:
        """Return those of the streams that the node's newest report does not mention; none without a report."""
        reported = self._reported.get(node)
        if reported is None or reported.issuperset(streams):
            return []
        return [stream for stream in streams if stream not in reported]

    def is_writable(self, node: StorageNodeId) -> bool:
        report = self._newest.get(node)
        return report is not None and report.node_state is NodeState.READY

    def is_followed(self, node: StorageNodeId) -> bool:
        report = self._newest.get(node)
        return report is not None and report.is_followed

    def members_known(self, node: StorageNodeId) -> MemberList | UnsetType:
        """Return the list of members that the node holds, as it says."""
        report = self._newest.get(node)
        return UNSET if report is None else report.members

    def forget(self, node: StorageNodeId) -> None:
        """Forget a node that was removed from the cluster, except that it says what its reports build on."""
        self._newest.pop(node, None)
        self._bases.pop(node, None)
        for stream in self._reported.pop(node, frozenset()):
            self._by_stream.get(stream, {}).pop(node, None)
