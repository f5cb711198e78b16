"""Decides how an append is sent: small appends share a batch with others; large ones, and those with a condition, go
alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from operator import index
from time import time_ns
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.append.batcher import RECORD_COST_BYTES, SMALL_BYTES, BatchQueue, BatchQueues, Waiting
from cutwater.client.append.declarations import declared_of
from cutwater.client.append.plain_arrow import AppendRecords, Single, are_in_order, owned, values_of
from cutwater.client.append.sender import Shipment, Shipping
from cutwater.client.arguments import check_number
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.convert.conversion import Records, to_batch
from cutwater.client.convert.encoding import Compression, Limits, encode, encode_parts, value_bytes_max
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.convert.times import Time, time_us
from cutwater.client.convert.value_rule import check_arrow
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.client.thread_calls import NotThisWay, Visit
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, InvalidArgument, NotFound
from cutwater.runtime.deadlines import Deadline
from cutwater.types import LLSN, Ack, Batch, LogStreamId

LANES_MAX = 256
RECORD_BYTES = 16
"""Approximate overhead of one record, or of a batch of values with their offsets."""
TIME_BYTES = 8
"""Bytes that an event time adds to a record."""
_PLAIN = (str, bytearray, memoryview, bytes)
_ONLY_VALUES = ["value"]

Prepare = Callable[[Records, Any, Any, Any], tuple[AppendRecords, int, int]]
"""Turns records, key, timestamp and headers into a part of a batch, its number of records, and its bytes."""


def check_stream(stream: object) -> LogStreamId:
    try:
        return LogStreamId(index(stream))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(
            f"stream= is the number of a log stream, as an acknowledgement has it, not {stream!r}"
        ) from None


def now_us() -> int:
    return time_ns() // 1_000


class AppendInput:
    """The arguments of one append."""

    __slots__ = ("declared", "headers", "if_llsn", "key", "records", "stream", "timestamp")

    def __init__(
        self,
        records: Records,
        key: Any,
        timestamp: Any,
        headers: Any,
        stream: int | None,
        watermark: Time | None,
        if_llsn: int | None,
        idle: bool = False,
    ) -> None:
        self.records, self.key, self.timestamp, self.headers = records, key, timestamp, headers
        self.stream = None if stream is None else check_stream(stream)
        self.declared = declared_of(watermark, idle)
        self.if_llsn = None if if_llsn is None else check_number("if_llsn", if_llsn, "an LLSN")


class AppendVisit(Visit[Ack]):
    """A small append of a thread that waits. It is itself the outcome that its lane sets. ``enter`` returns the lane,
    or None if the append has to be made as a coroutine."""

    __slots__ = ("_ack", "_count", "_enter", "_error", "_is_done", "_part", "_seconds", "_size")

    def __init__(
        self, enter: Callable[[], BatchQueue | None], part: AppendRecords, count: int, size: int, seconds: float
    ) -> None:
        super().__init__(seconds)
        self._enter, self._part, self._count, self._size, self._seconds = enter, part, count, size, seconds
        self._ack: Ack | None = None
        self._error: BaseException | None = None
        self._is_done = False

    def begin(self) -> None:
        try:
            lane = self._enter()
            at = asyncio.get_running_loop().time() + self._seconds
            if lane is None or not lane.take(Waiting(self._part, self._count, self._size, at, self._seconds, self)):
                raise NotThisWay
        except Exception as error:
            # The waiting thread must get any error.
            self.set_exception(error)

    def give_up(self) -> None:
        """Give the append up. If it was not sent, its batch leaves it out."""
        self._is_done = True

    def done(self) -> bool:
        return self._is_done

    def set_result(self, ack: Ack) -> None:
        self._ack, self._is_done = ack, True
        self.over.release()

    def set_exception(self, error: BaseException) -> None:
        self._error, self._is_done = error, True
        self.over.release()

    def result(self) -> Ack:
        if isinstance(self._error, NotFound):
            # Nothing was appended. The name may mean another topic by now.
            raise NotThisWay
        if self._error is not None:
            raise self._error
        if self._ack is None:
            raise ClientClosed("this client was closed meanwhile")
        return self._ack

    def stuck(self, seconds: float) -> CutwaterError:
        return AppendUnknown(
            f"no answer came within {self._seconds:g} s, as a disk of this log does not answer, so whether the append "
            "is in the log is not known: see to the disk, and read the log, or use a producer, which finds out"
        )


class Appends:
    def __init__(self, catalogs: Catalogs, shipping: Shipping, limits: Limits, compression: Compression | None) -> None:
        self._catalogs, self._shipping = catalogs, shipping
        self.limits, self._compression = limits, compression
        self._small_bytes = min(SMALL_BYTES, limits.record_bytes_max)
        self._lanes: BatchQueues = {}
        self._view = catalogs.view
        self._plain_lanes: dict[tuple[str, LogStreamId | None], BatchQueue] = {}
        """Lanes by topic and log stream. Valid as long as ``_view`` is the catalog."""

    async def close(self) -> None:
        for lane in self._lanes.values():
            await lane.close()
        self._shipping.close()

    def begin(
        self, topic: str, records: Records, key: Any, timestamp: Any, stream: int | None, seconds: float
    ) -> tuple[asyncio.Future[Ack], float] | None:
        """Accept a small and plain append, if there is room. Returns its outcome and its deadline, or None if it needs
        ``append``; then nothing was done."""
        if type(records) is bytes and key is None and timestamp is None and stream is None:
            # The most common append. Does the same as the code below in fewer steps.
            lane = self._plain_lanes.get((topic, None))
            size = len(records) + RECORD_BYTES
            if lane is not None and size <= self._small_bytes and self._catalogs.view is self._view:
                return lane.begin(Single(records, None, time_ns() // 1_000), 1, size, seconds)
        lane = self._enter(topic, None if stream is None else check_stream(stream))
        if lane is None:
            return None
        part, count, size = self._plain(records, key, timestamp)
        if part is None or size > self._small_bytes:
            return None
        return lane.begin(part, count, size, seconds)

    async def append(self, topic: str, given: AppendInput, deadline: Deadline) -> Ack:
        if given.if_llsn is not None and given.stream is None:
            raise InvalidArgument("if_llsn= is a position in one log stream: name it with stream=")
        info = self._catalogs.view.topics.get(topic) or await self._catalogs.topic(topic, deadline)
        try:
            return await self._append(info, given, deadline)
        except NotFound:
            # Nothing was appended. The name may mean another topic by now.
            found = self._catalogs.view.topics.get(topic)
            if found is None or found.topic == info.topic:
                raise
            return await self._append(found, given, deadline)

    def quick(
        self, topic: str, records: Records, key: Any, timestamp: Any, stream: int | None, seconds: float
    ) -> Visit[Ack] | None:
        """See ``AsyncClient._quick_append``. Any thread may call this, so it changes nothing before the visit
        begins."""
        info = self._catalogs.view.topics.get(topic)
        if info is None or info.schemas:
            return None
        part, count, size = self._plain(records, key, timestamp)
        if part is None or size > self._small_bytes:
            return None
        pin = None if stream is None else check_stream(stream)
        return AppendVisit(partial(self._enter, topic, pin), part, count, size, seconds)

    def _enter(self, topic: str, pin: LogStreamId | None) -> BatchQueue | None:
        """Return the lane for records of key and value, or None if the topic is unknown or has a schema."""
        if self._catalogs.view is not self._view:
            self._view = self._catalogs.view
            self._plain_lanes.clear()
        lane = self._plain_lanes.get((topic, pin))
        if lane is None:
            info = self._view.topics.get(topic)
            if info is None or info.schemas:
                return None
            lane = self._plain_lanes[topic, pin] = self._lane(info, pin, self._view.schema(info))
        return lane

    async def _append(self, info: TopicInfo, given: AppendInput, deadline: Deadline) -> Ack:
        schema = self._catalogs.view.schema(info)
        now = now_us()
        is_plain = given.declared is None and given.if_llsn is None
        if is_plain and given.headers is None and not schema.is_typed:
            part, count, size = self._plain(given.records, given.key, given.timestamp)
            if part is not None and size <= self._small_bytes:
                return await self._lane(info, given.stream, schema).append(part, count, size, deadline)
            if part is not None:
                return await self._alone(info, given, self._encoded(schema, [part]), deadline)
        make = partial(
            to_batch,
            records=given.records,
            key=given.key,
            timestamp=given.timestamp,
            headers=given.headers,
            now_us=now,
        )
        try:
            rows = make(schema)
        except InvalidRecord:
            # The schema may have grown since the catalog was fetched.
            await self._catalogs.fresh(deadline)
            schema = self._catalogs.view.schema(await self._catalogs.topic(info.name, deadline))
            rows = make(schema)
        if is_plain and (size := rows.nbytes) <= self._small_bytes:
            return await self._lane(info, given.stream, schema).append(owned(rows), rows.num_rows, size, deadline)
        batch = encode(rows, schema, now, limits=self.limits, compression=self._compression)
        if given.declared is not None:
            batch = given.declared.with_records(batch)
        return await self._alone(info, given, batch, deadline)

    async def _alone(self, info: TopicInfo, given: AppendInput, batch: Batch, deadline: Deadline) -> Ack:
        condition = None if given.if_llsn is None else LLSN(given.if_llsn)
        return await self._shipping.ship(Shipment(), info, given.stream, lambda: batch, condition, deadline)

    def preparing(self, schema: TopicSchema) -> Prepare:
        """Return a function that prepares records for a producer. It refuses at once what cannot be sent at all, not
        when its turn comes."""
        is_typed = schema.is_typed

        def prepare(records: Records, key: Any, timestamp: Any, headers: Any) -> tuple[AppendRecords, int, int]:
            part: AppendRecords | None = None
            if headers is None and not is_typed:
                part, count, size = self._plain(records, key, timestamp)
                if part is not None and size <= self._small_bytes:
                    return part, count, size + RECORD_COST_BYTES
            if part is None:
                rows = to_batch(schema, records, key=key, timestamp=timestamp, headers=headers, now_us=now_us())
                part, count, size = rows, rows.num_rows, rows.nbytes
            if size > self.limits.record_bytes_max:
                self._encoded(schema, [part])
            return owned(part), count, size + RECORD_COST_BYTES

        return prepare

    def encoding(self, schema: TopicSchema) -> Callable[[Sequence[AppendRecords]], Batch]:
        return partial(self._encoded, schema)

    def _encoded(self, schema: TopicSchema, parts: Sequence[AppendRecords]) -> Batch:
        return encode_parts(parts, schema, now_us, limits=self.limits, compression=self._compression)

    def _plain(self, records: Any, key: Any, timestamp: Any) -> tuple[AppendRecords | None, int, int]:
        """Return plain records of key and value as a part, their number and size, or a part of None if they need a full
        conversion. Small parts own their memory."""
        if type(records) is bytes:
            value = records
        elif isinstance(records, _PLAIN):
            value = _bytes(records)
        else:
            return self._values(records) if key is None and timestamp is None else (None, 0, 0)
        if timestamp is None:
            timestamp = time_ns() // 1_000
        elif type(timestamp) is datetime:
            timestamp = time_us(timestamp)
        else:
            return None, 0, 0
        size = len(value) + RECORD_BYTES
        if key is not None:
            if not isinstance(key, bytes):
                return None, 0, 0
            size += len(key)
        if size > self._small_bytes:
            if size > self.limits.record_bytes_max:
                raise RecordTooLarge(0, size, self.limits.record_bytes_max)
            return None, 0, 0
        return Single(value, key, timestamp), 1, size

    def _values(self, records: Any) -> tuple[AppendRecords | None, int, int]:
        """Return the values of Arrow data that has no other column and no errors, however many they are."""
        if isinstance(records, pa.RecordBatch):
            if records.schema.names != _ONLY_VALUES:
                return None, 0, 0
            records = records.column(0)
        if not isinstance(records, pa.BinaryArray) or records.null_count:
            return None, 0, 0
        part = values_of(records, time_ns() // 1_000, self._small_bytes - RECORD_BYTES)
        if part is None:
            return None, 0, 0
        # The same number as ``nbytes``, for a fiftieth of its cost.
        size = len(part.data) + len(part.offsets) + RECORD_BYTES
        if size <= self._small_bytes:
            return (part, part.count, size) if are_in_order(part) else (None, 0, 0)
        check_arrow(records)
        return (part, part.count, size) if self._is_plain_large(records) else (None, 0, 0)

    def _is_plain_large(self, values: pa.Array) -> bool:
        """Return whether a part that is not small can be encoded without Arrow: it is not compressed, and no record is
        too large."""
        if self._compression is not None:
            return False
        return (
            values.total_values_length + TIME_BYTES <= self.limits.record_bytes_max
            or value_bytes_max(values) + TIME_BYTES <= self.limits.record_bytes_max
        )

    def _lane(self, info: TopicInfo, pin: LogStreamId | None, schema: TopicSchema) -> BatchQueue:
        name = info.topic, pin, schema.number
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= LANES_MAX:
                self._lanes = {known: lane for known, lane in self._lanes.items() if not lane.is_idle}
                self._plain_lanes.clear()
            encode, bytes_max = partial(self._encoded, schema), self.limits.together_bytes_max
            lane = self._lanes[name] = BatchQueue(info, pin, self._shipping, encode, bytes_max)
        return lane


def _bytes(value: str | bytearray | memoryview | bytes) -> bytes:
    """Return an immutable copy."""
    if not isinstance(value, str):
        return bytes(value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"this text cannot be stored as UTF-8: {error}", column="value", row=0) from error
