"""Collects what the named checkers use from a simulated cluster: decisions, histories, and what the disks hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.core.order.decisions import CreateTopic, Decision
from cutwater.core.order.state import OrderState
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.format.entry_codec import decode_header
from cutwater.format.projection import decode_schema
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.testing.checkers.guarantees import Evidence, ReplicaDump
from cutwater.testing.checkers.record import Subscribed
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.cluster import VirtualCluster, open_volumes
from cutwater.testing.virtual.history import ClientHistory
from cutwater.testing.virtual.workload import VirtualSubscriber
from cutwater.types import GLSN, LLSN, Batch, CommitContext, Entry, Epoch, LogStreamId, StorageNodeId, TopicId

READ_BYTES = 1 << 20
_STREAM = re.compile(r"/lsid=(\d+)")


class EvidenceRoom:
    """Reads the disks of a cluster whose processes have ended."""

    def __init__(self, cluster: VirtualCluster, history: ClientHistory, state: OrderState) -> None:
        self._cluster, self._history, self._state = cluster, history, state
        self._topics = _topics_of_streams(cluster.store.history)
        self._raw: dict[tuple[LogStreamId, LLSN], bytes] = {}
        self.written: dict[tuple[LogStreamId, Epoch, LLSN], Batch] = {}
        self.applied: dict[LogStreamId, list[CommitContext]] = {}
        self._internal = {topic.topic for topic in state.topics.values() if topic.is_internal}

    def collect(self, readers: Sequence[VirtualSubscriber]) -> Evidence:
        dumps = self._dumps()
        self._read_writes()
        last = max((stream.last_glsn for stream in self._state.streams.values()), default=GLSN(0))
        for number, reader in enumerate(readers, 1):
            self._history.subscribers[number] = self._seen(reader, last)
        return Evidence(self._cluster.store.history, self._history, dumps, self.applied, self.written, last)

    def _seen(self, reader: VirtualSubscriber, last: GLSN) -> Subscribed:
        topics = frozenset(topic.topic for topic in self._state.topics.values() if topic.name == reader.topic)
        gaps = {begin for begin, _ in reader.gaps}
        # An append that was trimmed when a part of it was delivered is none.
        runs = [
            run for run in self._history.records(reader.records) if run.last_glsn + 1 not in gaps or self._is_whole(run)
        ]
        return Subscribed(topics, runs, reader.gaps, {}, last)

    def _is_whole(self, run: CommittedBatch) -> bool:
        return self._history.op_of(run.batch) is not None

    def _dumps(self) -> dict[LogStreamId, list[ReplicaDump]]:
        dumps: dict[LogStreamId, list[ReplicaDump]] = {}
        for machine, node in zip(self._cluster.nodes, range(1, len(self._cluster.nodes) + 1), strict=True):
            if machine.is_retired:
                continue
            volumes = open_volumes(machine, StorageNodeId(node))
            stores = VolumeStores(volumes, self._cluster.shape.segments)
            for stream in stores.streams():
                info = self._state.streams.get(stream)
                if info is not None and node in info.replicas:
                    dumps.setdefault(stream, []).append(self._dump(StorageNodeId(node), stream, stores.open(stream)))
            volumes.release()
        for stream, info in self._state.streams.items():
            replicas = [node for node in info.replicas if not self._cluster.nodes[node - 1].is_retired]
            if len(dumps.get(stream, ())) != len(replicas):
                raise Violation("14 converge", f"not all of storage nodes {info.replicas} hold log stream {stream}")
            if not replicas and info.last_glsn >= self._state.topics[info.topic].trimmed_before:
                raise Violation(
                    "3 durable", f"no storage node holds log stream {stream}, which ends at {info.last_glsn}"
                )
        return dumps

    def _dump(self, node: StorageNodeId, stream: LogStreamId, storage: SegmentStorage) -> ReplicaDump:
        schemas = self._schemas(stream)
        committed, llsn = storage.committed_end, storage.first_llsn
        entries: list[Entry] = []
        while llsn <= committed:
            for frame in storage.read(llsn, committed, READ_BYTES).frames:
                entry = frame.entry
                if entry.last_llsn > committed:
                    raise Violation("8 batches", f"node {node}: {stream}/{entry.first_llsn} is committed in part")
                data = bytes(frame.data)
                if self._raw.setdefault((stream, entry.first_llsn), data) != data:
                    raise Violation("1 unique", f"node {node} holds other bytes at {stream}/{entry.first_llsn}")
                entries += self._entries(stream, entry, schemas)
                llsn = LLSN(entry.last_llsn + 1)
        for entry in entries:
            self.written[stream, entry.epoch, entry.first_llsn] = entry.batch
        contexts = tuple(storage.contexts)
        self.applied.setdefault(stream, []).extend(contexts)
        return ReplicaDump(node, storage.first_llsn, committed, tuple(entries), contexts)

    def _entries(self, stream: LogStreamId, entry: Entry, schemas: Sequence[pa.Schema]) -> list[Entry]:
        """Return an entry as one for each append in it. Servers append to internal topics, whole entries."""
        if self._topics[stream] in self._internal:
            return [entry]
        return self._history.entries(stream, entry, schemas)

    def _read_writes(self) -> None:
        """Add what was written and is no longer there, because it was trimmed."""
        for machine in self._cluster.nodes:
            for path, data in machine.disk.written:
                match = _STREAM.search(path)
                if match is not None and int(match[1]) in self._topics:
                    self._read_write(LogStreamId(int(match[1])), data)

    def _read_write(self, stream: LogStreamId, data: bytes) -> None:
        view, offset = memoryview(data), 0
        while offset < len(view):
            header = decode_header(view, offset)
            if header is None:
                return
            if (stream, header.epoch, header.first_llsn) not in self.written:
                end = offset + header.frame_bytes
                body = bytes(view[offset + header.header_bytes : offset + header.header_bytes + header.body_bytes])
                if end > len(view):
                    return
                for entry in self._entries(stream, header.entry(body), self._schemas(stream)):
                    self.written[stream, entry.epoch, entry.first_llsn] = entry.batch
            offset += header.frame_bytes

    def _schemas(self, stream: LogStreamId) -> list[pa.Schema]:
        topic = self._state.topics.get(self._topics[stream])
        return [decode_schema(schema) for schema in topic.schemas] if topic is not None else []


def _topics_of_streams(decisions: Sequence[Decision]) -> dict[LogStreamId, TopicId]:
    topics: dict[LogStreamId, TopicId] = {}
    for decision in decisions:
        if hasattr(decision, "stream") and hasattr(decision, "topic") and not isinstance(decision, CreateTopic):
            topics[decision.stream] = decision.topic
    return topics
