"""Interfaces that a storage node needs from its surroundings: connections, files, and callers that wait for appends."""

from __future__ import annotations

from typing import Protocol

from cutwater.core.messages import GroupOutcome, PublishGroup, Replicate, SyncRequest
from cutwater.errors import CutwaterError, Damaged
from cutwater.protocol.storage_api import AppendAnswer, Complaint
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.types import GLSN, LogStreamId, Report, StorageNodeId


class AppendWaiter(Protocol):
    """The caller of an append. It gets either an answer or an error."""

    def answer(self, value: AppendAnswer) -> None: ...

    def fail(self, error: CutwaterError) -> None: ...


class Outside(Protocol):
    """The surroundings of a node: peers, the metadata repository and the disk."""

    def send_report(self, report: Report) -> None: ...

    def send_complaint(self, complaint: Complaint) -> None: ...

    def replicate(self, peer: StorageNodeId, message: Replicate, *, is_first: bool) -> None:
        """Send an entry to a peer; raises if the peer cannot be reached. The first entry in a turn of the event loop is
        usually the only one, so it is sent at once; later ones of the same turn are sent together."""

    def flush_peers(self) -> None:
        """Send what was replicated in this turn of the event loop."""

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        """Begin a sync; raises if the source cannot be reached."""

    def publish(self, group: PublishGroup) -> None:
        """Get the parts of a group, then let its replica take it."""

    def feed_group(self, driver: ReplicaDriver, group: PublishGroup) -> None:
        """Feed the entries of this group to a replica that asked for them."""

    def send_outcome(self, outcome: GroupOutcome) -> None: ...

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        """Replace unreadable data by an intact copy."""

    def may_wait_for_disk(self) -> bool:
        """Whether all other work may wait while the disk syncs."""

    def take_room(self, size: int) -> None:
        """Note that ``size`` bytes are about to be written; this may make the node read-only."""

    def disk_is_full(self) -> None: ...


class Stores(Protocol):
    """The files of a node's replicas."""

    def streams(self) -> list[LogStreamId]:
        """List the log streams that have files here."""

    def open(self, stream: LogStreamId) -> SegmentStorage: ...

    def create(self, stream: LogStreamId, base_glsn: GLSN) -> SegmentStorage:
        """Create a replica. If this fails or the process dies meanwhile, nothing of it remains."""

    def set_aside(self, stream: LogStreamId) -> str:
        """Set aside files that cannot be opened; return their new place."""

    def remove(self, stream: LogStreamId) -> None:
        """Remove the files permanently."""
