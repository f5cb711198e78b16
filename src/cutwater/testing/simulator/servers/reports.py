"""Checks that a report of a simulated storage node agrees with its disks."""

from __future__ import annotations

from collections.abc import Mapping

from cutwater.format.errors import DamagedEntries
from cutwater.testing.simulator.servers.disk import ReplicaDisk
from cutwater.testing.simulator.servers.segment_disk import SegmentDisk
from cutwater.testing.simulator.world import Violation
from cutwater.types import LogStreamId, ReplicaState, Report, UncommitReport

Disk = ReplicaDisk | SegmentDisk


def check_report(report: Report, disks: Mapping[LogStreamId, Disk]) -> None:
    """Check the base of every other guarantee: a report never includes what a power failure could take back."""
    for ur in report.uncommit_reports:
        if ur.state is ReplicaState.LEARNING:
            continue
        disk = disks[ur.log_stream_id]
        if ur.durable_end > disk.synced_end():
            raise Violation(
                "3 durable", f"storage node {report.storage_node_id} reports {ur}, synced to {disk.synced_end()}"
            )
        _check_group(report, ur, disk)
        last = disk.synced_commit()
        applied = last.high_watermark if last else 0
        base = disk.hard_state.base_glsn if disk.hard_state else 0
        if ur.high_watermark > max(applied, base):
            raise Violation(
                "3 durable", f"storage node {report.storage_node_id} reports HWM {ur}, on disk is {applied}"
            )


def _check_group(report: Report, ur: UncommitReport, disk: Disk) -> None:
    """Check that the report does not end inside a group: a cut could end there too."""
    try:
        last = list(disk.heads(ur.durable_end, ur.durable_end)) if ur.uncommitted_llsn_length else []
    except DamagedEntries:
        return
    if any(entry.batch.more for entry in last):
        raise Violation("groups", f"storage node {report.storage_node_id} reports {ur}, which ends inside a group")
