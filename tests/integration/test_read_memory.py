"""Columns of compressed batches are picked within a budget: whoever asks for many at a time waits, or is told to try
again, and the storage node, a process of its own, stays small."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pyarrow as pa
import pytest

import cutwater
from cutwater.admin.operations import Admin
from cutwater.errors import ResourceExhausted
from cutwater.format.bodies import MIB
from cutwater.format.checksum import crc32c
from cutwater.format.projection import serialize
from cutwater.protocol import storage_api as api
from cutwater.protocol.scan_api import SCAN, ScanArguments
from cutwater.storagenode.memory_budget import BUDGET_BYTES
from cutwater.types import GLSN, Batch, EventTime
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from tests.integration.real_cluster import running_cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

SCHEMA = pa.schema([("zeros", pa.binary()), ("note", pa.string())])
ROWS = 200
INFLATED = ROWS * MIB
READERS = 12


def large_body() -> bytes:
    """A batch that becomes nearly as much as is allowed, from nearly as little."""
    noise = random.Random(5).randbytes(900 * 1_024)
    values = [bytes(MIB)] * (ROWS - 1)
    rows = pa.record_batch([pa.array([*values, noise], pa.binary()), pa.array(["n"] * ROWS)], schema=SCHEMA)
    body: bytes = serialize(rows, "zstd").to_pybytes()
    return body


def memory_bytes(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) * 1_024


async def read_one(connection: Connection, method: str, stream: int) -> int:
    """Ask until there is an answer; how often that was refused."""
    wanted = {1: api.Columns(SCHEMA.serialize().to_pybytes(), ("zeros",), "")}
    refused = 0
    while True:
        try:
            if method == "read":
                asked = api.ReadArguments(stream, GLSN(1), 1, wanted)  # type: ignore[arg-type]
                await connection.call(api.READ, asked, timeout_ms=30_000)
            else:
                scan = ScanArguments(stream, GLSN(1), GLSN(1), 1, wanted, tells_checked=True)  # type: ignore[arg-type]
                await connection.call(SCAN, scan, timeout_ms=30_000)
            return refused
        except ResourceExhausted as error:
            refused += 1
            await asyncio.sleep(error.retry_ms / 1_000)


async def test_many_column_reads_of_compressed_batches_share_a_budget(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, storage_nodes=1) as cluster, Admin(cluster.addresses) as admin:
        servers = f"cutwater://{','.join(cluster.addresses)}"
        async with await cutwater.AsyncClient.connect(servers) as log:
            await log.create_topic("t", schema=SCHEMA)
            catalog = await admin.catalog()
            (info,) = catalog.streams
            body = large_body()
            host, port = parse_address(catalog.nodes[0].address)
            endpoint = Endpoint(ANY_CLUSTER, "client")
            connections = [await connect(endpoint, host, port, timeout_ms=5_000) for _ in range(READERS)]
            try:
                batch = Batch(ROWS, b"", crc32c(body), EventTime(5), EventTime(5), schema=1)
                arguments = api.AppendArguments(info.stream, info.epoch, batch)
                await connections[0].call(api.APPEND, arguments, body, timeout_ms=60_000)
                (node,) = cluster.storage_nodes
                # The peak begins anew here: looking into the batch took memory, too.
                Path(f"/proc/{node.pid}/clear_refs").write_text("5")
                before = memory_bytes(node.pid, "VmRSS")
                tasks = [
                    read_one(connection, method, info.stream)
                    for connection, method in zip(connections, ["read", "scan"] * READERS, strict=False)
                ]
                async with asyncio.timeout(60):
                    await asyncio.gather(*tasks)
                grown = memory_bytes(node.pid, "VmHWM") - before
            finally:
                for connection in connections:
                    connection.abort()
    print(f"grown by {grown / MIB:.0f} MiB, budget {BUDGET_BYTES / MIB:.0f}, all {READERS * 2 * INFLATED / MIB:.0f}")
    assert grown < BUDGET_BYTES
