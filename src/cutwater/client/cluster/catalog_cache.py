"""The client's copy of the catalog: fetched at first use, and again when there is a sign that it is old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.client.arguments import check_topic
from cutwater.client.cluster.metadata_client import Repository, no_such_topic
from cutwater.client.convert.schemas import TopicSchema
from cutwater.core.append_fate import is_out_of_date
from cutwater.core.requests import Catalog, CatalogRequest, DescribeRequest, Description, StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, DeadlineExceeded, Unavailable
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, CutTime, LogStreamId, Revision, StorageNodeId, TopicId

FETCH_MS_MAX = 10_000
LOOK_SECONDS = 0.2
"""``look`` fetches no more often than this."""
NOTHING = Catalog(Revision(0), GLSN(0), CutTime(0), (), ())


class CatalogView:
    """One catalog, indexed for look-ups. A result stays valid for its revision."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.topics: dict[str, TopicInfo] = {topic.name: topic for topic in catalog.topics}
        self.names: dict[TopicId, str] = {topic.topic: topic.name for topic in catalog.topics}
        self.streams: dict[LogStreamId, StreamInfo] = {info.stream: info for info in catalog.streams}
        self.addresses: dict[StorageNodeId, str] = {node.node: node.address for node in catalog.nodes if node.address}
        self._of_topic: dict[TopicId, list[StreamInfo]] = {topic.topic: [] for topic in catalog.topics}
        for info in catalog.streams:
            self._of_topic[info.topic].append(info)
        self._schemas: dict[TopicId, TopicSchema] = {}

    def streams_of(self, topic: TopicId) -> list[StreamInfo]:
        return self._of_topic.get(topic, [])

    def schema(self, topic: TopicInfo) -> TopicSchema:
        found = self._schemas.get(topic.topic)
        if found is None:
            found = self._schemas[topic.topic] = TopicSchema.of(topic)
        return found

    def address(self, node: StorageNodeId) -> str:
        address = self.addresses.get(node)
        if address is None:
            raise Unavailable(f"the address of storage node {node} is not known: is it running?")
        return address


class Catalogs:
    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.view = CatalogView(NOTHING)
        self._fetching: asyncio.Task[Catalog] | None = None
        self._fetched_at = -LOOK_SECONDS
        """When a catalog was last requested."""
        self._looking: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.listeners: dict[Callable[[CatalogView], None], None] = {}
        """Called with every view of another revision."""

    def heard(self, revision: Revision) -> None:
        """Note that a commit was made under this revision of the catalog."""
        if is_out_of_date(self.view.catalog.revision, revision):
            self.look()

    def look(self, *, after_seconds: float = LOOK_SECONDS) -> None:
        """Fetch the catalog without waiting for the answer. If one was requested less than ``after_seconds`` ago, fetch
        it a little later."""
        if self._fetching is not None or self._looking is not None or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        wait = self._fetched_at + after_seconds - loop.time()
        if wait <= 0:
            self._fetch()
        else:
            self._looking = loop.call_later(wait, self._look)

    def _look(self) -> None:
        self._looking = None
        if not self._is_closed:
            self._fetch()

    def nodes_at(self, address: str) -> list[StorageNodeId]:
        """Return the storage nodes that are known to have this address. Usually it is one."""
        return [node for node, known in self.view.addresses.items() if known == address]

    async def fresh(self, deadline: Deadline) -> CatalogView:
        """Return the catalog as of some moment after this call began."""
        if self._fetching is not None:
            # It was requested before this call, so it may be older than what the caller knows.
            await self._wait(self._fetching, deadline, is_last=False)
        await self._wait(self._fetch(), deadline, is_last=True)
        return self.view

    async def known(self, deadline: Deadline) -> CatalogView:
        """Return the cached catalog; fetch one only if there is none."""
        return self.view if self.view.catalog.revision else await self.fresh(deadline)

    async def topic(self, name: str, deadline: Deadline) -> TopicInfo:
        check_topic(name)
        found = self.view.topics.get(name)
        if found is None:
            found = (await self.fresh(deadline)).topics.get(name)
        if found is None:
            raise no_such_topic(name, self.view.catalog)
        return found

    async def tls_problem(self) -> CutwaterError | None:
        """Return the error that says why TLS keeps this client from all metadata nodes; None if it does not, or not for
        certain."""
        return await self._repository.tls_trouble.certain()

    async def description(self, deadline: Deadline) -> Description:
        """Return a description of the cluster, for error messages."""
        return await self._repository.ask(DescribeRequest(), Description, timeout_ms=deadline.left_ms(FETCH_MS_MAX))

    def take(self, catalog: Catalog) -> None:
        """Keep the newest catalog. Catalogs may arrive out of order, for example from a deposed leader."""
        known = self.view.catalog
        if (catalog.revision, catalog.high_watermark) >= (known.revision, known.high_watermark):
            self.view = CatalogView(catalog)
            if catalog.revision != known.revision:
                for listener in list(self.listeners):
                    listener(self.view)

    async def close(self) -> None:
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _fetch(self) -> asyncio.Task[Catalog]:
        """Fetch the catalog. Callers share a fetch that is under way."""
        if self._fetching is None or self._fetching.done():
            # A finished task whose result has not been taken yet was requested too early.
            loop = asyncio.get_running_loop()
            self._fetched_at = loop.time()
            asking = self._repository.ask(CatalogRequest(), Catalog, timeout_ms=FETCH_MS_MAX)
            self._fetching = loop.create_task(asking)
            self._fetching.add_done_callback(self._fetched)
        return self._fetching

    def _fetched(self, task: asyncio.Task[Catalog]) -> None:
        if self._fetching is task:
            self._fetching = None
        if not task.cancelled() and task.exception() is None:
            self.take(task.result())

    async def _wait(self, task: asyncio.Task[Catalog], deadline: Deadline, *, is_last: bool) -> None:
        try:
            async with asyncio.timeout_at(deadline.at):
                await asyncio.shield(task)
        except TimeoutError:
            trouble = self._repository.trouble
            raise DeadlineExceeded(
                f"the metadata repository has not answered within {deadline.seconds:g} s{trouble and f': {trouble}'}"
            ) from None
        except CutwaterError:
            if is_last:
                raise
