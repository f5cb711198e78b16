"""Records: ranges by position and by time, single ones, and the tail as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Meta, Raw, Struct

from cutwater.client.async_client import AsyncClient
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.core import requests as r
from cutwater.errors import DeadlineExceeded, InvalidArgument, NoRecordHere
from cutwater.protocol import storage_api
from cutwater.runtime.deadlines import Deadline
from cutwater.service.record_filter import RowFilter, compile_filter
from cutwater.service.record_json import OF_EVERY_RECORD, JsonRecord, json_rows
from cutwater.service.resources.paging import NUMBER_IN_PATH, Limit, Position, number_of
from cutwater.service.routes import LAST_EVENT_ID, EventStream, Page, RestCall, RestRoute, SentEvent, get

ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Size of the records in one answer; at least one is in it."""
SCANNED_ROWS_MAX = 200_000
SCANNED_BYTES_MAX = 128 * 1024 * 1024
"""How much a filter may pass over for one answer."""
SCAN_SECONDS = 8.0
STREAM_SECONDS = 3_600.0
ALIVE_SECONDS = 15.0
READS = (storage_api.FOLLOW.name, storage_api.READ.name, storage_api.FIND.name)
Text = Annotated[str, Meta(max_length=2_000)]
Time = Annotated[str, Meta(max_length=64, description="A time in ISO 8601, such as 2026-01-31T12:00:00Z.")]


class RecordsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``start`` and ``stop`` are positions, ``since`` and ``until`` times of commit; the ends are not included. Without
    a start, the range begins with the topic. ``after`` continues behind a page."""

    start: Position | None = None
    stop: Position | None = None
    since: Time | None = None
    until: Time | None = None
    after: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    where: Text | None = None
    limit: Limit = 100


class TailQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``start``: begin at this position; otherwise with the next record. The stream ends after ``limit`` records or
    ``seconds``."""

    start: Position | None = None
    where: Text | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 1_000_000_000
    seconds: Annotated[int, Meta(ge=1, le=int(STREAM_SECONDS))] = int(STREAM_SECONDS)


class RecordsPage(Struct, frozen=True):
    """``next``: what ``after`` of the next request is; null at the end of the range. With a filter, a page may have few
    records, or none, before the end. ``high_watermark`` is where the log ended."""

    items: tuple[Raw, ...]
    next: str | None
    high_watermark: int


class _Reading:
    """A range of one topic, on its way into an answer."""

    def __init__(self, log: AsyncClient, is_typed: bool, where: str | None) -> None:
        self.log, self.is_typed, self.where = log, is_typed, where
        self._schema: pa.Schema | None = None
        self._filter: RowFilter | None = None

    def selected(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that the filter selects. Later batches may have more columns."""
        if self.where is None:
            return batch
        if batch.schema != self._schema:
            self._schema, self._filter = batch.schema, compile_filter(self.where, batch.schema)
        assert self._filter is not None
        return batch.filter(self._filter(batch))


async def _opened(call: RestCall[Any, None], where: str | None) -> _Reading:
    """Check the topic and the filter before anything is read."""
    log = await call.ask.log()
    topic = await log.topic(call.path["topic"])
    reading = _Reading(log, topic.schema is not None, where)
    if where is not None:
        fields = list(topic.schema or KEY_VALUE_COLUMNS)
        known = {field.name for field in fields}
        fields += [field for field in COLUMNS_OF_THE_LOG if field.name not in known]
        compile_filter(where, pa.schema(fields))
    return reading


TIMESTAMP = pa.timestamp("us", "UTC")
COLUMNS_OF_THE_LOG = [
    pa.field(name, kind)
    for name, kind in zip(
        OF_EVERY_RECORD, (pa.int64(), pa.int64(), pa.int64(), pa.string(), TIMESTAMP, TIMESTAMP), strict=True
    )
]
KEY_VALUE_COLUMNS = (pa.field("key", pa.binary()), pa.field("value", pa.binary()))


async def records(call: RestCall[RecordsQuery, None]) -> RecordsPage:
    query, topic = call.query, call.path["topic"]
    reading = await _opened(call, query.where)
    end = await reading.log.tail()
    start, stop = _start(query), _stop(query, end)
    found: list[Raw] = []
    size = rows = seen = 0
    reached = 0
    is_cut = False
    deadline = Deadline(SCAN_SECONDS)
    batches = reading.log.batches(topic, start=start, stop=stop, follow=False, timeout=SCAN_SECONDS + 2)
    async with batches:
        while not is_cut and (some := await batches.take()):
            for batch in some:
                rows += batch.num_rows
                seen += batch.nbytes
                for glsn, record in json_rows(reading.selected(batch), is_typed=reading.is_typed):
                    if len(found) >= query.limit or (found and size + len(record) > ANSWER_BYTES_MAX):
                        is_cut = True
                        break
                    found.append(Raw(record))
                    size += len(record)
                    reached = glsn
                if is_cut:
                    break
                if batch.num_rows:
                    reached = max(reached, batch.column("glsn")[-1].as_py())
                is_cut = rows >= SCANNED_ROWS_MAX or seen >= SCANNED_BYTES_MAX or deadline.is_over
                if is_cut or len(found) >= query.limit:
                    is_cut = True
                    break
    return RecordsPage(tuple(found), str(reached) if is_cut and reached < end else None, end)


def _start(query: RecordsQuery) -> int | datetime | Literal["earliest"]:
    if query.start is not None and query.since is not None:
        raise InvalidArgument("a range begins in one place: give one of start and since")
    if query.after is not None:
        return query.after + 1
    if query.since is not None:
        return parse_time(query.since)
    return query.start if query.start is not None else "earliest"


def _stop(query: RecordsQuery, end: int) -> int | datetime | None:
    if query.stop is not None and query.until is not None:
        raise InvalidArgument("a range ends in one place: give one of stop and until")
    if query.until is not None:
        return min(parse_time(query.until), datetime.now(UTC))
    # A range that ends beyond the log ends with it: nobody waits for records that are to come.
    return None if query.stop is None else min(query.stop, end + 1)


def parse_time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{text[:80]!r} is no time: write it in ISO 8601, as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


async def record(call: RestCall[None, None]) -> Any:
    glsn, topic = number_of(call.path, "glsn"), call.path["topic"]
    reading = await _opened(call, None)
    end = await reading.log.tail()
    if glsn <= end:
        async with reading.log.batches(topic, start=glsn, stop=glsn + 1, follow=False) as batches:
            while some := await batches.take():
                for batch in some:
                    for _, encoded in json_rows(batch, is_typed=reading.is_typed):
                        return encoded
    raise NoRecordHere(f"topic {topic!r} has no record at GLSN {glsn}")


async def tail(call: RestCall[TailQuery, None]) -> EventStream:
    query = call.query
    reading = await _opened(call, query.where)
    start = _resumed(call.headers.get(LAST_EVENT_ID), query.start)
    batches = reading.log.batches(call.path["topic"], start=start)
    await batches.begun()
    return EventStream(_tailed(reading, batches, query))


def _resumed(last: str | None, start: int | None) -> Any:
    if last is None:
        return "latest" if start is None else start
    return int(last) + 1


async def _tailed(
    reading: _Reading, batches: AsyncSubscription[pa.RecordBatch], query: TailQuery
) -> AsyncIterator[SentEvent | None]:
    left, deadline = query.limit, Deadline(query.seconds)
    async with batches:
        while left > 0 and not deadline.is_over:
            try:
                some = await batches.take(timeout=max(0.001, min(ALIVE_SECONDS, deadline.left)))
            except DeadlineExceeded:
                yield None
                continue
            for batch in some:
                for glsn, encoded in json_rows(reading.selected(batch), is_typed=reading.is_typed):
                    yield SentEvent(encoded, id=str(glsn))
                    left -= 1
                    if left <= 0:
                        return
                # A batch of many rows that nobody is sent must not keep others waiting.
                await asyncio.sleep(0)


CALLS = {"requests": (r.CatalogRequest,), "methods": READS, "tag": "records"}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/topics/{topic}/records",
        "records",
        "Records of a range, filtered if wanted",
        records,
        answer=Page[JsonRecord],
        query=RecordsQuery,
        seconds=20.0,
        **CALLS,
    ),
    get(
        "/v1/topics/{topic}/records/{glsn}",
        "record",
        "The record at a position",
        record,
        answer=JsonRecord,
        path_types={"glsn": NUMBER_IN_PATH},
        **CALLS,
    ),
    get(
        "/v1/topics/{topic}/tail",
        "tail",
        "Records as they come, as server-sent events",
        tail,
        answer=JsonRecord,
        query=TailQuery,
        is_stream=True,
        **CALLS,
    ),
)
