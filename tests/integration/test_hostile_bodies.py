"""A client that speaks the protocol and sends batches that are not what they claim to be, to real processes; and data
of a version that let such batches in.

Each is refused with words before it has a place in the log, the topic goes on, and every reader lives.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from msgspec import structs

import cutwater
from cutwater.admin.operations import Admin
from cutwater.admin.verification import verify as verify_all
from cutwater.client.append.plain_arrow import Single, plain_body
from cutwater.core.publish.staged import PartOrder, PartSize, StagedPart
from cutwater.core.requests import Catalog, DescribeRequest, StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, InvalidArgument, Malformed
from cutwater.format.bodies import MIB
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import frames_in, staged_frame
from cutwater.format.ipc_message import read_message
from cutwater.format.merging import POSITION
from cutwater.format.projection import KEY_VALUE, serialize
from cutwater.protocol import storage_api as api
from cutwater.types import Batch, BatchKind, BatchNumber, Epoch, EventTime, LogStreamId, RunId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from tests.integration.log_cluster import LogCluster, with_log
from tests.integration.real_cluster import running_cluster
from tests.times import at_us

SCHEMA = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC"))])


class Hostile(NamedTuple):
    """What a header claims, the body, and what the refusal says."""

    name: str
    count: int
    time_min: int
    time_max: int
    body: bytes
    told: str
    schema: int = 0


def plain(count: int = 3, time: int = 10) -> bytes:
    made = plain_body([Single(b"value", b"key", time + i) for i in range(count)])
    assert made is not None
    return made.body


def patched(body: bytes, at: int, form: str, *values: int) -> bytes:
    changed = bytearray(body)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def with_wrong_offsets(body: bytes) -> bytes:
    """The second value ends far outside of all memory there is."""
    message = read_message(body)
    return patched(body, message.data_at + message.offsets[4] + 4, "<i", (1 << 31) - 1)


def bomb(size: int) -> bytes:
    rows = pa.RecordBatch.from_pylist([{"value": bytes(size), "timestamp": 10}], schema=KEY_VALUE)
    return serialize(rows, "zstd").to_pybytes()


def hostile() -> Iterator[Hostile]:
    good = plain()
    yield Hostile("wrong inner offsets", 3, 10, 12, with_wrong_offsets(good), "no record batch of its schema")
    yield Hostile("a zstd bomb", 1, 10, 10, bomb(300 * MIB), "when they are decompressed")
    yield Hostile("a smaller bomb", 1, 10, 10, bomb(64 * MIB), "times as many are allowed")
    yield Hostile("not Arrow", 1, 10, 10, b"this is no Arrow", "no Arrow record batch")
    yield Hostile("nothing", 1, 10, 10, b"", "no Arrow record batch")
    yield Hostile("a count of 2**31", 1 << 31, 10, 12, good, "its header says that it has 2147483648 records")
    yield Hostile("a count that is too large", 4, 10, 12, good, "it has 3 records, and its header says 4")
    yield Hostile("a false time_max", 3, 10, 1 << 62, good, "event times go from 10 to 12")
    yield Hostile("a false time_min", 3, 0, 12, good, "event times go from 10 to 12")
    rows = pa.RecordBatch.from_pylist([{"user": "u", "at": 10}], schema=SCHEMA)
    yield Hostile("another schema", 1, 10, 10, rows.serialize().to_pybytes(), "and its schema has")
    yield Hostile("a schema that is not there", 1, 10, 10, rows.serialize().to_pybytes(), "names schema 7", 7)
    yield Hostile("two messages", 3, 10, 12, good + good, "bytes of columns follow")


@cache
def cases() -> list[Hostile]:
    """Made when they are needed: a bomb takes memory before it is small."""
    return list(hostile())


def batch_of(case: Hostile, *, with_body: bool = False) -> Batch:
    body = case.body if with_body else b""
    # A client that says that it was checked is not believed.
    return Batch(
        case.count,
        body,
        crc32c(case.body),
        EventTime(case.time_min),
        EventTime(case.time_max),
        schema=case.schema,
        checked=not with_body,
    )


class Attack:
    """One topic of a cluster, and connections to its storage nodes."""

    def __init__(self, catalog: Catalog, topic: str) -> None:
        self.topic: TopicInfo = next(info for info in catalog.topics if info.name == topic)
        self.stream: StreamInfo = next(info for info in catalog.streams if info.topic == self.topic.topic)
        self._addresses = {node.node: node.address for node in catalog.nodes}
        self._parts = 0

    @asynccontextmanager
    async def head(self) -> AsyncIterator[Connection]:
        host, port = parse_address(self._addresses[self.stream.chain[0]])
        connection = await connect(Endpoint(ANY_CLUSTER, "client"), host, port, timeout_ms=5_000)
        try:
            yield connection
        finally:
            connection.abort()

    async def append(self, case: Hostile) -> None:
        async with self.head() as connection:
            arguments = api.AppendArguments(self.stream.stream, self.stream.epoch, batch_of(case))
            await connection.call(api.APPEND, arguments, case.body, timeout_ms=20_000)

    async def stage(self, case: Hostile, order: PartOrder | None = None) -> None:
        self._parts += 1
        part = StagedPart(RunId(1), BatchNumber(0), 1, self.topic.topic, f"{self._parts:032x}", order)
        frame = b"".join(staged_frame(batch_of(case, with_body=True), 1))
        async with self.head() as connection:
            await connection.call(api.STAGE, api.StageArguments(part, 0), frame, timeout_ms=20_000)
            size = PartSize(1, case.count, len(frame))
            await connection.call(api.FINISH_PART, api.FinishArguments(part.part, size), timeout_ms=20_000)


@pytest.mark.asyncio
async def test_hostile_batches_are_refused_and_everyone_goes_on(tmp_path: Path) -> None:
    """Against real processes, with replication."""
    async with running_cluster(tmp_path, storage_nodes=2) as cluster, Admin(cluster.addresses) as admin:
        servers = f"cutwater://{','.join(cluster.addresses)}"
        async with await cutwater.AsyncClient.connect(servers) as log:
            await log.create_topic("t", replication=2)
            first = await log.append("t", b"before")
            attack = Attack(await admin.catalog(), "t")
            for case in cases():
                with pytest.raises(InvalidArgument) as refused:
                    await attack.append(case)
                assert case.told in refused.value.message, case.name
                with pytest.raises(InvalidArgument) as refused:
                    await attack.stage(case)
                assert case.told in refused.value.message, f"{case.name}, staged"
                order = PartOrder(KEY_VALUE.append(POSITION).serialize().to_pybytes(), case.schema, "timestamp")
                with pytest.raises(InvalidArgument):
                    await attack.stage(case, order)
            # Nothing of it has got a place: the next record follows the first one.
            last = await log.append("t", b"after")
            assert last.llsn == first.llsn + 1
            assert [record.value async for record in log.subscribe("t", follow=False)] == [b"before", b"after"]
            assert (await log.table("t", columns=["value"])).column("value").to_pylist() == [b"before", b"after"]
            assert all(member.pid and Path(f"/proc/{member.pid}").exists() for member in cluster.processes())


# What an older version has stored.


def old_entries(cluster: LogCluster, stream: LogStreamId) -> list[Hostile]:
    """Put batches into the log as a version did that looked into nothing; which ones."""
    chosen = [case for case in cases() if case.body and case.name not in ("two messages", "a smaller bomb")]
    content = cluster.nodes[1].content
    content.append = lambda stream, batch, asker, take: take(structs.replace(batch, checked=False))  # type: ignore
    return chosen


async def store_old(
    cluster: LogCluster, log: cutwater.AsyncClient, topic: str = "t"
) -> tuple[list[Hostile], list[int]]:
    """Good records with hostile batches between them; where the hostile ones lie."""
    view = log._catalogs.view
    attack = Attack(view.catalog, topic)
    content = cluster.nodes[1].content
    stored = old_entries(cluster, attack.stream.stream)
    places = []
    for i, case in enumerate(stored):
        await log.append(topic, b"good %d" % i)
        async with attack.head() as connection:
            arguments = api.AppendArguments(attack.stream.stream, attack.stream.epoch, batch_of(case))
            answer = await connection.call(api.APPEND, arguments, case.body, timeout_ms=20_000)
            places.append(int(answer.value.ack.glsn))
    await log.append(topic, b"good at last")
    del content.append
    return stored, places


def test_readers_of_old_data_get_an_error_or_skip(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        stored, places = await store_old(cluster, log)
        good = [b"good %d" % i for i in range(len(stored))] + [b"good at last"]
        # An error comes after everything before it was delivered.
        reading = await log.subscribe("t", follow=False)
        assert [record.value for record in await reading.take()] == good[:1]
        with pytest.raises(Malformed) as error:
            await reading.take()
        assert error.value.first_glsn == places[0]
        assert stored[0].told in error.value.message
        assert "on_malformed='skip'" in error.value.message
        # Skipped is what is malformed, and nothing else.
        subscription = await log.subscribe("t", follow=False, on_malformed="skip")
        assert [record.value async for record in subscription] == good
        assert [one.first_glsn for one in subscription.skipped] == places
        assert subscription.skipped_records == sum(case.count for case in stored)
        for case, skipped in zip(stored, subscription.skipped, strict=True):
            assert case.told in skipped.why or case.schema, case.name
        # The same for columns, which storage nodes pick.
        for columns in (["value"], ["timestamp", "glsn"], None):
            batches = await log.batches("t", follow=False, columns=columns, on_malformed="skip")
            rows = [row async for batch in batches for row in batch.to_pylist()]
            assert len(rows) == len(good)
            assert [one.first_glsn for one in batches.skipped] == places
            with pytest.raises(Malformed):
                await log.table("t", columns=columns)
        with pytest.raises(Malformed):
            await log.read(places[1])
        # And for those who read large ranges.
        for projection in (False, True):
            await check_scan(cluster, places, len(good), projection=projection)
        await check_verify(cluster, stored)
        with pytest.raises(InvalidArgument, match="on_malformed= is 'error' or 'skip', not 'ignore'"):
            log.subscribe("t", on_malformed="ignore")  # type: ignore[arg-type]

    with_log(tmp_path, test, nodes=1)


async def check_scan(cluster: LogCluster, places: list[int], good: int, *, projection: bool) -> None:
    from cutwater.client.read.range_reader import Ranges
    from cutwater.client.read.records import ColumnLayout

    ranges = await Ranges.connect(cluster.servers, timeout=10.0)
    try:
        view = await ranges.view(10.0)
        layout = ColumnLayout(view.schema(view.topics["t"]), ["value"] if projection else None)
        (info,) = view.catalog.streams
        last = view.catalog.high_watermark
        with pytest.raises(Malformed) as error:
            async for _ in ranges.pieces(info.stream, 1, last, layout.projection, patience=10.0):  # type: ignore[arg-type]
                pass
        assert error.value.first_glsn == places[0]
        malformed, rows = [], 0
        asked = ranges.pieces(info.stream, 1, last, layout.projection, patience=10.0, skips_malformed=True)  # type: ignore[arg-type]
        async for found in asked:
            malformed += [first for first, _ in found.malformed]
            assert all(block.checked for block in found.blocks)
            rows += sum(
                pa.ipc.read_record_batch(pa.py_buffer(block.body), layout._stored[0]).num_rows for block in found.blocks
            )
        assert (malformed, rows) == (places, good)
    finally:
        await ranges.close()


async def check_verify(cluster: LogCluster, stored: list[Hostile]) -> None:
    node = cluster.nodes[1]
    (stream,) = node.node.replicas
    connection = await connect(Endpoint(ANY_CLUSTER, "client"), "127.0.0.1", cluster.ports[1], timeout_ms=5_000)
    try:
        findings = (await connection.call(api.VERIFY, stream, timeout_ms=30_000)).value
    finally:
        connection.abort()
    assert len(findings) == len(stored)
    assert all(finding.is_content and finding.what.startswith("malformed content: ") for finding in findings)
    assert node.node.counters.damage_met == 0
    # Operators are told the same: nothing is damaged, and nobody has a better copy.
    told = (await verify_all(await cluster.ask(DescribeRequest()), timeout_ms=30_000)).findings
    assert [finding.is_content for finding in told] == [True] * len(stored)
    assert {finding.way_out for finding in told} == {'readers with on_malformed="skip" pass over it'}


def test_typed_old_data_is_told_apart_too(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("typed", schema=SCHEMA, event_time="at")
        rows = pa.RecordBatch.from_pylist([{"user": f"u{i}", "at": i} for i in range(5)], schema=SCHEMA)
        await log.append("typed", rows)
        attack = Attack(log._catalogs.view.catalog, "typed")
        content = cluster.nodes[1].content
        content.append = lambda stream, batch, asker, take: take(structs.replace(batch, checked=False))  # type: ignore
        body = serialize(rows, "lz4").to_pybytes()
        for times in ((0, 4), (0, 1 << 60)):
            await attack.append(Hostile("", 5, *times, body, "", 1))
        broken = rows.serialize().to_pybytes().replace(b"u0u1u2u3u4", b"u0\xffu2u3u4\xff")
        await attack.append(Hostile("", 5, 0, 4, broken, "", 1))
        del content.append
        for columns in (None, ["user"], ["at"]):
            batches = await log.batches("typed", follow=False, columns=columns, on_malformed="skip")
            # The first of the two that are compressed is sound.
            assert [row async for batch in batches for row in batch.to_pylist()] != []
            assert (batches.skipped_records, len(batches.skipped)) == (10, 2)

    with_log(tmp_path, test, nodes=1)


# What else concerns appends.


def test_batches_are_taken_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """A large one that a thread looks into is not overtaken by small ones behind it."""

    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"first")
        attack = Attack(log._catalogs.view.catalog, "t")
        rows = pa.RecordBatch.from_pylist(
            [{"value": bytes([i % 256]) * 4_000, "timestamp": 10} for i in range(4_000)], schema=KEY_VALUE
        )
        large = Hostile("", 4_000, 10, 10, serialize(rows, "zstd").to_pybytes(), "")
        bad = structs_of(large, count=3_999)
        small = Hostile("", 1, 10, 10, plain(1), "")
        async with attack.head() as connection:
            calls = []
            for case in [large, small, bad, small, large, small] * 2:
                arguments = api.AppendArguments(attack.stream.stream, attack.stream.epoch, batch_of(case))
                calls.append(connection.call(api.APPEND, arguments, case.body, timeout_ms=30_000))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        llsns = [one.value.ack.llsn for one in outcomes if not isinstance(one, BaseException)]
        assert len(llsns) == 10
        assert llsns == sorted(llsns)
        assert [isinstance(one, InvalidArgument) for one in outcomes] == [False, False, True, False, False, False] * 2

    with_log(tmp_path, test, nodes=1)


def structs_of(case: Hostile, **changes: int) -> Hostile:
    return case._replace(**changes)


def test_without_the_catalog_appends_wait_a_little_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"x")
        attack = Attack(log._catalogs.view.catalog, "t")
        topics = cluster.nodes[1].topics
        monkeypatch.setattr("cutwater.storagenode.validation.topic_forms.FETCH_SECONDS", 0.2)

        async def silent(request: object) -> Catalog:
            await asyncio.sleep(3_600)
            raise AssertionError

        answering, topics._ask = topics._ask, silent
        topics._of_stream.clear()
        good = Hostile("", 1, 10, 10, plain(1), "")
        with pytest.raises(CutwaterError, match="the metadata repository does not tell it now") as error:
            await attack.append(good)
        assert error.value.code == "unavailable"
        assert error.value.retriable
        topics._ask = answering
        assert topics._fetching is not None
        topics._fetching.cancel()
        await attack.append(good)

    with_log(tmp_path, test, nodes=1)


def test_what_is_no_data_has_no_body(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"x")
        attack = Attack(log._catalogs.view.catalog, "t")
        async with attack.head() as connection:
            batch = structs.replace(batch_of(cases()[3]), kind=BatchKind.FENCE)
            arguments = api.AppendArguments(attack.stream.stream, Epoch(attack.stream.epoch), batch)
            with pytest.raises(InvalidArgument, match="no body"):
                await connection.call(api.APPEND, arguments, cases()[3].body, timeout_ms=5_000)

    with_log(tmp_path, test, nodes=1)


def test_a_topic_may_refuse_event_times_that_are_far_ahead(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        topic = await log.create_topic("t", event_time_ahead_max="1h")
        assert topic.event_time_ahead_max is not None
        assert topic.event_time_ahead_max.total_seconds() == 3_600
        now = (await log.read((await log.append("t", b"now")).glsn)).timestamp_us
        await log.append("t", b"a little ahead", timestamp=at_us(now + 1_800_000_000))
        for hours in (2, 24 * 365 * 100):
            with pytest.raises(InvalidArgument, match=r"ahead of the log's clock, and topic 't' takes at most 1h:"):
                await log.append("t", b"far ahead", timestamp=at_us(now + hours * 3_600_000_000))
        with pytest.raises(InvalidArgument, match="declared watermark"):
            await log.append("t", b"x", watermark=at_us(now + 7_200_000_000))
        run = await log.open_run("far", "key of far")
        far = pa.table({"value": [b"far"], "timestamp": pa.array([now + 7_200_000_000], KEY_VALUE.field(2).type)})
        async with await log.stager(run, 0, "t") as stager:
            await stager.write(far)
            with pytest.raises(InvalidArgument, match="ahead of the log's clock"):
                await stager.finish()
        await log.change_topic("t", event_time_ahead_max=0)
        async with asyncio.timeout(20):
            while True:
                try:
                    await log.append("t", b"far ahead", timestamp=at_us(now + 7_200_000_000))
                    break
                except InvalidArgument:
                    await log.append("t", b"now")
                    await asyncio.sleep(0.1)

    with_log(tmp_path, test, nodes=1)


def test_what_was_checked_is_marked_appended_or_published(tmp_path: Path) -> None:
    """Readers need not look into it again."""

    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"appended")
        run = await log.open_run("marks", "key of marks")
        for batch, positions in ((0, None), (1, [b"p"])):
            async with await log.stager(run, batch, "t", ordered=positions is not None) as stager:
                await stager.write([b"published"], positions=positions)
                await log.publish(run, batch, [await stager.finish()])
        attack = Attack(log._catalogs.view.catalog, "t")
        async with attack.head() as connection:
            asked = api.ReadArguments(attack.stream.stream, 1, MIB)  # type: ignore[arg-type]
            received = await connection.call(api.READ, asked, timeout_ms=5_000)
        assert [frame.header.checked for frame in frames_in(bytes(received.body))] == [True] * 3

    with_log(tmp_path, test, nodes=1)
