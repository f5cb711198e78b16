"""Reduces stored batches to the columns that a reader asked for, within a memory budget.

Batches that were checked before they got their places are read as they are. Others, of older versions, are checked
first. Malformed ones are sent as they are stored: the reader gets the same bytes from any replica, and decides what to
do about them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from msgspec import Struct

from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.bodies import INFLATED_BYTES_MAX, BadBody, BodyForm, inflated_bytes, problem_with, read_checked
from cutwater.format.checksum import Buffer
from cutwater.format.entry_codec import EntryFrame
from cutwater.format.ipc_message import may_be_compressed
from cutwater.protocol.scan_api import CHECKED, MALFORMED
from cutwater.protocol.storage_api import Columns
from cutwater.runtime.threads import to_the_end
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.types import BatchKind

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

INFLATED_AT_ONCE: Final = INFLATED_BYTES_MAX // 4
"""An answer ends after the batch that brings the decompressed bytes above this limit."""
READ_BYTES_MAX: Final = 8 * 1024 * 1024

R = TypeVar("R")
FormOf = Callable[[int], BodyForm | Literal[False] | None]
"""Returns the form of batches of this schema number; False if there is no such schema, None if it is not known."""


class Needs(Struct, Generic[R], frozen=True):
    """Work that is left to do, and the memory that it needs."""

    memory_bytes: int
    go_on: Callable[[], R]


async def within(memory: MemoryBudget, in_reader: Callable[[Callable[[], R]], Awaitable[R]], found: R | Needs[R]) -> R:
    """Do the remaining work within the memory budget and return the result. Raises ``ResourceExhausted`` if no memory
    becomes free for a while. The memory of a cancelled reader stays reserved until its thread has ended."""
    if not isinstance(found, Needs):
        return found
    async with memory.reserved(found.memory_bytes):
        return await to_the_end(in_reader(found.go_on))


def memory_needed(
    frames: Iterable[EntryFrame], projection: Mapping[int, Columns], form_of: FormOf | None = None
) -> int:
    """Return the memory needed to decompress the largest batch that is projected or checked, and to hold the result."""
    largest = 0
    for frame in frames:
        header = frame.header
        is_read = header.schema in projection or (form_of is not None and not header.checked)
        if header.kind is BatchKind.DATA and is_read:
            largest = max(largest, inflated(frame.body))
    return 2 * largest


def inflated(body: Buffer) -> int:
    """Return the decompressed size of a compressed body; 0 if it is not compressed, or above the limit."""
    try:
        return inflated_bytes(body)
    except BadBody:
        return 0


class Room:
    """The space that is left in an answer."""

    def __init__(self) -> None:
        self._bytes = self._inflated = 0
        self._is_empty = True

    def take(self, size: int, inflated_bytes: int = 0) -> bool:
        """Take space for one more frame; return whether it fits. The first one always fits."""
        self._bytes += size
        self._inflated += inflated_bytes
        is_first, self._is_empty = self._is_empty, False
        return is_first or (self._bytes <= READ_BYTES_MAX and self._inflated <= INFLATED_AT_ONCE)


def verdict_on(frame: EntryFrame, form_of: FormOf) -> int:
    """Return whether a batch is ``CHECKED`` or ``MALFORMED``; 0 if it was never checked, and its schema is not known
    here."""
    header = frame.header
    if header.checked:
        return CHECKED
    form = form_of(header.schema)
    if not form:
        return 0 if form is None else MALFORMED
    problem = problem_with(frame.body, form, header.count, header.time_min, header.time_max)
    return MALFORMED if problem else CHECKED


def columns_of(frame: EntryFrame, wanted: Columns) -> pa.RecordBatch | None:
    """Return the wanted columns; None if the batch is malformed."""
    # Only nodes that are asked for columns need Arrow, which is slow to import.
    from cutwater.format import projection  # noqa: PLC0415

    schema, header = projection.decode_schema(wanted.schema), frame.header
    if header.checked:
        with _schema_is_theirs(frame):
            return projection.read_columns(frame.body, schema, wanted.columns)
    projection.projected_schema(schema, wanted.columns)
    form = _form(wanted.schema, wanted.event_time)
    try:
        rows = read_checked(frame.body, form, header.count, header.time_min, header.time_max)
    except BadBody:
        return None
    return rows.select(list(wanted.columns))


@lru_cache(maxsize=64)
def _form(schema: bytes, event_time: str | None) -> BodyForm:
    return BodyForm(schema, event_time)


def picked(frame: EntryFrame, wanted: Columns) -> memoryview | None:
    """Return the body of an entry with the wanted columns only; None if it is malformed."""
    from cutwater.format import projection  # noqa: PLC0415

    rows = columns_of(frame, wanted)
    if rows is None:
        return None
    if rows.nbytes <= frame.header.body_bytes or not may_be_compressed(frame.body):
        body = memoryview(rows.serialize())
        if len(body) <= frame.header.body_bytes:
            return body
    # It was compressed before, and is compressed again: the size of a message is limited.
    return memoryview(projection.serialize(rows, "lz4"))


@contextmanager
def _schema_is_theirs(frame: EntryFrame) -> Iterator[None]:
    """Blame the given schema for a read error, because the batch itself was checked."""
    try:
        yield
    except Damaged as error:
        raise InvalidArgument(
            f"the batch at LLSN {frame.header.first_llsn} is not of the schema that was given for number "
            f"{frame.header.schema}: {error.message}"
        ) from error
