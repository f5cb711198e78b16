"""The files of a node's replicas on its volumes."""

from __future__ import annotations

from pathlib import Path

from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storage.volume import NodeVolumes
from cutwater.types import GLSN, LogStreamId


class VolumeStores:
    """Opens, creates and removes the files of replicas."""

    def __init__(self, volumes: NodeVolumes, options: SegmentOptions | None = None) -> None:
        self._volumes = volumes
        self._options = options
        self._unfinished: set[LogStreamId] = set()
        """Replicas that lie in their places and were not opened since they were created."""

    def streams(self) -> list[LogStreamId]:
        """List the log streams that have files here."""
        return sorted(self._volumes.replicas)

    def open(self, stream: LogStreamId) -> SegmentStorage:
        """Open a replica, also one whose creation failed at a late step."""
        if stream in self._volumes.unsynced:
            self._volumes.sync_name(stream)
        storage = self._storage(self._volumes.replicas[stream], stream)
        self._unfinished.discard(stream)
        return storage

    def create(self, stream: LogStreamId, base_glsn: GLSN) -> SegmentStorage:
        """Create a replica. If the process dies meanwhile, nothing of it remains.

        If an earlier call created it and then failed, this one continues. Nothing has been stored in it since, so if it
        cannot be opened, nothing is lost with it, and it is created again.
        """
        if stream in self._unfinished:
            try:
                return self.open(stream)
            except CutwaterError:
                self.remove(stream)
        is_new = stream not in self._volumes.replicas
        try:
            with self._volumes.creating(stream) as path:
                storage = self._storage(path, stream)
                storage.save_hard_state(HardState(base_glsn=base_glsn))
                storage.close()
        finally:
            if is_new and stream in self._volumes.replicas:
                self._unfinished.add(stream)
        return self.open(stream)

    def set_aside(self, stream: LogStreamId) -> str:
        """Set aside files that cannot be opened; return their new place."""
        self._unfinished.discard(stream)
        return str(self._volumes.set_aside(stream))

    def remove(self, stream: LogStreamId) -> None:
        """Remove the files permanently."""
        try:
            self._volumes.remove(stream)
        finally:
            if stream not in self._volumes.replicas:
                self._unfinished.discard(stream)

    def _storage(self, path: Path, stream: LogStreamId) -> SegmentStorage:
        identity = self._volumes.identity
        replica = ReplicaIdentity(identity.cluster, identity.node, stream)
        return SegmentStorage(path, replica, self._options, self._volumes.files)
