"""Takes an append in: prepares its records, and decides how they are sent. Small appends share a batch with others;
large ones, and those with a declaration or a condition, go alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from operator import index
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.append.batcher import AppendOutcome, BatchQueue, RoutedAppend
from cutwater.client.append.declarations import Declared, declared_of, raise_first
from cutwater.client.append.plain_arrow import AppendRecords, Single, are_in_order, owned, values_of
from cutwater.client.append.sender import Shipment, Shipping
from cutwater.client.arguments import check_number
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.convert.conversion import Records, to_batch
from cutwater.client.convert.encoding import Compression, Limits, encode_parts, value_bytes_max
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.convert.times import Time, time_us
from cutwater.client.convert.value_rule import check_arrow
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.client.loop_thread import NotThisWay, Visit
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, InvalidArgument, NotFound, Unavailable
from cutwater.runtime import system
from cutwater.runtime.deadlines import Deadline
from cutwater.types import LLSN, Ack, Batch, LogStreamId, TopicId

LANES_MAX = 256
SMALL_BYTES = 64 * 1024
"""Appends up to this size may share a batch."""
RECORD_BYTES = 16
"""Approximate overhead of one record, or of a batch of values with their offsets."""
RECORD_COST_BYTES = 64
"""Approximate overhead of a call of send() besides its values."""
TIME_BYTES = 8
"""Bytes that an event time adds to a record."""
_PLAIN = (str, bytearray, memoryview, bytes)
_ONLY_VALUES = ["value"]

Prepared: TypeAlias = tuple[AppendRecords, int, int]
"""A part of a batch, its number of records, and its bytes."""


def check_stream(stream: object) -> LogStreamId:
    try:
        return LogStreamId(index(stream))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(
            f"stream= is the number of a log stream, as an acknowledgement has it, not {stream!r}"
        ) from None


def now_us() -> int:
    return system.wall_time_ns() // 1_000


class _Alone(Shipment, eq=False, kw_only=True):
    """A batch of one append."""

    append: RoutedAppend

    def load(self) -> Batch:
        if self.append.outcome.done():
            raise ClientClosed("the caller does not wait for this append any more")
        assert self.append.batch is not None
        return self.append.batch

    def end(self, outcome: Ack | Exception) -> None:
        waiting = self.append.outcome
        if waiting.done():
            return
        if isinstance(outcome, Ack):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)


class Appends:
    def __init__(self, catalogs: Catalogs, shipping: Shipping, limits: Limits, compression: Compression | None) -> None:
        self._catalogs, self._shipping = catalogs, shipping
        self.limits, self._compression = limits, compression
        self._small_bytes = min(SMALL_BYTES, limits.record_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[TopicId, LogStreamId | None, int], BatchQueue] = {}
        """By topic, log stream and number of the schema."""
        self._waiting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        await self._shipping.close()
        await asyncio.gather(*self._waiting)

    def begin(
        self,
        topic: str,
        seconds: float,
        records: Records,
        key: Any,
        timestamp: Any,
        headers: Any,
        stream: int | None,
        watermark: Time | None,
        idle: bool,
        if_llsn: int | None,
    ) -> tuple[asyncio.Future[Ack], float] | None:
        """Append what ``prepare`` is given, without a coroutine, and return the outcome and the deadline. Returns None
        if this needs ``append``; then nothing was done."""
        info = self._catalogs.view.topics.get(topic)
        if info is None:
            return None
        outcome: asyncio.Future[Ack] = self._loop.create_future()
        try:
            append = self.prepare(
                info, seconds, outcome, records, key, timestamp, headers, stream, watermark, idle, if_llsn
            )
        except InvalidRecord:
            # The schema may have grown since the catalog was fetched, which ``append`` will find out.
            return None
        append.at = at = self._loop.time() + seconds
        self.submit(append)
        return outcome, at

    async def append(self, topic: str, deadline: Deadline, *given: Any) -> Ack:
        """Do the same as ``begin`` in every case."""
        info = self._catalogs.view.topics.get(topic) or await self._catalogs.topic(topic, deadline)
        try:
            return await self._append(info, deadline, given)
        except NotFound:
            # Nothing was appended. The name may mean another topic by now.
            found = self._catalogs.view.topics.get(topic)
            if found is None or found.topic == info.topic:
                raise
            return await self._append(found, deadline, given)

    async def _append(self, info: TopicInfo, deadline: Deadline, given: tuple[Any, ...]) -> Ack:
        outcome: asyncio.Future[Ack] = self._loop.create_future()
        try:
            append = self.prepare(info, deadline.seconds, outcome, *given)
        except InvalidRecord:
            await self._catalogs.fresh(deadline)
            info = await self._catalogs.topic(info.name, deadline)
            append = self.prepare(info, deadline.seconds, outcome, *given)
        append.at = deadline.at
        self.submit(append)
        return await outcome

    async def declare(self, name: str, declared: Declared, pin: LogStreamId | None, deadline: Deadline) -> list[Ack]:
        """Append a declaration without a record to the log stream ``pin``, or to every log stream of the topic that is
        not sealed permanently."""
        view = await self._catalogs.fresh(deadline)
        topic = await self._catalogs.topic(name, deadline)
        if pin is not None:
            return [await self._declare(topic, pin, declared, deadline)]
        streams = [info for info in view.streams_of(topic.topic) if not info.final]
        if not streams:
            raise Unavailable(f"topic {name!r} has no log stream that takes appends, so nothing was declared")
        outcomes = await asyncio.gather(
            *(self._declare(topic, info.stream, declared, deadline) for info in streams), return_exceptions=True
        )
        raise_first(streams, outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, Ack)]

    async def _declare(self, topic: TopicInfo, pin: LogStreamId, declared: Declared, deadline: Deadline) -> Ack:
        outcome: asyncio.Future[Ack] = self._loop.create_future()
        append = RoutedAppend(
            None, 1, 0, deadline.seconds, outcome, deadline.at, topic=topic, pin=pin, batch=declared.alone()
        )
        self.submit(append)
        return await outcome

    def visit(self, topic: str, seconds: float, records: Records, **given: Any) -> Visit[Ack] | None:
        """Return an append that a thread waits for without a coroutine, or None if it needs ``append``. Takes what
        ``prepare`` takes. Any thread may call this, so it changes nothing before the visit begins."""
        info = self._catalogs.view.topics.get(topic)
        if info is None:
            return None
        visit = AppendVisit(self.submit, seconds)
        try:
            visit.append = self.prepare(info, seconds, visit, records, **given)
        except InvalidRecord:
            return None
        return visit

    def prepare(
        self,
        info: TopicInfo,
        seconds: float,
        outcome: AppendOutcome,
        records: Records,
        key: Any = None,
        timestamp: Any = None,
        headers: Any = None,
        stream: int | None = None,
        watermark: Time | None = None,
        idle: bool = False,
        if_llsn: int | None = None,
    ) -> RoutedAppend:
        """Check the arguments of an append, and copy its records. Any thread may call this."""
        pin = None if stream is None else check_stream(stream)
        schema = self._catalogs.view.schema(info)
        plain = None if headers is not None or schema.versions else self._plain(records, key, timestamp)
        part, count, size = plain or self._rows(schema, records, key, timestamp, headers)
        append = RoutedAppend(part, count, size, seconds, outcome, topic=info, pin=pin, schema=schema)
        if watermark is not None or idle is not False or if_llsn is not None:
            declared = declared_of(watermark, idle)
            append.if_llsn = None if if_llsn is None else LLSN(check_number("if_llsn", if_llsn, "an LLSN"))
            if if_llsn is not None and pin is None:
                raise InvalidArgument("if_llsn= is a position in one log stream: name it with stream=")
            append.batch = self.encode(schema, [part], declared)
        elif size > self._small_bytes:
            append.batch = self.encode(schema, [part])
        elif type(part) is not Single:
            append.part = owned(part)
        return append

    def submit(self, append: RoutedAppend) -> None:
        """Send an append, by itself or through its lane, now or when the lane has room. Its records are not converted
        again for that: an iterator can be read only once."""
        schema = append.schema
        if append.batch is None and schema is not None:
            if not self._lane(append, schema).take(append):
                task = self._loop.create_task(self._when_there_is_room(append, schema))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
            return
        append.part = None
        shipment = _Alone(
            topic=append.topic,
            pin=append.pin,
            deadline=Deadline(append.seconds, append.at),
            if_llsn=append.if_llsn,
            append=append,
        )
        self._shipping.send(shipment)
        if isinstance(append.outcome, asyncio.Future):
            # Its caller may be cancelled.
            append.outcome.add_done_callback(lambda _: self._shipping.cancel(shipment))

    async def _when_there_is_room(self, append: RoutedAppend, schema: TopicSchema) -> None:
        try:
            # There may be room already: this begins in a later turn of the event loop.
            while not append.outcome.done() and not (lane := self._lane(append, schema)).take(append):
                await lane.wait_for_room(Deadline(append.seconds, append.at))
        except Exception as error:
            if not append.outcome.done():
                append.outcome.set_exception(error)

    def _lane(self, append: RoutedAppend, schema: TopicSchema) -> BatchQueue:
        found = self._lanes.get((append.topic.topic, append.pin, len(schema.versions)))
        return self._new_lane(append.topic, append.pin, schema) if found is None else found

    def part_of(self, schema: TopicSchema, records: Records, key: Any, timestamp: Any, headers: Any) -> Prepared:
        """Prepare records for a producer. What cannot be sent at all is refused here, not when its turn comes."""
        plain = None if headers is not None or schema.versions else self._plain(records, key, timestamp)
        part, count, size = plain or self._rows(schema, records, key, timestamp, headers)
        if size > self.limits.record_bytes_max:
            self.encode(schema, [part])
        return owned(part), count, size + RECORD_COST_BYTES

    def _rows(self, schema: TopicSchema, records: Records, key: Any, timestamp: Any, headers: Any) -> Prepared:
        rows = to_batch(schema, records, key=key, timestamp=timestamp, headers=headers, now_us=now_us())
        return rows, rows.num_rows, rows.nbytes

    def encode(self, schema: TopicSchema, parts: Sequence[AppendRecords], declared: Declared | None = None) -> Batch:
        batch = encode_parts(parts, schema, now_us, limits=self.limits, compression=self._compression)
        return batch if declared is None else declared.with_records(batch)

    def _plain(self, records: Any, key: Any, timestamp: Any) -> Prepared | None:
        """Convert plain records of key and value; return None if they need a full conversion."""
        if type(records) is bytes:
            value = records
        elif isinstance(records, _PLAIN):
            value = _bytes(records)
        else:
            return self._values(records) if key is None and timestamp is None else None
        if timestamp is None:
            timestamp = system.wall_time_ns() // 1_000
        elif type(timestamp) is datetime:
            timestamp = time_us(timestamp)
        else:
            return None
        size = len(value) + RECORD_BYTES
        if key is not None:
            if not isinstance(key, bytes):
                return None
            size += len(key)
        if size > self.limits.record_bytes_max:
            raise RecordTooLarge(0, size, self.limits.record_bytes_max)
        return (Single(value, key, timestamp), 1, size) if size <= self._small_bytes else None

    def _values(self, records: Any) -> Prepared | None:
        """Return the values of Arrow data that has no other column and no errors, however many they are."""
        if isinstance(records, pa.RecordBatch):
            if records.schema.names != _ONLY_VALUES:
                return None
            records = records.column(0)
        if not isinstance(records, pa.BinaryArray) or records.null_count:
            return None
        part = values_of(records, system.wall_time_ns() // 1_000, self._small_bytes - RECORD_BYTES)
        if part is None:
            return None
        # The same number as ``nbytes``, for a fiftieth of its cost.
        size = len(part.data) + len(part.offsets) + RECORD_BYTES
        if size <= self._small_bytes:
            return (part, part.count, size) if are_in_order(part) else None
        check_arrow(records)
        return (part, part.count, size) if self._is_plain_large(records) else None

    def _is_plain_large(self, values: pa.Array) -> bool:
        """Return whether a part that is not small can be encoded without Arrow: it is not compressed, and no record is
        too large."""
        if self._compression is not None:
            return False
        return (
            values.total_values_length + TIME_BYTES <= self.limits.record_bytes_max
            or value_bytes_max(values) + TIME_BYTES <= self.limits.record_bytes_max
        )

    def _new_lane(self, topic: TopicInfo, pin: LogStreamId | None, schema: TopicSchema) -> BatchQueue:
        if len(self._lanes) >= LANES_MAX:
            self._lanes = {known: lane for known, lane in self._lanes.items() if not lane.is_idle}
        encode, bytes_max = partial(self.encode, schema), self.limits.together_bytes_max
        lane = self._lanes[topic.topic, pin, schema.number] = BatchQueue(topic, pin, self._shipping, encode, bytes_max)
        return lane


class AppendVisit(Visit[Ack]):
    """An append of a thread that waits, without a coroutine (ADR 0045). It is itself the outcome that is set."""

    __slots__ = ("_ack", "_error", "_is_done", "_submit", "append")

    append: RoutedAppend | None
    """None once it has begun: the append refers to this visit, and without the way back its memory is free at once."""

    def __init__(self, submit: Callable[[RoutedAppend], None], seconds: float) -> None:
        super().__init__(seconds)
        self._submit = submit
        self._ack: Ack | None = None
        self._error: BaseException | None = None
        self._is_done = False

    def begin(self) -> None:
        append, self.append = self.append, None
        assert append is not None
        try:
            append.at = asyncio.get_running_loop().time() + append.seconds
            self._submit(append)
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
            f"no answer came within {self.seconds:g} s, as a disk of this log does not answer, so whether the "
            "append is in the log is not known: see to the disk, and read the log, or use a producer, which finds out"
        )


def _bytes(value: str | bytearray | memoryview | bytes) -> bytes:
    """Return an immutable copy."""
    if not isinstance(value, str):
        return bytes(value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"this text cannot be stored as UTF-8: {error}", column="value", row=0) from error
