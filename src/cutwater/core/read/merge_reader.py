"""A subscription: every committed record of its topics once, in GLSN order.

Records arrive per log stream, from any replica. The subscription hands on records up to a position h only when

1. it knows all streams of the topics that exist at h: its catalog is of h or later, or the answer that reached h named
   the catalog revision of that cut, and the catalog is at least that new;
2. everything up to h has arrived from each of them, according to a replica that applied h.

A sealed stream sends nothing more. Opening it again would change the catalog. So a stream that is sealed in the
catalog, and whose records have all arrived, has nothing else up to the position to which all streams are known.

So a stream with nothing new never holds up the others, and a new one is never skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from msgspec import Struct

from cutwater.core.requests import Catalog, StreamInfo
from cutwater.errors import NotFound, ProtocolViolation, Trimmed
from cutwater.types import GLSN, LLSN, Batch, BatchKind, CutTime, LogStreamId, Revision, TopicId

BUFFERED_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait for slower streams. Each stream may exceed the limit once, by the size of one read."""
RUN_OVERHEAD_BYTES = 512
"""Size of a run besides its body, so that many small runs count as well."""


class CommittedBatch(Struct, frozen=True):
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
    """Answer of a replica to a reader: some runs in order, and the GLSN up to which the stream has nothing else.

    ``complete_through`` reaches beyond the last run only if there is nothing in between. ``revision`` is the catalog
    revision of that cut, 0 when the replica does not know it.
    """

    stream: LogStreamId
    runs: tuple[CommittedBatch, ...]
    complete_through: GLSN
    revision: Revision


class _Source:
    """One log stream of the subscription."""

    __slots__ = ("arrived", "bytes", "info", "last_llsn", "runs")

    def __init__(self, info: StreamInfo, start: GLSN) -> None:
        self.info = info
        self.arrived = max(GLSN(start - 1), info.created_at)
        """Everything up to this GLSN has arrived, never existed, or is not wanted."""
        self.last_llsn: LLSN | None = None
        self.runs: deque[CommittedBatch] = deque()
        self.bytes = 0

    @property
    def is_read(self) -> bool:
        """Whether everything up to the end that the catalog names has arrived."""
        return self.info.last_glsn <= self.arrived

    def take(self, run: CommittedBatch) -> None:
        self.arrived, self.last_llsn = run.last_glsn, run.last_llsn
        if run.batch.kind is BatchKind.DATA:
            self.runs.append(run)
            self.bytes += _bytes_of(run)

    def pop(self) -> CommittedBatch:
        run = self.runs.popleft()
        self.bytes -= _bytes_of(run)
        return run


class MergeReader:
    """Merges log streams by GLSN. Feed it with catalogs and answers; take what is ready.

    Runs are handed on whole: the first may begin before ``start``, and the last may end after ``stop``.
    """

    def __init__(
        self,
        topics: Iterable[TopicId],
        start: GLSN,
        starts: Mapping[TopicId, GLSN] | None = None,
        *,
        stop: GLSN | None = None,
        bytes_max: int = BUFFERED_BYTES_MAX,
    ) -> None:
        """``starts`` names topics of which only records from a later position on are wanted. ``stop`` is the last GLSN
        that is wanted."""
        self.topics = frozenset(topics)
        """The caller may change this before it passes a catalog, if the topics come from a pattern."""
        self.next_glsn = start
        """Everything below this GLSN has been handed on."""
        self.revision = Revision(0)
        self.wanted_revision = Revision(0)
        self._starts = dict(starts or {})
        self._stop = stop
        self._bytes_max = bytes_max
        self._known_through = GLSN(start - 1)
        """All streams that exist at any position up to this GLSN are known."""
        self._names: dict[TopicId, str] = {}
        self._sources: dict[LogStreamId, _Source] = {}
        self._bytes = 0
        """Bytes that all sources hold together."""
        self._gaps: dict[TopicId, tuple[GLSN, GLSN]] = {}
        """Ranges that were trimmed before they arrived: the first trimmed GLSN, and the first one that is left."""
        self._ended: dict[TopicId, GLSN] = {}
        """Deleted topics, and the GLSN from which on nothing of them is handed on."""
        self._told: set[TopicId] = set()
        """Deleted topics that ``take_ended`` has returned."""

    # Reads.

    @property
    def needs_catalog(self) -> bool:
        """Whether nothing more can be handed on before a newer catalog arrives."""
        if self.wanted_revision > self.revision:
            return True
        return all(position > self._known_through + 1 for _, position in self.wants()) and not self.is_finished

    @property
    def is_finished(self) -> bool:
        return self._stop is not None and self.next_glsn > self._stop

    def wants(self) -> list[tuple[StreamInfo, GLSN]]:
        """Return the streams from which more is wanted, each with the GLSN to read from."""
        wants = (self.want(stream) for stream in self._sources)
        return [want for want in wants if want is not None]

    def want(self, stream: LogStreamId) -> tuple[StreamInfo, GLSN] | None:
        """Do the same for one stream. Return None if it is not part of this subscription, or if it has nothing more."""
        source = self._sources.get(stream)
        if source is None or (source.is_read and not source.info.is_open):
            return None
        if self._stop is not None and source.arrived >= self._stop:
            return None
        return source.info, GLSN(source.arrived + 1)

    def has_room(self, stream: LogStreamId) -> bool:
        """Whether more of this stream should be read now. A stream that the others wait for always has room, because
        none of its runs are buffered."""
        source = self._sources.get(stream)
        if source is None or not source.runs:
            return True
        return self._bytes < self._bytes_max

    # Input.

    def take_catalog(self, catalog: Catalog) -> None:
        """Take a catalog: it tells which streams exist and how far each is committed at its high watermark."""
        if catalog.revision < self.revision:
            return
        trimmed_before = {topic.topic: topic.trimmed_before for topic in catalog.topics}
        self._names = {topic.topic: topic.name for topic in catalog.topics}
        self._end_topics(trimmed_before.keys())
        self.revision = catalog.revision
        sources: dict[LogStreamId, _Source] = {}
        for info in catalog.streams:
            if info.topic not in self.topics:
                continue
            source = self._sources.get(info.stream)
            if source is None:
                start = max(self.next_glsn, self._starts.get(info.topic, self.next_glsn))
                source = _Source(info, start)
            source.info = info
            if source.is_read:
                source.arrived = max(source.arrived, catalog.high_watermark)
            sources[info.stream] = source
            self._skip(source, trimmed_before[info.topic])
        # The streams of a deleted topic are gone, and the subscription no longer waits for them.
        self._sources = sources
        self._bytes = sum(source.bytes for source in sources.values())
        self._know(catalog.high_watermark)

    def take_answer(self, answer: ReadAnswer) -> None:
        """Take records of one stream from one of its replicas. Records that arrived before are dropped."""
        source = self._sources.get(answer.stream)
        if source is None:
            return
        self._bytes -= source.bytes
        for run in answer.runs:
            if run.last_glsn <= source.arrived:
                continue
            if source.last_llsn is not None and run.first_llsn != source.last_llsn + 1:
                raise ProtocolViolation(
                    f"log stream {answer.stream}: after LLSN {source.last_llsn} a replica gave {run.first_llsn}"
                )
            source.take(run)
        self._bytes += source.bytes
        source.arrived = max(source.arrived, answer.complete_through)
        if self._knows(answer.revision):
            self._know(answer.complete_through)
        else:
            self.wanted_revision = max(self.wanted_revision, answer.revision)

    def take_trimmed(self, stream: LogStreamId, first_left: GLSN) -> None:
        """Note that a replica has trimmed the requested records. It may know that before the catalog here does."""
        source = self._sources.get(stream)
        if source is not None:
            self._skip(source, first_left)

    def _skip(self, source: _Source, first_left: GLSN) -> None:
        """Skip trimmed records, which will not arrive any more. Only those that had not arrived are missed."""
        if source.arrived + 1 >= first_left:
            return
        begin, end = self._gaps.get(source.info.topic, (GLSN(source.arrived + 1), first_left))
        self._gaps[source.info.topic] = min(begin, GLSN(source.arrived + 1)), max(end, first_left)
        source.arrived, source.last_llsn = GLSN(first_left - 1), None

    def _end_topics(self, existing: Iterable[TopicId]) -> None:
        left = self.topics & set(existing)
        if self.topics and not left:
            raise NotFound("none of the topics of this subscription exists any more: they were deleted")
        for topic in self.topics | {source.info.topic for source in self._sources.values()}:
            if topic not in left:
                self._ended.setdefault(topic, self.next_glsn)
                self._gaps.pop(topic, None)

    def _knows(self, revision: Revision) -> bool:
        """Whether all streams that existed under this revision are known."""
        return 0 < revision <= self.revision

    def _know(self, through: GLSN) -> None:
        self._known_through = max(self._known_through, through)
        for source in self._sources.values():
            if source.is_read and not source.info.is_open:
                source.arrived = max(source.arrived, self._known_through)

    # Output.

    def ready_through(self) -> GLSN:
        """Return the position up to which the order is final and everything that is wanted has arrived."""
        through = min((source.arrived for source in self._sources.values()), default=self._known_through)
        through = min(through, self._known_through)
        return through if self._stop is None else min(through, self._stop)

    def take_ready(self) -> list[CommittedBatch]:
        """Return the next runs in GLSN order, without fences. Raise ``Trimmed`` when the next records of a topic were
        trimmed before they arrived; a caller that can do without them calls again."""
        through = self.ready_through()
        topic = min(self._gaps, key=lambda topic: self._gaps[topic], default=None)
        if topic is not None:
            through = min(through, GLSN(self._gaps[topic][0] - 1))
        ready: list[CommittedBatch] = []
        # A run that holds the first wanted position may begin before it. That alone does not make it ready.
        for source in self._sources.values() if through >= self.next_glsn else ():
            while source.runs and source.runs[0].first_glsn <= through:
                ready.append(source.pop())
        ready.sort(key=lambda run: run.first_glsn)
        self._bytes -= sum(_bytes_of(run) for run in ready)
        self.next_glsn = max(self.next_glsn, GLSN(through + 1))
        if topic is not None and not ready and self.next_glsn >= self._gaps[topic][0]:
            raise Trimmed(*self._gaps.pop(topic), self._names[topic])
        return ready

    def take_ended(self) -> dict[TopicId, GLSN]:
        """Return the topics that were deleted since the last call, each with the position from which on nothing of it
        is handed on, whether or not it had arrived."""
        news = {topic: at for topic, at in self._ended.items() if topic not in self._told}
        self._told = self._ended.keys() & set(self.topics)
        self._ended = {topic: at for topic, at in self._ended.items() if topic in self._told}
        return news


def _bytes_of(run: CommittedBatch) -> int:
    return len(run.batch.body) + RUN_OVERHEAD_BYTES
