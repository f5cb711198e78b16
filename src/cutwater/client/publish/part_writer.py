"""Writes one staged part to the storage nodes that will hold it: rows in, frames out, to all of them at the same time.

All holders get the same bytes in the same order; a few messages are in flight at a time. If one holder fails, the whole
part fails and is staged again under another name; the other holders give up what they have of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import UNSET, UnsetType, structs

from cutwater.client.append.router import now_us
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import watched
from cutwater.client.convert.conversion import Records, to_batch
from cutwater.client.convert.encoding import Compression, Limits, encode
from cutwater.client.convert.schemas import encode_schema
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.core.publish.staged import PartOrder, PartSize, StagedPart
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from cutwater.format.checksum import Buffer
from cutwater.format.entry_codec import staged_frame
from cutwater.format.merging import POSITION, check_order
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.methods import Method
from cutwater.protocol.storage_api import DISCARD_PART, FINISH_PART, STAGE, FinishArguments, StageArguments
from cutwater.runtime import system
from cutwater.runtime.deadlines import Deadline
from cutwater.types import Batch, BatchNumber, JobEpoch, Part, RunId, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.options import KIB, MIB

ENTRY_BYTES = MIB
"""Approximate size of an entry."""
ORDERED_ENTRY_BYTES = 256 * KIB
"""The same in a part with positions: a merge of parts holds one entry of each part in memory."""
ENTRY_BYTES_MAX = 8 * MIB
MESSAGE_BYTES = MIB
MESSAGES_AT_ONCE = 4
DISCARD_MS_MAX = 300
"""Limit for discarding a part: a holder that hangs must not delay the client that stages the part again."""

Positions: TypeAlias = Sequence[bytes] | pa.Array | pa.ChunkedArray
"""One position for each row, not null, each not below the one before."""


class AsyncStager:
    """Stages one part. Made by ``AsyncClient.stager``. Leaving its context without ``finish`` gives the part up."""

    def __init__(
        self,
        catalogs: Catalogs,
        nodes: Nodes,
        limits: Limits,
        compression: Compression | None,
        *,
        run: tuple[RunId, int],
        batch: BatchNumber,
        topic: TopicInfo,
        ordered: bool,
        seconds: float,
        job_epoch: JobEpoch | UnsetType = UNSET,
    ) -> None:
        self._catalogs, self._nodes, self._compression, self._topic = catalogs, nodes, compression, topic
        self._limits = Limits(
            record_bytes_max=limits.record_bytes_max, batch_bytes_max=min(limits.batch_bytes_max, ENTRY_BYTES_MAX)
        )
        self._schema = catalogs.view.schema(topic)
        self._is_ordered, self._seconds = ordered, seconds
        self._staged = StagedPart(
            run[0], batch, run[1], topic.topic, system.token_hex(16), self._order(), job_epoch=job_epoch
        )
        self._stream: StreamInfo | None = None
        self._holders: dict[StorageNodeId, tuple[str, Connection]] = {}
        self._size = PartSize()
        self._pieces: list[Buffer] = []
        """Frames that wait until a message is full."""
        self._pieces_bytes = 0
        self._sending: deque[asyncio.Task[None]] = deque()
        self._last: bytes | None = None
        self._is_over = False

    async def begin(self, deadline: Deadline) -> None:
        """Choose and connect the holders: the nodes of one of the topic's open log streams. The batch number decides
        which one, so that the parts of a group lie where it will be published, and the batches of a run take turns."""
        streams = [s for s in self._catalogs.view.streams_of(self._topic.topic) if s.is_open and s.chain]
        if not streams:
            raise Unavailable(f"no log stream of topic {self._topic.name!r} is open now: wait for repair")
        streams.sort(key=lambda info: info.stream)
        self._stream = stream = streams[self._staged.batch % len(streams)]
        for node in stream.chain:
            address = self._catalogs.view.address(node)
            try:
                async with watched(self._catalogs, self._nodes, stream.stream, node):
                    self._holders[node] = address, await self._nodes.connection(address, deadline)
            except ConnectionLost:
                self._nodes.unreachable(stream.stream, node)
                raise

    async def __aenter__(self) -> AsyncStager:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def write(
        self, records: Records, *, positions: Positions | None = None, timeout: float | None = None
    ) -> None:
        """Write more rows: an Arrow batch or table, or anything that ``append`` takes. Returns when there is room for
        more."""
        self._require_open()
        if self._is_ordered != (positions is not None):
            raise InvalidArgument(
                "this part is ordered, so each row needs a position: give positions="
                if self._is_ordered
                else "this part is not ordered, so positions= has no place: begin it with ordered=True"
            )
        deadline = Deadline(self._seconds if timeout is None else timeout)
        at = 0
        for given in _pieces_of(records):
            count = rows_in(given)
            rows = await self._converted(given, at, deadline)
            if positions is not None:
                rows = self._with_positions(rows, positions, at)
            for batch in self._entries(rows, at):
                await self._add(batch, deadline)
            at += count
        if positions is not None and at != len(positions):
            raise InvalidArgument(f"{at} records, but {len(positions)} positions: give one for each")

    async def finish(self, *, timeout: float | None = None) -> Part | None:
        """Return the part, durable on all its holders; None if it has no rows."""
        self._require_open()
        deadline = Deadline(self._seconds if timeout is None else timeout)
        await self._flush(deadline)
        while self._sending:
            await self._sending.popleft()
        self._is_over = True
        if not self._size.rows:
            return None
        assert self._stream is not None
        arguments = FinishArguments(self._staged.part, self._size)
        await self._tell_all(FINISH_PART, arguments, (), deadline)
        return Part(
            self._topic.topic,
            self._stream.stream,
            tuple(self._holders),
            self._staged.part,
            self._staged.generation,
            self._size.entries,
            self._size.rows,
            self._size.bytes,
            self._is_ordered,
            self._staged.run,
            self._staged.batch,
        )

    async def close(self) -> None:
        """Give the part up, unless it is finished."""
        if self._is_over:
            return
        self._is_over = True
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._sending.clear()
        if self._size.bytes:
            calls = [
                connection.call(DISCARD_PART, self._staged.part, timeout_ms=DISCARD_MS_MAX)
                for _, connection in self._holders.values()
            ]
            # A holder that does not get this message gives the part up after a while.
            await asyncio.gather(*calls, return_exceptions=True)

    def _require_open(self) -> None:
        if self._is_over:
            raise ClientClosed("this part is finished, or was given up: begin another one")

    # From rows to entries.

    def _order(self) -> PartOrder | None:
        if not self._is_ordered:
            return None
        schema = encode_schema(self._schema.newest.append(POSITION))
        return PartOrder(schema, self._schema.number, self._schema.event_time, self._compression or "")

    async def _converted(self, given: Records, at: int, deadline: Deadline) -> pa.RecordBatch:
        make = partial(to_batch, records=given, now_us=now_us())
        try:
            return make(self._schema)
        except InvalidRecord as error:
            if self._is_ordered and self._size.bytes:
                raise _in_row(error, at) from error
            # The schema may have grown since the catalog was fetched.
            await self._catalogs.fresh(deadline)
            self._schema = self._catalogs.view.schema(await self._catalogs.topic(self._topic.name, deadline))
            try:
                rows = make(self._schema)
            except InvalidRecord as again:
                raise _in_row(again, at) from again
            if self._is_ordered:
                self._staged = structs.replace(self._staged, order=self._order())
            return rows

    def _with_positions(self, rows: pa.RecordBatch, positions: Positions, at: int) -> pa.RecordBatch:
        some = positions[at : at + rows.num_rows]
        try:
            column = (
                some.cast(POSITION.type)
                if isinstance(some, pa.Array | pa.ChunkedArray)
                else pa.array(some, POSITION.type)
            )
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(f"positions= are bytes, one for each row: {error}") from error
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if len(column) != rows.num_rows:
            raise InvalidArgument(f"{at + rows.num_rows} records, but {len(positions)} positions: give one for each")
        schema = self._schema.newest.append(POSITION)
        with_positions = pa.RecordBatch.from_arrays([*rows.columns, column], schema=schema)
        self._last = check_order(with_positions, self._last)
        return with_positions

    def _entries(self, rows: pa.RecordBatch, at: int) -> Iterator[Batch]:
        """Cut the rows into batches of about the same size. The first row was given as row ``at``."""
        target = ORDERED_ENTRY_BYTES if self._is_ordered else ENTRY_BYTES
        step = max(1, rows.num_rows * target // max(rows.nbytes, 1))
        for start in range(0, rows.num_rows, step):
            yield from self._encoded(rows.slice(start, step), at + start)

    def _encoded(self, rows: pa.RecordBatch, start: int) -> Iterator[Batch]:
        try:
            batch = encode(rows, self._schema, now_us(), limits=self._limits, compression=self._compression)
        except RecordTooLarge as error:
            if error.row is not None:
                raise RecordTooLarge(start + error.row, error.size, error.limit) from error
            if rows.num_rows == 1:
                raise
            # The sizes of the rows differ much.
            half = rows.num_rows // 2
            yield from self._encoded(rows.slice(0, half), start)
            yield from self._encoded(rows.slice(half), start + half)
        else:
            yield batch

    # From entries to messages.

    async def _add(self, batch: Batch, deadline: Deadline) -> None:
        pieces = staged_frame(batch, self._size.rows + 1)
        size = sum(map(len, pieces))
        if self._pieces and self._pieces_bytes + size > ENTRY_BYTES_MAX:
            await self._flush(deadline)
        self._pieces += pieces
        self._pieces_bytes += size
        self._size = PartSize(self._size.entries + 1, self._size.rows + batch.count, self._size.bytes + size)
        if self._pieces_bytes >= MESSAGE_BYTES:
            await self._flush(deadline)

    async def _flush(self, deadline: Deadline) -> None:
        """Send the waiting frames, as soon as few enough messages are in flight."""
        if not self._pieces:
            return
        pieces, size, self._pieces, self._pieces_bytes = self._pieces, self._pieces_bytes, [], 0
        while len(self._sending) >= MESSAGES_AT_ONCE:
            await self._sending.popleft()
        arguments = StageArguments(self._staged, self._size.bytes - size)
        work = self._tell_all(STAGE, arguments, pieces, deadline)
        self._sending.append(asyncio.get_running_loop().create_task(work))

    async def _tell_all(
        self, method: Method[Any, Any], argument: object, body: Sequence[Buffer], deadline: Deadline
    ) -> None:
        calls = [self._tell(node, method, argument, body, deadline) for node in self._holders]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _tell(
        self,
        node: StorageNodeId,
        method: Method[Any, Any],
        argument: object,
        body: Sequence[Buffer],
        deadline: Deadline,
    ) -> None:
        address, connection = self._holders[node]
        stream = self._stream
        assert stream is not None
        refusal: ResourceExhausted | None = None
        while True:
            try:
                async with watched(self._catalogs, self._nodes, stream.stream, node):
                    await connection.call(method, argument, list(body), timeout_ms=deadline.left_ms())
                return
            except ResourceExhausted as error:
                if deadline.left * 1_000 <= error.retry_ms:
                    raise
                refusal = error
                await deadline.pause(error.retry_ms / 1_000)
            except DeadlineExceeded:
                if refusal is not None:
                    # The refusal says more than that the time is up.
                    raise refusal from None
                raise
            except ConnectionLost:
                self._nodes.drop(address, connection)
                self._nodes.unreachable(stream.stream, node)
                raise


def rows_in(records: Records) -> int:
    """Return the number of given rows."""
    if isinstance(records, pa.RecordBatch | pa.Table):
        return int(records.num_rows)
    return len(records) if hasattr(records, "__len__") and not isinstance(records, str | bytes | dict) else 1


def _pieces_of(records: Records) -> Iterator[Records]:
    """Yield a table batch by batch, because as a whole it might not fit into one batch; yield other records as they
    are."""
    if isinstance(records, pa.Table):
        yield from (batch for batch in records.to_batches() if batch.num_rows)
    elif rows_in(records):
        yield records


def _in_row(error: InvalidRecord, at: int) -> InvalidRecord:
    """Return the error with a row number that counts from the first given row, not from the first row of a piece."""
    if not at or error.row is None:
        return error
    message = error.message.partition(": ")[2]
    return InvalidRecord(message, column=error.column, row=error.row + at)
