"""Drives a subscription: follows every log stream of its topics at one of its replicas, and hands on what is ready.

One task per log stream keeps a stream of messages open, at another replica if the first one fails, falls behind or goes
silent. ``core.read.merge_reader`` decides which runs are ready, and drops repeated ones. So nothing is skipped or
repeated, whichever replica answers. The amount that has arrived and is not yet taken is bounded: a log stream that is
far ahead waits, but never one that the others wait for.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cutwater.client.arguments import check_topic
from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.metadata_client import no_such_topic
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.errors import ClientClosed
from cutwater.client.read.point_reads import NOT_ALLOWED, LastingDamage
from cutwater.client.read.records import ColumnLayout, runs_of
from cutwater.core.access.access_requests import AccessVerdict
from cutwater.core.access.denials import denied
from cutwater.core.access.rights import Resource, ResourceKind
from cutwater.core.names import is_reserved
from cutwater.core.read.merge_reader import CommittedBatch, MergeReader, ReadAnswer
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import (
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolViolation,
    QuotaExceeded,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import Unauthenticated
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import FOLLOW, Columns, ReadAnswerHeader, ReadArguments
from cutwater.runtime.deadlines import SLOW_SECONDS, Deadline
from cutwater.types import GLSN, BatchKind, LogStreamId, StorageNodeId, TopicId
from cutwater.wire.calls.streams import SharedCredit, StreamReceiver
from cutwater.wire.options import MIB, WireOptions

_log = logging.getLogger(__name__)

WINDOWS_BYTES = 64 * MIB
"""Bytes that may be in flight from all log streams together, divided among them; what waits here is not counted."""
WINDOW_BYTES_MIN = MIB
WINDOW_BYTES_MAX = 8 * MIB
MESSAGE_BYTES = MIB
WINDOW_ITEMS = 256

CATALOG_SECONDS = 2.0
"""How often the catalog is fetched when nothing shows that it changed: a replica that was left out says nothing."""
CATALOG_SECONDS_ALONE = 0.2
"""The same while a pattern matches no topic yet: no message announces a new topic."""
SILENT_MS = 1_000
"""A replica that is silent for this long, while the log has more, is left for another one."""
QUIET_MS = round(SLOW_SECONDS * 1_000)
"""The same for a replica that is no longer in the chain, as its storage node may hang."""
CONNECT_SECONDS = 5.0
RETRY_SECONDS_MIN = 0.01
RETRY_SECONDS_MAX = 1.0

_OF_PATTERNS = frozenset("*?+|^$()[]{}\\")
"""Characters that mark a pattern; topic names cannot contain them."""


class Selection:
    """Topics by name, or all whose names match a pattern, including those that are created later. A pattern matches no
    reserved name, so no internal topic."""

    def __init__(self, topics: str | Sequence[str] | re.Pattern[str]) -> None:
        self._pattern = topics if isinstance(topics, re.Pattern) else None
        if self._pattern is not None and not isinstance(self._pattern.pattern, str):
            raise InvalidArgument(f"names of topics are text, and so are patterns of them: {topics!r} is one of bytes")
        self._names: tuple[str, ...] = ()
        if not isinstance(topics, re.Pattern):
            given: Any = topics
            # Bytes are a sequence of numbers, not of names.
            is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
            self._names = tuple(given) if is_several else (given,)
            if not self._names:
                raise InvalidArgument("name at least one topic, or give a pattern: re.compile('orders-.*')")
            for name in self._names:
                check_topic(name)
        self._chosen: dict[str, TopicId] = {}

    def topics(self, view: CatalogView) -> list[TopicInfo]:
        """Return the selected topics. Raises if a named topic does not exist, or no longer exists."""
        if self._pattern is not None:
            return [topic for name, topic in view.topics.items() if self.selects(name)]
        return [self._named(name, view) for name in self._names]

    def selects(self, name: str) -> bool:
        """Report whether a topic of this name is selected."""
        if self._pattern is None:
            return name in self._names
        return not is_reserved(name) and self._pattern.fullmatch(name) is not None

    def _named(self, name: str, view: CatalogView) -> TopicInfo:
        topic = view.topics.get(name)
        chosen = self._chosen.get(name)
        if topic is None and chosen is None:
            error = no_such_topic(name, view.catalog)
            if not _OF_PATTERNS.isdisjoint(name):
                error.message += "; for topics by a pattern give re.compile('orders-.*'), or --pattern with a command"
            raise error
        if topic is None or (chosen is not None and topic.topic != chosen):
            raise NotFound(f"topic {name!r} was deleted")
        self._chosen[name] = topic.topic
        return topic


class Feed:
    """The runs of one subscription in GLSN order, up to and excluding ``stop``. ``columns``: those that are wanted, or
    None for all. ``starts``: topics of which only later records are wanted. ``fences``: also return fences and
    declarations, which are commits without records."""

    def __init__(
        self,
        catalogs: Catalogs,
        nodes: Nodes,
        selection: Selection,
        columns: Sequence[str] | None,
        view: CatalogView,
        start: GLSN,
        starts: Mapping[TopicId, GLSN] | None = None,
        stop: GLSN | None = None,
        *,
        fences: bool = False,
    ) -> None:
        self.catalogs, self.nodes, self._selection, self._columns = catalogs, nodes, selection, columns
        self._machine = MergeReader((), start, starts, stop=None if stop is None else GLSN(stop - 1))
        self._fences: list[CommittedBatch] | None = [] if fences else None
        self._readers: dict[LogStreamId, _Reader] = {}
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self.catalog_is_old = asyncio.Event()
        self._error: CutwaterError | None = None
        self._names: dict[TopicId, str] = {}
        self._catalog_trouble = ""
        """Why the catalog could not be fetched; empty if it could."""
        self._loop = asyncio.get_running_loop()
        self._settled_hwm = GLSN(0)
        """The log reached this position a while ago, so every healthy replica should be complete up to it."""
        self._seen_hwm, self._seen_at = GLSN(0), self._loop.time()
        self._watching = self._loop.create_task(self.guard(self._watch))
        self._take_catalog(view)
        if self._error is not None:
            raise self._error

    @property
    def next_glsn(self) -> GLSN:
        """Everything below this position was handed on."""
        return self._machine.next_glsn

    @property
    def window_bytes(self) -> int:
        share = WINDOWS_BYTES // max(1, len(self._readers))
        return min(max(share, WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)

    @property
    def trouble(self) -> str:
        """Which log streams cannot be followed, and why, or that no new records can come; empty if all is well."""
        cut_off = {stream: reader for stream, reader in list(self._readers.items()) if reader.is_cut_off}
        if not cut_off:
            return self._closed()
        them = f"log stream{'s' if len(cut_off) > 1 else ''} {', '.join(map(str, sorted(cut_off)))}"
        failures = {node: why for reader in cut_off.values() for node, why in reader.failures.items()}
        nodes = ", ".join(f"{node} at {self.catalogs.view.addresses.get(node, '?')}" for node in sorted(failures))
        told = f"no storage node with {them} could be read from"
        if not failures:
            return f"{told}, as there is none. `cutwater cluster health` says what is down"
        damage = [error for error in failures.values() if isinstance(error, Damaged)]
        if damage:
            return f"{told}: {nodes}. One is damaged: {damage[-1].message}. `cutwater verify` names all that is damaged"
        last = list(failures.values())[-1].message
        return f"{told}: {nodes}. The last one: {last}. `cutwater cluster health` says what is down"

    def _closed(self) -> str:
        known, topics = self.catalogs.view.streams.values(), self._machine.topics
        streams = [info for info in known if info.topic in topics and not info.final]
        if not streams or any(info.is_open or self.wanted(info.stream) for info in streams):
            return ""
        if self._catalog_trouble:
            # The cached catalog of log streams is old.
            return f"all that was known of has been read, and no metadata node answers: {self._catalog_trouble}"
        them = ", ".join(str(info.stream) for info in streams)
        told = f"all there was has been read, and no log stream takes appends now (closed: {them})"
        return f"{told}. `cutwater cluster health` says what is wrong"

    async def take(self) -> list[CommittedBatch]:
        """Return the runs that are ready, in order; wait until there are some, or the position has moved. After
        ``Trimmed``, the next call continues after the trimmed records."""
        while True:
            self._news.clear()
            runs = self.take_ready()
            if runs is not None:
                return runs
            await self._news.wait()

    def take_ready(self) -> list[CommittedBatch] | None:
        """Return ready runs without waiting; None if there are none and the position has not moved."""
        before = self.next_glsn
        runs = self._machine.take_ready()
        if runs or self.next_glsn > before:
            self._room.set()
            return self._with_fences(runs)
        if self._error is not None:
            raise self._error
        return None

    def _with_fences(self, runs: list[CommittedBatch]) -> list[CommittedBatch]:
        if not self._fences:
            return runs
        ready = [run for run in self._fences if run.first_glsn < self.next_glsn]
        self._fences = [run for run in self._fences if run.first_glsn >= self.next_glsn]
        return sorted((*runs, *ready), key=lambda run: run.first_glsn)

    async def close(self) -> None:
        await asyncio.gather(*self._end(), return_exceptions=True)
        self._readers.clear()

    def abandon(self) -> None:
        """Close from any thread without waiting for it."""
        with suppress(RuntimeError):
            # The event loop raises this if it is closed, and then everything has ended.
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> list[asyncio.Task[None]]:
        self.fail(ClientClosed("this subscription was closed"))
        return self._tasks()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [self._watching, *(reader.task for reader in self._readers.values())]

    # Called by readers.

    def take_answer(self, answer: ReadAnswer) -> None:
        wanted = self._machine.want(answer.stream)
        self._machine.take_answer(answer)
        if self._fences is not None and wanted is not None:
            new = [run for run in answer.runs if run.batch.kind is not BatchKind.DATA and run.last_glsn >= wanted[1]]
            self._fences += new
        if self._machine.needs_catalog:
            self.catalog_is_old.set()
        self._news.set()

    def take_trimmed(self, stream: LogStreamId, error: Trimmed) -> None:
        self._machine.take_trimmed(stream, error.first_left)
        self.catalog_is_old.set()
        self._news.set()

    async def wait_for_room(self, stream: LogStreamId) -> None:
        """Wait until more of this log stream should be read."""
        while not self._machine.has_room(stream):
            self._room.clear()
            await self._room.wait()

    async def guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run background work, and fail the subscription on a bug: a bug must not look like silence."""
        try:
            await work()
        except Exception as error:
            failure = CutwaterError(f"the subscription failed: {error!r}")
            failure.__cause__ = error
            self.fail(failure)

    def fail(self, error: CutwaterError) -> None:
        """End the subscription with an error; runs that are ready are still handed on."""
        if self._error is None:
            self._error = error
            self._news.set()
            for task in self._tasks():
                task.cancel()

    def wanted(self, stream: LogStreamId) -> tuple[StreamInfo, GLSN] | None:
        """Return the log stream from the catalog and the position from which it is wanted; None if it is not wanted."""
        return self._machine.want(stream)

    def is_behind(self, stream: LogStreamId) -> bool:
        """Return whether something is missing that a healthy replica would have sent."""
        wanted = self.wanted(stream)
        return wanted is not None and wanted[1] <= self._settled_hwm

    def projection(self, info: StreamInfo) -> Mapping[int, Columns]:
        """Return the wanted columns of each schema of the topic; empty if all are wanted."""
        view = self.catalogs.view
        name = view.names.get(info.topic)
        if name is None:
            raise Unavailable(f"log stream {info.stream} belongs to a topic that is being deleted")
        return ColumnLayout(view.schema(view.topics[name]), self._columns).projection

    def naming(self, error: PermissionDenied, info: StreamInfo) -> PermissionDenied:
        """Return a denial with the name of the topic, which servers do not tell a client that may not describe it: a
        subscription knew it before the right was taken away."""
        name = self._names.get(info.topic)
        if error.resource != ResourceKind.TOPIC or name is None:
            return error
        resource = Resource(ResourceKind.TOPIC, name)
        return denied(AccessVerdict(error.principal, error.right, resource, is_allowed=False))

    # The catalog.

    async def _watch(self) -> None:
        wait = RETRY_SECONDS_MIN
        while True:
            try:
                async with asyncio.timeout(CATALOG_SECONDS if self._machine.topics else CATALOG_SECONDS_ALONE):
                    await self.catalog_is_old.wait()
            except TimeoutError:
                pass
            self.catalog_is_old.clear()
            try:
                view = await self.catalogs.fresh(Deadline(CONNECT_SECONDS))
            except (ClientClosed, *NOT_ALLOWED) as error:
                self.fail(error)
                return
            except CutwaterError as error:
                # Nothing is lost: the log streams that are being followed go on.
                if (problem := await self.catalogs.tls_problem()) is not None:
                    self.fail(problem)
                    return
                self._catalog_trouble = error.message
                await asyncio.sleep(wait)
                wait = min(wait * 2, RETRY_SECONDS_MAX)
                self.catalog_is_old.set()
                continue
            self._catalog_trouble, wait = "", RETRY_SECONDS_MIN
            self._take_catalog(view)

    def _take_catalog(self, view: CatalogView) -> None:
        try:
            topics = self._selection.topics(view)
            self._machine.topics = frozenset(topic.topic for topic in topics)
            self._names = {topic.topic: topic.name for topic in topics}
            self._machine.take_catalog(view.catalog)
        except CutwaterError as error:
            self.fail(error)
            return
        if self._loop.time() - self._seen_at >= SILENT_MS / 1_000:
            self._settled_hwm = self._seen_hwm
            self._seen_hwm, self._seen_at = view.catalog.high_watermark, self._loop.time()
        wanted = {info.stream for info, _ in self._machine.wants()}
        for stream, reader in list(self._readers.items()):
            # A reader that has ended had nothing more to read then, but may have now.
            if stream not in wanted or reader.task.done():
                self._readers.pop(stream).task.cancel()
        for stream in wanted - self._readers.keys():
            self._readers[stream] = _Reader(self, stream)
        self._news.set()


class _Reader:
    """Follows one log stream, at one replica after another."""

    def __init__(self, feed: Feed, stream: LogStreamId) -> None:
        self._feed, self._stream = feed, stream
        self._turn = 0
        self._was_heard = False
        self._is_attached = False
        self._damage = LastingDamage()
        self.failures: dict[StorageNodeId, CutwaterError] = {}
        """Why nodes could not be followed, since a message last arrived."""
        self.task = asyncio.get_running_loop().create_task(feed.guard(self._run))

    @property
    def is_cut_off(self) -> bool:
        """Whether all nodes that have the log stream were tried in vain."""
        wanted = self._feed.wanted(self._stream)
        return wanted is not None and not self._is_attached and self.failures.keys() >= set(reading_order(wanted[0]))

    async def _run(self) -> None:
        wait = RETRY_SECONDS_MIN
        while (wanted := self._feed.wanted(self._stream)) is not None:
            self._was_heard = self._is_attached = False
            retry_after = 0.0
            try:
                await self._follow(*wanted)
            except Trimmed as error:
                self._feed.take_trimmed(self._stream, error)
            except PermissionDenied as error:
                self._feed.fail(self._feed.naming(error, wanted[0]))
                return
            except (ProtocolViolation, InvalidArgument, ClientClosed, Unauthenticated) as error:
                self._feed.fail(error)
                return
            except CutwaterError as error:
                _log.info("log stream %s is followed elsewhere: %s", self._stream, error.message)
                self._note(wanted[0], error)
                if isinstance(error, QuotaExceeded):
                    retry_after = error.retry_after
                now = asyncio.get_running_loop().time()
                if lasting := self._damage.take(error, len(reading_order(wanted[0])), now):
                    self._feed.fail(lasting)
                    return
                self._feed.catalog_is_old.set()
            self._turn += 1
            wait = RETRY_SECONDS_MIN if self._was_heard else min(wait * 2, RETRY_SECONDS_MAX)
            await asyncio.sleep(max(wait, retry_after))

    def _note(self, info: StreamInfo, why: CutwaterError) -> None:
        self._is_attached = False
        if self._was_heard:
            self.failures.clear()
            self._damage.forget()
        if nodes := reading_order(info):
            self.failures[nodes[self._turn % len(nodes)]] = why

    async def _follow(self, info: StreamInfo, position: GLSN) -> None:
        feed = self._feed
        revision = feed.catalogs.view.catalog.revision
        projection = dict(feed.projection(info))
        nodes = reading_order(info)
        if not nodes:
            raise Unavailable(f"log stream {info.stream} has no replica")
        node = nodes[self._turn % len(nodes)]
        address = feed.catalogs.view.address(node)
        connection = await feed.nodes.connection(address, Deadline(CONNECT_SECONDS))
        credit = SharedCredit(WINDOW_ITEMS, feed.window_bytes, item_bytes_max=WireOptions().frame_bytes_max)
        arguments = ReadArguments(self._stream, position, MESSAGE_BYTES, projection)
        async with connection.open_stream(FOLLOW, arguments, credit=credit) as messages:
            self._is_attached = True
            while (message := await self._next(messages, node)) is not None:
                self._was_heard = True
                runs = runs_of(message.value, message.body)
                is_old = revision < message.value.revision
                # If even a newer catalog does not have the schema, it does not exist, and the batch is malformed.
                if projection and is_old and not _schemas_in(runs) <= projection.keys():
                    raise Unavailable(f"log stream {self._stream} has a schema that the catalog here is too old for")
                value = message.value
                feed.take_answer(ReadAnswer(self._stream, runs, value.complete_through, value.revision))
                await feed.wait_for_room(self._stream)

    async def _next(
        self, messages: StreamReceiver[ReadAnswerHeader], node: StorageNodeId
    ) -> Received[ReadAnswerHeader] | None:
        quiet_ms = 0
        while True:
            try:
                return await messages.receive(timeout_ms=QUIET_MS)
            except DeadlineExceeded:
                quiet_ms += QUIET_MS
                catalogs = self._feed.catalogs
                info = catalogs.view.streams.get(self._stream)
                if info is not None and info.chain and node not in info.chain:
                    raise
                if quiet_ms >= SILENT_MS:
                    if self._feed.is_behind(self._stream):
                        self._feed.nodes.unreachable(self._stream, node)
                        raise
                    quiet_ms = 0
                    catalogs.look(after_seconds=SILENT_MS / 1_000)


def reading_order(info: StreamInfo) -> tuple[StorageNodeId, ...]:
    """Return the members of the chain before other replicas, with the head last among them: it has the most to do."""
    return tuple(dict.fromkeys((*reversed(info.chain), *info.replicas)))


def _schemas_in(runs: Iterable[CommittedBatch]) -> set[int]:
    return {run.batch.schema for run in runs if run.batch.kind is BatchKind.DATA}
