"""The client for asyncio. ``cutwater.Client`` is the same without asyncio, derived from this one.

Everything here belongs to one event loop. Every call has a deadline: ``timeout=`` in seconds, or the client's default.
The examples are written for ``cutwater.Client``; here they need ``await``.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.append.declarations import required
from cutwater.client.append.router import Appends, check_stream
from cutwater.client.append.sender import Shipping
from cutwater.client.arguments import check_not_called, check_number, check_topic
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.credentials import Access, check_tls, token_access
from cutwater.client.cluster.cursors import AsyncCursor
from cutwater.client.cluster.holder_file import with_secret
from cutwater.client.cluster.metadata_client import SCHEME, Repository, check_no_path, parse_servers
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.topics import Topic, Topics, topic_of
from cutwater.client.convert.conversion import Headers, Records, Value
from cutwater.client.convert.encoding import Compression, Limits, check_compression
from cutwater.client.convert.schemas import SchemaLike
from cutwater.client.convert.times import Time
from cutwater.client.errors import ClientClosed
from cutwater.client.loop_thread import Visit
from cutwater.client.produce.producer import BUFFER_BYTES_MAX, AsyncProducer
from cutwater.client.publish.runs import PublishingCalls
from cutwater.client.read.point_reads import PointReads
from cutwater.client.read.positions import Position, Positions, TopicNames
from cutwater.client.read.records import Record
from cutwater.client.read.watermarks import Watermarks, strategy_of
from cutwater.client.subscribe.stream_readers import Selection
from cutwater.client.subscribe.subscriptions import AsyncSubscription, Subscriptions, make_batches, make_records
from cutwater.core.names import check_name
from cutwater.core.requests import Catalog, CatalogRequest
from cutwater.durations import Duration
from cutwater.errors import InvalidArgument, NotFound
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, Deadline, check_timeout
from cutwater.types import GLSN, Ack, ClusterId, Retention
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint

CONNECT_SECONDS_MAX = 10.0
COMPLAIN_MS_MAX = 2_000
IDLE_AFTER = timedelta(seconds=30)

OnMalformed: TypeAlias = Literal["error", "skip"]


class AsyncClient(PublishingCalls):
    """A connection to a log. Made by ``AsyncClient.connect`` or ``AsyncClient.open``::

    async with await AsyncClient.connect("cutwater://127.0.0.1:7000") as log:
        ack = await log.append("orders", b"hello")
        async for record in log.subscribe("orders", start=ack.glsn, follow=False):
            print(record.glsn, record.value)
    """

    def __new__(cls, *given: object, **_: object) -> Self:
        check_not_called(cls, given)
        return super().__new__(cls)

    def __init__(
        self, repository: Repository, access: Access, timeout: float, compression: Compression | None, limits: Limits
    ) -> None:
        """Use ``connect`` instead; ``repository`` must have answered before."""
        self.cluster = repository.cluster
        self.servers = SCHEME + ",".join(repository.addresses)
        """The address at which other clients can connect to the same cluster."""
        self._repository = self.repository = repository
        """``repository`` is for other parts of Cutwater, whose calls are no methods of a client."""
        self._timeout, self._limits, self._compression = timeout, limits, compression
        self._catalogs = Catalogs(repository)
        complain = partial(repository.complain, timeout_ms=COMPLAIN_MS_MAX)
        self._nodes = Nodes(Endpoint(self.cluster, "client"), access, complain, self._catalogs.nodes_at)
        self._topics = Topics(repository, self._catalogs)
        self._appends = Appends(self._catalogs, Shipping(self._catalogs, self._nodes), limits, compression)
        self._reading = PointReads(self._catalogs, self._nodes)
        self._watermarks = Watermarks(self._catalogs, self._nodes, repository, self._reading)
        self._positions = Positions(self._catalogs, self._reading, repository)
        self._subscribing = Subscriptions(self._catalogs, self._nodes, self._positions)
        self._producers: dict[AsyncProducer, None] = {}
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._on_close: Callable[[], Awaitable[None]] | None = None
        """Closes what ends together with the client; None once that has ended."""

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        exclusive: bool = False,
        timeout: float = TIMEOUT_SECONDS,
        compression: Compression | None = None,
        limits: Limits | None = None,
    ) -> AsyncClient:
        """Open the log in a directory, as ``cutwater.open`` does, with its servers on this event loop. Close the client
        before the loop ends, best by ``async with``: otherwise nothing is lost, but the log stays locked until the
        process ends.
        """
        # The servers are above the client, which knows only their module's name: programs that only connect need not
        # load them.
        opened: AsyncClient = await import_module("cutwater.embedded").open_on_this_loop(
            path, exclusive=exclusive, timeout=timeout, compression=compression, limits=limits
        )
        return opened

    @classmethod
    async def connect(
        cls,
        servers: str,
        *,
        timeout: float = TIMEOUT_SECONDS,
        compression: Compression | None = None,
        cluster: int | None = None,
        token: str | os.PathLike[str] = "",
        tls: ssl.SSLContext | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
    ) -> AsyncClient:
        """Connect to the metadata repository at any of the addresses in ``cutwater://host:port,host:port``.

        ``timeout`` is what each call may take unless it says otherwise. ``compression`` (``"lz4"`` or ``"zstd"``) is
        applied to appended records. ``cluster``: refuse to talk to any other cluster than this one. ``token`` is the
        token itself, or the ``pathlib.Path`` of a file with it, which every new connection reads again.
        """
        check_no_path(servers)
        access = token_access(check_tls(tls), token, insecure)
        number = ANY_CLUSTER if cluster is None else check_number("cluster", cluster, "the number of a cluster")
        return await cls._connect(servers, access, timeout, compression, limits, number)

    @classmethod
    async def _connect(
        cls,
        servers: str,
        access: Access,
        timeout: float,
        compression: Compression | None,
        limits: Limits | None,
        cluster: int = ANY_CLUSTER,
    ) -> AsyncClient:
        addresses, access = parse_servers(servers), with_secret(servers, access)
        repository = Repository(Endpoint(ClusterId(cluster), "client"), addresses, access)
        deadline = Deadline(min(check_timeout(timeout), CONNECT_SECONDS_MAX))
        try:
            catalog = await repository.ask(CatalogRequest(), Catalog, timeout_ms=deadline.left_ms())
            client = cls(repository, access, timeout, check_compression(compression), limits or Limits())
            client.servers = servers
            client._catalogs.take(catalog)
        except BaseException:
            repository.close()
            raise
        return client

    async def close(self) -> None:
        """Close the client. Appends in flight are given up, and their callers get an error. Producers are closed first,
        which lets them finish what was sent; if they cannot, their error is raised when everything else is closed.

        Cancelling a caller that waits for this does not stop it; the caller may wait for it again. If a log that was
        opened here cannot be closed in time, that is raised, and calling this once more tries again."""
        if self._closing is not None and self._closing.done() and self._on_close is None:
            return
        if self._closing is None or self._closing.done():
            self._closing = asyncio.get_running_loop().create_task(self._close(is_first=not self._is_closed))
            self._is_closed = True
        await asyncio.shield(self._closing)

    async def _close(self, *, is_first: bool) -> None:
        try:
            if is_first:
                await self._close_parts()
        finally:
            if self._on_close is not None:
                await self._on_close()
                self._on_close = None

    async def _close_parts(self) -> None:
        closing = await asyncio.gather(*(producer.finish() for producer in self._producers), return_exceptions=True)
        await self._appends.close()
        await self._subscribing.close()
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
        self._check_open()
        return Deadline(self._timeout if timeout is None else timeout)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("this client was closed: make another one")

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
        event_time_ahead_max: Duration | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> Topic:
        """Make a topic and return when it takes appends.

        ``replication``: how many storage nodes hold each record; by default three, or as many as there are. ``schema``
        is an Arrow schema, and ``event_time`` the name of its column with event time; without a schema, records have a
        key and a value. ``retention``: for how long, or up to which size, records are kept; for ever by default.
        ``exist_ok``: return an existing topic of this name as it is; it must have this schema and event time.
        ``event_time_ahead_max``: refuse records whose event time or declared watermark is further ahead of the log's
        clock than this, such as ``"1h"``; no limit by default. A single wrong clock would move the watermark for ever.

        >>> log.create_topic("orders", streams=3, retention=timedelta(days=7)).name
        'orders'
        >>> schema = pa.schema({"user": pa.string(), "amount": pa.int64(), "at": pa.timestamp("us", "UTC")})
        >>> log.create_topic("payments", schema=schema, event_time="at").schema.names
        ['user', 'amount', 'at']
        """
        deadline = self._deadline(timeout)
        return await self._topics.create(
            name, streams, replication, schema, event_time, retention, event_time_ahead_max, exist_ok, deadline
        )

    async def change_topic(
        self,
        name: str,
        *,
        streams: int | None = None,
        schema: SchemaLike | None = None,
        retention: timedelta | Retention | None = None,
        event_time_ahead_max: Duration | None = None,
        replication: int | None = None,
        timeout: float | None = None,
    ) -> Topic:
        """Change the given properties. Returns when there are as many log streams as asked for; if these are fewer than
        before, the surplus log streams are sealed permanently. A schema may only grow, by columns that may be null.
        ``event_time_ahead_max=0`` removes the limit; a new limit does not change stored records. ``replication``: how
        many storage nodes shall hold each record. Copies of all stored records are added or removed one after another
        while appends go on; the call does not wait for that. It may be more than there are storage nodes: the other
        copies are made when there are more.

        >>> old = log.create_topic("visits", schema={"page": pa.string()})
        >>> log.change_topic("visits", schema=old.schema.append(pa.field("country", pa.string()))).schema.names
        ['page', 'country']
        """
        deadline = self._deadline(timeout)
        return await self._topics.change(name, streams, schema, retention, event_time_ahead_max, replication, deadline)

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic with all its records."""
        await self._topics.delete(name, self._deadline(timeout))

    async def topics(self, *, internal: bool = False, timeout: float | None = None) -> list[Topic]:
        """Return all topics, by name. ``internal``: also those that the cluster made for itself."""
        view = await self._catalogs.fresh(self._deadline(timeout))
        found = [topic_of(view.topics[name], view) for name in sorted(view.topics)]
        return [topic for topic in found if internal or not topic.is_internal]

    async def topic(self, name: str, *, timeout: float | None = None) -> Topic:
        """Return the description of one topic."""
        view = await self._catalogs.fresh(self._deadline(timeout))
        return topic_of(await self._catalogs.topic(name, self._deadline(timeout)), view)

    async def trim(self, topic: str, *, before: int, timeout: float | None = None) -> None:
        """Remove all records of a topic below this GLSN, permanently. Durable when it returns; files are removed later.

        >>> acks = [log.append("t", b"old"), log.append("t", b"new")]
        >>> log.trim("t", before=acks[1].glsn)
        >>> [record.value for record in log.subscribe("t", follow=False)]
        [b'new']
        """
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
        idle: bool = False,
        if_llsn: int | None = None,
        timeout: float | None = None,
    ) -> Ack:
        """Append one record or several, all or none, with consecutive positions.

        ``records`` is one value (bytes, or str as UTF-8), a list of them, an Arrow array, batch or table, a DataFrame
        of pandas or Polars, a dict or a list of dicts. ``key``, ``timestamp`` and ``headers`` are one for all records,
        or a list with one for each; event time is this client's clock by default. A time is a ``datetime`` with a time
        zone; an integer is refused, because its unit cannot be told. Records are copied when the append begins, so that
        their memory may be reused. If the topic or its schema is new to this client, it is looked up first, and the
        records are copied only after that.

        ``stream``: the log stream to append to, otherwise any of the topic. ``watermark``: no record with an earlier
        event time follows in that log stream. ``idle``: that log stream is idle until its next entry. ``if_llsn``:
        append only if the first record gets exactly this position in ``stream``, otherwise raise ``ConditionFailed``.

        The outcome is definite: the acknowledgement; an error, and then no record will ever appear; or
        ``AppendUnknown``, if no answer came in time or the connection was lost. Nothing is ever sent twice.

        >>> log.append("t", b"one").count
        1
        >>> ack = log.append("t", [b"a", b"b"], key=[b"k", None], headers={"from": b"web"})
        >>> [log.read(ack.glsn + i).key for i in range(ack.count)]
        [b'k', None]
        >>> log.append("t", pa.table({"value": [b"x", b"y", b"z"]})).count
        3
        """
        if type(topic) is not str:
            check_topic(topic)
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        self._check_open()
        begun = self._appends.begin(topic, seconds, records, key, timestamp, headers, stream, watermark, idle, if_llsn)
        if begun is not None:
            try:
                return await begun[0]
            except NotFound:
                # Nothing was appended. The name may mean another topic by now.
                pass
        deadline = Deadline(seconds, None if begun is None else begun[1])
        given = records, key, timestamp, headers, stream, watermark, idle, if_llsn
        return await self._appends.append(topic, deadline, *given)

    def _quick_append(
        self, topic: str, records: Records, *, timeout: float | None = None, **given: Any
    ) -> Visit[Ack] | None:
        """Return the append of a waiting thread without a coroutine; None if it needs one. Any thread may call it."""
        check_topic(topic)
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        return None if self._is_closed else self._appends.visit(topic, seconds, records, **given)

    async def declare(
        self,
        topic: str,
        *,
        watermark: Time | None = None,
        idle: bool = False,
        stream: int | None = None,
        timeout: float | None = None,
    ) -> list[Ack]:
        """Declare a watermark, idleness or both without a record, for one log stream or for every one of the topic.

        ``watermark``: no record with an earlier event time follows there; punctuated strategies use it. ``idle``: no
        records are expected there, so the log stream holds no watermark back until its next entry. Each log stream gets
        an entry of one position that subscribers never see; their positions are returned. With several log streams,
        this is not atomic: if an error says that some have it and others not, declare the same again.

        >>> [ack.count for ack in log.declare("t", watermark=datetime(2026, 1, 1, tzinfo=UTC), idle=True)]
        [1]
        >>> log.watermark("t", punctuated=True).isoformat()
        '2026-01-01T00:00:00+00:00'
        """
        check_topic(topic)
        pin = None if stream is None else check_stream(stream)
        return await self._appends.declare(topic, required(watermark, idle), pin, self._deadline(timeout))

    # Reading.

    async def read(self, glsn: int, *, stream: int | None = None, timeout: float | None = None) -> Record:
        """Return the record at this position. It is found faster if the log stream is named.

        Raises ``Trimmed`` with the first position left, ``NotYetCommitted`` above the end of the log, ``NoRecordHere``
        for a position that no record has.

        >>> ack = log.append("t", b"hello", key=b"greeting")
        >>> record = log.read(ack.glsn)
        >>> record.key, record.value, record.topic
        (b'greeting', b'hello', 't')
        """
        position: object = glsn
        if not isinstance(position, int) or position < 1:
            raise InvalidArgument(f"there is no GLSN {glsn!r}: positions are whole numbers and begin with 1")
        pin = None if stream is None else check_stream(stream)
        return await self._reading.read(GLSN(glsn), pin, self._deadline(timeout))

    async def tail(self, *, timeout: float | None = None) -> GLSN:
        """Return the highest GLSN that is given out; 0 if none is. It never goes back.

        >>> ack = log.append("t", b"x")
        >>> log.tail() >= ack.glsn
        True
        """
        return (await self._catalogs.fresh(self._deadline(timeout))).catalog.high_watermark

    async def find(self, time: datetime, topics: TopicNames | None = None, *, timeout: float | None = None) -> GLSN:
        """Return the first position that was committed at or after this time, of these topics or of any; one above the
        end of the log if there is none.

        >>> ack = log.append("t", b"x")
        >>> log.find(log.read(ack.glsn).ingested_at) == ack.glsn
        True
        """
        deadline = self._deadline(timeout)
        view = await self._catalogs.fresh(deadline)
        return await self._positions.find(time, None if topics is None else Selection(topics), view, deadline)

    async def watermark(
        self,
        topic: str,
        *,
        at: int | None = None,
        bound: Duration = timedelta(0),
        punctuated: bool = False,
        idle_after: Duration = IDLE_AFTER,
        timeout: float | None = None,
    ) -> datetime | None:
        """Return how far event time has come after this position, or at the end of the log; None if nothing is known
        yet, as with ``at=0``, which is before the first position.

        The result is the same for every reader and at any time. The watermark of a log stream is its largest event time
        so far, less ``bound`` and a millisecond; with ``punctuated``, it is what was declared, by
        ``append(..., watermark=)`` or ``declare``. The watermark of the topic is the smallest of its log streams. A log
        stream without a commit for ``idle_after`` is left out. Both are a ``timedelta``, a text such as ``"5s"``, or a
        number of milliseconds. Only the end of the topic is read, as far back as its log streams lie apart.

        >>> ack = log.append("t", [b"a", b"b"], timestamp=datetime(2026, 1, 1, 12, tzinfo=UTC))
        >>> log.watermark("t", at=ack.glsn, bound=timedelta(seconds=5)).isoformat()
        '2026-01-01T11:59:54.999000+00:00'
        """
        deadline = self._deadline(timeout)
        strategy = strategy_of(bound, punctuated, idle_after)
        if at is not None:
            glsn = GLSN(check_number("at", at, "a GLSN, if not the end of the log"))
            if glsn < 0:
                raise InvalidArgument(f"there is no GLSN {at}: positions begin with 1, and at=0 is before all of them")
        else:
            glsn = (await self._catalogs.fresh(deadline)).catalog.high_watermark
        return await self._watermarks.at(topic, glsn, strategy, deadline)

    def subscribe(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        follow: bool = True,
        on_malformed: OnMalformed = "error",
        timeout: float | None = None,
    ) -> AsyncSubscription[Record]:
        """Deliver every committed record of the topics once, in GLSN order, in spite of failures.

        ``topics``: a name, several, or a compiled pattern, which also matches topics that are created later. ``start``:
        a GLSN, ``"earliest"``, ``"latest"`` (records after the subscription has begun), the time at which records were
        committed, or a cursor, to continue after it. ``stop``: a GLSN or a time, not included. With ``follow=False``
        the subscription ends where the log ends when it begins; otherwise it waits for more.

        ``timeout`` limits the beginning, and each wait for records that the log is known to have. Raises ``Trimmed``,
        with the first position left, when the next records are gone.

        ``on_malformed`` concerns batches with a correct checksum and invalid content, which only older versions have
        accepted. ``"error"`` raises ``Malformed`` when all records before them were delivered. ``"skip"`` continues
        after them; the subscription's ``skipped`` lists their positions, and ``skipped_records`` counts them.

        >>> acks = [log.append("t", value) for value in (b"a", b"b", b"c")]
        >>> [record.value for record in log.subscribe("t", follow=False)]
        [b'a', b'b', b'c']
        >>> [record.value for record in log.subscribe("t", start=acks[1].glsn, stop=acks[2].glsn)]
        [b'b']
        >>> with log.subscribe("t", start="latest") as latest:
        ...     ack = log.append("t", b"d")
        ...     next(latest).value
        b'd'
        """
        seconds = self._deadline(timeout).seconds
        return self._subscribing.make(topics, start, stop, follow, seconds, make_records, None, on_malformed)

    def batches(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        follow: bool = True,
        columns: Sequence[str] | None = None,
        on_malformed: OnMalformed = "error",
        timeout: float | None = None,
    ) -> AsyncSubscription[pa.RecordBatch]:
        """Deliver the same records as ``subscribe``, as Arrow record batches.

        Columns are ``topic, stream, glsn, llsn, timestamp``, then ``key, value, headers`` or those of the topic's
        schema, then ``ingested_at``; with ``columns``, only those, and storage nodes send no others. All rows of a
        batch have the same columns, so batches of several topics with schemas may differ.

        >>> ack = log.append("t", [b"a", b"b"])
        >>> for batch in log.batches("t", follow=False, columns=["llsn", "value"]):
        ...     print(batch.to_pylist())
        [{'llsn': 1, 'value': b'a'}, {'llsn': 2, 'value': b'b'}]
        """
        seconds = self._deadline(timeout).seconds
        return self._subscribing.make(topics, start, stop, follow, seconds, make_batches, columns, on_malformed)

    async def table(
        self,
        topics: TopicNames,
        *,
        start: Position = "earliest",
        stop: int | datetime | None = None,
        columns: Sequence[str] | None = None,
        on_malformed: OnMalformed = "error",
        timeout: float | None = None,
    ) -> pa.Table:
        """Return all records from ``start`` to ``stop``, or to the present end of the log, as one Arrow table. Convert
        it with ``.to_pandas()`` or ``polars.from_arrow``. Several topics must have the same columns.

        >>> ack = log.append("t", [b"a", b"b"])
        >>> log.table("t").to_pandas()["value"].to_list()
        [b'a', b'b']
        """
        deadline = self._deadline(timeout)
        follow = stop is not None
        batches = self.batches(
            topics,
            start=start,
            stop=stop,
            follow=follow,
            columns=columns,
            on_malformed=on_malformed,
            timeout=timeout,
        )
        return await self._subscribing.table(batches, topics, columns, deadline)

    # Producers and consumers.

    async def producer(
        self, topic: str, *, id: str, buffer_bytes: int = BUFFER_BYTES_MAX, timeout: float | None = None
    ) -> AsyncProducer:
        """Open a named producer, whose records are in the log exactly once: it repeats what got no answer until it
        knows the outcome.

        Records go to one log stream in the order in which they were sent. Only one holder of a name can append;
        opening the name anywhere ends all earlier holders with ``ProducerFenced``. ``buffer_bytes`` bounds the memory
        for records; beyond that ``send`` waits.

        >>> with log.producer("t", id="billing-1") as producer:
        ...     future = producer.send(b"invoice")
        ...     producer.flush()
        >>> future.result().count
        1
        """
        deadline = self._deadline(timeout)
        check_name("producer", id)
        info = await self._catalogs.topic(topic, deadline)
        appends, schema = self._appends, self._catalogs.view.schema(info)
        cluster = self._catalogs, self._nodes, self._repository
        prepare, encode = partial(appends.part_of, schema), partial(appends.encode, schema)
        bytes_max = appends.limits.together_bytes_max
        producer = AsyncProducer(*cluster, topic, id, prepare, encode, bytes_max, self._timeout, buffer_bytes)
        # Added before it is open, so that closing the client ends it then too.
        self._producers = {known: None for known in self._producers if not known.is_closed} | {producer: None}
        await producer.open(deadline)
        return producer

    def cursor(self, name: str) -> AsyncCursor:
        """Return a cursor, the position of a consumer kept in the cluster: ``commit(glsn)``, ``get()``, ``drop()``.

        >>> acks = [log.append("t", b"done"), log.append("t", b"to do")]
        >>> log.cursor("billing").commit(acks[0].glsn)
        >>> [record.value for record in log.subscribe("t", start=log.cursor("billing"), follow=False)]
        [b'to do']
        """
        return AsyncCursor(self._repository, name, self._timeout)

    async def cluster_key(self, *, timeout: float | None = None) -> str:
        """Return the random text that distinguishes this log from all others, even with equal numbers and addresses.

        >>> log.cluster_key() == log.cluster_key() != ""
        True
        """
        return (await self._catalogs.description(self._deadline(timeout))).cluster_key
