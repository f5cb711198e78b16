"""Compares what runs have published with what was decided: every group is in its topic once and whole, and no group is
there that was not decided.

The last entry of a group carries its run, batch, size and decision. A walk through all log streams at once, by
position, meets the batches of each run one after the other, so it need only remember the last one. The metadata
repository remembers that one too, with its topics and positions: it must be in the log exactly as decided.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from cutwater.admin.verification import Finding
from cutwater.core.requests import Catalog, Description, PublishedGroup, RunDescription, StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, Trimmed
from cutwater.types import GLSN, BatchNumber, DecisionIndex, LogStreamId, RunId, TopicId

if TYPE_CHECKING:
    from cutwater.client.read.range_reader import Ranges


class AuditedEntry(Struct, frozen=True):
    """One entry of a group, or all of its entries so far joined into one. Only the last entry of a group names the run;
    before that, ``run`` is 0. ``rows`` counts the rows of the whole group."""

    stream: LogStreamId
    glsn: GLSN
    count: int
    run: RunId
    batch: BatchNumber
    rows: int
    decided: DecisionIndex

    @property
    def end(self) -> int:
        return self.glsn + self.count

    def __str__(self) -> str:
        return f"batch {self.batch} of run {self.run}"


class _Last(Struct):
    """The newest batch of a run in the walk so far, and where it is in each topic."""

    batch: BatchNumber
    decided: DecisionIndex
    topics: dict[TopicId, AuditedEntry]


class PublishAudit:
    """Checks published groups: ``take`` entries of all log streams in the order of their positions, then
    ``compare``."""

    def __init__(self, catalog: Catalog) -> None:
        self._streams = {info.stream: info for info in catalog.streams}
        self._topics = {info.topic: info for info in catalog.topics}
        self.trimmed_before: dict[TopicId, GLSN] = {info.topic: info.trimmed_before for info in catalog.topics}
        self._through = catalog.high_watermark
        self._begun: dict[LogStreamId, AuditedEntry] = {}
        """Groups whose last entry has not come yet."""
        self._runs: dict[RunId, _Last] = {}
        self.groups = 0
        """How many groups the walk has met."""
        self.findings: list[Finding] = []

    def take(self, entry: AuditedEntry) -> None:
        begun = self._begun.pop(entry.stream, None)
        if begun is not None and begun.end == entry.glsn:
            entry = structs.replace(entry, glsn=begun.glsn, count=begun.count + entry.count)
        elif begun is not None:
            self._find_endless(begun)
        if entry.run:
            self._take_group(entry)
        else:
            self._begun[entry.stream] = entry

    def trimmed(self, topic: TopicId, first_left: GLSN) -> None:
        """Note that a topic was trimmed meanwhile."""
        self.trimmed_before[topic] = max(self.trimmed_before[topic], first_left)

    def give_up(self, stream: LogStreamId) -> None:
        """Note that no more of this log stream can be read."""
        self._begun.pop(stream, None)

    def _take_group(self, group: AuditedEntry) -> None:
        self.groups += 1
        self._check_whole(group)
        topic = self._streams[group.stream].topic
        last = self._runs.get(group.run)
        if last is None or group.batch > last.batch:
            if last is not None and group.decided <= last.decided:
                self._find(group, f"{group} was decided no later than batch {last.batch}, which comes before it")
            self._runs[group.run] = _Last(group.batch, group.decided, {topic: group})
            return
        if group.batch < last.batch:
            self._find(group, f"{group} comes after batch {last.batch}, although it was decided before it")
        elif topic in last.topics:
            self._find(group, f"{group} is in the topic twice, also at GLSN {last.topics[topic].glsn}")
        elif group.decided != last.decided:
            self._find(group, f"{group} is from decision {group.decided}, in another topic from {last.decided}")
        else:
            last.topics[topic] = group

    def _check_whole(self, group: AuditedEntry) -> None:
        # The first records of a group may be trimmed.
        trimmed_before = self.trimmed_before[self._streams[group.stream].topic]
        missing = group.rows - group.count
        if missing and not (missing > 0 and group.glsn - missing < trimmed_before):
            self._find(group, f"{group} is not whole: {group.count} of {group.rows} records are there")

    def _find_endless(self, begun: AuditedEntry) -> None:
        self._find(begun, f"{begun.count} records begin a batch of a run, which does not end")

    def compare(self, description: Description, unseen: frozenset[TopicId] = frozenset()) -> None:
        """Compare with the decisions, as described after the last entry was taken. ``unseen`` topics could not be read
        completely."""
        for begun in self._begun.values():
            self._find_endless(begun)
        known = {run.run: run for run in description.runs}
        for number, last in self._runs.items():
            group = next(iter(last.topics.values()))
            if number > description.last_run:
                self._find(group, f"{group} was never decided: there has been no such run")
            elif number in known:
                self._compare_run(known[number], last, group)
        for run in description.runs:
            for expected in run.published:
                self._check_there(run, expected, unseen)

    def _compare_run(self, run: RunDescription, last: _Last, group: AuditedEntry) -> None:
        if last.batch > run.last_batch:
            self._find(group, f"{group} was never decided: the last batch of this run is {run.last_batch}")
        elif last.batch == run.last_batch:
            if last.decided != run.decided:
                self._find(group, f"{group} is from decision {last.decided}, but decided by {run.decided}")
            own = {expected.topic for expected in run.published}
            names = {waiting.topic for waiting in run.unpublished}
            for topic, found in last.topics.items():
                # For a run that is over and was dropped, the other decisions are no longer known.
                if topic not in own and self._topics[topic].name not in names and not run.fenced_by:
                    self._find(found, f"{found} was decided, but not for this topic")

    def _check_there(self, run: RunDescription, expected: PublishedGroup, unseen: frozenset[TopicId]) -> None:
        info = self._topics.get(expected.topic)
        is_gone = expected.glsn + expected.count <= self.trimmed_before.get(expected.topic, 0)
        if info is None or expected.topic in unseen or is_gone or expected.glsn > self._through:
            return
        last = self._runs.get(run.run)
        if last is not None and last.batch > run.last_batch:
            # The decision is no longer remembered, but this case is an error anyway.
            return
        found = last.topics.get(expected.topic) if last is not None and last.batch == run.last_batch else None
        what = f"batch {run.last_batch} of run {run.run}"
        if found is None:
            self._add(expected.stream, info, f"{what} was published at GLSN {expected.glsn}, and is not there")
        elif (found.stream, found.end, found.rows) != (
            expected.stream,
            expected.glsn + expected.count,
            expected.count,
        ):
            self._find(
                found,
                f"{what} was published at GLSN {expected.glsn} of log stream {expected.stream} with {expected.count} "
                "records, and is elsewhere",
            )

    def _find(self, group: AuditedEntry, what: str) -> None:
        info = self._topics[self._streams[group.stream].topic]
        self._add(group.stream, info, f"at GLSN {group.glsn}: {what}")

    def _add(self, stream: LogStreamId, topic: TopicInfo, what: str) -> None:
        self.findings.append(Finding(None, stream, f"topic {topic.name!r}", what))


async def verify_published(
    ranges: Ranges, describe: Callable[[], Awaitable[Description]], *, timeout: float
) -> tuple[int, tuple[Finding, ...]]:
    """Verify everything that is in the log now. ``timeout`` applies to one request. Returns how many groups were met,
    and the findings."""
    catalog = (await ranges.view(timeout)).catalog
    published = PublishAudit(catalog)
    unseen: dict[TopicId, list[Finding]] = {}
    heap: list[tuple[GLSN, LogStreamId, AuditedEntry]] = []
    walks: dict[LogStreamId, AsyncIterator[AuditedEntry]] = {}

    async def push_next(info: StreamInfo) -> None:
        try:
            entry = await anext(walks[info.stream], None)
        except CutwaterError as error:
            what = f"what runs have published could not be verified: {error.message}"
            unseen.setdefault(info.topic, []).append(Finding(None, info.stream, "", what, is_damage=False))
            published.give_up(info.stream)
        else:
            if entry is not None:
                heappush(heap, (entry.glsn, entry.stream, entry))

    streams = {info.stream: info for info in catalog.streams}
    for info in catalog.streams:
        last = min(info.last_glsn, catalog.high_watermark)
        walks[info.stream] = _entries(ranges, info, published, last, timeout)
        await push_next(info)
    while heap:
        _, stream, entry = heappop(heap)
        published.take(entry)
        await push_next(streams[stream])
    # The decisions are requested last, so that they include all groups that were met.
    published.compare(await describe(), frozenset(unseen))
    return published.groups, (*published.findings, *(finding for found in unseen.values() for finding in found))


async def _entries(
    ranges: Ranges, info: StreamInfo, published: PublishAudit, last: GLSN, timeout: float
) -> AsyncIterator[AuditedEntry]:
    """Yield the group entries of a log stream, which are read a page at a time."""
    first = GLSN(max(info.created_at + 1, published.trimmed_before[info.topic]))
    while first <= last:
        try:
            columns, through = await ranges.groups(info, first, last, timeout)
        except Trimmed as error:
            published.trimmed(info.topic, error.first_left)
            first = max(first, error.first_left)
            continue
        for glsn, count, run, batch, rows, decided in zip(*columns, strict=True):
            yield AuditedEntry(
                info.stream, GLSN(glsn), count, RunId(run), BatchNumber(batch), rows, DecisionIndex(decided)
            )
        first = GLSN(through + 1)
