"""What tasks and drivers do to publish a batch: rows are staged piece by piece, and the pieces decided on together.

There is nothing of Spark's classes here. A task makes a ``Staging``, adds rows as they come and hands the parts that
``finish`` returns to whoever calls ``publish``, as plain data that can be pickled.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from types import TracebackType

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.encoding import Compression
from cutwater.client.publish.runs import Published, Run, RunStart
from cutwater.spark.session.worker_connections import Link
from cutwater.types import Part
from cutwater.wire.options import MIB

PIECE_BYTES = 64 * MIB
"""About what becomes one part. A task has two of them in memory, one that grows and one that is on its way; three for a
moment, if they are sorted."""
PUBLISHED_BYTES_PER_SECOND_MIN = 4 * MIB
"""A large batch gets more time than the options say, as if it were published at no more than this."""


def open_run(link: Link, name: str, key: str, *, once: bool = False, start: RunStart | None = None) -> Run:
    return link.loop.run(link.client().open_run(name, key, once=once, start=start))


def publish(
    link: Link, run: Run, batch: int, parts: Iterable[Part], position: int | None = None
) -> tuple[Published, ...]:
    """Returns when all of the batch is in the log; asks again until then, or until the time is up."""
    parts = tuple(parts)
    seconds = link.where.timeout + sum(part.bytes for part in parts) / PUBLISHED_BYTES_PER_SECOND_MIN
    return link.loop.run(link.client().publish(run, batch, parts, position=position, timeout=seconds))


class Staging:
    """What one attempt of a task stages of a batch. Rows with positions are sorted by them, in each piece.

    A piece that a storage node has lost on the way is staged again on others, so rows are kept until it is finished.
    """

    def __init__(self, link: Link, run: Run, batch: int, *, compression: Compression | None = None) -> None:
        self._link, self._run, self._batch = link, run, batch
        self._client = link.client(compression)
        self._growing: dict[str, _Piece] = {}
        self._bytes = 0
        self._under_way: concurrent.futures.Future[Part | None] | None = None
        self._parts: list[Part] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._under_way is not None:
            self._under_way.cancel()

    def add(self, topic: str, rows: pa.RecordBatch, positions: pa.Array | None = None) -> None:
        """Rows of a topic, with its columns. ``positions`` are bytes, one for each row, in any order; all rows of a
        topic have them or none has."""
        if not rows.num_rows:
            return
        piece = self._growing.setdefault(topic, _Piece())
        piece.add(rows, positions)
        self._bytes += rows.nbytes
        while self._bytes >= PIECE_BYTES:
            self._stage(max(self._growing, key=lambda name: self._growing[name].bytes))

    def finish(self) -> tuple[Part, ...]:
        """All parts, durable on the storage nodes that they name."""
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
    """Rows of one topic that will be a part."""

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
