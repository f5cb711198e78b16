"""Cuts entries down to the columns that a reader of a large range wants, and puts their rows together.

Only nodes that are asked for columns need this, and Arrow, which takes long to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.storage.checksum import Buffer, crc32c
from cutwater.storage.frames import Frame
from cutwater.storage.projection import decode_schema, is_compressed, merged, read_columns
from cutwater.storagenode.reading import READ_BYTES_MAX, picked, schema_is_theirs
from cutwater.types import BatchKind
from cutwater.wire.storage_api import Columns


class Place(NamedTuple):
    """Where a record batch lies in an answer, and its checksum."""

    offset: int
    bytes: int
    checksum: int


NOWHERE = Place(0, 0, 0)


def pick_blocks(frames: Sequence[Frame], projection: Mapping[int, Columns]) -> tuple[list[Place], list[Buffer]]:
    """Of as many frames as an answer has room for: where the rows of each begin, which is nowhere if they are in the
    block of the one before; and the blocks, in pieces."""
    made = _Blocks()
    size = 0
    for frame in frames:
        header = frame.header
        if header.kind is BatchKind.FENCE:
            made.places.append(NOWHERE)
            continue
        wanted = projection.get(header.schema)
        if wanted is not None and not is_compressed(frame.body):
            size += header.body_bytes
            if made.places and size > READ_BYTES_MAX:
                break
            with schema_is_theirs(frame):
                rows = read_columns(frame.body, decode_schema(wanted.schema), wanted.columns)
            made.join(header.schema, rows)
        else:
            body = frame.body if wanted is None else picked(frame, wanted)
            size += len(body)
            if made.places and size > READ_BYTES_MAX:
                break
            made.put(body)
    made.close()
    return made.places, made.pieces


class _Blocks:
    def __init__(self) -> None:
        self.places: list[Place] = []
        self.pieces: list[Buffer] = []
        self._end = 0
        self._rows: list[pa.RecordBatch] = []
        """Of the block that is being made."""
        self._schema = 0
        self._first = 0
        """Which frame it begins with."""

    def join(self, schema: int, rows: pa.RecordBatch) -> None:
        """Rows that go into the same block as those before, if they are of the same schema."""
        if self._rows and schema != self._schema:
            self.close()
        if not self._rows:
            self._schema, self._first = schema, len(self.places)
        self._rows.append(rows)
        self.places.append(NOWHERE)

    def put(self, body: Buffer) -> None:
        """A block as it is."""
        self.close()
        self.places.append(self._place([body]))

    def close(self) -> None:
        if self._rows:
            self.places[self._first] = self._place(merged(self._rows))
            self._rows = []

    def _place(self, pieces: Sequence[Buffer]) -> Place:
        start, checksum = self._end, 0
        for piece in pieces:
            checksum = crc32c(piece, checksum)
            self._end += len(piece)
        self.pieces += pieces
        return Place(start, self._end - start, checksum)
