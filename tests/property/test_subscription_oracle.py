"""A subscription against the log itself, which the oracle simply has.

The world makes cuts, creates, seals, trims and deletes; replicas lag behind and answer in pieces; answers and catalogs
arrive late, twice and in any order. What is delivered must at every moment be exactly the beginning of the log, but for
what the reader was told to be trimmed, and what was left of a topic when it was deleted.
"""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from cutwater.core.read.merge_reader import RUN_OVERHEAD_BYTES, CommittedBatch, MergeReader, ReadAnswer
from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.errors import NotFound, Trimmed
from cutwater.types import GLSN, LLSN, BatchKind, CutTime, Epoch, LogStreamId, Revision, TopicId
from tests.unit.replica_bench import batch, fence

T, OTHER = TopicId(1), TopicId(2)


class Stream(Struct):
    number: int
    topic: TopicId
    created_at: int
    runs: list[CommittedBatch]
    is_open: bool = True
    replicas: list[tuple[int, int]] = []
    """Of each replica: through which cut it is complete, and the revision of that cut; (0, 0) after a restart."""


class World:
    def __init__(self) -> None:
        self.revision, self.high_watermark, self.trimmed = 1, 0, 1
        self.is_deleted = False
        """Whether the other topic is."""
        self.cuts: list[tuple[int, int]] = [(0, 1)]
        self.streams: list[Stream] = []
        self.catalogs: list[Catalog] = []
        self.create(T)

    def create(self, topic: TopicId) -> None:
        self.revision += 1
        number = len(self.streams) + 1
        replicas = [(self.high_watermark, self.revision), (0, 0)]
        self.streams.append(Stream(number, topic, self.high_watermark, [], replicas=replicas))
        self.publish()

    def seal(self, stream: Stream) -> None:
        self.revision += 1
        stream.is_open = not stream.is_open and not self.is_gone(stream)
        self.publish()

    def delete(self) -> None:
        self.revision += 1
        self.is_deleted = True
        for stream in self.streams:
            stream.is_open = stream.is_open and stream.topic == T
        self.publish()

    def is_gone(self, stream: Stream) -> bool:
        return self.is_deleted and stream.topic == OTHER

    def trim(self, before: int) -> None:
        if self.trimmed < before <= self.high_watermark + 1:
            self.revision += 1
            self.trimmed = before
            self.publish()

    def cut(self, sizes: int) -> None:
        """Some batches for some of the open streams; a tick if there are none."""
        before = self.high_watermark
        for stream in self.streams:
            sizes, size = divmod(sizes, 4)
            for count in range(1, size + 1) if stream.is_open else ():
                of = fence() if count == 3 else batch(count)
                last = stream.runs[-1].last_llsn if stream.runs else 0
                first_glsn = GLSN(self.high_watermark + 1)
                stream.runs.append(
                    CommittedBatch(LogStreamId(stream.number), LLSN(last + 1), first_glsn, CutTime(first_glsn), of)
                )
                self.high_watermark += of.count
        if self.high_watermark == before:
            self.high_watermark += 1
        self.cuts.append((self.high_watermark, self.revision))
        self.publish()

    def publish(self) -> None:
        infos = tuple(
            StreamInfo(
                stream=LogStreamId(s.number),
                topic=s.topic,
                epoch=Epoch(1),
                is_open=s.is_open,
                final=False,
                chain=(),
                replicas=(),
                committed_end=s.runs[-1].last_llsn if s.runs else LLSN(0),
                last_glsn=s.runs[-1].last_glsn if s.runs else GLSN(0),
                created_at=GLSN(s.created_at),
                created_time=CutTime(0),
            )
            for s in self.streams
            if not self.is_gone(s)
        )
        topics = (TopicInfo(T, "orders", GLSN(self.trimmed)),)
        if not self.is_deleted:
            topics += (TopicInfo(OTHER, "other", GLSN(1)),)
        self.catalogs.append(Catalog(Revision(self.revision), GLSN(self.high_watermark), CutTime(0), topics, infos))

    def apply(self, stream: Stream, replica: int, by: int) -> None:
        """A replica hears of some more cuts; of a sealed stream it hears only until its last record."""
        through, _ = stream.replicas[replica]
        later = [cut for cut in self.cuts if cut[0] > through]
        if not stream.is_open:
            last = stream.runs[-1].last_glsn if stream.runs else 0
            sealed_in = min((cut for cut, _ in self.cuts if cut >= last), default=0)
            later = [cut for cut in later if cut[0] <= sealed_in]
        if later:
            stream.replicas[replica] = later[min(by, len(later) - 1)]

    def read(self, stream: Stream, replica: int, position: int, chunk: int) -> ReadAnswer | None:
        """What the replica answers; nothing if it has to say that the position is trimmed."""
        if position < self.trimmed and stream.topic == T:
            return None
        through, revision = stream.replicas[replica]
        runs = [r for r in stream.runs if r.last_glsn >= position and r.last_glsn <= through]
        if len(runs) > chunk:
            runs = runs[:chunk]
            through = runs[-1].last_glsn if runs else 0
        return ReadAnswer(LogStreamId(stream.number), tuple(runs), GLSN(through), Revision(revision))

    def log(self, topics: set[TopicId], start: int, end: int) -> list[CommittedBatch]:
        """Every run that a subscriber gets, from the one that holds ``start`` to the one that holds ``end``."""
        runs = [r for s in self.streams if s.topic in topics for r in s.runs]
        wanted = [r for r in runs if r.batch.kind is BatchKind.DATA and r.last_glsn >= start and r.first_glsn <= end]
        return sorted(wanted, key=lambda r: r.first_glsn)

    def topic_of(self, run: CommittedBatch) -> TopicId:
        return self.streams[run.stream - 1].topic


class Reader:
    def __init__(self, world: World, topics: set[TopicId], start: int, stop: int | None) -> None:
        self.world, self.topics, self.start, self.stop = world, topics, start, stop
        end = None if stop is None else GLSN(stop)
        self.subscription = MergeReader(topics, GLSN(start), stop=end, bytes_max=3 * RUN_OVERHEAD_BYTES)
        self.under_way: list[ReadAnswer] = []
        self.delivered: list[CommittedBatch] = []
        self.gaps: list[Trimmed] = []
        self.ended_at: int | None = None
        """Where the reader was when it heard that the other topic is deleted."""

    def take_catalog(self, catalog: Catalog) -> bool:
        """Whether the subscription goes on."""
        try:
            self.subscription.take_catalog(catalog)
        except NotFound:
            assert self.topics == {OTHER}
            assert self.world.is_deleted
            return False
        for topic, position in self.subscription.take_ended().items():
            assert topic == OTHER
            assert self.world.is_deleted
            self.ended_at = position
        return True

    def take(self) -> None:
        before = self.subscription.next_glsn
        try:
            self.delivered += self.subscription.take_ready()
        except Trimmed as error:
            self.gaps.append(error)
        assert all(gap.asked < gap.first_left <= self.world.trimmed for gap in self.gaps)
        assert before <= self.subscription.next_glsn
        positions = [run.first_glsn for run in self.delivered]
        assert positions == sorted(set(positions))
        end = self.subscription.next_glsn - 1
        log = self.world.log(self.topics, self.start, end) if end >= self.start else []
        assert all(run in log for run in self.delivered)
        missing = [run for run in log if run not in self.delivered]
        assert all(self.may_be_missing(run) for run in missing), (missing, self.gaps)

    def may_be_missing(self, run: CommittedBatch) -> bool:
        if self.world.topic_of(run) == OTHER:
            return self.ended_at is not None and run.last_glsn >= self.ended_at
        return any(gap.asked <= run.last_glsn and run.first_glsn < gap.first_left for gap in self.gaps)

    def read(self, stream: LogStreamId, position: GLSN, replica: int, chunk: int) -> ReadAnswer | None:
        answer = self.world.read(self.world.streams[stream - 1], replica, position, chunk)
        if answer is None:
            self.subscription.take_trimmed(stream, GLSN(self.world.trimmed))
        return answer

    def ask(self, which: int, replica: int, chunk: int) -> None:
        wants = self.subscription.wants()
        if wants:
            info, position = wants[which % len(wants)]
            answer = self.read(info.stream, position, replica, chunk)
            if answer is not None:
                self.under_way.append(answer)

    def finish(self) -> None:
        """The faults are over: the newest catalog, and replicas that have applied everything. No more is read than
        there is room for."""
        before: object = None
        while (now := self._progress()) != before:
            before = now
            if not self.take_catalog(self.world.catalogs[-1]):
                return
            for info, position in self.subscription.wants():
                if self.subscription.has_room(info.stream):
                    self.world.apply(self.world.streams[info.stream - 1], 0, 1_000)
                    answer = self.read(info.stream, position, 0, 3)
                    if answer is not None:
                        self.subscription.take_answer(answer)
                self.take()
            self.take()

    def _progress(self) -> tuple[int, int, int, list[tuple[StreamInfo, GLSN]]]:
        wants = self.subscription.wants()
        return self.subscription.next_glsn, len(self.delivered), len(self.gaps), wants


def step(world: World, reader: Reader, what: int, number: int, other: int) -> bool:
    """Whether the subscription goes on."""
    streams, subscription = world.streams, reader.subscription
    match what:
        case 0 | 1 | 2:
            world.cut(number * 7 + other)
        case 3:
            topic = (T, T, OTHER)[number % 3]
            if len(streams) < 4 and not (world.is_deleted and topic == OTHER):
                world.create(topic)
        case 4:
            world.seal(streams[number % len(streams)])
        case 5 | 6 | 7:
            world.apply(streams[number % len(streams)], other % 2, other // 2)
        case 8:
            streams[number % len(streams)].replicas[other % 2] = (0, 0)
        case 9 | 10 | 11 | 12:
            reader.ask(number, other % 2, 1 + other % 3)
        case 13 | 14 | 15:
            if reader.under_way:
                subscription.take_answer(reader.under_way.pop(number % len(reader.under_way)))
        case 16:
            if reader.under_way:
                subscription.take_answer(reader.under_way[number % len(reader.under_way)])
        case 17 | 18:
            return reader.take_catalog(world.catalogs[-1 - number % len(world.catalogs)])
        case 19:
            if other == 0:
                world.trim(reader.subscription.next_glsn + number - 2)
            elif other == 1 and number == 0 and not world.is_deleted:
                world.delete()
    return True


steps = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 15), st.integers(0, 9)), min_size=20, max_size=160)
beginnings = st.lists(st.integers(0, 63), max_size=4)


# A run that begins before the first position wanted arrives before its cut is known.
BEFORE_THE_START = [(0, 0, 0)] * 2 + [(3, 0, 0)] + [(5, 0, 0)] * 5 + [(0, 0, 0)] * 2 + [(5, 0, 0)] * 2 + [(17, 6, 0)]
BEFORE_THE_START += [(0, 0, 0)] * 5 + [(9, 0, 0), (13, 0, 0)]


@example(BEFORE_THE_START, [0, 0, 3, 2], 9, {T}, None)
@given(
    steps,
    beginnings,
    st.integers(1, 20),
    st.sampled_from([{T}, {OTHER}, {T, OTHER}]),
    st.one_of(st.none(), st.integers(0, 40)),
)
def test_what_is_delivered_is_the_log(
    made: list[tuple[int, int, int]], before: list[int], start: int, topics: set[TopicId], length: int | None
) -> None:
    world = World()
    for sizes in before:
        world.cut(sizes)
    start = min(start, world.high_watermark + 1)
    reader = Reader(world, topics, start, None if length is None else start + length)
    for what, number, other in made:
        if not step(world, reader, what, number, other):
            return
        reader.take()
    reader.finish()
    if reader.topics == {OTHER} and world.is_deleted:
        return
    end = world.high_watermark if reader.stop is None else min(reader.stop, world.high_watermark)
    assert reader.subscription.next_glsn == end + 1
    assert reader.subscription.is_finished == (reader.stop == end)
