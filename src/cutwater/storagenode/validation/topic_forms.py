"""Forms of the bodies of each log stream, as the catalog defines them: fetched from the metadata repository when
needed, and cached. A schema never changes once it has its number, so cached forms stay valid.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from cutwater.core.requests import Catalog, CatalogRequest, TopicInfo
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, Unavailable
from cutwater.format.bodies import KEY_VALUE_FORM, BodyForm
from cutwater.types import LogStreamId, Revision, TopicId

_log = logging.getLogger(__name__)

FETCH_SECONDS: Final = 2.0
"""How long an append waits for the catalog."""
AGAIN_SECONDS: Final = 0.1
"""Minimum interval between catalog requests, so that not every append with an unknown schema sends one."""

MISSED_MAX: Final = 1_024
MISSED_SECONDS: Final = 5.0
"""For how long a catalog answers what was missed. Later it may be out of date."""

Ask = Callable[[CatalogRequest], Awaitable[Catalog]]


class Moment(NamedTuple):
    """When a caller arrived: any later catalog request answers it."""

    questions: int
    until: float
    """When the caller stops waiting."""


class TopicForms:
    """The schemas of one topic. ``ahead_us``: how far event times may be ahead of cut time; 0 means no limit."""

    def __init__(self, info: TopicInfo) -> None:
        self.topic, self.name, self.ahead_us = info.topic, info.name, info.event_time_ahead_us
        self.event_time = info.event_time
        self.schemas = info.schemas
        self._forms = [BodyForm(schema, info.event_time) for schema in info.schemas]

    def form(self, number: int) -> BodyForm | None:
        """Return the form of a batch of this schema; None if the topic is not known to have such a schema."""
        if not self._forms:
            return KEY_VALUE_FORM if number == 0 else None
        return self._forms[number - 1] if 0 < number <= len(self._forms) else None

    def no_such_schema(self, number: int) -> InvalidArgument:
        has = f"schemas 1 to {len(self._forms)}" if self._forms else "records of key and value, which is schema 0"
        return InvalidArgument(f"the batch names schema {number}, and topic {self.name!r} has {has}: fetch the catalog")


class KnownTopics:
    """The known topics. Belongs to the event loop of the node."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self.revision = self._heard = Revision(0)
        """The revision of the cached catalog, and the newest revision that was heard of."""
        self._of_stream: dict[LogStreamId, TopicForms] = {}
        self._of_topic: dict[TopicId, TopicForms] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at = -1.0
        self._asked = self._settled = 0
        """Number of requests sent, and number of the last one up to which all were answered or failed."""
        self._trouble = ""
        self._first_missed: dict[tuple[str, int], tuple[int, float]] = {}
        """What was looked up and not found, how many requests had been sent by then, and when that was."""

    def now(self) -> Moment:
        return Moment(self._asked, self._loop.time() + FETCH_SECONDS)

    def known(self, stream: LogStreamId) -> TopicForms | None:
        """Return the topic of the log stream if it is cached; sends no request."""
        return self._of_stream.get(stream)

    def name_of_stream(self, stream: LogStreamId) -> str | None:
        """Return the name of the topic; None if the catalog has no such log stream. Raises ``Unavailable`` if that is
        not known yet: the catalog is fetched meanwhile."""
        found = self._of_stream.get(stream)
        if found is None:
            self.miss_stream(stream)
        return None if found is None else found.name

    def name_of_topic(self, topic: TopicId) -> str | None:
        found = self._of_topic.get(topic)
        if found is None:
            self.miss_topic(topic)
        return None if found is None else found.name

    def miss_stream(self, stream: LogStreamId) -> None:
        """Act as if the catalog that is known here did not have this log stream."""
        self._missed(("log stream", stream))

    def miss_topic(self, topic: TopicId) -> None:
        """The same for the number of a topic."""
        self._missed(("topic number", topic))

    def _missed(self, what: tuple[str, int]) -> None:
        """Return if a catalog that was requested after this was missed does not have it either."""
        asked, since = self._first_missed.get(what, (-1, 0.0))
        now = self._loop.time()
        if asked < 0 or now - since > MISSED_SECONDS:
            if len(self._first_missed) >= MISSED_MAX:
                self._first_missed.clear()
            self._first_missed[what] = self._asked, now
        elif self._settled > asked and not self._trouble:
            return
        self.refresh()
        kind, number = what
        raise Unavailable(f"{kind} {number} is not known here yet, or does not exist: nothing was done, try again")

    async def of_stream(self, stream: LogStreamId, since: Moment | None = None) -> TopicForms:
        """Return the topic of a log stream. Raises ``Unavailable`` if the metadata repository does not answer now, and
        ``NotFound`` if it does not know the log stream. ``since``: when the caller arrived, if earlier than now."""
        found = self._of_stream.get(stream)
        if found is None:
            await self._fresh(f"log stream {stream}", since)
            found = self._of_stream.get(stream)
        return _require(found, f"log stream {stream}")

    async def form_of_stream(
        self, stream: LogStreamId, number: int, since: Moment | None = None
    ) -> tuple[TopicForms, BodyForm]:
        """Return the topic and the form of a batch of this schema; ``InvalidArgument`` if it has no such schema."""
        return await self._form(lambda: self._of_stream.get(stream), number, f"log stream {stream}", since)

    async def form_of_topic(self, topic: TopicId, number: int) -> tuple[TopicForms, BodyForm]:
        return await self._form(lambda: self._of_topic.get(topic), number, f"topic number {topic}")

    async def _form(
        self, look: Callable[[], TopicForms | None], number: int, what: str, since: Moment | None = None
    ) -> tuple[TopicForms, BodyForm]:
        found = look()
        form = None if found is None else found.form(number)
        if form is None:
            await self._fresh(what, since)
            form = _require(look(), what).form(number)
        found = _require(look(), what)
        if form is None:
            raise found.no_such_schema(number)
        return found, form

    def refresh(self, revision: Revision | None = None) -> None:
        """Note that the catalog has this revision now, or may have changed. It is fetched again as soon as allowed; the
        caller does not wait."""
        if revision is not None and revision > self._heard:
            self._heard = revision
            self._first_missed.clear()
        if (revision is None or revision > self.revision) and self._fetching is None:
            self._begin()

    def expect(self, stream: LogStreamId) -> None:
        """Fetch the topic of this log stream, which exists now, before its first append arrives, so that the append
        need not wait."""
        self._first_missed.pop(("log stream", stream), None)
        if stream not in self._of_stream and self._fetching is None:
            self._begin()

    async def _fresh(self, what: str, since: Moment | None) -> None:
        """Wait for a catalog that was requested after this call began, or after ``since``. One request answers all
        callers that arrived before it; later ones wait for the next."""
        questions, until = since or self.now()
        while self._settled <= questions and self._loop.time() < until:
            task = self._fetching or self._begin()
            await asyncio.wait({task}, timeout=until - self._loop.time())
        is_late = self._settled <= questions
        if is_late or self._trouble:
            raise Unavailable(
                f"the schema of {what} is not known here, and the metadata repository does not tell it now "
                f"({f'no answer within {FETCH_SECONDS:g} s' if is_late else self._trouble}): nothing was taken, try "
                "again"
            )

    def _begin(self) -> asyncio.Task[None]:
        self._fetching = self._loop.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        trouble = "it was not asked to the end"
        try:
            wait = self._fetched_at + AGAIN_SECONDS - self._loop.time()
            if self._fetched_at >= 0 and wait > 0:
                await asyncio.sleep(wait)
            self._fetched_at = self._loop.time()
            self._asked += 1
            self.take(await self._ask(CatalogRequest()))
            trouble = ""
        except CutwaterError as error:
            trouble = error.message
            _log.info("the catalog cannot be fetched now: %s", error.message)
        finally:
            self._settled, self._trouble, self._fetching = self._asked, trouble, None
        if not trouble and self.revision < self._heard:
            # It changed again while the answer was on its way.
            self._begin()

    def take(self, catalog: Catalog) -> None:
        if catalog.revision < self.revision:
            return
        self.revision = catalog.revision
        known, self._of_topic = self._of_topic, {}
        for info in catalog.topics:
            old = known.get(info.topic)
            is_same = old is not None and (old.schemas, old.ahead_us) == (info.schemas, info.event_time_ahead_us)
            # Forms that were built from a schema are kept while nothing changes.
            self._of_topic[info.topic] = old if is_same and old is not None else TopicForms(info)
        self._of_stream = {
            info.stream: self._of_topic[info.topic] for info in catalog.streams if info.topic in self._of_topic
        }

    def stop(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()


def _require(found: TopicForms | None, what: str) -> TopicForms:
    if found is None:
        raise NotFound(f"the catalog has no {what}: it was deleted, or never existed")
    return found
