"""Publishes a batch: tasks stage rows piece by piece, and the driver publishes all pieces together.

This module uses no classes of Spark. A task makes a ``TaskStaging``, adds rows as they come and sends the parts that
``finish`` returns to the caller of ``publish``, as plain data that can be pickled.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from types import TracebackType

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.encoding import Compression
from cutwater.client.publish.runs import Published, Run
from cutwater.spark.session.worker_connections import WorkerConnection
from cutwater.types import Part
from cutwater.wire.options import MIB

PIECE_BYTES = 64 * MIB
"""Approximate bytes of one part. A task holds two in memory, one that grows and one that is being sent; when they are
sorted, three for a moment."""
PUBLISHED_BYTES_PER_SECOND_MIN = 4 * MIB
"""A large batch gets more time than the options say, as if it were published at this rate."""


def publish(
    link: WorkerConnection, run: Run, batch: int, parts: Iterable[Part], position: int | None = None
) -> tuple[Published, ...]:
    """Publish a batch. Returns when all of it is in the log; retries until then, or until the time is up."""
    parts = tuple(parts)
    seconds = link.where.timeout + sum(part.bytes for part in parts) / PUBLISHED_BYTES_PER_SECOND_MIN
    return link.loop.run(link.client().publish(run, batch, parts, position=position, timeout=seconds))


class TaskStaging:
    """The rows of a batch that one attempt of a task stages. In each piece, rows with positions are sorted by them.

    If a storage node loses a piece while it is staged, the piece is staged again on other nodes. So the rows are kept
    until the piece is finished.
    """

    def __init__(self, link: WorkerConnection, run: Run, batch: int, *, compression: Compression | None = None) -> None:
        self._link, self._run, self._batch = link, run, batch
        self._client = link.client(compression)
        self._growing: dict[str, _Piece] = {}
        self._bytes = 0
        self._under_way: concurrent.futures.Future[Part | None] | None = None
        self._parts: list[Part] = []

    def __enter__(self) -> TaskStaging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._under_way is not None:
            self._under_way.cancel()

    def add(self, topic: str, rows: pa.RecordBatch, positions: pa.Array | None = None) -> None:
        """Add rows of a topic, with the topic's columns. ``positions`` are bytes, one value per row, in any order.
        Either all rows of a topic have positions, or none has."""
        if not rows.num_rows:
            return
        piece = self._growing.setdefault(topic, _Piece())
        piece.add(rows, positions)
        self._bytes += rows.nbytes
        while self._bytes >= PIECE_BYTES:
            self._stage(max(self._growing, key=lambda name: self._growing[name].bytes))

    def finish(self) -> tuple[Part, ...]:
        """Stage the rest and return all parts. They are durable on the storage nodes that they name."""
        while self._growing:
            self._stage(next(iter(self._growing)))
        self._wait()
        return tuple(self._parts)

    def _stage(self, topic: str) -> None:
        piece = self._growing.pop(topic)
        self._bytes -= piece.bytes
        rows, positions = piece.sorted()
        self._wait()
        work = self._client.stage(self._run, self._batch, topic, rows, positions=positions)
        self._under_way = self._link.loop.begin(work)

    def _wait(self) -> None:
        if self._under_way is not None:
            part = self._link.loop.wait(self._under_way)
            self._under_way = None
            if part is not None:
                self._parts.append(part)


class _Piece:
    """Rows of one topic that will become a part."""

    def __init__(self) -> None:
        self._rows: list[pa.RecordBatch] = []
        self._positions: list[pa.Array] = []
        self.bytes = 0

    def add(self, rows: pa.RecordBatch, positions: pa.Array | None) -> None:
        self._rows.append(rows)
        if positions is not None:
            self._positions.append(positions)
        self.bytes += rows.nbytes

    def sorted(self) -> tuple[pa.Table, pa.Array | None]:
        rows = pa.Table.from_batches(self._rows)
        if not self._positions:
            return rows, None
        positions = pa.concat_arrays(self._positions)
        order = pc.array_sort_indices(positions)
        return rows.take(order), positions.take(order)
