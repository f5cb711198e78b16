"""What readers return: records, or Arrow record batches with a column for each property of a record.

Columns come in this order: ``topic, stream, glsn, llsn, timestamp``, then ``key, value, headers`` or the topic's own
columns, then ``ingested_at``. Whole columns of stored batches are converted at once; a Python object per record is made
only for callers that ask for records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.convert.schemas import KEY_VALUE, KEY_VALUE_NUMBER, TIMESTAMP, TopicSchema, encode_schema
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.errors import Damaged, InvalidArgument, Malformed, ProtocolViolation
from cutwater.format.bodies import BadBody, BodyForm, read_checked
from cutwater.format.entry_codec import frames_in
from cutwater.format.plain_bodies import is_plain
from cutwater.format.projection import decode_schema, projected_schema, read_columns, timestamps
from cutwater.protocol.methods import Body
from cutwater.protocol.storage_api import Columns, ReadAnswerHeader
from cutwater.types import GLSN, LLSN, Batch, LogStreamId

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})
NO_ROW: Mapping[str, Any] = MappingProxyType({})

BEFORE = (
    pa.field("topic", pa.string(), nullable=False),
    pa.field("stream", pa.int64(), nullable=False),
    pa.field("glsn", pa.int64(), nullable=False),
    pa.field("llsn", pa.int64(), nullable=False),
    pa.field("timestamp", TIMESTAMP, nullable=False),
)
AFTER = (pa.field("ingested_at", TIMESTAMP, nullable=False),)
OF_THE_LOG = frozenset(field.name for field in (*BEFORE, *AFTER))


class Record(Struct, frozen=True, gc=False):
    """One record. ``row`` has the columns of a topic with a schema, also available as ``record["column"]``; a record of
    that kind has neither key nor value nor headers."""

    # Records are in no cycles. Without the garbage collector looking at all of them again and again, a subscription
    # takes half the processor time.

    glsn: GLSN
    llsn: LLSN
    stream: LogStreamId
    topic: str
    key: bytes | None
    value: bytes
    timestamp_us: int
    ingested_us: int
    headers: Mapping[str, bytes] = NO_HEADERS
    row: Mapping[str, Any] = NO_ROW

    @property
    def timestamp(self) -> datetime:
        """Event time, as declared by the record."""
        return _EPOCH + timedelta(microseconds=self.timestamp_us)

    @property
    def ingested_at(self) -> datetime:
        """Time of the commit, by the clock of the cluster."""
        return _EPOCH + timedelta(microseconds=self.ingested_us)

    def __getitem__(self, column: str) -> Any:
        return self.row[column]


def runs_of(header: ReadAnswerHeader, body: Body) -> tuple[CommittedBatch, ...]:
    """Return the committed batches in an answer, each verified. Their bodies are views of the answer: nothing is
    copied."""
    return tuple(_runs(header, body)) if len(body) else ()


def _runs(header: ReadAnswerHeader, body: Body) -> Iterator[CommittedBatch]:
    commits = iter(header.commits)
    commit = next(commits, None)
    for frame in frames_in(body):
        found = frame.header
        while commit is not None and commit.last_llsn < found.first_llsn:
            commit = next(commits, None)
        if commit is None or not commit.first_llsn <= found.first_llsn <= found.last_llsn <= commit.last_llsn:
            raise ProtocolViolation(
                f"log stream {header.stream}: LLSN {found.first_llsn} came without the commit that it belongs to"
            )
        batch = Batch(
            found.count,
            cast(bytes, frame.body),
            found.checksum,
            found.time_min,
            found.time_max,
            found.kind,
            found.producer,
            found.declared,
            found.schema,
            idle=found.idle,
            checked=found.checked,
        )
        yield CommittedBatch(header.stream, found.first_llsn, commit.glsn_of(found.first_llsn), commit.time, batch)


class ColumnLayout:
    """Converts runs of one topic to columns. With ``columns``, only those, in that order."""

    def __init__(self, schema: TopicSchema, columns: Sequence[str] | None = None) -> None:
        self._topic = schema
        own = [field for field in schema.newest if field.name != "timestamp"]
        self.schema = pa.schema([*BEFORE, *own, *AFTER])
        if columns is not None:
            self.schema = _chosen(self.schema, columns)
        self.projection: dict[int, Columns] = {}
        """The columns that storage nodes are asked for; empty if all columns are wanted."""
        self._stored = {number: schema.numbered(number) for number in self._numbers()}
        self._whole: dict[int, BodyForm] = {}
        if columns is not None:
            for number, stored in self._stored.items():
                wanted = self._wanted(stored)
                self.projection[number] = Columns(encode_schema(stored), wanted, schema.event_time)
                self._stored[number] = projected_schema(stored, wanted)

    @property
    def topic(self) -> str:
        return self._topic.topic

    def _numbers(self) -> Sequence[int]:
        return range(1, self._topic.number + 1) if self._topic.is_typed else (KEY_VALUE_NUMBER,)

    def _wanted(self, stored: pa.Schema) -> tuple[str, ...]:
        """Return the stored columns that the output needs; at least one, because a batch without columns has no
        rows."""
        names = set(self.schema.names)
        if "timestamp" in names:
            names.add(self._topic.event_time)
        wanted = tuple(name for name in stored.names if name in names)
        return wanted or (self._topic.event_time or stored.names[0],)

    def knows(self, run: CommittedBatch) -> bool:
        """Return whether the run's schema was part of the catalog that this layout was made from."""
        return run.batch.schema in self._stored

    def stored(self, run: CommittedBatch) -> pa.RecordBatch:
        """Return the appended rows, with the columns that were asked for. A batch that was never checked is checked
        here. Raises ``Malformed`` if it does not match its header."""
        batch = run.batch
        if batch.checked or self._is_plain(run):
            return self.rows(batch.schema, batch.body, batch.count, run.first_glsn)
        try:
            return self._checked(run)
        except BadBody as error:
            raise Malformed(run.first_glsn, run.last_glsn, self.topic, str(error)) from None

    def _is_plain(self, run: CommittedBatch) -> bool:
        batch = run.batch
        if self._topic.is_typed or self.projection:
            return False
        return is_plain(batch.body, batch.count, batch.time_min, batch.time_max)

    def _checked(self, run: CommittedBatch) -> pa.RecordBatch:
        """Check a batch and return its rows. A storage node leaves a malformed batch as it is stored. A node of an
        older version picks columns all the same, and does not say that the batch was checked."""
        batch, wanted = run.batch, self.projection.get(run.batch.schema)
        claims = (batch.count, batch.time_min, batch.time_max)
        try:
            rows = read_checked(batch.body, self._form(batch.schema), *claims)
            return rows if wanted is None else rows.select(list(wanted.columns))
        except BadBody:
            if wanted is None:
                raise
            picked = self._stored[batch.schema]
            try:
                return read_checked(batch.body, BodyForm(encode_schema(picked), None), *claims)
            except BadBody:
                pass
            raise

    def _looked_into(self, number: int, body: Body, count: int, first_glsn: int, *, is_stored: bool) -> pa.RecordBatch:
        wanted = self.projection.get(number)
        schema = self._stored[number] if not is_stored or wanted is None else decode_schema(wanted.schema)
        try:
            rows = read_checked(body, BodyForm(encode_schema(schema), None), count, 0, 0)
        except BadBody as error:
            raise Malformed(GLSN(first_glsn), GLSN(first_glsn + count - 1), self.topic, str(error)) from None
        return rows.select(list(wanted.columns)) if is_stored and wanted is not None else rows

    def _form(self, number: int) -> BodyForm:
        """Return the form of batches of the schema with this number."""
        form = self._whole.get(number)
        if form is None:
            schema = self._topic.numbered(number) if number in self._stored else None
            if schema is None:
                raise BadBody(f"it names schema {number}, which the topic does not have")
            encoded = encode_schema(schema) if self._topic.is_typed else b""
            form = self._whole[number] = BodyForm(encoded, self._topic.event_time)
        return form

    def rows(
        self,
        number: int,
        body: Body,
        count: int,
        first_glsn: int,
        *,
        is_stored: bool = False,
        checked: bool = True,
    ) -> pa.RecordBatch:
        """Return the rows of a record batch of the schema with this number. ``is_stored``: it has all columns, even
        those that were not asked for. Unless it was ``checked``, it is checked here, except for its event times."""
        schema = self._stored.get(number)
        if not checked and schema is not None:
            return self._looked_into(number, body, count, first_glsn, is_stored=is_stored)
        if schema is None:
            raise Damaged(f"GLSN {first_glsn} names schema {number}, which topic {self.topic!r} does not have")
        wanted = self.projection.get(number) if is_stored else None
        try:
            if wanted is not None:
                batch = read_columns(body, decode_schema(wanted.schema), wanted.columns)
            else:
                batch = pa.ipc.read_record_batch(pa.py_buffer(body), schema)
        except (pa.ArrowException, OSError, EOFError, Damaged) as error:
            raise Damaged(f"the batch at GLSN {first_glsn} is no record batch of its schema: {error}") from error
        if batch.num_rows != count:
            raise Damaged(f"the batch at GLSN {first_glsn} has {batch.num_rows} rows, not {count}")
        return batch

    def batch(self, run: CommittedBatch, start: int, stop: int, stored: pa.RecordBatch | None = None) -> pa.RecordBatch:
        """Return rows ``start`` to ``stop`` of a run with all columns of ``schema``. ``stored``: its rows, if they are
        read already."""
        if stored is None:
            stored = self.stored(run)
        if (start, stop) != (0, run.batch.count):
            stored = stored.slice(start, stop - start)
        count = stop - start
        arrays = [self._column(field, stored, run, start, count) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, field: pa.Field, stored: pa.RecordBatch, run: CommittedBatch, start: int, count: int) -> pa.Array:
        match field.name:
            case "topic":
                return pa.repeat(self.topic, count)
            case "stream":
                return pa.repeat(pa.scalar(run.stream, pa.int64()), count)
            case "glsn":
                return pa.arange(run.first_glsn + start, run.first_glsn + start + count)
            case "llsn":
                return pa.arange(run.first_llsn + start, run.first_llsn + start + count)
            case "ingested_at":
                return pa.repeat(pa.scalar(run.time, TIMESTAMP), count)
            case "timestamp":
                if self._topic.event_time:
                    return timestamps(stored, self._topic.event_time)
                return pa.repeat(pa.scalar(run.batch.time_min, TIMESTAMP), count)
        index = stored.schema.get_field_index(field.name)
        # A batch of an older schema lacks the columns that were added since.
        return stored.column(index) if index >= 0 else pa.nulls(count, field.type)

    def records(self, run: CommittedBatch, start: int, stop: int, stored: pa.RecordBatch | None = None) -> list[Record]:
        """Return the same rows as Python objects."""
        if stored is None:
            stored = self.stored(run)
        if (start, stop) != (0, run.batch.count):
            stored = stored.slice(start, stop - start)
        glsns = range(run.first_glsn + start, run.first_glsn + stop)
        llsns = range(run.first_llsn + start, run.first_llsn + stop)
        if self._topic.is_typed:
            return self._rows(run, stored, glsns, llsns)
        stream, topic, ingested = run.stream, self.topic, int(run.time)
        keys, values = stored.column(0).to_pylist(), stored.column(1).to_pylist()
        times = stored.column(2).view(pa.int64()).to_pylist()
        maps = [NO_HEADERS if pairs is None else dict(pairs) for pairs in stored.column(3).to_pylist()]
        return [
            Record(GLSN(glsn), LLSN(llsn), stream, topic, key, value, time, ingested, headers)
            for glsn, llsn, key, value, time, headers in zip(glsns, llsns, keys, values, times, maps, strict=True)
        ]

    def _rows(self, run: CommittedBatch, stored: pa.RecordBatch, glsns: range, llsns: range) -> list[Record]:
        event_time = self._topic.event_time
        if event_time:
            times = timestamps(stored, event_time).view(pa.int64()).to_pylist()
        else:
            times = [int(run.batch.time_min)] * len(glsns)
        lacking = {name: None for name in self._topic.newest.names if name not in stored.schema.names}
        try:
            rows = stored.to_pylist()
        except (ValueError, OverflowError, ArithmeticError) as error:
            raise InvalidArgument(
                f"a value at GLSN {glsns[0]} to {glsns[-1]} of topic {self.topic!r} is none that Python has ({error}): "
                "read it as Arrow, with batches()"
            ) from error
        return [
            Record(
                GLSN(glsn),
                LLSN(llsn),
                run.stream,
                self.topic,
                None,
                b"",
                time,
                int(run.time),
                NO_HEADERS,
                row | lacking,
            )
            for glsn, llsn, time, row in zip(glsns, llsns, times, rows, strict=True)
        ]


def _chosen(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
        raise InvalidArgument("columns= is a list of at least one name, and each name once")
    for name in columns:
        if name not in schema.names:
            raise InvalidArgument(f"there is no column {name!r}: choose among {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


assert set(KEY_VALUE.names) & OF_THE_LOG == {"timestamp"}
