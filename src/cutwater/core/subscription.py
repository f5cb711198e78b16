"""A subscription: every committed record of its topics once, in GLSN order.

Records arrive per log stream, from any replica. They are handed on up to a position h only when

1. all streams of the topics that exist at h are known: whoever says something about h also names the catalog revision
   under which that cut was made, and it is not used before the catalog is at least that new;
2. each of them is complete through h, told by a replica that applied h or by the metadata repository.

So a stream with nothing new never holds up the others, and a new one is never skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from cutwater.core.requests import Catalog, StreamInfo
from cutwater.errors import ProtocolViolation, Trimmed
from cutwater.types import GLSN, LLSN, Batch, BatchKind, CutTime, LogStreamId, Revision, TopicId


class Run(Struct, frozen=True):
    """A committed batch as a reader gets it: its records have consecutive LLSNs and GLSNs."""

    stream: LogStreamId
    first_llsn: LLSN
    first_glsn: GLSN
    time: CutTime
    batch: Batch

    @property
    def last_glsn(self) -> GLSN:
        return GLSN(self.first_glsn + self.batch.count - 1)

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.batch.count - 1)


class ReadAnswer(Struct, frozen=True):
    """What a replica gives to a reader: some runs in order, and up to which GLSN the stream has nothing else.

    ``complete_through`` reaches beyond the last run only if there is nothing in between; ``revision`` is the catalog
    revision of that cut, 0 when the replica does not know it.
    """

    stream: LogStreamId
    runs: tuple[Run, ...]
    complete_through: GLSN
    revision: Revision


class _Source:
    """One log stream of the subscription."""

    __slots__ = ("complete_through", "info", "last_llsn", "position", "runs")

    def __init__(self, info: StreamInfo, position: GLSN) -> None:
        self.info = info
        self.position = position
        """The first GLSN that has not arrived yet."""
        self.last_llsn: LLSN | None = None
        self.runs: deque[Run] = deque()
        self.complete_through = GLSN(position - 1)
        self.complete(info.created_at)

    def complete(self, through: GLSN) -> None:
        """Everything up to here has arrived, or never was."""
        if through > self.complete_through:
            self.complete_through = through
            self.position = max(self.position, GLSN(through + 1))


class Subscription:
    """Merges log streams by GLSN. Feed it with catalogs and answers; take what is ready."""

    def __init__(self, topics: Iterable[TopicId], start: GLSN) -> None:
        self.topics = frozenset(topics)
        self.next_glsn = start
        """Everything below has been handed on."""
        self.revision = Revision(0)
        self.wanted_revision = Revision(0)
        self._sources: dict[LogStreamId, _Source] = {}

    @property
    def needs_catalog(self) -> bool:
        """Whether somebody spoke of a catalog that is newer than ours."""
        return self.wanted_revision > self.revision

    def wants(self) -> list[tuple[StreamInfo, GLSN]]:
        """From which streams more should be read, and from which GLSN on."""
        return [(source.info, source.position) for source in self._sources.values()]

    def take_catalog(self, catalog: Catalog) -> None:
        """The metadata repository tells which streams exist and how far each is committed at its high watermark."""
        if catalog.revision < self.revision:
            return
        for topic in catalog.topics:
            if topic.topic in self.topics and topic.trimmed_before > self.next_glsn:
                raise Trimmed(self.next_glsn, topic.trimmed_before)
        self.revision = catalog.revision
        # The streams of a deleted topic are gone, and nobody waits for them.
        existing = {info.stream for info in catalog.streams}
        self._sources = {stream: source for stream, source in self._sources.items() if stream in existing}
        for info in catalog.streams:
            if info.topic not in self.topics:
                continue
            source = self._sources.get(info.stream)
            if source is None:
                source = self._sources[info.stream] = _Source(info, self.next_glsn)
            source.info = info
            if info.last_glsn < source.position:
                # Everything that is committed there has arrived, or lies before our start.
                source.complete(catalog.high_watermark)

    def take_answer(self, answer: ReadAnswer) -> None:
        """Records of one stream, from one of its replicas; what has arrived before is dropped."""
        source = self._sources.get(answer.stream)
        if source is None:
            return
        for run in answer.runs:
            if run.last_glsn < source.position:
                continue
            if source.last_llsn is not None and run.first_llsn != source.last_llsn + 1:
                raise ProtocolViolation(
                    f"log stream {answer.stream}: after LLSN {source.last_llsn} a replica gave {run.first_llsn}"
                )
            source.runs.append(run)
            source.position, source.last_llsn = GLSN(run.last_glsn + 1), run.last_llsn
        if self._knows(answer.revision):
            source.complete(answer.complete_through)
        else:
            self.wanted_revision = max(self.wanted_revision, answer.revision)

    def _knows(self, revision: Revision) -> bool:
        """Whether the streams that existed under this revision are all known."""
        return 0 < revision <= self.revision

    def ready_through(self) -> GLSN:
        """The position up to which the order is final and everything has arrived."""
        if not self._sources:
            return GLSN(self.next_glsn - 1)
        return min(source.complete_through for source in self._sources.values())

    def take_ready(self) -> list[Run]:
        """The next runs in GLSN order, fences left out."""
        through = self.ready_through()
        ready: list[Run] = []
        for source in self._sources.values():
            while source.runs and source.runs[0].last_glsn <= through:
                ready.append(source.runs.popleft())
        ready.sort(key=lambda run: run.first_glsn)
        self.next_glsn = max(self.next_glsn, GLSN(through + 1))
        return [run for run in ready if run.batch.kind is BatchKind.DATA]
