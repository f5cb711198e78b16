"""What clients of a simulated cluster did and saw, in the form that the named checkers judge.

A checker knows appends, each with a batch of its own. A shipped client joins small appends into one batch, and readers
get records. So every record says which append it belongs to, and here the records of an append become its batch again,
wherever they were found: in the log, on a disk, in the hands of a reader. Records that are not exactly those of an
append become a batch that no client has sent.

The time of an event is the number of callbacks before it, which orders all events of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct, structs

from cutwater.client.convert.schemas import KEY_VALUE
from cutwater.client.read.records import Record
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.format.checksum import crc32c
from cutwater.testing.checkers.record import AppendOp, OpenOp, SimHistory, SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    BatchKind,
    CutTime,
    Entry,
    EventTime,
    LogStreamId,
    Part,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    RunId,
    TopicId,
)
from cutwater.types import (
    Sequence as SequenceNumber,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RECORD_US = 1_000
"""Event time from one record of an append to the next, as ``record.event_times`` expects."""

TYPED = pa.schema(
    [
        pa.field("append", pa.int64()),
        pa.field("place", pa.int32()),
        pa.field("count", pa.int32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("text", pa.string()),
    ]
)
"""The schema of a topic with columns."""


class Found(Struct, frozen=True):
    """A record that was found somewhere: its append, its place among the append's records, their number, and its event
    time. An append of 0 means that the bytes are of no client."""

    append: int
    place: int
    count: int
    time_us: int


class ScanOp(Struct):
    """What a query read of a topic above ``start`` up to ``end``: GLSN, log stream, LLSN and content of each record, in
    no order. ``gaps`` are the ranges that it was told are trimmed."""

    topic: TopicId
    start: GLSN
    end: GLSN
    found: list[tuple[int, int, int, Found]] = []
    gaps: list[tuple[GLSN, GLSN]] = []


class DeclareOp(Struct):
    """A declaration without records, for one log stream or several. Each that has it gets an append of its own."""

    invoked: int
    topic: str
    time: EventTime
    idle: bool
    acks: list[Ack] = []
    is_refused: bool = False
    appends: dict[LogStreamId, AppendOp] = {}


class WatermarkOp(Struct):
    """A watermark that a client was told. ``bound_us`` is None if declarations count."""

    topic: TopicId
    glsn: int
    bound_us: int | None
    idle_after_us: int
    watermark: int | None
    is_trimmed: bool
    """Whether the topic had been trimmed before. Then the true watermark may be higher."""


class ClientHistory(SimHistory):
    """The history of a run, written by shipped clients."""

    def __init__(self, stored: Callable[[], GLSN]) -> None:
        """``stored`` returns the last position of the cuts that the store has."""
        super().__init__()
        self.offered: list[tuple[RunId, int, tuple[str, ...]]] = []
        """The names of the parts with which drivers asked to publish a batch of a run."""
        self._stored = stored
        self._calls: dict[str, int] = {}
        self.violations: list[Violation] = []
        """What was found wrong when it was noted."""
        self.scans: list[ScanOp] = []
        self.declared: dict[EventTime, DeclareOp] = {}
        self.watermarks: list[WatermarkOp] = []
        self._times: set[int] = set()
        self._topics: dict[int, str] = {}
        """The topic of each append."""
        self._cache: dict[tuple[bytes, int], list[Found]] = {}

    # Appends.

    def begin(
        self, now: int, topic: str, count: int, time_us: int, producer: tuple[str, int] | None = None
    ) -> AppendOp:
        """Note an append that is about to be called. ``producer``: its name and the number of its call."""
        op = self.new_append(now, count, EventTime(time_us))
        self._topics[op.payload] = topic
        if producer is not None:
            name, number = ProducerId(producer[0]), SequenceNumber(producer[1])
            op.producer, op.sequence = name, number
            op.batch = structs.replace(op.batch, producer=ProducerTag(name, ProducerEpoch(1), number))
        return op

    def end(self, op: AppendOp, now: int, outcome: SimOutcome, ack: Ack | None = None) -> None:
        op.completed, op.outcome, op.ack = now, outcome, ack
        if ack is not None and last_glsn(ack) > (stored := self._stored()):
            what = f"append {op.payload} was acknowledged as {ack}, and the store has cuts to {stored}"
            self.violations.append(Violation("12 one cut sequence", what))

    def next_call(self, producer: str) -> int:
        """Return the number of the next call of a producer, whichever client has its name."""
        number = self._calls[producer] = self._calls.get(producer, 0) + 1
        return number

    def opened(self, producer: str, invoked: int, now: int) -> int:
        """Note that a client has opened a producer. Return the number of this opening."""
        self.opens.append(OpenOp(ProducerId(producer), invoked, now))
        return len(self.opens)

    def stage(self, part: Part, ops: Sequence[AppendOp]) -> None:
        """Note the rows of a part, which is staged."""
        self.staged[part.part] = [op.payload for op in ops]
        for op in ops:
            op.part = part.part

    def new_declaration(self, time_us: int) -> EventTime:
        """Return this time or the next one that nothing else declares."""
        while time_us in self._times:
            time_us += 1
        self._times.add(time_us)
        return EventTime(time_us)

    def topic_of(self, op: AppendOp) -> str:
        return self._topics[op.payload]

    def last_acknowledged(self, topic: str) -> GLSN:
        """Return the highest position of the topic that was acknowledged."""
        acks = [op.ack for op in self.appends if op.ack is not None and self._topics[op.payload] == topic]
        return max((last_glsn(ack) for ack in acks), default=GLSN(0))

    # Records.

    def records(self, found: Sequence[Record]) -> list[CommittedBatch]:
        """Return records that a reader got, as batches of appends."""
        runs: list[CommittedBatch] = []
        i = 0
        while i < len(found):
            first = found[i]
            batch = self._batch([found_of(record) for record in found[i : i + _reach(found, i)]])
            runs.append(CommittedBatch(first.stream, first.llsn, first.glsn, CutTime(first.ingested_us), batch))
            i += batch.count
        return runs

    def entries(self, stream: LogStreamId, entry: Entry, schemas: Sequence[pa.Schema]) -> list[Entry]:
        """Return an entry of a log stream as one entry for each append in it."""
        batch = entry.batch
        if batch.kind is BatchKind.DECLARATION:
            return [structs.replace(entry, batch=self._declaration(stream, batch))]
        if batch.kind is not BatchKind.DATA:
            return [entry]
        found = self._found(batch, schemas)
        entries: list[Entry] = []
        llsn, i = entry.first_llsn, 0
        while i < len(found):
            logical = self._batch(found[i : i + max(1, found[i].count)])
            entries.append(Entry(LLSN(llsn + i), entry.epoch, logical))
            i += logical.count
        declared = [(own.batch.declared, own.batch.idle) for own in entries]
        if declared != [(None, False)] * (len(entries) - 1) + [(batch.declared, batch.idle)]:
            return [structs.replace(entry, batch=_without_append(found, f"declares {batch.declared}, {batch.idle}"))]
        return entries

    def _declaration(self, stream: LogStreamId, batch: Batch) -> Batch:
        call = self.declared.get(batch.declared or EventTime(0))
        if call is None or (call.time, call.idle) != (batch.declared, batch.idle):
            return batch
        op = call.appends.get(stream)
        if op is None:
            op = call.appends[stream] = self.begin(call.invoked, call.topic, 1, 0)
            op.batch = structs.replace(op.batch, kind=BatchKind.DECLARATION, declared=call.time, idle=call.idle)
            op.outcome = SimOutcome.FAIL if call.is_refused else SimOutcome.UNKNOWN
        return op.batch

    def op_of(self, batch: Batch) -> AppendOp | None:
        """Return the append that sent this batch, found by its body; None if none did."""
        number = batch.body.split(b":")[0]
        payload = int(number) if number.isdigit() else 0
        op = self.appends[payload - 1] if 1 <= payload <= len(self.appends) else None
        return op if op is not None and op.batch == batch else None

    def _found(self, batch: Batch, schemas: Sequence[pa.Schema]) -> list[Found]:
        key = (batch.body, batch.schema)
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = _decode(batch, schemas)
        return known

    def _batch(self, found: list[Found]) -> Batch:
        """Return the batch of the append to which these records belong, or one that no client has sent."""
        first = found[0]
        if 1 <= first.append <= len(self.appends) and len(found) == first.count:
            op = self.appends[first.append - 1]
            start = op.batch.time_min
            wanted = [Found(op.payload, i, op.batch.count, start + i * RECORD_US) for i in range(op.batch.count)]
            if found == wanted:
                return op.batch
        return _without_append(found)


def _without_append(found: Sequence[Found], what: str = "") -> Batch:
    """Return a batch with these records that no client has sent."""
    body, time = f"{found} {what}".encode(), EventTime(found[0].time_us)
    return Batch(len(found), body, crc32c(body), time, time)


def _reach(found: Sequence[Record], start: int) -> int:
    """Return how many records from here on are in one piece, at most those of the first one's append."""
    first = found[start]
    wanted = max(1, found_of(first).count)
    size = 1
    while size < wanted and start + size < len(found):
        following = found[start + size]
        if (following.stream, following.glsn) != (first.stream, first.glsn + size):
            break
        size += 1
    return size


def found_of(record: Record) -> Found:
    """Return which record of which append a reader got."""
    if record.row:
        row = record.row
        return Found(row["append"], row["place"], row["count"], record.timestamp_us)
    return _of_value(record.value, record.timestamp_us)


def _of_value(value: bytes, time_us: int) -> Found:
    try:
        append, place, count = map(int, value.split(b"|")[0].split(b":"))
    except ValueError:
        return Found(0, 0, 0, time_us)
    return Found(append, place, count, time_us)


def _decode(batch: Batch, schemas: Sequence[pa.Schema]) -> list[Found]:
    schema = KEY_VALUE if batch.schema == 0 else schemas[batch.schema - 1]
    return found_in(pa.ipc.read_record_batch(pa.py_buffer(batch.body), schema))


def found_in(rows: pa.RecordBatch) -> list[Found]:
    """Return the records of a stored batch, which has at least the columns that say which records they are."""
    if "value" in rows.schema.names:
        times = rows.column("timestamp").view(pa.int64()).to_pylist()
        return [_of_value(value, time) for value, time in zip(rows.column("value").to_pylist(), times, strict=True)]
    times = rows.column("at").view(pa.int64()).to_pylist()
    columns = [rows.column(name).to_pylist() for name in ("append", "place", "count")]
    return [Found(*row) for row in zip(*columns, times, strict=True)]


# The content of records.


def values_of(op: AppendOp, padding: bytes) -> list[bytes]:
    return [prefix_of(op, place) + padding for place in range(op.batch.count)]


def prefix_of(op: AppendOp, place: int) -> bytes:
    """Return how the value of a record begins."""
    return b"%d:%d:%d|" % (op.payload, place, op.batch.count)


def declare_with(op: AppendOp, time: EventTime, *, is_idle: bool) -> None:
    """Let an append declare a watermark after its records."""
    op.batch = structs.replace(op.batch, declared=time, idle=is_idle)


def times_of(op: AppendOp) -> list[datetime]:
    return [at(op.batch.time_min + place * RECORD_US) for place in range(op.batch.count)]


def rows_of(op: AppendOp, padding: str) -> list[dict[str, Any]]:
    count = op.batch.count
    return [
        {"append": op.payload, "place": place, "count": count, "at": time, "text": padding}
        for place, time in enumerate(times_of(op))
    ]


def at(time_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=time_us)


def last_glsn(ack: Ack) -> GLSN:
    return GLSN(ack.glsn + ack.count - 1)


def first_of(record: Record, op: AppendOp) -> Batch:
    """Return the batch of an append if this is its first record, otherwise one that no client has sent."""
    wanted = Found(op.payload, 0, op.batch.count, op.batch.time_min)
    if found_of(record) == wanted:
        return op.batch
    body = repr(record).encode()
    return Batch(1, body, crc32c(body), EventTime(record.timestamp_us), EventTime(record.timestamp_us))
