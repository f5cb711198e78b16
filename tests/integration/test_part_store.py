"""Staging over real sockets onto real files: what is staged is durable on all holders, bounded, and seen by nobody."""

from __future__ import annotations

import asyncio
import errno
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec import structs

from cutwater.client.async_client import AsyncClient
from cutwater.client.errors import InvalidRecord, RecordTooLarge
from cutwater.client.publish.runs import Run
from cutwater.core.publish.staged import PartOrder, PartSize, StagedPart
from cutwater.core.requests import DescribeRequest, Description, StagedAnswer, StagedRequest
from cutwater.errors import (
    AlreadyExists,
    CutwaterError,
    Damaged,
    InvalidArgument,
    NotFound,
    ReadOnly,
    ResourceExhausted,
)
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import frames_in, staged_frame
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.storage.files import OsFiles
from cutwater.types import Batch, BatchNumber, EventTime, NodeState, Part, RunId, TopicId
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ProvenServer
from tests.integration.log_cluster import CLUSTER, LogCluster, with_log
from tests.integration.node_cluster import body_of

pytestmark = pytest.mark.timeout(100)

RUN = Run(RunId(1), 1, -1, "", "a key")
MIB = 1024 * 1024


async def to_node(cluster: LogCluster, number: int) -> Connection:
    return await connect(Endpoint(CLUSTER, "test"), "127.0.0.1", cluster.ports[number], timeout_ms=2_000)


async def as_peer(cluster: LogCluster, number: int) -> Connection:
    """With the private key of a storage node, which may be the node itself."""
    server = cluster.nodes[number]
    endpoint = Endpoint(CLUSTER, STORAGE_NODE, str(number), key=server._key)
    own = ProvenServer(STORAGE_NODE, str(number), server.public_key)
    await cluster.until(lambda: server._book.is_known(own), "the node knows the keys of the others")
    return await connect(endpoint, "127.0.0.1", cluster.ports[number], timeout_ms=2_000, expect=lambda server: None)


async def fetched(cluster: LogCluster, node: int, part: Part) -> list[Batch]:
    """All entries of a part, as one holder gives them to others."""
    connection = await as_peer(cluster, node)
    found: list[Batch] = []
    offset = 0
    try:
        while True:
            received = await connection.call(api.FETCH, api.FetchArguments(part.part, offset, MIB), timeout_ms=5_000)
            assert received.value.size == PartSize(part.entries, part.rows, part.bytes)
            if not received.body:
                return found
            found += [frame.entry.batch for frame in frames_in(bytes(received.body))]
            offset += len(received.body)
    finally:
        connection.abort()


def values_of(batches: list[Batch], schema: pa.Schema, column: str) -> list[object]:
    read = [pa.ipc.read_record_batch(pa.py_buffer(batch.body), schema) for batch in batches]
    return [value for batch in read for value in batch.column(schema.get_field_index(column)).to_pylist()]


def test_a_part_is_the_same_on_all_holders_also_after_a_restart_and_nobody_sees_it(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        schema = pa.schema({"n": pa.int64(), "text": pa.string()})
        await log.create_topic("t", schema=schema)

        async def is_whole() -> bool:
            description: Description = await cluster.ask(DescribeRequest())
            return all(len(stream.members) == 3 for stream in description.streams)

        await cluster.until(is_whole, "all three nodes are in the chain")
        await log.topics()
        table = pa.table({"n": range(300_000), "text": ["x" * 20] * 300_000})
        part = await log.stage(RUN, 0, "t", table)
        assert part is not None
        assert (part.rows, len(part.holders), part.ordered) == (300_000, 3, False)
        assert part.entries > 5
        assert pickle.loads(pickle.dumps(part)) == part
        for node in (1, 2, 3):
            await cluster.restart_node(node)
        staged = [await fetched(cluster, node, part) for node in (1, 2, 3)]
        assert staged[0] == staged[1] == staged[2]
        assert values_of(staged[0], schema, "n") == list(range(300_000))
        assert [server.staging.bytes for server in cluster.nodes.values()] == [part.bytes] * 3
        assert (await log.table("t")).num_rows == 0
        assert await log.stage(RUN, 0, "t", table.slice(0, 0)) is None
        connection = await to_node(cluster, 1)
        assert (await connection.call(api.VERIFY_STAGED, None, timeout_ms=5_000)).value == ()
        path = cluster.nodes[1].staging.held[part.part].path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        found = (await connection.call(api.VERIFY_STAGED, None, timeout_ms=5_000)).value
        assert [finding.where for finding in found] == [str(path)]
        with pytest.raises(Damaged):
            await fetched(cluster, 1, part)
        connection.abort()

    with_log(tmp_path, test, nodes=3)


def test_rows_that_do_not_fit_are_named_by_column_and_row(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=pa.schema([pa.field("n", pa.int32(), nullable=False)]))
        table = pa.Table.from_batches(
            [pa.record_batch({"n": pa.array([1, 2], pa.int64())}), pa.record_batch({"n": pa.array([3, 1 << 40])})]
        )
        with pytest.raises(InvalidRecord, match="column 'n', row 3: 1099511627776"):
            await log.stage(RUN, 0, "t", table)
        with pytest.raises(InvalidRecord, match="no such column"):
            await log.stage(RUN, 0, "t", pa.table({"m": [1]}))
        await log.create_topic("kv")
        with pytest.raises(RecordTooLarge) as caught:
            await log.stage(RUN, 0, "kv", pa.table({"value": [b"small"] * 100_000 + [b"x" * (2 * MIB)]}))
        assert caught.value.row == 100_000
        with pytest.raises(InvalidArgument, match="sort them first"):
            await log.stage(RUN, 0, "kv", [b"a", b"b"], positions=[b"2", b"1"])
        with pytest.raises(InvalidArgument, match="one for each"):
            await log.stage(RUN, 0, "kv", [b"a", b"b"], positions=[b"2"])
        with pytest.raises(NotFound, match="nope"):
            await log.stage(RUN, 0, "nope", [b"a"])
        async with await log.stager(RUN, 0, "kv") as stager:
            with pytest.raises(InvalidArgument, match="ordered=True"):
                await stager.write([b"a"], positions=[b"1"])
            assert await stager.finish() is None
        # Rows of very different sizes are cut where it is needed.
        rows = [b"y" * 1000 if i % 1000 else b"x" * (MIB - 100) for i in range(20_000)]
        part = await log.stage(RUN, 0, "kv", rows)
        assert part is not None
        assert part.rows == 20_000
        # What was given up is gone.
        assert [held.part.part for held in cluster.nodes[1].staging.held.values()] == [part.part]
        assert cluster.nodes[1].staging.bytes == part.bytes
        assert len(list(tmp_path.glob("volume1/*/*/staged/*"))) == 1

    with_log(tmp_path, test)


def test_the_limit_holds_and_there_is_room_again_when_the_leader_says_so(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        staging = cluster.nodes[1].staging
        staging.bytes_max = 5 * MIB
        rows = [b"x" * 1000] * 3_000
        first = await log.stage(RUN, 0, "t", rows)
        with pytest.raises(ResourceExhausted, match="staged bytes of at most"):
            await log.stage(RUN, 1, "t", rows, timeout=2.5)
        assert first is not None
        assert staging.bytes == first.bytes
        waiting = asyncio.create_task(log.stage(structs.replace(RUN, generation=2), 1, "t", rows))
        await asyncio.sleep(0.2)
        asked: list[StagedRequest] = []

        async def drop_the_first(request: StagedRequest) -> StagedAnswer:
            asked.append(request)
            return StagedAnswer(tuple(batch for batch in request.batches if batch.batch == 0))

        await staging.tidy(drop_the_first)
        second = await waiting
        assert second is not None
        assert [(b.run, b.batch, b.generation) for b in asked[0].batches] == [(1, 0, 1)]
        assert list(staging.held) == [second.part]
        assert staging.bytes == second.bytes
        await staging.tidy(drop_the_first)
        assert list(staging.held) == [second.part]
        assert asked[1].batches[0].generation == 2

    with_log(tmp_path, test)


def test_with_too_many_parts_all_messages_of_a_new_one_wait_for_a_place(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        staging = cluster.nodes[1].staging
        staging.parts_max = 1
        first = await log.stage(RUN, 0, "t", [b"x"])
        rows = [b"x" * 1000] * 6_000
        waiting = asyncio.create_task(log.stage(RUN, 1, "t", rows))
        await cluster.until(lambda: bool(staging._turned_away), "the second one is refused")
        with pytest.raises(ResourceExhausted, match="staged parts of at most"):
            # Not NotFound, although nothing is here of it: its first message was refused.
            staging._writing_of(StagedPart(RunId(1), BatchNumber(1), 1, TopicId(1), staging._turned_away[0]), 100)

        async def drop_the_first(request: StagedRequest) -> StagedAnswer:
            return StagedAnswer(tuple(batch for batch in request.batches if batch.batch == 0))

        await staging.tidy(drop_the_first)
        # There is a place again, and the messages come in any order.
        with pytest.raises(ResourceExhausted):
            staging._writing_of(StagedPart(RunId(1), BatchNumber(1), 1, TopicId(1), staging._turned_away[0]), 100)
        second = await waiting
        assert first is not None
        assert second is not None
        assert list(staging.held) == [second.part]
        assert not staging._turned_away

    with_log(tmp_path, test)


def test_a_part_that_cannot_be_removed_still_counts_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        staging = cluster.nodes[1].staging
        parts = [await log.stage(RUN, 0, "t", [b"x" * n]) for n in (1, 10, 100)]
        stuck = staging.held[parts[0].part].path if parts[0] else Path()
        really_unlink = OsFiles.unlink

        def unlink(self: OsFiles, path: Path) -> None:
            if path == stuck:
                raise OSError(errno.EIO, "Input/output error")
            really_unlink(self, path)

        async def drop_all(request: StagedRequest) -> StagedAnswer:
            return StagedAnswer(request.batches)

        with monkeypatch.context() as patch:
            patch.setattr(OsFiles, "unlink", unlink)
            await staging.tidy(drop_all)
        assert [held.path for held in staging.held.values()] == list(tmp_path.glob("volume1/*/*/staged/*")) == [stuck]
        assert staging.bytes == (parts[0].bytes if parts[0] else 0)
        assert cluster.nodes[1].node.counters.parts_dropped == 2
        await staging.tidy(drop_all)
        assert (staging.held, staging.bytes, list(tmp_path.glob("volume1/*/*/staged/*"))) == ({}, 0, [])


def test_what_is_staged_while_the_leader_answers_is_not_dropped(tmp_path: Path) -> None:
    """The leader speaks of batches: it knows nothing of a part that came after it was asked."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        old = await log.stage(RUN, 0, "t", [b"old"])
        staging = cluster.nodes[1].staging
        new: list[Part | None] = []

        async def drop_all(request: StagedRequest) -> StagedAnswer:
            new.append(await log.stage(RUN, 0, "t", [b"new"]))
            return StagedAnswer(request.batches)

        await staging.tidy(drop_all)
        assert old is not None
        assert [part.part for part in new if part is not None] == list(staging.held)
        await fetched(cluster, 1, new[0])  # type: ignore[arg-type]

    with_log(tmp_path, test)


def test_a_node_without_room_takes_nothing_until_it_has_some(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        node = cluster.nodes[1].node
        node.set_state(NodeState.READ_ONLY, "a test says so")
        with pytest.raises(ReadOnly, match="no room left"):
            await log.stage(RUN, 0, "t", [b"x"], timeout=2)
        assert cluster.nodes[1].staging.bytes == 0
        staging = asyncio.create_task(log.stage(RUN, 0, "t", [b"x"]))
        await asyncio.sleep(0.1)
        node.set_state(NodeState.READY, "a test says so")
        part = await staging
        assert part is not None

    with_log(tmp_path, test)


def test_garbage_and_what_is_out_of_place_get_clear_errors(tmp_path: Path) -> None:
    def frame(value: bytes, first: int = 1) -> bytes:
        body = body_of(value)
        batch = Batch(1, body, crc32c(body), EventTime(1), EventTime(1))
        return b"".join(staged_frame(batch, first))

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        connection = await to_node(cluster, 1)
        staging = cluster.nodes[1].staging
        names = iter([f"{i:032x}" for i in range(100)])

        async def stage(part: StagedPart, offset: int, body: bytes) -> int:
            arguments = api.StageArguments(part, offset)
            return (await connection.call(api.STAGE, arguments, body, timeout_ms=5_000)).value.end

        async def refused(kind: type[CutwaterError], part: StagedPart, offset: int, body: bytes) -> None:
            with pytest.raises(kind):
                await stage(part, offset, body)

        def new(order: PartOrder | None = None) -> StagedPart:
            return StagedPart(RunId(1), BatchNumber(0), 1, TopicId(1), next(names), order)

        await refused(InvalidArgument, structs.replace(new(), part="../x"), 0, frame(b"x"))
        await refused(Damaged, new(), 0, b"garbage")
        await refused(Damaged, new(), 0, frame(b"x")[:-3])
        await refused(InvalidArgument, new(), 0, frame(b"x", first=2))
        await refused(NotFound, new(), 100, frame(b"x"))
        await refused(InvalidArgument, new(PartOrder(b"no schema", 1)), 0, frame(b"x"))
        good = new()
        end = await stage(good, 0, frame(b"x"))
        assert await stage(good, 0, frame(b"x")) == end
        await refused(ResourceExhausted, good, end + 7, frame(b"y", 2))
        await refused(InvalidArgument, structs.replace(good, batch=5), end, frame(b"y", 2))
        assert await stage(good, end, frame(b"y", 2)) == 2 * end
        for size in (PartSize(1, 1, end), PartSize(3, 2, 2 * end)):
            with pytest.raises(InvalidArgument):
                await connection.call(api.FINISH_PART, api.FinishArguments(good.part, size), timeout_ms=5_000)
        size = PartSize(2, 2, 2 * end)
        for _ in range(2):
            await connection.call(api.FINISH_PART, api.FinishArguments(good.part, size), timeout_ms=5_000)
        await refused(AlreadyExists, good, 2 * end, frame(b"z", 3))
        await connection.call(api.DISCARD_PART, good.part, timeout_ms=5_000)
        assert (list(staging.held), staging.parts) == ([good.part], 1)
        peer = await as_peer(cluster, 1)
        for unknown in ("f" * 32, "../.."):
            finishing = api.FinishArguments(unknown, size)
            with pytest.raises(NotFound):
                await connection.call(api.FINISH_PART, finishing, timeout_ms=5_000)
            with pytest.raises(NotFound):
                await peer.call(api.FETCH, api.FetchArguments(unknown, 0, 1), timeout_ms=5_000)
        with pytest.raises(InvalidArgument):
            await peer.call(api.FETCH, api.FetchArguments(good.part, 1 << 40, 1), timeout_ms=5_000)
        peer.abort()
        connection.abort()

    with_log(tmp_path, test)


def test_nobody_adds_to_a_part_that_is_copied_from_another_node(tmp_path: Path) -> None:
    """What was decided on is not looked into again, so it must come from its holders alone."""

    def frame(body: bytes, first: int) -> bytes:
        return b"".join(staged_frame(Batch(1, body, crc32c(body), EventTime(1), EventTime(1)), first))

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        connection = await to_node(cluster, 1)
        staging = cluster.nodes[1].staging
        good, bad = frame(body_of(b"x"), 1), frame(b"this is not Arrow", 2)

        async def stage(part: StagedPart, offset: int, data: bytes) -> None:
            await connection.call(api.STAGE, api.StageArguments(part, offset), data, timeout_ms=5_000)

        one, other = (StagedPart(RunId(1), BatchNumber(0), 1, TopicId(1), f"{i:032x}") for i in range(2))
        assert await staging.add_decided(one, 0, good, checked=True) == len(good)
        with pytest.raises(AlreadyExists):
            await stage(one, len(good), bad)
        assert await staging.add_decided(one, len(good), frame(body_of(b"y"), 2), checked=True) > len(good)
        # What was decided on is taken as it is, whoever came before.
        await stage(other, 0, frame(body_of(b"another"), 1))
        decided = frame(b"of an older version", 1)
        assert await staging.add_decided(other, 0, decided, checked=False) == len(decided)
        held = await staging.finish(other.part, PartSize(1, 1, len(decided)))
        assert (held.checked, staging._files.read(held, 0, MIB)) == (False, decided)
        connection.abort()

    with_log(tmp_path, test)
