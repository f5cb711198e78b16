"""Keeps the reports that count.

Only the newest report of a storage node counts, by (incarnation, sequence). A new incarnation voids all earlier
reports. A seal and an unseal void what replicas reported of that stream before: they have to report again, in the new
epoch. A new leader starts with an empty book and admits only reports that name it (see ``leader.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from cutwater.core.order.state import LogStream
from cutwater.types import LogStreamId, NodeState, ReplicaState, Report, StorageNodeId, UncommitReport


class Admitted(Struct, frozen=True):
    """The news in a report."""

    changed: tuple[UncommitReport, ...]
    """Everything in the first report of an incarnation; later only what has changed, or was voided since."""
    is_other: bool
    """Whether this is the first report of an incarnation, or covers other streams or other invalid replicas."""
    is_restart: bool
    """Whether the node was restarted since its last report."""


class ReportBook:
    """The newest report of every storage node, by log stream, as one leader received them."""

    def __init__(self) -> None:
        self._newest: dict[StorageNodeId, Report] = {}
        self._by_stream: dict[LogStreamId, dict[StorageNodeId, UncommitReport]] = {}
        self._reported: dict[StorageNodeId, frozenset[LogStreamId]] = {}

    def admit(self, report: Report) -> Admitted | None:
        """Take in a report. Return None if it is not newer than the last one of its node."""
        node = report.storage_node_id
        known = self._newest.get(node)
        if known is not None and (report.incarnation, report.sequence) <= (known.incarnation, known.sequence):
            return None
        is_restart = known is not None and known.incarnation != report.incarnation
        is_first = known is None or is_restart
        is_other = known is None or is_restart or known.invalid != report.invalid
        reported = frozenset([ur.log_stream_id for ur in report.uncommit_reports])
        if known is None or self._reported[node] != reported:
            is_other = True
            for gone in self.reported(node) - reported:
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
        return Admitted(tuple(changed), is_other, is_restart)

    def void(self, stream: LogStreamId) -> None:
        """Forget the reports of a stream that was sealed or opened since."""
        self._by_stream.pop(stream, None)

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
        return self._newest.get(node)

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

    def forget(self, node: StorageNodeId) -> None:
        """Forget a node that was removed from the cluster."""
        self._newest.pop(node, None)
        for stream in self._reported.pop(node, frozenset()):
            self._by_stream.get(stream, {}).pop(node, None)
