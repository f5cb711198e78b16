"""Subscriptions as readers use them: records or record batches in GLSN order, from the start to the stop."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Generic, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.errors import ClientClosed
from cutwater.client.read.positions import Position, Positions, SubscriptionRange, TopicNames, check_range
from cutwater.client.read.records import ColumnLayout, Record
from cutwater.client.subscribe.stream_readers import Feed, Selection
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.errors import DeadlineExceeded, InvalidArgument, Malformed, Trimmed
from cutwater.runtime.deadlines import Deadline, check_wait
from cutwater.types import GLSN, LogStreamId

BATCH_ROWS = 16_384
"""Ready runs are joined until a batch has this many rows."""
BATCH_BYTES = 64 * 1024 * 1024
"""Runs are not joined beyond this size: decompressed, they may be many times as large."""
SKIPPED_MAX = 1_000

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Skipped(Struct, frozen=True):
    """Positions that were not delivered, because the stored batch is malformed, and why."""

    first_glsn: GLSN
    last_glsn: GLSN
    stream: LogStreamId
    topic: str
    why: str


class WantedRows(Struct):
    """The wanted rows of a run."""

    layout: ColumnLayout
    run: CommittedBatch
    start: int
    stop: int
    stored: pa.RecordBatch | None = None
    """The whole run, once it is read."""

    @property
    def rows(self) -> int:
        return self.stop - self.start


def abandon_with(holder: object, held: Feed | AsyncSubscription[Any]) -> None:
    """End ``held`` when ``holder`` is no longer referenced. This keeps only a weak reference to ``held``, because an
    error stored in it may refer to the holder. Its background tasks keep it alive as long as that matters."""
    known = weakref.ref(held)

    def abandon() -> None:
        if (still_there := known()) is not None:
            still_there.abandon()

    weakref.finalize(holder, abandon).atexit = False


class AsyncSubscription(Generic[T]):
    """An asynchronous iterator. It begins at its first use, or earlier with ``await``. Its first position, even
    ``"latest"``, is fixed when it begins::

        subscription = await log.subscribe("orders", follow=False)
        async for record in subscription:
            print(record.glsn, record.value)
    """

    # It ends with ``close``, at its end, or when it is no longer referenced. So its background tasks must not refer to
    # it.

    def __init__(
        self,
        catalogs: Catalogs,
        nodes: Nodes,
        selection: Selection,
        resolve: Callable[[Deadline], Awaitable[SubscriptionRange]],
        make: Callable[[Sequence[WantedRows]], list[T]],
        columns: Sequence[str] | None,
        timeout: float,
        *,
        from_earliest: bool,
        patience: float | None,
        skips_malformed: bool = False,
    ) -> None:
        """``resolve`` finds the range when the subscription begins. ``patience``: how long each wait for records may
        take; None if there need not be any new records."""
        self._skips_malformed = skips_malformed
        self._skipped: deque[Skipped] = deque(maxlen=SKIPPED_MAX)
        self._skipped_records = 0
        self._catalogs, self._nodes, self._selection = catalogs, nodes, selection
        self._patience = patience
        self._resolve, self._make, self._columns, self._timeout = resolve, make, columns, timeout
        self._from_earliest = from_earliest
        self._opening = asyncio.Lock()
        self._feed: Feed | None = None
        self._range: SubscriptionRange | None = None
        self._layouts: dict[LogStreamId, ColumnLayout] = {}
        self._pieces: deque[WantedRows] = deque()
        self._made: deque[T] = deque()
        self._reached = GLSN(0)
        """Everything below this position has been taken from the feed, though perhaps not from here."""
        self._is_closed = self._is_over = False

    def __await__(self) -> Generator[Any, None, AsyncSubscription[T]]:
        return self.begun().__await__()

    async def begun(self) -> AsyncSubscription[T]:
        async with self._opening:
            self._check_open()
            if self._feed is None and not self._is_over:
                await self._open()
        return self

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("this subscription was closed: subscribe again")

    async def _open(self) -> None:
        self._range = found = await self._resolve(Deadline(self._timeout))
        self._reached = found.start
        selection, columns = self._selection, self._columns
        for topic in selection.topics(found.view):
            # Raises now if a column does not exist.
            ColumnLayout(self._catalogs.view.schema(topic), columns)
        catalogs, nodes = self._catalogs, self._nodes
        self._feed = Feed(catalogs, nodes, selection, columns, found.view, found.start, found.starts, found.stop)
        abandon_with(self, self._feed)

    def __aiter__(self) -> AsyncIterator[T]:
        self._check_open()
        return self

    async def __anext__(self) -> T:
        if not self._made:
            try:
                await self._filled(self._patience)
            except ClientClosed:
                # Closing it ends the loops over it.
                if not self._is_closed:
                    raise
            if not self._made:
                raise StopAsyncIteration
        return self._made.popleft()

    async def take(self, timeout: float | None = None) -> list[T]:
        """Return everything that is ready, at least one item unless the subscription is at its end. Waits at most
        ``timeout`` seconds. Without ``timeout``, a subscription that follows the log waits as long as necessary. With 0
        it returns only what has already arrived. Raises ``DeadlineExceeded`` if nothing has arrived by then."""
        seconds = self._patience if timeout is None else check_wait(timeout)
        if not self._made:
            await self._filled(seconds)
        made, self._made = list(self._made), deque()
        return made

    async def _filled(self, seconds: float | None) -> None:
        self._check_open()
        if seconds == 0:
            # Let other tasks run, so that a caller that polls does not keep records from arriving.
            await asyncio.sleep(0)
            await self.begun()
            await self._fill(waits=False)
            if not self._made and not self._is_over:
                raise self._nothing_came(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._fill()
        except TimeoutError:
            assert seconds is not None, "only what has a limit reaches it"
            raise self._nothing_came(seconds) from None

    def _nothing_came(self, seconds: float) -> DeadlineExceeded:
        """Return the error for a caller that has waited in vain; any thread may call this."""
        trouble, found = self.trouble, self._range
        told = f"nothing came within {seconds:g} s" if seconds else "nothing has come yet"
        if found is not None and found.stop is not None and self._reached <= found.view.catalog.high_watermark:
            told += f", though the log goes on at GLSN {self._reached}"
        return DeadlineExceeded(f"{told}: {trouble}" if trouble else told)

    @property
    def trouble(self) -> str:
        """Log streams that cannot be read now, or take no appends, and what to do; empty if all is well."""
        feed = self._feed
        return "" if feed is None else feed.trouble

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The latest malformed batches that ``on_malformed="skip"`` has left out."""
        return tuple(self._skipped)

    @property
    def skipped_records(self) -> int:
        """How many positions ``on_malformed="skip"`` has left out."""
        return self._skipped_records

    async def close(self) -> None:
        self._is_closed = True
        self._made.clear()
        self._pieces.clear()
        await self._end()

    async def _end(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    def abandon(self) -> None:
        """Close from any thread without waiting for it."""
        feed = self._feed
        if feed is not None:
            feed.abandon()

    async def __aenter__(self) -> AsyncSubscription[T]:
        return await self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Ready runs.

    async def _fill(self, *, waits: bool = True) -> None:
        """Make the next few items; none at the end, or if ``waits`` is false and nothing has arrived."""
        while not self._made and not self._is_over:
            if self._pieces:
                pieces = self._take_pieces()
                if pieces:
                    self._made.extend(self._make(pieces))
                continue
            await self.begun()
            feed, found = self._feed, self._range
            assert feed is not None
            assert found is not None
            if found.stop is not None and self._reached >= found.stop:
                self._is_over = True
                await self._end()
                return
            try:
                runs = await self._taken(feed, found) if waits else feed.take_ready()
            except Trimmed:
                if not self._from_earliest or feed.next_glsn > found.start:
                    raise
                # The log was trimmed after its beginning was found and before it was read.
                continue
            if runs is None:
                return
            # The subscription may have been closed since they were ready.
            self._check_open()
            self._reached = feed.next_glsn
            self._pieces.extend(self._clipped(runs))

    async def _taken(self, feed: Feed, found: SubscriptionRange) -> list[CommittedBatch]:
        """Take runs from the feed. If the log has already reached the wanted position, do not wait for ever."""
        has_more = found.stop is not None and self._reached <= found.view.catalog.high_watermark
        try:
            async with asyncio.timeout(self._timeout if has_more else None):
                return await feed.take()
        except TimeoutError:
            raise self._nothing_came(self._timeout) from None

    def _clipped(self, runs: Iterable[CommittedBatch]) -> Iterable[WantedRows]:
        found = self._range
        assert found is not None
        stop, starts = found.stop, found.starts
        for run in runs:
            start = found.start
            if starts and (info := self._catalogs.view.streams.get(run.stream)) is not None:
                start = max(start, starts.get(info.topic, start))
            first = max(0, start - run.first_glsn)
            last = run.batch.count if stop is None else min(run.batch.count, stop - run.first_glsn)
            layout = self._layout(run) if first < last else None
            if layout is not None:
                yield WantedRows(layout, run, first, last)

    def _take_pieces(self) -> list[WantedRows]:
        """Read the next few pieces. Stop before a malformed one, so that everything before it is delivered first."""
        pieces: list[WantedRows] = []
        rows = size = 0
        while self._pieces:
            piece = self._pieces[0]
            if pieces and (rows + piece.rows > BATCH_ROWS or size > BATCH_BYTES):
                break
            try:
                piece.stored = piece.layout.stored(piece.run)
            except Malformed as error:
                if not self._skips_malformed:
                    if pieces:
                        break
                    raise
                self._pieces.popleft()
                self._skip(piece, error)
                continue
            rows += piece.rows
            size += piece.stored.nbytes
            pieces.append(self._pieces.popleft())
        return pieces

    def _skip(self, piece: WantedRows, error: Malformed) -> None:
        run = piece.run
        first, last = GLSN(run.first_glsn + piece.start), GLSN(run.first_glsn + piece.stop - 1)
        self._skipped.append(Skipped(first, last, run.stream, error.topic, error.why))
        self._skipped_records += piece.rows
        _log.warning(
            "GLSN %s to %s of topic %r are skipped, they are malformed: %s", first, last, error.topic, error.why
        )

    def _layout(self, run: CommittedBatch) -> ColumnLayout | None:
        """Return the layout of a run; None if its topic was deleted and was not selected by name."""
        layout = self._layouts.get(run.stream)
        if layout is not None and layout.knows(run):
            return layout
        view = self._catalogs.view
        info = view.streams.get(run.stream)
        name = None if info is None else view.names.get(info.topic)
        if name is None:
            self._selection.topics(view)
            return None
        layout = self._layouts[run.stream] = ColumnLayout(view.schema(view.topics[name]), self._columns)
        return layout


class Subscriptions:
    """Makes the subscriptions of a client, and closes them together with it."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes, positions: Positions) -> None:
        self._catalogs, self._nodes, self._positions = catalogs, nodes, positions
        self.known: weakref.WeakSet[AsyncSubscription[Any]] = weakref.WeakSet()

    def make(
        self,
        topics: TopicNames,
        start: Position,
        stop: int | datetime | None,
        follow: bool,
        seconds: float,
        make: Callable[[Sequence[WantedRows]], list[T]],
        columns: Sequence[str] | None,
        on_malformed: str,
    ) -> AsyncSubscription[T]:
        """Make a subscription. ``make`` converts the rows: ``make_records`` or ``make_batches``."""
        selection = Selection(topics)
        if not isinstance(follow, bool):
            raise InvalidArgument(f"follow= is True or False, not {follow!r}")
        check_range(start, stop)
        if on_malformed not in ("error", "skip"):
            raise InvalidArgument(f"on_malformed= is 'error' or 'skip', not {on_malformed!r}")
        subscription = AsyncSubscription(
            self._catalogs,
            self._nodes,
            selection,
            partial(self._positions.resolve, selection, start, stop, follow),
            make,
            columns,
            seconds,
            from_earliest=start == "earliest",
            patience=None if follow else seconds,
            skips_malformed=on_malformed == "skip",
        )
        self.known.add(subscription)
        return subscription

    async def table(
        self,
        batches: AsyncSubscription[pa.RecordBatch],
        topics: TopicNames,
        columns: Sequence[str] | None,
        deadline: Deadline,
    ) -> pa.Table:
        """Return everything that a subscription to these topics and columns delivers until it ends."""
        found: list[pa.RecordBatch] = []
        async with batches:
            while some := await batches.take(timeout=max(deadline.left, 0.001)):
                found += some
        if not found:
            known = Selection(topics).topics(self._catalogs.view)
            schema = self._catalogs.view.schema(known[0]) if known else TopicSchema("")
            return ColumnLayout(schema, columns).schema.empty_table()
        try:
            return pa.Table.from_batches(found, found[-1].schema)
        except pa.ArrowInvalid:
            # An older part may lack columns that were added to the schema meanwhile.
            return pa.concat_tables([pa.Table.from_batches([batch]) for batch in found], promote_options="default")

    async def close(self) -> None:
        for subscription in list(self.known):
            await subscription.close()


def make_records(pieces: Sequence[WantedRows]) -> list[Record]:
    return [
        record for piece in pieces for record in piece.layout.records(piece.run, piece.start, piece.stop, piece.stored)
    ]


def make_batches(pieces: Sequence[WantedRows]) -> list[pa.RecordBatch]:
    """Make record batches; neighbours with the same columns become one batch."""
    made = [piece.layout.batch(piece.run, piece.start, piece.stop, piece.stored) for piece in pieces]
    groups = [list(group) for _, group in groupby(made, key=lambda batch: batch.schema)]
    return [group[0] if len(group) == 1 else pa.concat_batches(group) for group in groups]
