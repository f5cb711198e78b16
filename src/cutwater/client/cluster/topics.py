"""Creates, changes, deletes and describes topics."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import UNSET, Struct

from cutwater.client.arguments import check_number, check_topic
from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.convert.schemas import (
    SchemaLike,
    TopicSchema,
    decode_schema,
    describe,
    encode_schema,
    grown_schema,
    new_schema,
)
from cutwater.core.names import check_not_reserved, check_topic_name
from cutwater.core.requests import (
    ChangeTopicRequest,
    Created,
    CreateTopicRequest,
    DeleteTopicRequest,
    DescribeRequest,
    Description,
    Done,
    TopicInfo,
    TrimRequest,
)
from cutwater.durations import Duration, milliseconds
from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused, Unavailable
from cutwater.protocol.errors import ConnectionLost
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, MILLISECOND, REPLICATION_DEFAULT, LogStreamId, Retention, TopicId

POLL_SECONDS = 0.02


class Topic(Struct, frozen=True):
    """A description of a topic. ``streams`` are the numbers of its log streams that may take appends; ``schema`` is
    None for records of key and value. Records below ``trimmed_before`` are gone."""

    name: str
    streams: tuple[LogStreamId, ...]
    replication: int
    schema: pa.Schema | None
    event_time: str
    retention: Retention
    trimmed_before: GLSN
    event_time_ahead_max: timedelta | None = None
    """How far event times may be ahead of the log's clock; None if there is no limit."""
    number: TopicId = TopicId(0)
    """Never reused: a topic that is created again under the same name has another number."""
    is_internal: bool = False
    """Whether the cluster made the topic for itself."""


def topic_of(info: TopicInfo, view: CatalogView) -> Topic:
    schema = view.schema(info)
    return Topic(
        info.name,
        tuple(stream.stream for stream in view.streams_of(info.topic) if not stream.final),
        info.replication,
        schema.newest if schema.is_typed else None,
        info.event_time,
        info.retention,
        info.trimmed_before,
        timedelta(microseconds=info.event_time_ahead_us) if info.event_time_ahead_us else None,
        info.topic,
        info.is_internal,
    )


def _form(schema: TopicSchema) -> str:
    if not schema.is_typed:
        return "no schema, records of key and value"
    return f"{describe(schema.newest)}; {f'event_time={schema.event_time!r}' if schema.event_time else 'no event_time'}"


def _ahead_us(given: Duration | None) -> int:
    """Return the limit in microseconds; 0 means no limit."""
    return 0 if given is None else milliseconds(given, "event_time_ahead_max=") * MILLISECOND


def _retention(given: timedelta | Retention | None) -> Retention:
    if given is None:
        return Retention()
    if isinstance(given, timedelta):
        if given <= timedelta(0):
            raise InvalidArgument(f"retention is a time that is longer than nothing, not {given}")
        return Retention(time_us=int(given / timedelta(microseconds=1)))
    if not isinstance(given, Retention):
        raise InvalidArgument(
            f"retention= is a timedelta, such as timedelta(days=7), or cutwater.Retention(time_us=..., bytes=...), not "
            f"{given!r} ({type(given).__name__})"
        )
    return Retention(
        check_number("Retention.time_us", given.time_us, "a number of microseconds"),
        check_number("Retention.bytes", given.bytes, "a number of bytes"),
    )


def _check_streams(given: object) -> int:
    return check_number("streams", given, "how many log streams the topic has")


def _check_replication(given: object) -> int:
    return check_number("replication", given, "how many storage nodes hold each record")


class Topics:
    def __init__(self, repository: Repository, catalogs: Catalogs) -> None:
        self._repository, self._catalogs = repository, catalogs

    async def create(
        self,
        name: str,
        streams: int,
        replication: int | None,
        schema: SchemaLike | None,
        event_time: str,
        retention: timedelta | Retention | None,
        event_time_ahead_max: Duration | None,
        exist_ok: bool,
        deadline: Deadline,
    ) -> Topic:
        check_topic(name)
        check_topic_name(name)
        if not isinstance(event_time, str):
            raise InvalidArgument(f"event_time= is the name of a column of schema=, such as 'at', not {event_time!r}")
        streams, kept = _check_streams(streams), _retention(retention)
        if replication is not None:
            replication = _check_replication(replication)
        ahead_us = _ahead_us(event_time_ahead_max)
        if event_time and schema is None:
            raise InvalidArgument("event_time= names a column of schema=: without a schema, event time is 'timestamp'")
        encoded = b"" if schema is None else encode_schema(new_schema(schema, event_time))
        if exist_ok and (found := (await self._catalogs.fresh(deadline)).topics.get(name)) is not None:
            return self._existing(found, encoded, event_time)
        check_not_reserved(name)
        copies = await self._seen_replication(deadline) if replication is None else replication
        request = CreateTopicRequest(
            name,
            streams,
            copies,
            encoded,
            event_time,
            kept,
            ahead_us,
            is_replication_usual=replication is None or UNSET,
        )
        try:
            await self._repository.ask(request, Created, timeout_ms=deadline.left_ms(), idempotent=False)
        except ConnectionLost:
            await self._check_created(request, deadline)
        except AlreadyExists:
            # Another client has just created it.
            if not exist_ok:
                raise
            await self._catalogs.fresh(deadline)
            return self._existing(await self._catalogs.topic(name, deadline), encoded, event_time)
        return await self._opened(name, deadline)

    def _existing(self, found: TopicInfo, schema: bytes, event_time: str) -> Topic:
        """Return a topic that already exists. The number of its log streams and the like may have been changed
        meanwhile, but records of another form could not be appended."""
        is_other = schema not in found.schemas if schema else bool(found.schemas)
        if is_other or event_time != found.event_time:
            own = TopicSchema.of(found)
            wanted = TopicSchema(found.name, [decode_schema(schema)] if schema else (), event_time)
            what = ["schema"] * is_other + ["event_time"] * (event_time != found.event_time)
            grow = ", or let its schema grow with change_topic" if what == ["schema"] and own.is_typed else ""
            raise AlreadyExists(
                f"topic {found.name!r} exists with another {' and another '.join(what)}: give the same, or choose "
                f"another name{grow}\n  present: {_form(own)}\n  given:   {_form(wanted)}"
            )
        return topic_of(found, self._catalogs.view)

    async def _seen_replication(self, deadline: Deadline) -> int:
        """Return three, or the number of live storage nodes that this client may see if there are fewer. Only a leader
        of an earlier version uses it: one of this version counts the nodes itself."""
        description = await self._repository.ask(DescribeRequest(), Description, timeout_ms=deadline.left_ms())
        alive = sum(1 for node in description.nodes if node.is_alive)
        return max(1, min(REPLICATION_DEFAULT, alive))

    async def _check_created(self, request: CreateTopicRequest, deadline: Deadline) -> None:
        """Ask again after the answer was lost. If the topic exists as it was wanted, the first attempt created it."""
        try:
            await self._repository.ask(request, Created, timeout_ms=deadline.left_ms())
        except AlreadyExists:
            found = await self._catalogs.topic(request.name, deadline)
            schemas = (request.schema,) if request.schema else ()
            copies = found.replication if request.is_replication_usual else request.replication
            wanted = (request.streams, copies, schemas, request.event_time, request.retention)
            is_same = (found.streams, found.replication, found.schemas, found.event_time, found.retention) == wanted
            if not is_same or found.event_time_ahead_us != request.event_time_ahead_us:
                raise

    async def _opened(self, name: str, deadline: Deadline) -> Topic:
        """Wait until all log streams take appends."""
        while True:
            view = await self._catalogs.fresh(deadline)
            info = view.topics.get(name)
            if info is None:
                raise NotFound(f"topic {name!r} was deleted as soon as it was made")
            closed = [stream.stream for stream in view.streams_of(info.topic) if not stream.is_open]
            if not closed:
                return topic_of(info, view)
            if deadline.left <= POLL_SECONDS:
                raise Unavailable(f"topic {name!r} was made, but log streams {closed} do not take appends yet")
            await deadline.pause(POLL_SECONDS)

    async def change(
        self,
        name: str,
        streams: int | None,
        schema: SchemaLike | None,
        retention: timedelta | Retention | None,
        event_time_ahead_max: Duration | None,
        replication: int | None,
        deadline: Deadline,
    ) -> Topic:
        check_topic(name)
        if all(given is None for given in (streams, schema, retention, event_time_ahead_max, replication)):
            raise InvalidArgument(
                "nothing to change: say how many log streams or copies, how long records are kept, a schema, or how "
                "far event times may be ahead"
            )
        ahead_us = None if event_time_ahead_max is None else _ahead_us(event_time_ahead_max)
        kept = None if retention is None else _retention(retention)
        if streams is not None:
            streams = _check_streams(streams)
        copies = UNSET if replication is None else _check_replication(replication)
        view = await self._catalogs.fresh(deadline)
        info = view.topics.get(name)
        known = TopicSchema(name) if info is None else view.schema(info)
        encoded = b"" if schema is None or info is None else encode_schema(grown_schema(known, schema))
        request = ChangeTopicRequest(name, streams, kept, encoded, known.number, ahead_us, copies)
        await self._repository.ask(request, Done, timeout_ms=deadline.left_ms())
        changed = await self._grown(name, view, streams, deadline)
        if replication is not None and changed.replication != replication:
            raise Refused(
                f"topic {name!r} has replication {changed.replication}, not {replication}: another client changed it "
                "meanwhile, or the leader of the metadata repository runs an earlier version; see `cutwater topic "
                f"describe {name}`, upgrade the metadata nodes, and try again"
            )
        return changed

    async def _grown(self, name: str, before: CatalogView, streams: int | None, deadline: Deadline) -> Topic:
        """Wait until ``streams`` log streams take appends. Log streams that were sealed before, by an operator or by a
        failure, count too: they are not replaced by new ones."""
        old = before.topics.get(name)
        sealed = [] if old is None else [s.stream for s in before.streams_of(old.topic) if not s.is_open]
        while True:
            view = await self._catalogs.fresh(deadline)
            info = await self._catalogs.topic(name, deadline)
            live = [s for s in view.streams_of(info.topic) if not s.final]
            ready = sum(1 for s in live if s.is_open or s.stream in sealed)
            if streams is None or ready >= streams:
                return topic_of(info, view)
            if deadline.left <= POLL_SECONDS:
                raise Unavailable(
                    f"topic {name!r} was changed, but only {ready} of its {streams} log streams take appends yet: the "
                    "others will as soon as enough storage nodes can be used (`cutwater cluster health` says more)"
                )
            await deadline.pause(POLL_SECONDS)

    async def delete(self, name: str, deadline: Deadline) -> None:
        check_topic(name)
        request = DeleteTopicRequest(name)
        try:
            await self._repository.ask(request, Done, timeout_ms=deadline.left_ms(), idempotent=False)
        except ConnectionLost:
            # If it no longer exists, the first attempt has succeeded, and only its answer was lost.
            with suppress(NotFound):
                await self._repository.ask(request, Done, timeout_ms=deadline.left_ms())
        await self._catalogs.fresh(deadline)

    async def trim(self, name: str, before: int, deadline: Deadline) -> None:
        check_topic(name)
        before = check_number("before", before, "a GLSN")
        if before < 1:
            raise InvalidArgument(f"trim before GLSN {before}: positions begin with 1")
        await self._repository.ask(TrimRequest(name, GLSN(before)), Done, timeout_ms=deadline.left_ms())
