"""Checks that a body is what it claims to be.

It must be exactly one Arrow record batch of its schema, with valid offsets throughout, and with the number of records
and the smallest and largest event time that the header of its batch says.

No other code may decode a body that was not checked: wrong offsets would make Arrow read memory that is not its own.
Cheap checks come first. The decompressed size of a body is known and limited before anything is decompressed, and it is
decompressed once. The limits here are constants of the format: a body beyond them is malformed everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cutwater.errors import Unavailable
from cutwater.format.checksum import Buffer
from cutwater.format.ipc_message import BadMessage, Message, may_be_compressed, read_message
from cutwater.format.plain_bodies import is_plain

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

# Arrow is imported where it is needed: this takes long, and a storage node that gets only plain records needs none of
# it.

MIB: Final = 1024 * 1024
RECORDS_MAX: Final = 1 << 24
"""Largest number of records of a batch. Columns of nulls take no bytes, so bytes alone do not limit them."""
INFLATED_BYTES_MAX: Final = 256 * MIB
"""Largest size of a body after decompression."""
INFLATED_BYTES_FREE: Final = 16 * MIB
"""A body of any size may inflate to this many bytes. A body without compression may have as many."""
RATIO_MAX: Final = 250
"""Above ``INFLATED_BYTES_FREE``, the inflated size is at most this many times the size of the body."""
_NO_MEMORY: Final = re.compile(r"^(ZSTD|LZ4|Lz4)\b.*failed: .*[Aa]llocation")
"""Messages of the decompression libraries that report lack of memory, by way of Arrow."""


class BodyForm:
    """The form of the bodies of one schema.

    ``schema`` is in its IPC form; without one, records have key and value. ``event_time`` names the column with event
    time. It is empty if all records of a batch have the time of its header. It is None if bodies lack the column, so
    that event time cannot be checked.
    """

    def __init__(self, schema: bytes = b"", event_time: str | None = "") -> None:
        self._encoded = schema
        self.is_key_value = not schema
        self.event_time = "timestamp" if self.is_key_value else event_time

    @cached_property
    def schema(self) -> pa.Schema:
        from cutwater.format import projection  # noqa: PLC0415

        return projection.decode_schema(self._encoded) if self._encoded else projection.KEY_VALUE

    @cached_property
    def nodes(self) -> int:
        """Number of columns, including nested ones."""
        return sum(_nodes(field.type) for field in self.schema)

    @cached_property
    def demanded(self) -> tuple[int, ...]:
        """Indexes of columns that must not contain nulls."""
        schema = self.schema
        return tuple(i for i, field in enumerate(schema) if not field.nullable or field.name == self.event_time)

    @cached_property
    def demanded_inside(self) -> tuple[int, ...]:
        """Indexes of columns with nested columns that must not contain nulls."""
        return tuple(i for i, field in enumerate(self.schema) if _demands_inside(field.type))

    @cached_property
    def has_shared(self) -> bool:
        """Whether values may share bytes, so that together they may have more bytes than are stored."""
        from cutwater.format.seen_bytes import is_shared  # noqa: PLC0415

        return any(is_shared(field.type) for field in self.schema)


KEY_VALUE_FORM = BodyForm()


class BadBody(Exception):
    """A body is not what the header of its batch claims. The text says why."""


def problem_with(body: Buffer, form: BodyForm, count: int, time_min: int, time_max: int) -> str:
    """Return the fault of a batch's body, compared with its header; empty if there is none."""
    if form.is_key_value and is_plain(body, count, time_min, time_max):
        return ""
    try:
        read_checked(body, form, count, time_min, time_max)
    except BadBody as error:
        return str(error)
    return ""


def read_checked(body: Buffer, form: BodyForm, count: int, time_min: int, time_max: int) -> pa.RecordBatch:
    """Read the rows of a body that was never checked.

    Raises ``BadBody``, or ``Unavailable`` if this machine cannot check it now.
    """
    if not 1 <= count <= RECORDS_MAX:
        raise BadBody(f"its header says that it has {count} records, and a batch has 1 to {RECORDS_MAX}")
    message = _message(body)
    problem = limit_problem(message, len(body)) or _count_problem(message, form, count)
    if problem:
        raise BadBody(problem)
    with _judged():
        batch = _read(body, form)
        problem = _content_problem(batch, form, count) or _time_problem(batch, form, time_min, time_max)
    if problem:
        raise BadBody(problem)
    return batch


def inflated_bytes(body: Buffer) -> int:
    """Return how many bytes must be decompressed to read a body; 0 if its columns are not compressed.

    Raises ``BadBody`` if that is unknown or too much.
    """
    if not may_be_compressed(body):
        return 0
    message = _message(body)
    problem = limit_problem(message, len(body))
    if problem:
        raise BadBody(problem)
    return message.inflated_bytes if message.is_compressed else 0


def _message(body: Buffer) -> Message:
    try:
        return read_message(body)
    except BadMessage as error:
        raise BadBody(f"it is no Arrow record batch: {error}") from None


def limit_problem(message: Message, body_bytes: int) -> str:
    """Return what is wrong if a body becomes too large when it is decompressed; otherwise an empty string."""
    inflated = message.inflated_bytes
    if inflated > INFLATED_BYTES_MAX:
        return f"its columns have {inflated} bytes when they are decompressed, and at most {INFLATED_BYTES_MAX} may be"
    if inflated > max(INFLATED_BYTES_FREE, RATIO_MAX * body_bytes):
        return (
            f"its {body_bytes} bytes become {inflated} when they are decompressed: above {INFLATED_BYTES_FREE} bytes, "
            f"at most {RATIO_MAX} times as many are allowed"
        )
    return ""


def _count_problem(message: Message, form: BodyForm, count: int) -> str:
    if message.records != count:
        return f"it has {message.records} records, and its header says {count}"
    values = message.values
    if len(values) != form.nodes:
        return f"it has {len(values)} columns, with those inside of others, and its schema has {form.nodes}"
    if values and not 0 <= min(values) <= max(values) <= 8 * message.inflated_bytes + RECORDS_MAX:
        return f"one of its columns has {max(values, key=abs)} values"
    return ""


def _read(body: Buffer, form: BodyForm) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415

    batch = pa.ipc.read_record_batch(pa.py_buffer(body), form.schema)
    batch.validate(full=True)
    return batch


@contextmanager
def _judged() -> Iterator[None]:
    """Distinguish faults of a body from faults of the machine, such as lack of memory or threads."""
    import pyarrow as pa  # noqa: PLC0415

    content = (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        pa.ArrowIndexError,
        pa.ArrowKeyError,
        pa.ArrowCapacityError,
        pa.ArrowSerializationError,
        EOFError,
        OverflowError,
        ValueError,
    )
    try:
        yield
    except (*content, OSError, MemoryError, RuntimeError, pa.ArrowException) as error:
        if isinstance(error, content) or (isinstance(error, OSError) and not _is_of_machine(error)):
            # For a schema with many columns, Arrow's text contains all of it.
            raise BadBody(f"it is no record batch of its schema: {str(error)[:400]}") from None
        raise Unavailable(f"a batch cannot be looked into now, because of this machine: {error}: try again") from error


def _is_of_machine(error: OSError) -> bool:
    """Return whether the error is a fault of the machine.

    Arrow uses the same class for bytes that cannot be decompressed or are no message, but then without an error number.
    """
    return error.errno is not None or _NO_MEMORY.search(str(error)) is not None


def _content_problem(batch: pa.RecordBatch, form: BodyForm, count: int) -> str:
    if batch.num_rows != count:
        return f"it has {batch.num_rows} records, and its header says {count}"
    for i in form.demanded:
        if batch.column(i).null_count:
            return f"column {form.schema.field(i).name!r} has nulls, and must have none"
    if form.has_shared and (problem := _sharing_problem(batch)):
        return problem
    for i in form.demanded_inside:
        missing = _missing_inside(batch.column(i), form.schema.field(i).type, form.schema.field(i).name)
        if missing:
            return f"column {missing!r} has nulls, and must have none"
    return ""


def _sharing_problem(batch: pa.RecordBatch) -> str:
    from cutwater.format.seen_bytes import TooMany, seen_bytes  # noqa: PLC0415

    try:
        seen = sum(seen_bytes(column) for column in batch.columns)
    except TooMany as error:
        return str(error)
    if seen > INFLATED_BYTES_MAX:
        return (
            f"its values point to the same bytes again and again: {seen:.0f} bytes in all, and at most "
            f"{INFLATED_BYTES_MAX} may be"
        )
    return ""


def _time_problem(batch: pa.RecordBatch, form: BodyForm, time_min: int, time_max: int) -> str:
    if form.event_time is None:
        return ""
    if form.schema.get_field_index(form.event_time) < 0:
        if time_min == time_max:
            return ""
        return f"its records have one event time, and its header says {time_min} to {time_max}"
    from cutwater.format.projection import event_times  # noqa: PLC0415

    found = event_times(batch, form.event_time)
    if found == (time_min, time_max):
        return ""
    return f"its event times go from {found[0]} to {found[1]}, and its header says {time_min} to {time_max}"


def _nodes(kind: pa.DataType) -> int:
    from cutwater.format.seen_bytes import stored_type  # noqa: PLC0415

    kind = stored_type(kind)
    return 1 + sum(_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _demands_inside(kind: pa.DataType) -> bool:
    """Return whether a type has nested columns that must not contain nulls. Arrow checks the keys of maps."""
    from pyarrow import types  # noqa: PLC0415

    fields = [kind.field(i) for i in range(kind.num_fields)]
    if types.is_map(kind):
        return not kind.item_field.nullable or _demands_inside(kind.item_type)
    return any(not field.nullable or _demands_inside(field.type) for field in fields)


def _missing_inside(values: Any, kind: pa.DataType, path: str) -> str:
    """Return the nested column that has nulls and must have none, or "". Values inside a null do not count."""
    from pyarrow import types  # noqa: PLC0415

    if types.is_struct(kind):
        values = values.drop_null() if values.null_count else values
        inside = [(kind.field(i), values.field(i)) for i in range(kind.num_fields)]
    elif types.is_map(kind):
        values = values.drop_null() if values.null_count else values
        start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        inside = [(kind.item_field, values.items.slice(start, end - start))]
    elif hasattr(values, "flatten") and kind.num_fields == 1:
        inside = [(kind.field(0), values.flatten())]
    else:
        return ""
    for field, found in inside:
        here = f"{path}.{field.name}"
        if not field.nullable and found.null_count:
            return here
        deeper = _missing_inside(found, field.type, here) if _demands_inside(field.type) else ""
        if deeper:
            return deeper
    return ""
