"""Appends to a cluster of real processes, with the same record of what clients saw as in a simulated one.

The load uses storage nodes like any client, but tags its batches, so that the checkers of the simulator
(``testing/checkers/guarantees.py``) can tell which append they belong to. Benchmarks and tests use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from random import Random

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import structs

from cutwater.admin.local_cluster import CLUSTER_ID, ClusterMember, LocalCluster
from cutwater.client.append.plain_arrow import Single, plain_body
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.convert.schemas import KEY_VALUE
from cutwater.core import requests as r
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded, NotFound, Trimmed
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import frames_in
from cutwater.protocol import metadata_api
from cutwater.protocol import storage_api as api
from cutwater.protocol.errors import ConnectionLost
from cutwater.runtime import processes
from cutwater.testing.checkers.record import AppendOp, SimHistory, SimOutcome, TailOp, event_times
from cutwater.types import (
    GLSN,
    Batch,
    ClusterId,
    EventTime,
    LogStreamId,
    StorageNodeId,
)
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint

CONNECT_MS = 1_000
APPEND_MS = 3_000
READ_BYTES = 1024 * 1024
READS_AT_ONCE = 32
PAUSE_SECONDS = 0.02
CATALOG_US_MAX = 500_000
"""Maximum age of the catalog: there may be new log streams, which no error reveals."""


def now_us() -> int:
    return time.monotonic_ns() // 1_000


async def leader_of(cluster: LocalCluster, seconds: float = 20.0) -> ClusterMember:
    """Return the live metadata node that leads, according to any node that answers. It may take a while until one is
    elected, and until the others have noticed."""
    async with asyncio.timeout(seconds):
        while True:
            for member in cluster.metadata:
                told = await who_leads(member)
                for found in cluster.metadata:
                    if told is not None and found.id == told.leader and processes.is_running(found.pid):
                        return found
            await asyncio.sleep(PAUSE_SECONDS)


async def who_leads(member: ClusterMember) -> metadata_api.MetadataNode | None:
    try:
        connection = await connect(Endpoint(ANY_CLUSTER, "test"), *parse_address(member.address), timeout_ms=500)
        try:
            return (await connection.call(metadata_api.WHO_LEADS, None, timeout_ms=500)).value
        finally:
            connection.abort()
    except CutwaterError:
        return None


class ClusterLoad:
    """Appenders on one topic, each with one append at a time, and the catalog that they share."""

    def __init__(self, cluster: LocalCluster, topic: str, seed: int) -> None:
        self.record = SimHistory()
        self.topic = topic
        self._rng = Random(f"load/{seed}")
        self._endpoint = Endpoint(ClusterId(CLUSTER_ID), "load")
        self._repository = Repository(self._endpoint, cluster.addresses)
        self._connections: dict[str, Connection] = {}
        self._catalog: r.Catalog | None = None
        self._fetching = asyncio.Lock()
        self._fetched = 0
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, appenders: int) -> None:
        self._tasks = [asyncio.create_task(self._append_for_ever()) for _ in range(appenders)]

    async def stop(self) -> None:
        """Stop, and wait for the outcome of appends in progress."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        for connection in self._connections.values():
            connection.abort()
        self._repository.close()

    @property
    def acknowledged(self) -> int:
        return sum(1 for op in self.record.appends if op.ack is not None)

    async def until_acknowledged(self, more: int, seconds: float) -> float:
        """Wait until ``more`` appends that began from now on are acknowledged. Returns the seconds until the first of
        them was."""
        begun = now_us()
        async with asyncio.timeout(seconds):
            while True:
                done = [op.completed for op in self.record.appends if op.ack is not None and op.invoked >= begun]
                if len(done) >= more:
                    return (min(done) - begun) / 1e6
                await asyncio.sleep(PAUSE_SECONDS / 4)

    # Appending.

    async def _append_for_ever(self) -> None:
        while not self._is_over:
            try:
                stream = await self._choose()
            except CutwaterError:
                self._catalog = None
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            await self._append(stream)

    async def _append(self, stream: r.StreamInfo) -> None:
        count = self._rng.choice((1, 1, 2, 7))
        op = self.record.new_append(now_us(), count, EventTime(time.time_ns() // 1_000))
        try:
            connection = await self._connected(stream.chain[0])
        except CutwaterError:
            self._settle(op, SimOutcome.FAIL)
            self._catalog = None
            await asyncio.sleep(PAUSE_SECONDS)
            return
        body = _as_records(op.batch)
        arguments = api.AppendArguments(stream.stream, stream.epoch, _headless(op.batch, body))
        try:
            answer = await connection.call(api.APPEND, arguments, body, timeout_ms=APPEND_MS)
        except CutwaterError as error:
            self._settle(op, SimOutcome.UNKNOWN if is_unknown(error) else SimOutcome.FAIL)
            if isinstance(error, DeadlineExceeded):
                await self._repository.complain(stream.stream, stream.chain[0], timeout_ms=CONNECT_MS)
            self._catalog = None
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            op.ack = answer.value.ack
            self._settle(op, SimOutcome.OK)

    def _settle(self, op: AppendOp, outcome: SimOutcome) -> None:
        op.outcome, op.completed = outcome, now_us()

    async def _choose(self) -> r.StreamInfo:
        catalog = await self.catalog()
        topics = {topic.topic for topic in catalog.topics if topic.name == self.topic}
        streams = [s for s in catalog.streams if s.topic in topics and s.is_open]
        if not streams:
            raise NotFound(f"no log stream of {self.topic!r} takes appends")
        return self._rng.choice(streams)

    async def catalog(self, *, fresh: bool = False) -> r.Catalog:
        async with self._fetching:
            old = now_us() - self._fetched > CATALOG_US_MAX
            if self._catalog is None or fresh or old:
                invoked = self._fetched = now_us()
                self._catalog = await self._repository.ask(r.CatalogRequest(), r.Catalog, timeout_ms=5_000)
                tail = TailOp(invoked, now_us(), self._catalog.high_watermark)
                self.record.tails.append(tail)
            return self._catalog

    async def _connected(self, node: StorageNodeId) -> Connection:
        catalog = await self.catalog()
        address = next(found.address for found in catalog.nodes if found.node == node)
        connection = self._connections.get(address)
        if connection is None or connection.is_closed:
            host, port = parse_address(address)
            connection = await connect(self._endpoint, host, port, timeout_ms=CONNECT_MS)
            self._connections[address] = connection
        return connection

    # Reading back.

    async def read(self, node: StorageNodeId, stream: LogStreamId, glsn: GLSN) -> Batch:
        """Return the batch that begins at a GLSN, as this storage node has it."""
        connection = await self._connected(node)
        arguments = api.ReadArguments(stream, glsn, 1)
        answer = await connection.call(api.READ, arguments, timeout_ms=5_000)
        for frame in frames_in(bytes(answer.body)):
            for context in answer.value.commits:
                if context.first_llsn <= frame.entry.first_llsn <= context.last_llsn:
                    found = context.glsn_of(frame.entry.first_llsn)
                    if found == glsn:
                        return as_tagged(frame.entry.batch)
        raise NotFound(f"storage node {node} has nothing at GLSN {glsn}")

    async def until_readable(self, nodes: Iterable[StorageNodeId], seconds: float, last: int = 0) -> None:
        """Wait until every acknowledged append, or the ``last`` of them, is readable at its GLSN from each of these
        nodes that has a replica."""
        catalog = await self.catalog(fresh=True)
        replicas = {s.stream: s.replicas for s in catalog.streams}
        live = set(nodes)
        acknowledged = [op for op in self.record.appends if op.ack is not None]
        wanted = [
            (op, node)
            for op in acknowledged[-last:]
            if op.ack is not None
            for node in live & set(replicas[op.ack.stream])
        ]
        async with asyncio.timeout(seconds):
            for start in range(0, len(wanted), READS_AT_ONCE):
                some = wanted[start : start + READS_AT_ONCE]
                await asyncio.gather(*(self._until_read(op, node) for op, node in some))

    async def _until_read(self, op: AppendOp, node: StorageNodeId) -> None:
        assert op.ack is not None
        while True:
            try:
                batch = await self.read(node, op.ack.stream, op.ack.glsn)
            except Trimmed:
                return
            except CutwaterError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            assert batch.body == op.batch.body, f"GLSN {op.ack.glsn} on storage node {node} holds other bytes"
            return


def _as_records(batch: Batch) -> bytes:
    """Return the body to send: real records, the first of which has the tag of the batch as its value."""
    times = event_times(batch)
    made = plain_body([Single(b"" if i else batch.body, None, time) for i, time in enumerate(times)])
    assert made is not None
    return made.body


def as_tagged(batch: Batch) -> Batch:
    """Return the batch as the checkers know it: its body is its tag."""
    rows = pa.ipc.read_record_batch(pa.py_buffer(batch.body), KEY_VALUE)
    tag = rows.column(1)[0].as_py()
    return structs.replace(batch, body=tag, checksum=crc32c(tag), checked=False)


def _headless(batch: Batch, body: bytes) -> Batch:
    return Batch(batch.count, b"", crc32c(body), batch.time_min, batch.time_max)


def is_unknown(error: CutwaterError) -> bool:
    """Whether an append that failed with this error may still be in the log."""
    if isinstance(error, ConnectionLost):
        return error.outcome_unknown
    return isinstance(error, (AppendUnknown, DeadlineExceeded))
