"""What the bodies of each log stream look like, as the catalog says: asked of the metadata repository when needed,
and kept. A schema never changes once it has its number, so what is known stays true.
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
"""How far apart questions to the metadata repository are: not every append that names nonsense asks one."""

Ask = Callable[[CatalogRequest], Awaitable[Catalog]]


class Moment(NamedTuple):
    """When a caller came: a question to the catalog that was asked later answers it."""

    questions: int
    until: float
    """How long it is waited for."""


class TopicForms:
    """The schemas of one topic. ``ahead_us``: how far event times may be ahead of cut time; 0 is without bound."""

    def __init__(self, info: TopicInfo) -> None:
        self.topic, self.name, self.ahead_us = info.topic, info.name, info.event_time_ahead_us
        self.event_time = info.event_time
        self.schemas = info.schemas
        self._forms = [BodyForm(schema, info.event_time) for schema in info.schemas]

    def form(self, number: int) -> BodyForm | None:
        """The form of a batch of this schema; None if the topic has no such schema, as far as is known."""
        if not self._forms:
            return KEY_VALUE_FORM if number == 0 else None
        return self._forms[number - 1] if 0 < number <= len(self._forms) else None

    def no_such_schema(self, number: int) -> InvalidArgument:
        has = f"schemas 1 to {len(self._forms)}" if self._forms else "records of key and value, which is schema 0"
        return InvalidArgument(f"the batch names schema {number}, and topic {self.name!r} has {has}: fetch the catalog")


class Topics:
    """Belongs to the event loop of the node."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self.revision = self._heard = Revision(0)
        """Of what is known, and of the newest catalog that was heard of."""
        self._of_stream: dict[LogStreamId, TopicForms] = {}
        self._of_topic: dict[TopicId, TopicForms] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at = -1.0
        self._asked = self._settled = 0
        """How many questions were asked, and up to which of them all have an answer, or have failed."""
        self._trouble = ""

    def now(self) -> Moment:
        return Moment(self._asked, self._loop.time() + FETCH_SECONDS)

    def known(self, stream: LogStreamId) -> TopicForms | None:
        """The topic of the log stream, if it is known now; nothing is asked."""
        return self._of_stream.get(stream)

    async def of_stream(self, stream: LogStreamId, since: Moment | None = None) -> TopicForms:
        """The topic of a log stream. Raises ``Unavailable`` if the metadata repository does not answer now, and
        ``NotFound`` if it does not know the log stream. ``since``: when the caller came, if that was before."""
        found = self._of_stream.get(stream)
        if found is None:
            await self._fresh(f"log stream {stream}", since)
            found = self._of_stream.get(stream)
        return _require(found, f"log stream {stream}")

    async def form_of_stream(
        self, stream: LogStreamId, number: int, since: Moment | None = None
    ) -> tuple[TopicForms, BodyForm]:
        """The same, and what a batch of this schema looks like; ``InvalidArgument`` if the topic has no such schema."""
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
        """The catalog has this revision now, or may have changed: it is asked for again, at once or as soon as it may
        be. Nobody waits for it."""
        if revision is not None:
            self._heard = max(self._heard, revision)
        if (revision is None or revision > self.revision) and self._fetching is None:
            self._begin()

    def expect(self, stream: LogStreamId) -> None:
        """Ask for the topic of this log stream before its first append comes, so that the append need not wait."""
        if stream not in self._of_stream and self._fetching is None:
            self._begin()

    async def _fresh(self, what: str, since: Moment | None) -> None:
        """Have a catalog that was asked for after this call began, or ``since``. One question answers all
        callers that came before it; later ones wait for the next."""
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
            _log.info("the schemas of the catalog cannot be had now: %s", error.message)
        finally:
            self._settled, self._trouble, self._fetching = self._asked, trouble, None
        if not trouble and self.revision < self._heard:
            # It changed once more while the answer was on its way.
            self._begin()

    def take(self, catalog: Catalog) -> None:
        if catalog.revision < self.revision:
            return
        self.revision = catalog.revision
        known, self._of_topic = self._of_topic, {}
        for info in catalog.topics:
            old = known.get(info.topic)
            is_same = old is not None and (old.schemas, old.ahead_us) == (info.schemas, info.event_time_ahead_us)
            # What was made of a schema is kept as long as nothing changes.
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
