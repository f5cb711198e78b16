"""Planner and tasks against the log itself, without a JVM."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.admin.operations import Admin
from cutwater.client.cluster.credentials import ANYONE
from cutwater.client.cluster.holder_file import with_secret
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.client.read import range_reader as ranges
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import BoundedOutOfOrderness
from cutwater.errors import InvalidArgument, NotFound, Refused, Trimmed
from cutwater.spark.options import read_options
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.source import log_walk, planning
from cutwater.spark.source.source import StreamReader
from cutwater.types import GLSN, LogStreamId
from tests.integration.log_cluster import seeded
from tests.spark.planner_kit import FOREVER, columns, latest, read, rows_of, stream, watermarks
from tests.times import at_us


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    with cutwater.open(tmp_path / "data") as client:
        yield client


def fill(log: cutwater.Client, topic: str, random: Random, batches: int, streams: Any, time_max: int = 10**8) -> None:
    for _ in range(batches):
        count = random.choice((1, 2, 3, 40))
        log.append(
            topic,
            [random.randbytes(random.choice((0, 3, 200))) for _ in range(count)],
            key=[random.choice((None, b"k")) for _ in range(count)],
            timestamp=[at_us(random.randrange(time_max)) for _ in range(count)],
            stream=random.choice(streams),
        )


def expected(log: cutwater.Client, topics: Any, first: int, last: int) -> list[tuple[Any, ...]]:
    return [
        (r.topic, r.stream, r.glsn, r.llsn, r.timestamp, r.key, r.value, r.ingested_at)
        for r in log.subscribe(topics, follow=False)
        if first <= r.glsn <= last
    ]


def plain(table: pa.Table) -> list[tuple[Any, ...]]:
    names = ("topic", "stream", "glsn", "llsn", "timestamp", "key", "value", "ingested_at")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def seen(table: pa.Table) -> dict[int, int | None]:
    return dict(zip(table["glsn"].to_pylist(), table["watermark"].cast(pa.int64()).to_pylist(), strict=True))


def test_any_range_is_that_of_the_log(fresh: cutwater.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, positions and watermarks, of one topic and of two, cut into parts and read from anywhere on."""
    random = seeded()
    monkeypatch.setattr(log_walk, "LOOK_BACK", random.choice((1, 7, 4_096)))
    a, b = fresh.create_topic("a", streams=3).streams, fresh.create_topic("b", streams=2).streams
    for _ in range(12):
        fill(fresh, "a", random, 5, a)
        fill(fresh, "b", random, 3, b)
    end = fresh.tail()
    for topics in (["a"], ["a", "b"]):
        # From files, or through the storage node.
        is_near = random.random() < 0.5
        monkeypatch.setattr(ranges, "is_loopback", lambda host, is_near=is_near: is_near)
        bound = random.randrange(10**6) * 1_000
        right = watermarks(fresh, topics, BoundedOutOfOrderness(bound, FOREVER.idle_after_us))
        for _ in range(6):
            first = random.randrange(1, end + 1)
            last = random.randrange(first, end + 1)
            table = read(
                servers=fresh.servers,
                subscribe=",".join(topics),
                startingOffsets=str(first),
                endingOffsets=f'{{"glsn": {last}}}',
                minPartitions=str(random.choice((1, 2, 9))),
                **{"watermark.bound": f"{bound}us", "watermark.idleAfter": "1000d"},
            )
            rows = expected(fresh, topics, first, last)
            assert plain(table) == rows
            assert seen(table) == {row[2]: right[row[2]] for row in rows}


def test_declared_watermarks_and_idle_streams(fresh: cutwater.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``log.watermark`` says, which asks the clock of the log too."""
    random = seeded()
    monkeypatch.setattr(log_walk, "LOOK_BACK", random.choice((1, 5, 4_096)))
    streams = fresh.create_topic("t", streams=3).streams
    for _ in range(40):
        declared = random.choice((None, at_us(random.randrange(10**8))))
        fresh.append("t", [b"x"] * random.choice((1, 3)), stream=random.choice(streams), watermark=declared)
    for options, arguments in (
        ({"watermark.punctuated": "true"}, {"punctuated": True}),
        ({"watermark.idleAfter": "2ms"}, {"idle_after": timedelta(milliseconds=2)}),
        (
            {"watermark.punctuated": "true", "watermark.idleAfter": "1ms"},
            {"punctuated": True, "idle_after": timedelta(milliseconds=1)},
        ),
    ):
        first = random.randrange(1, fresh.tail())
        table = read(servers=fresh.servers, subscribe="t", startingOffsets=str(first), **options)
        for glsn, watermark in random.sample(sorted(seen(table).items()), min(5, table.num_rows)):
            right = fresh.watermark("t", at=glsn - 1, **arguments) if glsn > 1 else None
            assert watermark == (None if right is None else round(right.timestamp() * 1_000_000)), (glsn, options)


def test_a_stream_that_was_sealed_for_good(fresh: cutwater.Client) -> None:
    """Event time does not wait for it any more, only for the one that took its place."""

    async def finalize(stream: int) -> None:
        access = with_secret(fresh.servers, ANYONE)
        async with Admin(parse_servers(fresh.servers), timeout_ms=30_000, access=access) as admin:
            await admin.finalize(LogStreamId(stream))

    slow, fast = fresh.create_topic("t", streams=2).streams
    fresh.append("t", b"x", stream=slow, timestamp=at_us(1_000_000))
    fresh.append("t", b"x", stream=fast, timestamp=at_us(50_000_000))
    asyncio.run(finalize(slow))
    while len(streams := set(fresh.topic("t").streams) - {slow}) < 2:
        time.sleep(0.01)
    for number in (*sorted(streams), fast):
        fresh.append("t", b"x", stream=number, timestamp=at_us(60_000_000))
    found = seen(read(servers=fresh.servers, subscribe="t", **{"watermark.idleAfter": "9d"}))
    for glsn, watermark in found.items():
        right = fresh.watermark("t", at=glsn - 1, idle_after=timedelta(days=9)) if glsn > 1 else None
        assert watermark == (None if right is None else round(right.timestamp() * 1_000_000))
    assert found[max(found)] == 60_000_000 - 1_000


def test_micro_batches_with_limits(fresh: cutwater.Client) -> None:
    """Exactly as many records as allowed, in ranges that follow each other, and the same watermarks as in one read."""
    random = seeded()
    streams = fresh.create_topic("t", streams=3).streams
    fresh.create_topic("other")
    for _ in range(10):
        fill(fresh, "t", random, 4, streams)
        fresh.append("other", [b"x"] * random.choice((1, 300)))
    rows, right = expected(fresh, "t", 1, fresh.tail()), watermarks(fresh, ["t"], FOREVER)
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "earliest", "watermark.idleAfter": "99d"}
    with stream(**options, maxOffsetsPerTrigger="37") as reader:
        reader.prepareForTriggerAvailableNow()
        late = fresh.append("t", b"too late")
        start, found, sizes, marks = reader.initialOffset(), [], [], {}
        while (end := latest(reader, start)) != start:
            table = rows_of(reader, reader.partitions(start, end), columns(options))
            assert all(start["glsn"] < glsn <= end["glsn"] for glsn in table["glsn"].to_pylist())
            sizes.append(table.num_rows)
            found += plain(table)
            marks |= seen(table)
            start = end
    assert found == rows
    assert sizes[:-1] == [37] * (len(sizes) - 1)
    assert marks == right
    with stream(**options, maxBytesPerTrigger="1") as reader:
        first = latest(reader, reader.initialOffset())
        assert rows_of(reader, reader.partitions({"glsn": 0}, first), columns(options)).num_rows == 1
        assert latest(reader, {"glsn": 0}, ReadAllAvailable()) == {"glsn": late.glsn, "topics": {"1": "t"}, "rule": 2}


def test_the_offset_moves_with_the_topics_of_the_query_only(fresh: cutwater.Client) -> None:
    fresh.create_topic("t")
    fresh.create_topic("other")
    ack = fresh.append("t", b"x")
    options = {"servers": fresh.servers, "subscribe": "t", "columns": "glsn,value", "startingOffsets": "earliest"}
    with stream(**options) as reader:
        start = latest(reader, reader.initialOffset())
        assert start == {"glsn": ack.glsn, "from": 0, "topics": {"1": "t"}}
        fresh.append("other", [b"x"] * 10)
        assert latest(reader, start) == start
        behind = reader.reportLatestOffset()
        assert behind == {"glsn": ack.glsn, "recordsBehind": 1}
        reader.partitions({"glsn": 0}, start)
        assert reader.reportLatestOffset() == {"glsn": ack.glsn, "recordsBehind": 0}
        following = fresh.append("t", b"y")
        assert latest(reader, start) == {"glsn": following.glsn, "topics": {"1": "t"}}


def test_an_idle_stream_lets_the_offset_move(fresh: cutwater.Client) -> None:
    """The watermark moves at a tick, without a record, and the query is told."""
    for attempt in range(4):
        # At the tick a second after this record, the log stream that never spoke is idle and the other one is not;
        # unless the machine is so busy that both are, and then once more.
        topic = f"t{attempt}"
        speaks, _never = fresh.create_topic(topic, streams=2).streams
        time.sleep(2.1)
        ack = fresh.append(topic, b"x", stream=speaks, timestamp=at_us(5_000_000))
        options = {"servers": fresh.servers, "subscribe": topic, "startingOffsets": "earliest"}
        with stream(**options, **{"watermark.idleAfter": "3s"}) as reader:
            end = {"glsn": int(ack.glsn)}
            reader.partitions({"glsn": 0}, end)
            for _ in range(25):
                moved = latest(reader, end)
                if moved != end:
                    assert reader.partitions(end, moved) == []
                    return
    pytest.fail("the offset never moved without a record")


def test_a_declaration_moves_the_offset_and_has_no_rows(fresh: cutwater.Client) -> None:
    fresh.create_topic("t", streams=2)
    fresh.append("t", [b"a", b"b"])
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "earliest"}
    with stream(**options) as reader:
        end = latest(reader, reader.initialOffset())
        first = rows_of(reader, reader.partitions({"glsn": 0}, end), columns(options))
        assert first["value"].to_pylist() == [b"a", b"b"]
        # It waits for news, and is told of this one.
        asyncio.run(_declared_soon(fresh, reader, end))
        fresh.append("t", b"c")
        last = max(ack.glsn for ack in fresh.declare("t", idle=True))
        start, end = end, latest(reader, end)
        while end["glsn"] < last:
            end = latest(reader, end)
        assert rows_of(reader, reader.partitions(start, end), columns(options))["value"].to_pylist() == [b"c"]


async def _declared_soon(log: cutwater.Client, reader: StreamReader, end: dict[str, Any]) -> None:
    async def declare() -> int:
        await asyncio.sleep(0.1)
        acks = await asyncio.to_thread(log.declare, "t", idle=True)
        return max(ack.glsn for ack in acks)

    declaring = asyncio.create_task(declare())
    moved = end
    while not declaring.done() or moved["glsn"] < await declaring:
        moved = await asyncio.to_thread(latest, reader, moved)
    assert moved["glsn"] == await declaring


def test_a_long_silence_is_walked_through_once(fresh: cutwater.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MARKS_SECONDS", 0.0)
    fresh.create_topic("t", streams=2)
    fresh.create_topic("other")
    ack = fresh.append("t", b"x")
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "earliest", "watermark.idleAfter": "9d"}
    ranges = link_to(read_options(options, streaming=True).where).ranges
    marks, asked = ranges.marks, []

    async def noting(after: GLSN, through: GLSN, timeout: float) -> list[TimeMark]:
        asked.append((after, found := await marks(after, through, timeout)))
        return found

    with stream(**options) as reader:
        end = latest(reader, reader.initialOffset())
        reader.partitions({"glsn": 0}, end)
        assert end["glsn"] == ack.glsn
        monkeypatch.setattr(ranges, "marks", noting)
        while sum(len(found) for _, found in asked) < 3:
            # The log ticks once a second.
            assert latest(reader, end) == end
    told = [mark.glsn for _, found in asked for mark in found]
    assert told == sorted(set(told)), "no mark is asked for twice"


def test_new_streams_and_topics_join(fresh: cutwater.Client) -> None:
    fresh.create_topic("orders-1")
    fresh.append("orders-1", b"a")
    options = {"servers": fresh.servers, "subscribePattern": "orders-.*", "startingOffsets": "earliest"}
    with stream(**options) as reader:
        start = latest(reader, reader.initialOffset())
        fresh.change_topic("orders-1", streams=3)
        fresh.create_topic("orders-2")
        while len(fresh.topic("orders-1").streams) < 3:
            time.sleep(0.01)
        for number in fresh.topic("orders-1").streams:
            fresh.append("orders-1", b"b", stream=number)
        fresh.append("orders-2", b"c")
        end = latest(reader, start)
        while end["glsn"] < fresh.tail() and latest(reader, end) != end:
            end = latest(reader, end)
        table = rows_of(reader, reader.partitions(start, end), columns(options))
        assert plain(table) == expected(fresh, ["orders-1", "orders-2"], start["glsn"] + 1, end["glsn"])
        assert sorted(table["value"].to_pylist()) == [b"b", b"b", b"b", b"c"]
        fresh.create_topic("orders-typed", schema={"n": pa.int64()})
        fresh.append("orders-typed", {"n": 1})
        with pytest.raises(InvalidArgument, match="'orders-typed' does not have the columns of this query"):
            reader.partitions(end, latest(reader, end))


def test_trimmed_records(fresh: cutwater.Client, caplog: pytest.LogCaptureFixture) -> None:
    fresh.create_topic("t")
    fresh.create_topic("other")
    for value in (b"a", b"b", b"c", b"d"):
        ack = fresh.append("t", value)
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "1", "columns": "glsn,value"}
    fresh.trim("t", before=ack.glsn)
    with stream(**options) as reader:
        end = latest(reader, reader.initialOffset())
        with pytest.raises(Trimmed) as raised:
            reader.partitions({"glsn": 1}, end)
        assert raised.value.first_left == ack.glsn
        assert raised.value.topic == "t"
        assert f"GLSN 2 of topic 't' was trimmed: the first one left is {ack.glsn}. " in raised.value.message
        assert "failOnDataLoss=false" in raised.value.message
    with stream(**options, failOnDataLoss="false") as reader:
        end = latest(reader, {"glsn": 1})
        table = rows_of(reader, reader.partitions({"glsn": 1}, end), columns(options))
        assert table["value"].to_pylist() == [b"d"]
        assert reader.reportLatestOffset() == {"glsn": ack.glsn, "recordsBehind": 0, "lostBefore": {"t": ack.glsn}}
        assert "DATA LOSS" in caplog.text
    # What is gone was read before: the trim lies above it, because another topic went on.
    last = fresh.append("other", [b"x"] * 5)
    fresh.trim("t", before=last.glsn)
    new = fresh.append("t", b"e")
    with stream(**options) as reader:
        parts = reader.partitions({"glsn": ack.glsn}, {"glsn": new.glsn})
        assert rows_of(reader, parts, columns(options))["value"].to_pylist() == [b"e"]
    # Whoever begins with the earliest misses nothing.
    assert read(servers=fresh.servers, subscribe="t,other")["value"].to_pylist() == [b"x"] * 5 + [b"e"]


def test_a_trim_while_a_task_reads(fresh: cutwater.Client) -> None:
    fresh.create_topic("t")
    acks = [fresh.append("t", b"x" * 1_000) for _ in range(4)]
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "1", "columns": "glsn,value"}
    with stream(**options) as reader:
        parts = reader.partitions({"glsn": 0}, {"glsn": acks[-1].glsn})
        fresh.trim("t", before=acks[2].glsn)
        with pytest.raises(Trimmed, match=f"the first one left is {acks[2].glsn}"):
            rows_of(reader, parts, columns(options))
    with stream(**options, failOnDataLoss="false") as reader:
        link = link_to(reader.options.where)
        planner = reader.planner(link)
        parts = link.loop.run(planner.parts(acks[1].glsn, acks[-1].glsn))
        assert rows_of(reader, parts, columns(options))["glsn"].to_pylist() == [acks[2].glsn, acks[3].glsn]


def test_times_and_ends(fresh: cutwater.Client) -> None:
    fresh.create_topic("t")
    acks = [fresh.append("t", value) for value in (b"a", b"b", b"c")]
    middle = fresh.read(acks[1].glsn).ingested_at
    options = {"servers": fresh.servers, "subscribe": "t"}
    assert read(**options, startingTimestamp=middle.isoformat())["value"].to_pylist() == [b"b", b"c"]
    assert read(**options, endingTimestamp=middle.isoformat())["value"].to_pylist() == [b"a"]
    assert read(**options, startingOffsets=str(acks[2].glsn))["value"].to_pylist() == [b"c"]
    assert read(**options, endingOffsets=str(acks[2].glsn))["value"].to_pylist() == [b"a", b"b"]
    assert read(**options, startingTimestamp="4102444800000").num_rows == 0
    with pytest.raises(InvalidArgument, match="'endingOffsets' lies above the end of the log"):
        read(**options, endingOffsets="1000")
    with stream(**options) as reader:
        assert reader.initialOffset()["glsn"] >= acks[2].glsn
    with stream(**options, startingTimestamp=str(int(middle.timestamp() * 1_000) + 1)) as reader:
        assert reader.initialOffset()["glsn"] >= acks[0].glsn


def test_topics_that_do_not_fit(fresh: cutwater.Client) -> None:
    fresh.create_topic("a")
    fresh.create_topic("typed", schema={"n": pa.int64()})
    with pytest.raises(NotFound, match="there is no topic 'b'; topics: a, typed"):
        columns({"servers": fresh.servers, "subscribe": "a,b"})
    with pytest.raises(InvalidArgument, match="'a' and 'typed' do not have the same columns"):
        columns({"servers": fresh.servers, "subscribe": "a,typed"})
    assert columns({"servers": fresh.servers, "subscribe": "a,typed", "columns": "topic,glsn"}).names == [
        "topic",
        "glsn",
    ]
    with pytest.raises(
        InvalidArgument, match="'columns' names 'n', which topic 'a' does not have: choose among topic, "
    ):
        columns({"servers": fresh.servers, "subscribe": "a", "columns": "n"})
    with pytest.raises(InvalidArgument, match=r"'x\.\*': it matches no topic yet.*topics: a, typed"):
        columns({"servers": fresh.servers, "subscribePattern": "x.*"})
    assert read_options({"path": ".", "subscribe": "a"}, streaming=None).where.path == str(Path.cwd())


@pytest.mark.parametrize("where", [{}, {"startingTimestamp": "4102444800000"}])
def test_the_first_micro_batch_begins_where_it_was_decided(fresh: cutwater.Client, where: dict[str, str]) -> None:
    """Spark asks for the beginning once more when it plans the batch, and again after a restart; the log goes on."""
    fresh.create_topic("t")
    fresh.append("t", b"old")
    options = {"servers": fresh.servers, "subscribe": "t", "columns": "glsn,value", **where}
    with stream(**options) as reader:
        first = reader.initialOffset()
        fresh.append("t", [b"a", b"b"])
        end = latest(reader, first)
        fresh.append("t", [b"c", b"d"])
        again = reader.initialOffset()
        table = rows_of(reader, reader.partitions(again, end), columns(options))
        assert table["value"].to_pylist() == [b"a", b"b"]
    with stream(**options) as reader:
        again = reader.initialOffset()
        assert again["glsn"] > end["glsn"]
        table = rows_of(reader, reader.partitions(again, end), columns(options))
        assert table["value"].to_pylist() == [b"a", b"b"]
        following = latest(reader, end)
        table = rows_of(reader, reader.partitions(end, following), columns(options))
        assert table["value"].to_pylist() == [b"c", b"d"]
        assert following == {"glsn": fresh.tail(), "topics": {"1": "t"}}
        assert latest(reader, following) == following


def test_a_first_micro_batch_without_records(fresh: cutwater.Client) -> None:
    fresh.create_topic("t")
    fresh.append("t", b"old")
    options = {"servers": fresh.servers, "subscribe": "t", "columns": "glsn,value"}
    with stream(**options) as reader:
        end = latest(reader, first := reader.initialOffset())
        assert end == first
        fresh.append("t", b"new")
    with stream(**options) as reader:
        assert reader.partitions(reader.initialOffset(), end) == []
        following = latest(reader, end)
        parts = reader.partitions(end, following)
        assert rows_of(reader, parts, columns(options))["value"].to_pylist() == [b"new"]


def test_a_range_that_begins_after_its_end_is_refused(fresh: cutwater.Client) -> None:
    fresh.create_topic("t")
    acks = [fresh.append("t", value) for value in (b"a", b"b", b"c")]
    options = {"servers": fresh.servers, "subscribe": "t"}
    with stream(**options) as reader, pytest.raises(InvalidArgument, match="begins after GLSN"):
        reader.partitions({"glsn": acks[2].glsn}, {"glsn": acks[0].glsn})
    with stream(**options) as reader, pytest.raises(InvalidArgument, match="does this checkpoint belong to a log"):
        reader.partitions({"offset": 1}, {"glsn": 2})
    with pytest.raises(InvalidArgument, match="begins after GLSN"):
        read(**options, startingOffsets=str(acks[2].glsn), endingOffsets=str(acks[1].glsn))
    fresh.trim("t", before=acks[2].glsn)
    assert read(**options, endingOffsets=str(acks[1].glsn)).num_rows == 0


def test_a_checkpoint_that_has_read_further_than_the_log_goes_is_refused(fresh: cutwater.Client) -> None:
    """As after a copy of an older data directory: what is appended up to there would be skipped without a word."""
    fresh.create_topic("t")
    last = fresh.append("t", b"x").glsn
    with stream(servers=fresh.servers, subscribe="t", startingOffsets="earliest") as reader:
        assert latest(reader, {"glsn": last}) == {"glsn": last}
    with (
        stream(servers=fresh.servers, subscribe="t", startingOffsets="earliest") as reader,
        pytest.raises(Refused, match=rf"read up to GLSN {last + 1_000}, and the log ends at"),
    ):
        latest(reader, {"glsn": last + 1_000})
    # Also where it would have nothing to read.
    with stream(servers=fresh.servers, subscribe="t", startingOffsets="earliest") as reader:
        reader.prepareForTriggerAvailableNow()
        assert latest(reader, {"glsn": last}) == {"glsn": last}
        with pytest.raises(Refused, match=rf"read up to GLSN {last + 1_000}, and the log ends at"):
            latest(reader, {"glsn": last + 1_000})


def test_a_walk_begins_where_all_topics_have_begun() -> None:
    """And only if that is not enough, where the first of them begins."""
    far = 100_000

    def begins(glsn: int, *firsts: int, rule: int = 2) -> list[int]:
        return list(log_walk.walk_begins(glsn, [GLSN(first) for first in firsts], rule))

    assert begins(far) == begins(far, 1, 1) == [far - 4_096, far - 65_536, 0]
    assert begins(far, 500, 90_001) == [far - 4_096, 90_000, 499]
    assert begins(far, 500, 99_001) == begins(far, 500, 99_001, 700) == [99_000, 499]
    # A topic that begins above has said nothing that is known here.
    assert begins(far, 500, far + 2) == begins(far, 500, far + 1) == [499]
    assert begins(far, 500, 99_001, rule=1) == [far - 4_096, far - 65_536, 499]


def test_the_earliest_of_several_topics_after_a_restart(fresh: cutwater.Client) -> None:
    """What was trimmed before the query began is not missed, also by those who go on from its checkpoint."""
    fresh.create_topic("trimmed")
    fresh.create_topic("whole")
    for number in range(4):
        fresh.append("whole", b"w%d" % number)
        ack = fresh.append("trimmed", b"t%d" % number)
    fresh.trim("trimmed", before=ack.glsn)
    options = {
        "servers": fresh.servers,
        "subscribe": "trimmed,whole",
        "columns": "glsn,value",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "1",
    }
    values, end = [], None
    while True:
        # Every micro-batch by a planner of its own; the first one is planned twice, the second time after a restart.
        with stream(**options) as reader:
            start = end or reader.initialOffset()
            end = latest(reader, start)
        if end == start:
            break
        with stream(**options) as reader:
            parts = reader.partitions(reader.initialOffset() if start["glsn"] == 0 else start, end)
            values += rows_of(reader, parts, columns(options))["value"].to_pylist()
    assert values == [b"w0", b"w1", b"w2", b"w3", b"t3"]
    assert end == {"glsn": ack.glsn, "topics": {"1": "trimmed", "2": "whole"}}
    fresh.append("trimmed", b"t4")
    last = fresh.append("trimmed", b"t5")
    fresh.trim("trimmed", before=last.glsn)
    with stream(**options) as reader, pytest.raises(Trimmed):
        reader.partitions(end, {"glsn": last.glsn})


def test_event_times_that_were_trimmed_still_count(fresh: cutwater.Client) -> None:
    """However much of the trim the replica that answers has heard of: the clock begins with what was said by then."""
    slow, fast = fresh.create_topic("t", streams=2).streams
    fresh.append("t", b"x", stream=slow, timestamp=at_us(50_000_000))
    fresh.append("t", b"x", stream=fast, timestamp=at_us(60_000_000))
    left = fresh.append("t", b"x", stream=fast, timestamp=at_us(70_000_000))
    last = fresh.append("t", b"x", stream=fast, timestamp=at_us(80_000_000))
    options = {"servers": fresh.servers, "subscribe": "t", "watermark.idleAfter": "9d"}
    right = seen(read(**options))[last.glsn]
    assert right == 50_000_000 - 1_000
    fresh.trim("t", before=left.glsn)
    link = link_to(read_options(options, streaming=False).where)
    (info,) = (info for info in link.loop.run(link.ranges.view(10)).streams.values() if info.stream == slow)
    heard = False
    while not heard:
        assert seen(read(**options)) == {left.glsn: right, last.glsn: right}
        try:
            link.loop.run(link.ranges.heads(info, GLSN(1), last.glsn, 10))
        except Trimmed:
            heard = True
    assert seen(read(**options)) == {left.glsn: right, last.glsn: right}
    watermark = fresh.watermark("t", at=last.glsn, idle_after=timedelta(days=9))
    assert watermark is not None
    assert round(watermark.timestamp() * 1_000_000) == right


def test_a_micro_batch_of_before_is_read_again_under_its_own_rule(fresh: cutwater.Client) -> None:
    """Its end names no rule. Under rule 1 a record of one topic lets time pass for the streams of the other."""
    fresh.create_topic("t")
    fresh.create_topic("u")
    while True:
        acks = [
            fresh.append(topic, b"x", timestamp=at_us(time))
            for topic, time in (("t", 50_000), ("u", 100_000), ("u", 1))
        ]
        if acks[0].glsn + 2 == acks[2].glsn:
            break
    last = acks[2].glsn
    options = {"servers": fresh.servers, "subscribe": "t,u", "watermark.idleAfter": "0s", "startingOffsets": "earliest"}
    with stream(**options) as reader:
        for end, expected in (({"glsn": last}, 99_000), ({"glsn": last, "rule": 1}, 99_000)):
            table = rows_of(reader, reader.partitions({"glsn": acks[0].glsn - 1}, end), columns(options))
            assert seen(table)[last] == expected
        table = rows_of(
            reader, reader.partitions({"glsn": acks[0].glsn - 1}, {"glsn": last, "rule": 2}), columns(options)
        )
        assert seen(table)[last] == 49_000
        with pytest.raises(
            Refused, match="made under rule 3 of the watermark, and this version of Cutwater knows 1 and 2"
        ):
            reader.partitions({"glsn": 0}, {"glsn": last, "rule": 3})
        with pytest.raises(InvalidArgument, match="unknown field"):
            reader.partitions({"glsn": 0}, {"glsn": last, "clock": 3})


def test_after_a_trim_rule_1_begins_with_no_watermark(fresh: cutwater.Client) -> None:
    """Rule 2 is evaluated where the log begins after a trim; rule 1 was not."""
    fresh.create_topic("t")
    fresh.append("t", b"x", timestamp=at_us(50_000))
    left = fresh.append("t", b"x", timestamp=at_us(60_000)).glsn
    fresh.trim("t", before=left)
    options = {"servers": fresh.servers, "subscribe": "t", "startingOffsets": "earliest"}
    with stream(**options) as reader:
        for rule, expected in ((1, None), (2, 49_000)):
            parts = reader.partitions({"glsn": left - 1}, {"glsn": left, "rule": rule})
            assert seen(rows_of(reader, parts, columns(options))) == {left: expected}
