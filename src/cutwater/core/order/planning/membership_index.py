"""Index of the log streams in which each storage node is a member, and of the streams that need repair.

The index is rebuilt only when the catalog has changed, since the leader uses it at every wake and with every cut.
"""

from __future__ import annotations

from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import LogStreamId, StorageNodeId


class Roster:
    def __init__(self, state: OrderState) -> None:
        self._state = state
        self._revision = -1
        self._member_of: dict[StorageNodeId, tuple[LogStreamId, ...]] = {}
        self._replica_of: dict[StorageNodeId, tuple[LogStreamId, ...]] = {}
        self._unwell: tuple[LogStreamId, ...] = ()
        self._patient: tuple[LogStreamId, ...] = ()

    @property
    def member_of(self) -> dict[StorageNodeId, tuple[LogStreamId, ...]]:
        """Maps each storage node to the open streams of which it is a chain member."""
        self._refresh()
        return self._member_of

    @property
    def replica_of(self) -> dict[StorageNodeId, tuple[LogStreamId, ...]]:
        """Maps each storage node to all streams that it shall hold."""
        self._refresh()
        return self._replica_of

    @property
    def unwell(self) -> tuple[LogStreamId, ...]:
        """Streams that need repair soon: sealed ones, and open ones that lack a member."""
        self._refresh()
        return self._unwell

    @property
    def patient(self) -> tuple[LogStreamId, ...]:
        """Streams whose repair can wait: sealed permanently, or with fewer replicas than their topic asks for."""
        self._refresh()
        return self._patient

    def _refresh(self) -> None:
        state = self._state
        if self._revision == state.revision:
            return
        self._revision = state.revision
        members: dict[StorageNodeId, list[LogStreamId]] = {node: [] for node in sorted(state.nodes)}
        replicas: dict[StorageNodeId, list[LogStreamId]] = {node: [] for node in sorted(state.nodes)}
        for stream in state.streams.values():
            for node in stream.members if stream.is_open else ():
                members[node].append(stream.stream)
            for node in stream.replicas:
                replicas[node].append(stream.stream)
        self._member_of = {node: tuple(streams) for node, streams in members.items()}
        self._replica_of = {node: tuple(streams) for node, streams in replicas.items()}
        self._unwell = tuple(s.stream for s in state.streams.values() if not s.final and self._hurries(s))
        self._patient = tuple(s.stream for s in state.streams.values() if s.final or self._is_short(s))

    def _hurries(self, stream: LogStream) -> bool:
        return not stream.is_open or stream.members != stream.replicas

    def _is_short(self, stream: LogStream) -> bool:
        places = len(stream.replicas) - len(stream.leaving)
        return not self._hurries(stream) and places < self._state.topics[stream.topic].replication
