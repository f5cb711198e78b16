"""Merges the rows of ordered parts into one order, in whole columns and in bounded memory.

Each part is sorted by its positions. The result is sorted by position, then by part, then as staged. It depends on
nothing else, in particular not on how the parts are cut into blocks. One block of each part is in memory. If that is
too much, some parts are first merged into one, which is stored elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.core.publish.staged import PartOrder
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import BODY_BYTES_MAX
from cutwater.format.projection import decode_schema, event_times, no_values, serialize
from cutwater.types import Batch, EventTime

POSITION = pa.field("cutwater.position", pa.binary(), nullable=False)
ENTRY_BYTES = 1024 * 1024
"""Approximate size of an entry of the result."""
WINDOW_BYTES = 64 * 1024 * 1024
"""Approximate limit for the blocks of all parts together."""

Blocks = Iterator[pa.RecordBatch]
"""The rows of a part, one block after the other. The last column holds the positions."""


class Form(Struct, frozen=True):
    """The form of the rows of a group."""

    order: PartOrder
    schema: pa.Schema
    """The schema with the positions."""

    @property
    def rows(self) -> pa.Schema:
        """The schema without the positions."""
        return pa.schema(list(self.schema)[:-1])


def form_of(order: PartOrder) -> Form:
    """Return the form that this describes. Raises if it does not describe an ordered part."""
    schema = decode_schema(order.schema)
    if len(schema) < 2 or not schema.field(len(schema) - 1).type.equals(POSITION.type):
        raise InvalidArgument(f"the last column of an ordered part holds its positions, as {POSITION.type}")
    if order.event_time and pa.schema(list(schema)[:-1]).get_field_index(order.event_time) < 0:
        raise InvalidArgument(f"event time is in column {order.event_time!r}, which the part does not have")
    if order.compression not in ("", "lz4", "zstd"):
        raise InvalidArgument(f"{order.compression!r} is no compression of Arrow batches: lz4 or zstd")
    return Form(order, schema)


def read_block(body: Buffer, form: Form, count: int, *, is_new: bool = False) -> pa.RecordBatch:
    """Read the rows of a staged entry. ``is_new``: it has just been received, so every value is checked."""
    try:
        block = pa.ipc.read_record_batch(pa.py_buffer(body), form.schema)
        block.validate(full=is_new)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Damaged(f"a staged entry is no record batch of its schema: {error}") from error
    if block.num_rows != count:
        raise Damaged(f"a staged entry has {block.num_rows} rows, not {count}")
    return block


def check_order(block: pa.RecordBatch, last: bytes | None) -> bytes:
    """Check that the positions are in order, and not below ``last`` of the block before. Returns the last position."""
    positions = positions_of(block)
    if positions.null_count:
        raise InvalidArgument("each row of an ordered part has a position, and here is one without")
    if last is not None and positions[0].as_py() < last:
        raise InvalidArgument("the rows of an ordered part are staged in the order of their positions: sort them first")
    if len(positions) > 1 and not pc.all(pc.less_equal(positions[:-1], positions[1:])).as_py():
        raise InvalidArgument("the rows of an ordered part are staged in the order of their positions: sort them first")
    end: bytes = positions[-1].as_py()
    return end


def positions_of(block: pa.RecordBatch) -> pa.Array:
    return block.column(block.num_columns - 1)


def common_form(forms: Sequence[Form]) -> Form:
    """Return the form of the newest schema, which has all columns of the older ones."""
    return max(forms, key=lambda form: form.order.number)


def adapt(block: pa.RecordBatch, form: Form) -> pa.RecordBatch:
    """Return a block of an older schema in the form of a newer one. Missing columns are null."""
    if block.schema.equals(form.schema):
        return block
    names = block.schema.names[:-1]
    arrays = [
        block.column(names.index(field.name)) if field.name in names else no_values(block.num_rows, field.type)
        for field in form.rows
    ]
    return pa.RecordBatch.from_arrays([*arrays, positions_of(block)], schema=form.schema)


def merge(parts: Sequence[Blocks]) -> Blocks:
    """Yield the rows of all parts in order, in blocks of any size. All parts must have the same form."""
    heads = [_Head(blocks) for blocks in parts]
    while heads := [head for head in heads if head.rows is not None]:
        if len(heads) == 1:
            yield heads[0].take_all()
            continue
        # No later row of a part lies below the end of its current block. So every row up to the smallest of these ends
        # is known. Of the rows exactly at that position, only those of the part that ends there, and of the parts
        # before it, are taken.
        at = min(range(len(heads)), key=lambda i: (heads[i].end, i))
        bound = heads[at].end
        taken = [head.take_to(bound, with_equal=i <= at) for i, head in enumerate(heads)]
        yield _in_order([rows for rows in taken if rows is not None])


class _Head:
    """The current block of a part. ``rows`` is None at the end of the part."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.rows: pa.RecordBatch | None = None
        self.end = b""
        self._next()

    def _next(self) -> None:
        self.rows = next(self._blocks, None)
        if self.rows is not None:
            self.end = positions_of(self.rows)[-1].as_py()

    def take_all(self) -> pa.RecordBatch:
        rows = self.rows
        self._next()
        return rows

    def take_to(self, bound: bytes, *, with_equal: bool) -> pa.RecordBatch | None:
        """Return the rows below the bound, or with ``with_equal`` also those at the bound."""
        assert self.rows is not None
        positions = positions_of(self.rows)
        find = bisect_right if with_equal else bisect_left
        count = find(range(len(positions)), bound, key=lambda i: positions[i].as_py())
        if count == 0:
            return None
        if count == self.rows.num_rows:
            return self.take_all()
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        return taken


def _in_order(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Merge sorted pieces into one. Sorting is stable, so equal positions stay in the order of the parts."""
    if len(pieces) == 1:
        return pieces[0]
    rows = pa.concat_batches(pieces)
    return rows.take(pc.sort_indices(positions_of(rows)))


def merge_in_bounds(
    parts: Sequence[Callable[[], Blocks]], block_bytes: int, keep: Callable[[Blocks], Callable[[], Blocks]]
) -> Blocks:
    """Merge as ``merge`` does, with a limit on memory. A block has up to ``block_bytes``.

    If too many blocks would be in memory, ``keep`` stores merged rows elsewhere and returns a function that reads them
    again.
    """
    fan_in = max(2, WINDOW_BYTES // max(block_bytes, 1))
    while len(parts) > fan_in:
        # Neighbours are merged, so the order of the parts stays the same.
        parts = [
            keep(merge([read() for read in parts[i : i + fan_in]])) if len(parts[i : i + fan_in]) > 1 else parts[i]
            for i in range(0, len(parts), fan_in)
        ]
    yield from merge([read() for read in parts])


def in_entries(blocks: Blocks, entry_bytes: int = ENTRY_BYTES) -> Blocks:
    """Yield the same rows in blocks of about this size. Where they are cut depends only on the rows."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for block in blocks:
        for piece in _cut(block, entry_bytes):
            if held and held_bytes + piece.nbytes > 2 * entry_bytes:
                # A row that is large by itself gets its own entry.
                yield pa.concat_batches(held)
                held, held_bytes = [], 0
            held.append(piece)
            held_bytes += piece.nbytes
            if held_bytes >= entry_bytes:
                yield pa.concat_batches(held)
                held, held_bytes = [], 0
    if held:
        yield pa.concat_batches(held)


def _cut(block: pa.RecordBatch, entry_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut by bytes and not by the number of rows, since large rows may lie next to each other."""
    if block.num_rows <= 1 or block.nbytes <= entry_bytes:
        yield block
        return
    half = block.num_rows // 2
    yield from _cut(block.slice(0, half), entry_bytes)
    yield from _cut(block.slice(half), entry_bytes)


def to_batch(block: pa.RecordBatch, form: Form, time: int) -> Batch:
    """Return an entry of the log, without the positions. ``time`` is the event time of rows without their own."""
    rows = pa.RecordBatch.from_arrays(block.columns[:-1], schema=form.rows)
    order = form.order
    body = (serialize(rows, order.compression) if order.compression else rows.serialize()).to_pybytes()
    if len(body) > BODY_BYTES_MAX:
        raise InvalidArgument(
            f"{rows.num_rows} rows take {len(body)} bytes, and no reader can be sent more than {BODY_BYTES_MAX} at once"
        )
    first, last = event_times(rows, order.event_time) if order.event_time else (time, time)
    return Batch(rows.num_rows, body, crc32c(body), EventTime(first), EventTime(last), schema=order.number)
