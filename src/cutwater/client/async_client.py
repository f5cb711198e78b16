"""The client for asyncio. ``cutwater.Client`` is the same without asyncio, derived from this one.

Everything here belongs to one event loop. Every call has a deadline: ``timeout=`` in seconds, or what the client was
made with.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.access import Access
from cutwater.client.appending import Shipment, Shipping
from cutwater.client.catalogs import Catalogs, View
from cutwater.client.coalescing import RECORD_COST_BYTES, SMALL_BYTES, Lane, Lanes, Part, Single, now_us
from cutwater.client.conversion import Headers, Records, Time, Value, time_us, to_batch
from cutwater.client.cursors import AsyncCursor, NamedCursor
from cutwater.client.deadlines import TIMEOUT_SECONDS, Deadline, check_timeout
from cutwater.client.encoding import Compression, Limits, check_compression, encode
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.client.feeds import Selection
from cutwater.client.nodes import Nodes
from cutwater.client.producer import BUFFER_BYTES_MAX, AsyncProducer
from cutwater.client.reading import Reading
from cutwater.client.records import Record
from cutwater.client.repository import Repository, parse_servers
from cutwater.client.schemas import SchemaLike, TopicSchema
from cutwater.client.subscriptions import AsyncSubscription, Range, make_batches, make_records
from cutwater.client.topics import Topic, Topics, topic_of
from cutwater.core.requests import Catalog, CatalogRequest, TopicInfo
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, LLSN, Ack, Batch, ClusterId, CutTime, EventTime, LogStreamId, Retention
from cutwater.wire.handshake import ANY_CLUSTER, Endpoint

CONNECT_SECONDS_MAX = 10.0
COMPLAIN_MS_MAX = 2_000
LANES_MAX = 256

TopicNames: TypeAlias = str | Sequence[str] | re.Pattern[str]
Position: TypeAlias = int | datetime | Literal["earliest", "latest"] | NamedCursor
"""A GLSN, the time at which records were committed, an end of the log, or where a cursor is."""


class AsyncClient:
    """Made by ``AsyncClient.connect``::

    async with await AsyncClient.connect("cutwater://127.0.0.1:7000") as log:
        ack = await log.append("orders", b"hello")
        async for record in log.subscribe("orders", start=ack.glsn): ...
    """

    def __init__(
        self,
        repository: Repository,
        cluster: ClusterId,
        access: Access,
        *,
        timeout: float,
        compression: Compression | None,
        limits: Limits,
    ) -> None:
        """For ``connect``; ``repository`` has answered before."""
        self.cluster = cluster
        self._repository = repository
        self._timeout, self._compression, self._limits = timeout, compression, limits
        self._catalogs = Catalogs(repository)
        complain = partial(repository.complain, timeout_ms=COMPLAIN_MS_MAX)
        self._nodes = Nodes(Endpoint(cluster, "client"), access, complain)
        self._topics = Topics(repository, self._catalogs)
        self._shipping = Shipping(self._catalogs, self._nodes)
        self._reading = Reading(self._catalogs, self._nodes)
        self._lanes: Lanes = {}
        self._subscriptions: set[AsyncSubscription[Any]] = set()
        self._producers: set[AsyncProducer] = set()
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        servers: str,
        *,
        timeout: float = TIMEOUT_SECONDS,
        compression: Compression | None = None,
        cluster: int | None = None,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
    ) -> AsyncClient:
        """Connect to the metadata repository at any of the addresses in ``cutwater://host:port,host:port``.

        ``timeout`` is what each call may take unless it says otherwise. ``compression`` (``"lz4"`` or ``"zstd"``) is
        for what is appended. ``cluster``: refuse to talk to any other cluster than this one.
        """
        addresses = parse_servers(servers)
        access = Access(tls, token, insecure)
        repository = Repository(Endpoint(ClusterId(cluster or ANY_CLUSTER), "client"), addresses, access)
        deadline = Deadline(min(check_timeout(timeout), CONNECT_SECONDS_MAX))
        try:
            catalog = await repository.ask(CatalogRequest(), Catalog, timeout_ms=deadline.left_ms())
            client = cls(
                repository,
                repository.cluster,
                access,
                timeout=timeout,
                compression=check_compression(compression),
                limits=limits or Limits(),
            )
            client._catalogs.take(catalog)
        except BaseException:
            repository.close()
            raise
        return client

    async def close(self) -> None:
        """Appends that are under way are given up: their callers are told. Producers are closed first, which lets them
        finish what was sent; if they cannot, that is raised when everything else is closed."""
        if self._is_closed:
            return
        self._is_closed = True
        closing = await asyncio.gather(*(producer.finish() for producer in self._producers), return_exceptions=True)
        for lane in self._lanes.values():
            await lane.close()
        for subscription in list(self._subscriptions):
            await subscription.close()
        await self._catalogs.close()
        await self._nodes.close()
        self._repository.close()
        for error in closing:
            if error is not None:
                raise error

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _deadline(self, timeout: float | None) -> Deadline:
        if self._is_closed:
            raise ClientClosed("this client was closed: make another one")
        return Deadline(self._timeout if timeout is None else timeout)

    # Topics.

    async def create_topic(
        self,
        name: str,
        *,
        streams: int = 1,
        replication: int | None = None,
        schema: SchemaLike | None = None,
        event_time: str = "",
        retention: timedelta | Retention | None = None,
        timeout: float | None = None,
    ) -> Topic:
        """Make a topic and return when it takes appends.

        ``replication``: how many storage nodes hold each record; three, or as many as there are. ``schema`` is an
        Arrow schema, and ``event_time`` the name of its column with event time; without one, records have a key and a
        value. ``retention``: for how long, or up to which size, records are kept; for ever if not said.
        """
        deadline = self._deadline(timeout)
        return await self._topics.create(name, streams, replication, schema, event_time, retention, deadline)

    async def change_topic(
        self,
        name: str,
        *,
        streams: int | None = None,
        schema: SchemaLike | None = None,
        retention: timedelta | Retention | None = None,
        timeout: float | None = None,
    ) -> Topic:
        """Change what is given. A schema may only grow, by columns that may be null."""
        return await self._topics.change(name, streams, schema, retention, self._deadline(timeout))

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic with all its records."""
        await self._topics.delete(name, self._deadline(timeout))

    async def topics(self, *, timeout: float | None = None) -> list[Topic]:
        """All topics, by name."""
        view = await self._catalogs.fresh(self._deadline(timeout))
        return [topic_of(view.topics[name], view) for name in sorted(view.topics)]

    async def topic(self, name: str, *, timeout: float | None = None) -> Topic:
        """What is known of one topic."""
        view = await self._catalogs.fresh(self._deadline(timeout))
        return topic_of(await self._catalogs.topic(name, self._deadline(timeout)), view)

    async def trim(self, topic: str, *, before: int, timeout: float | None = None) -> None:
        """Remove all records of a topic below this GLSN, for good. Durable when it returns; files go a little later."""
        await self._topics.trim(topic, before, self._deadline(timeout))

    # Appending.

    async def append(
        self,
        topic: str,
        records: Records,
        *,
        key: Value | Sequence[Value | None] | pa.Array | None = None,
        timestamp: Time | Sequence[Time | None] | pa.Array | None = None,
        headers: Headers | Sequence[Headers | None] | pa.Array | None = None,
        stream: int | None = None,
        watermark: Time | None = None,
        if_llsn: int | None = None,
        timeout: float | None = None,
    ) -> Ack:
        """Append one record or several, all or none, with consecutive positions.

        ``records`` is one value (bytes, or str as UTF-8), a list of them, an Arrow array, batch or table, a DataFrame
        of pandas or Polars, a dict or a list of dicts. ``key``, ``timestamp`` and ``headers`` are one for all records,
        or a list with one for each; event time is this client's clock if not said.

        ``stream``: the log stream to append to, otherwise any of the topic. ``watermark``: no record with an earlier
        event time follows in that log stream. ``if_llsn``: only if the first record gets exactly this position in
        ``stream``, otherwise ``ConditionFailed``.

        The outcome is definite: the acknowledgement; an error, and then no record will ever appear; or
        ``AppendUnknown``, if no answer came in time or the connection was lost. Nothing is ever sent twice.
        """
        deadline = self._deadline(timeout)
        if if_llsn is not None and stream is None:
            raise InvalidArgument("if_llsn= is a position in one log stream: name it with stream=")
        info = await self._catalogs.topic(topic, deadline)
        pin = None if stream is None else LogStreamId(stream)
        now = now_us()
        schema = self._catalogs.view.schema(info)
        is_plain = watermark is None and if_llsn is None
        if is_plain and not schema.is_typed and isinstance(records, bytes | str | bytearray | memoryview):
            single, size = self._single(records, key, timestamp, headers, now)
            if single is not None:
                return await self._lane(info, pin, schema).append(single, 1, size, deadline)
        make = partial(to_batch, records=records, key=key, timestamp=timestamp, headers=headers, now_us=now)
        try:
            rows = make(schema)
        except InvalidRecord:
            # The schema may have grown since the catalog was fetched.
            schema = (await self._catalogs.fresh(deadline)).schema(await self._catalogs.topic(topic, deadline))
            rows = make(schema)
        if is_plain and rows.nbytes <= min(SMALL_BYTES, self._limits.record_bytes_max):
            return await self._lane(info, pin, schema).append(rows, rows.num_rows, rows.nbytes, deadline)
        declared = None if watermark is None else EventTime(time_us(watermark, "watermark"))
        batch = encode(rows, schema, now, limits=self._limits, compression=self._compression, declared=declared)
        condition = None if if_llsn is None else LLSN(if_llsn)
        return await self._shipping.ship(Shipment(), info, pin, batch, condition, deadline)

    def _single(self, value: Value, key: Any, timestamp: Any, headers: Any, now: int) -> tuple[Single | None, int]:
        """A record that needs no closer look, and its size; None if it does."""
        if not isinstance(key, bytes | str | None) or headers is not None or not isinstance(timestamp, int | None):
            return None, 0
        kept = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else bytes(value)
        size = len(kept) + (len(key) if key is not None else 0) + 16
        if size > self._limits.record_bytes_max:
            raise RecordTooLarge(0, size, self._limits.record_bytes_max)
        if size > SMALL_BYTES:
            return None, 0
        return Single(kept, key, now if timestamp is None else timestamp), size

    def _lane(self, info: TopicInfo, pin: LogStreamId | None, schema: TopicSchema) -> Lane:
        name = info.topic, pin, schema.number
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= LANES_MAX:
                self._lanes = {known: lane for known, lane in self._lanes.items() if not lane.is_idle}
            lane = Lane(info, pin, self._shipping, lambda rows: self._encoded(rows, schema), schema)
            self._lanes[name] = lane
        return lane

    def _encoded(self, rows: pa.RecordBatch, schema: TopicSchema) -> Batch:
        return encode(rows, schema, now_us(), limits=self._limits, compression=self._compression)

    # Reading.

    async def read(self, glsn: int, *, stream: int | None = None, timeout: float | None = None) -> Record:
        """The record at this position. It is found faster if the log stream is named.

        Raises ``Trimmed`` with the first position left, ``NotYetCommitted`` above the end of the log, ``NoRecordHere``
        for a position that no record has.
        """
        if glsn < 1:
            raise InvalidArgument(f"there is no GLSN {glsn}: positions begin with 1")
        pin = None if stream is None else LogStreamId(stream)
        return await self._reading.read(GLSN(glsn), pin, self._deadline(timeout))

    async def tail(self, *, timeout: float | None = None) -> GLSN:
        """The highest GLSN that is given out; 0 if none is. It never goes back."""
        return (await self._catalogs.fresh(self._deadline(timeout))).catalog.high_watermark

    async def find(self, time: datetime, topics: TopicNames | None = None, *, timeout: float | None = None) -> GLSN:
        """The first position that was committed at or after this time, of these topics or of any; one above the end of
        the log if nothing was."""
        deadline = self._deadline(timeout)
        view = await self._catalogs.fresh(deadline)
        return await self._find(time, None if topics is None else Selection(topics), view, deadline)

    async def _find(self, time: datetime, selection: Selection | None, view: View, deadline: Deadline) -> GLSN:
        cut_time = CutTime(time_us(time, "time"))
        if selection is None:
            return await self._reading.find(cut_time, view.catalog.streams, view, deadline)
        streams = [stream for topic in selection.topics(view) for stream in view.streams_of(topic.topic)]
        return await self._reading.find(cut_time, streams, view, deadline)

    def subscribe(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        follow: bool = True,
        timeout: float | None = None,
    ) -> AsyncSubscription[Record]:
        """Every committed record of the topics once, in GLSN order, whatever fails meanwhile.

        ``topics``: a name, several, or a compiled pattern, which also takes in topics that are created later.
        ``start``: a GLSN, ``"earliest"``, ``"latest"`` (what comes after the subscription has begun), the time at which
        records were committed, or a cursor, to go on after it. ``stop``: a GLSN or a time, not included. With
        ``follow=False`` it ends where the log ends when it begins; otherwise it waits for more.

        ``timeout`` is for the beginning. Raises ``Trimmed``, with the first position left, if records that it would
        have delivered are gone.
        """
        return self._subscription(topics, start, stop, follow, timeout, make_records, None)

    def batches(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        follow: bool = True,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> AsyncSubscription[pa.RecordBatch]:
        """As ``subscribe``, but as Arrow record batches.

        Columns are ``topic, stream, glsn, llsn, timestamp``, then ``key, value, headers`` or those of the topic's
        schema, then ``ingested_at``; with ``columns``, only those, and storage nodes send no others. All rows of a
        batch have one form, so batches of several topics with schemas may differ.
        """
        return self._subscription(topics, start, stop, follow, timeout, make_batches, columns)

    async def table(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> pa.Table:
        """All records from ``start`` to ``stop``, or to the present end of the log, as one Arrow table; from there
        ``.to_pandas()`` or ``polars.from_arrow`` go further. Several topics must have the same columns."""
        deadline = self._deadline(timeout)
        found: list[pa.RecordBatch] = []
        subscription = self.batches(
            topics, start=start, stop=stop, follow=stop is not None, columns=columns, timeout=timeout
        )
        async with subscription:
            while batches := await subscription.take(timeout=max(deadline.left, 0.001)):
                found += batches
        if not found:
            view = self._catalogs.view
            return subscription.layout(Selection(topics).topics(view)[0]).schema.empty_table()
        try:
            return pa.Table.from_batches(found, found[-1].schema)
        except pa.ArrowInvalid:
            # An older part may lack columns that the schema got meanwhile.
            return pa.concat_tables([pa.Table.from_batches([batch]) for batch in found], promote_options="default")

    def _subscription(
        self,
        topics: TopicNames,
        start: Position,
        stop: int | datetime | None,
        follow: bool,
        timeout: float | None,
        make: Any,
        columns: Sequence[str] | None,
    ) -> AsyncSubscription[Any]:
        seconds = self._deadline(timeout).seconds
        selection = Selection(topics)
        _check_position("start", start)
        if stop is not None:
            _check_position("stop", stop)

        async def resolve(selection: Selection, deadline: Deadline) -> Range:
            return await self._resolve(selection, start, stop, follow, deadline)

        subscription: AsyncSubscription[Any] = AsyncSubscription(
            self._catalogs,
            self._nodes,
            selection,
            resolve,
            make,
            columns,
            seconds,
            from_earliest=start == "earliest",
        )
        self._subscriptions = {known for known in self._subscriptions if not known.is_closed} | {subscription}
        return subscription

    async def _resolve(
        self, selection: Selection, start: Position, stop: int | datetime | None, follow: bool, deadline: Deadline
    ) -> Range:
        view = await self._catalogs.fresh(deadline)
        topics = selection.topics(view)
        after_end = GLSN(view.catalog.high_watermark + 1)
        if isinstance(start, NamedCursor):
            at = await self.cursor(start.name).get(timeout=max(deadline.left, 0.001))
            start = "earliest" if at is None else at + 1
        starts = {}
        if start == "earliest":
            starts = {topic.topic: topic.trimmed_before for topic in topics}
            first = min(starts.values(), default=GLSN(1))
        elif start == "latest":
            first = after_end
        elif isinstance(start, datetime):
            first = await self._find(start, selection, view, deadline)
        else:
            first = GLSN(start)
        last = None if follow else after_end
        if stop is not None:
            at_stop = await self._find(stop, selection, view, deadline) if isinstance(stop, datetime) else GLSN(stop)
            last = at_stop if last is None else min(last, at_stop)
        return Range(first, last, starts, view)

    # Producers and consumers.

    async def producer(
        self, topic: str, *, id: str, buffer_bytes: int = BUFFER_BYTES_MAX, timeout: float | None = None
    ) -> AsyncProducer:
        """A named producer, whose records are in the log exactly once: it repeats what got no answer until it knows.

        Records go to one log stream in the order in which they were sent. Only one holder of a name can append;
        opening it anywhere ends all earlier ones with ``ProducerFenced``. ``buffer_bytes`` bounds what it holds;
        beyond that ``send`` waits::

            async with await log.producer("orders", id="billing-1") as producer:
                future = await producer.send(b"...")
                await producer.flush()
                ack = await future
        """
        deadline = self._deadline(timeout)
        info = await self._catalogs.topic(topic, deadline)
        schema = self._catalogs.view.schema(info)

        def prepare(records: Records, key: Any, timestamp: Any, headers: Any) -> tuple[Part, int, int]:
            now = now_us()
            if not schema.is_typed and isinstance(records, bytes | str | bytearray | memoryview):
                single, size = self._single(records, key, timestamp, headers, now)
                if single is not None:
                    return single, 1, size + RECORD_COST_BYTES
            rows = to_batch(schema, records, key=key, timestamp=timestamp, headers=headers, now_us=now)
            if rows.nbytes > self._limits.record_bytes_max:
                # What cannot be sent at all is refused now, not when its turn comes.
                self._encoded(rows, schema)
            return rows, rows.num_rows, rows.nbytes + RECORD_COST_BYTES

        producer = AsyncProducer(
            self._catalogs,
            self._nodes,
            self._repository,
            topic,
            id,
            prepare,
            lambda rows: self._encoded(rows, schema),
            schema,
            self._timeout,
            buffer_bytes,
        )
        await producer.open(deadline)
        self._producers = {known for known in self._producers if not known.is_closed} | {producer}
        return producer

    def cursor(self, name: str) -> AsyncCursor:
        """How far a consumer has come, kept in the cluster: ``commit(glsn)``, ``get()``, ``drop()``."""
        return AsyncCursor(self._repository, name, self._timeout)


def _check_position(name: str, position: object) -> None:
    is_glsn = isinstance(position, int) and not isinstance(position, bool) and position >= 1
    if not (is_glsn or isinstance(position, datetime | NamedCursor) or position in ("earliest", "latest")):
        raise InvalidArgument(
            f"{name}= is a GLSN from 1 on, 'earliest', 'latest', a datetime or a cursor, not {position!r}"
        )
