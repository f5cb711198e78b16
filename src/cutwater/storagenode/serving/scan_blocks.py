"""Reduces entries to the columns that a reader of a large range wants, and joins their rows into blocks.

Only nodes that are asked for columns need this module and Arrow, which is slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import EntryFrame
from cutwater.format.ipc_message import may_be_compressed
from cutwater.protocol.scan_api import CHECKED, MALFORMED
from cutwater.protocol.storage_api import Columns
from cutwater.storagenode.serving.picking import FormOf, Room, columns_of, inflated, picked, verdict_on
from cutwater.types import BatchKind


class BatchPlace(NamedTuple):
    """The location of a record batch in an answer, and its checksum."""

    offset: int
    bytes: int
    checksum: int


NOWHERE = BatchPlace(0, 0, 0)


def pick_blocks(
    frames: Sequence[EntryFrame], projection: Mapping[int, Columns], form_of: FormOf | None
) -> tuple[list[BatchPlace], list[Buffer], list[int]]:
    """Process as many frames as fit into an answer. Returns, for each frame, where its rows begin (``NOWHERE`` if they
    are in the block of the frame before); the blocks, in pieces; and the verdict on each frame for the reader."""
    made = _Blocks()
    verdicts: list[int] = []
    room = Room()
    for frame in frames:
        header = frame.header
        if header.kind is not BatchKind.DATA:
            made.places.append(NOWHERE)
            verdicts.append(0)
            continue
        wanted = projection.get(header.schema)
        verdict = CHECKED
        if wanted is None:
            verdict = 0 if form_of is None else verdict_on(frame, form_of)
            if not room.take(len(frame.body), 0 if header.checked else inflated(frame.body)):
                break
            made.put(frame.body if verdict != MALFORMED else None)
        elif not may_be_compressed(frame.body):
            if not room.take(header.body_bytes):
                break
            rows = columns_of(frame, wanted)
            if rows is None:
                verdict = MALFORMED
                made.put(None if form_of is not None else frame.body)
            else:
                made.join(header.schema, rows)
        else:
            body = picked(frame, wanted)
            if not room.take(len(frame.body) if body is None else len(body), inflated(frame.body)):
                break
            if body is None:
                verdict = MALFORMED
            made.put(body if body is not None or form_of is not None else frame.body)
        verdicts.append(verdict if form_of is not None else 0)
    made.close()
    return made.places, made.pieces, verdicts


class _Blocks:
    def __init__(self) -> None:
        self.places: list[BatchPlace] = []
        self.pieces: list[Buffer] = []
        self._end = 0
        self._rows: list[pa.RecordBatch] = []
        """Rows of the block that is being built."""
        self._schema = 0
        self._first = 0
        """The frame that the block begins with."""

    def join(self, schema: int, rows: pa.RecordBatch) -> None:
        """Add rows to the current block if they have the same schema; otherwise begin a new one."""
        if self._rows and schema != self._schema:
            self.close()
        if not self._rows:
            self._schema, self._first = schema, len(self.places)
        self._rows.append(rows)
        self.places.append(NOWHERE)

    def put(self, body: Buffer | None) -> None:
        """Add a block as it is, or no block if its rows are not sent."""
        self.close()
        self.places.append(NOWHERE if body is None else self._place(body))

    def close(self) -> None:
        if self._rows:
            self.places[self._first] = self._place(memoryview(pa.concat_batches(self._rows).serialize()))
            self._rows = []

    def _place(self, block: Buffer) -> BatchPlace:
        place = BatchPlace(self._end, len(block), crc32c(block))
        self._end += len(block)
        self.pieces.append(block)
        return place
