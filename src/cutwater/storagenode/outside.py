"""The interface of a storage node to its surroundings."""

from __future__ import annotations

from typing import Any, Protocol

from cutwater.core.messages import PublishGroup, Replicate, SyncRequest
from cutwater.errors import Damaged
from cutwater.protocol.methods import Notice
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.types import LogStreamId, StorageNodeId


class Outside(Protocol):
    """The surroundings of a node: peers, the metadata repository and the disk."""

    def tell_metadata(self, notice: Notice[Any], argument: object) -> bool:
        """Send a notice to the metadata repository. Returns whether any of its nodes is connected."""

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

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        """Replace unreadable data by an intact copy."""

    def may_wait_for_disk(self) -> bool:
        """Whether all other work may wait while the disk syncs."""

    def take_room(self, size: int) -> None:
        """Note that ``size`` bytes are about to be written; this may make the node read-only."""

    def disk_is_full(self) -> None: ...
