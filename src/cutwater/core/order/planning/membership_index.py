"""Index of the log streams in which each storage node is a member, and of the streams that need repair.

The leader uses it at every wake and with every cut. It notes each decision as it is applied, at a cost that grows with
the streams that the decision concerns, not with all streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from cutwater.core.order import decisions as d
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import LogStreamId, Revision, StorageNodeId

_ABOUT_ONE_STREAM = (d.Seal, d.Unseal, d.Release, d.DropSurvivor, d.AddSurvivor, d.AssignReplicas, d.CreateStream)

_ABOUT_MANY = (d.AddNode, d.RemoveNode, d.ChangeTopic, d.DeleteTopic)
"""Rare decisions after which the index is built anew: how many copies are wanted may depend on nodes and topics."""


class StreamPlaces(Struct, frozen=True):
    """Where a stream is: the members of its chain while it is open, and the nodes that shall hold it."""

    members: tuple[StorageNodeId, ...] = ()
    replicas: tuple[StorageNodeId, ...] = ()


class NodeStreams:
    """The streams of each node. The tuple of a node's streams is made only when it is needed again."""

    __slots__ = ("_ids", "by_node", "stale")

    def __init__(self, nodes: Iterable[StorageNodeId]) -> None:
        self._ids: dict[StorageNodeId, set[LogStreamId]] = {node: set() for node in sorted(nodes)}
        self.by_node: dict[StorageNodeId, tuple[LogStreamId, ...]] = dict.fromkeys(self._ids, ())
        self.stale: set[StorageNodeId] = set()

    def move(self, stream: LogStreamId, before: tuple[StorageNodeId, ...], after: tuple[StorageNodeId, ...]) -> None:
        for node in before:
            self._ids[node].discard(stream)
        for node in after:
            self._ids[node].add(stream)
        self.stale.update(before, after)

    def refresh(self) -> None:
        """Bring ``by_node`` up to date."""
        for node in self.stale:
            self.by_node[node] = tuple(sorted(self._ids[node]))
        self.stale.clear()


class Roster:
    """``list_since`` is the revision at which a node's streams last changed, as far as this leader knows."""

    def __init__(self, state: OrderState) -> None:
        self._state = state
        self._build()

    def _build(self) -> None:
        state = self._state
        self._revision = self._all_touched = state.revision
        self._touched: dict[StorageNodeId, Revision] = {}
        self._places: dict[LogStreamId, StreamPlaces] = {}
        self._members, self._replicas = NodeStreams(state.nodes), NodeStreams(state.nodes)
        self._unwell: dict[LogStreamId, None] = {}
        self._patient: dict[LogStreamId, None] = {}
        self.list_since = dict.fromkeys(state.nodes, state.revision)
        for lsid in state.streams:
            self._place(lsid)

    def note(self, decision: d.Decision) -> None:
        """Note a decision that was just applied to the state."""
        state = self._state
        if not isinstance(decision, d.CATALOG_DECISIONS):
            return
        if isinstance(decision, d.AddNode) and decision.node in self.list_since:
            # Nodes that join again are frequent, and change nothing here.
            self._revision = Revision(self._revision + 1)
            return
        if state.revision != self._revision + 1 or isinstance(decision, _ABOUT_MANY):
            self._build()
            return
        self._revision = state.revision
        if isinstance(decision, _ABOUT_ONE_STREAM):
            before = self._places.get(decision.stream, StreamPlaces())
            self._place(decision.stream)
            if not isinstance(decision, (d.Seal, d.Unseal)):
                # A seal or an unseal voids the reports of the stream, so each of them is examined again anyway.
                for node in {*before.replicas, *self._places[decision.stream].replicas}:
                    self._touched[node] = state.revision
        else:
            self._all_touched = state.revision

    def touched(self, node: StorageNodeId) -> Revision:
        """Return the last revision that may have changed which replicas the node should have, or what they should know,
        except by a seal or an unseal."""
        self._refresh()
        return max(self._all_touched, self._touched.get(node, self._all_touched))

    @property
    def member_of(self) -> dict[StorageNodeId, tuple[LogStreamId, ...]]:
        """Maps each storage node to the open streams of which it is a chain member."""
        if self._revision != self._state.revision:
            self._build()
        if self._members.stale:
            self._members.refresh()
        return self._members.by_node

    @property
    def replica_of(self) -> dict[StorageNodeId, tuple[LogStreamId, ...]]:
        """Maps each storage node to all streams that it shall hold."""
        if self._revision != self._state.revision:
            self._build()
        if self._replicas.stale:
            self._replicas.refresh()
        return self._replicas.by_node

    @property
    def unwell(self) -> Mapping[LogStreamId, None]:
        """Streams that need repair soon: sealed ones, and open ones that lack a member."""
        self._refresh()
        return self._unwell

    @property
    def patient(self) -> Mapping[LogStreamId, None]:
        """Streams whose repair can wait: sealed permanently, or with another number of replicas than their topic asks
        for."""
        self._refresh()
        return self._patient

    def _refresh(self) -> None:
        if self._revision != self._state.revision:
            self._build()

    def _place(self, lsid: LogStreamId) -> None:
        """Put a stream where the state says that it is."""
        stream, before = self._state.streams[lsid], self._places.get(lsid, StreamPlaces())
        after = StreamPlaces(stream.members if stream.is_open else (), stream.replicas)
        if before.members != after.members:
            self._members.move(lsid, before.members, after.members)
            for node in (*before.members, *after.members):
                self.list_since[node] = self._revision
        if before.replicas != after.replicas:
            self._replicas.move(lsid, before.replicas, after.replicas)
        self._places[lsid] = after
        hurries, waits = self._hurries(stream), stream.final or self._is_off(stream)
        for streams, belongs in ((self._unwell, not stream.final and hurries), (self._patient, waits)):
            if belongs:
                streams[lsid] = None
            else:
                streams.pop(lsid, None)

    def _hurries(self, stream: LogStream) -> bool:
        return not stream.is_open or stream.members != stream.replicas

    def _is_off(self, stream: LogStream) -> bool:
        """Whether all replicas of the stream are members, and too many or too few, or one of them was replaced."""
        wrong = bool(stream.leaving) or len(stream.replicas) != self._state.wanted(stream.topic)
        return not self._hurries(stream) and wrong
