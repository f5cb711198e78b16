"""What a storage node needs of the world around it: connections, files, and whoever waits for an append."""

from __future__ import annotations

from typing import Protocol

from cutwater.core.messages import GroupOutcome, PublishGroup, Replicate, SyncRequest
from cutwater.errors import CutwaterError, Damaged
from cutwater.protocol.storage_api import AppendAnswer, Complaint
from cutwater.storage.interface import ReplicaStorage
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.types import GLSN, LogStreamId, Report, StorageNodeId


class Asker(Protocol):
    """Whoever waits for the outcome of an append, and is told one of these."""

    def answer(self, value: AppendAnswer) -> None: ...

    def fail(self, error: CutwaterError) -> None: ...


class Outside(Protocol):
    """What a node needs of the world."""

    def send_report(self, report: Report) -> None: ...

    def send_complaint(self, complaint: Complaint) -> None: ...

    def replicate(self, peer: StorageNodeId, message: Replicate, *, is_first: bool) -> None:
        """Raises if the peer cannot be reached. The first entry of a turn of the event loop is usually the only one, so
        it leaves at once; what comes after it in the same turn leaves together."""

    def flush_peers(self) -> None:
        """What was replicated in this turn of the event loop leaves now."""

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        """Raises if the source cannot be reached."""

    def publish(self, group: PublishGroup) -> None:
        """Have the parts of a group here, then let its replica take it."""

    def feed_group(self, driver: ReplicaDriver, group: PublishGroup) -> None:
        """A replica wants the entries of this group."""

    def send_outcome(self, outcome: GroupOutcome) -> None: ...

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        """Get an intact copy of what cannot be read."""

    def may_wait_for_disk(self) -> bool:
        """Whether everything else may stand still while the disk syncs."""

    def take_room(self, size: int) -> None:
        """So much is about to be written, unless the node turns read-only by this."""

    def disk_is_full(self) -> None: ...


class Stores(Protocol):
    """The files of a node's replicas."""

    def streams(self) -> list[LogStreamId]:
        """Those that are there."""

    def open(self, stream: LogStreamId) -> ReplicaStorage: ...

    def create(self, stream: LogStreamId, base_glsn: GLSN) -> ReplicaStorage:
        """A new replica, of which nothing is there if this fails or the process dies in it."""

    def set_aside(self, stream: LogStreamId) -> str:
        """Keep files that cannot be opened elsewhere, and say where."""

    def remove(self, stream: LogStreamId) -> None:
        """Remove the files for ever."""
