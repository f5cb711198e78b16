"""Serves readers of large ranges: sizes of ranges, headers of batches, and records, many batches at a time.

A reader on the same machine gets places in files instead of records (ADR 0030).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from operator import attrgetter
from typing import Literal, TypeVar

from msgspec import Struct

from cutwater.errors import CutwaterError, Damaged, InvalidArgument
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import EntryFrame, FrameHeader
from cutwater.protocol import scan_api as api
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.picking import (
    READ_BYTES_MAX,
    FormOf,
    Needs,
    Room,
    inflated,
    memory_needed,
    verdict_on,
    within,
)
from cutwater.storagenode.serving.reading import (
    count_read,
    find,
    indexed,
    last_llsn_at,
    require_not_trimmed,
    until_indexed,
)
from cutwater.storagenode.validation.topic_forms import KnownTopics
from cutwater.types import GLSN, LLSN, BatchKind, CommitContext, CutTime, Entry, LogStreamId
from cutwater.wire.addresses import is_loopback
from cutwater.wire.calls.handlers import ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.connection import Connection

COMMITS_AT_ONCE = 1_024

A = TypeVar("A")

_first_glsn = attrgetter("first_glsn")


class Scanning:
    """Serves readers of large ranges. ``tells_files``: whether a reader on this machine may open files by itself."""

    def __init__(
        self, node: StorageNode, memory: MemoryBudget, topics: KnownTopics, tells_files: Callable[[], bool]
    ) -> None:
        self._node, self._memory, self._topics, self._tells_files = node, memory, topics, tells_files

    async def measure(self, call: Call[api.MeasureArguments]) -> api.MeasureAnswer:
        asked = call.argument
        if len(asked.positions) > api.POSITIONS_MAX or list(asked.positions) != sorted(asked.positions):
            raise InvalidArgument(f"at most {api.POSITIONS_MAX} positions are measured at once, in rising order")
        driver = self._node.driver(asked.stream)
        return await driver.in_reader(lambda: _measure(driver, asked.positions))

    async def heads(self, call: Call[api.HeadsArguments]) -> ReplyWithBody[api.HeadsAnswer]:
        return await self._told(call.argument, _heads)

    async def groups(self, call: Call[api.HeadsArguments]) -> ReplyWithBody[api.GroupsAnswer]:
        return await self._told(call.argument, _groups)

    async def _told(
        self, asked: api.HeadsArguments, read: Callable[[ReplicaDriver, api.HeadsArguments], ReplyWithBody[A]]
    ) -> ReplyWithBody[A]:
        if not 0 < asked.heads_max <= api.HEADS_MAX:
            raise InvalidArgument(f"1 to {api.HEADS_MAX} heads are told at once, not {asked.heads_max}")
        driver = self._node.driver(asked.stream)
        return await driver.in_reader(lambda: read(driver, asked))

    async def scan(self, call: Call[api.ScanArguments]) -> ReplyWithBody[api.ScanAnswer]:
        asked = call.argument
        driver = self._node.driver(asked.stream)
        driver.require_readable()
        await until_indexed(driver)
        is_near = self._tells_files() and _is_near(call.connection)
        form_of = await self._form_of(asked) if asked.tells_checked else None
        found = await driver.in_reader(lambda: _scan(driver, asked, is_near, form_of))
        reply = await within(self._memory, driver.in_reader, found)
        count_read(self._node, reply.body)
        return reply

    async def _form_of(self, asked: api.ScanArguments) -> FormOf:
        """Return the schemas for unchecked batches. If they are not known now, the reader checks the batches."""
        topic = self._topics.known(asked.stream)
        revision = self._node.revision(asked.stream)
        if topic is None:
            with suppress(CutwaterError):
                topic = await self._topics.of_stream(asked.stream)
        # A schema enters the catalog before any batch of it is committed.
        otherwise: Literal[False] | None = False if self._topics.revision >= revision else None
        if otherwise is None:
            self._topics.refresh(revision)
        return (lambda number: None) if topic is None else (lambda number: topic.form(number) or otherwise)


def _is_near(connection: Connection) -> bool:
    peer = connection.peer
    return peer is not None and is_loopback(peer.address.rpartition(":")[0])


def _measure(driver: ReplicaDriver, positions: Sequence[GLSN]) -> api.MeasureAnswer:
    # Read in this order, because commits continue: what was complete before is still complete after the search.
    through, contexts = indexed(driver).complete_through, driver.storage.contexts
    llsns = [last_llsn_at(contexts, glsn) for glsn in positions]
    sizes = driver.storage.bytes_through(llsns)
    return api.MeasureAnswer(tuple(llsns), tuple(sizes), through)


class _Span(Struct, frozen=True):
    """The requested entries: their LLSNs, and the indexes of their commits."""

    start: LLSN
    stop: LLSN
    contexts: Sequence[CommitContext]
    places: range
    complete_through: GLSN


def _span(driver: ReplicaDriver, asked: api.HeadsArguments) -> _Span:
    storage = driver.storage
    # Read in this order, because commits continue: what was complete before is still complete after the search.
    found, contexts = indexed(driver), storage.contexts
    end = found.end
    require_not_trimmed(driver, asked.from_glsn)
    first = storage.from_glsn(asked.from_glsn)
    start = LLSN(end + 1) if first is None else first
    # A replica that catches up has commits beyond the position up to which it knows to be complete. Those are left for
    # the next question, which begins after that position.
    to_glsn = min(asked.to_glsn, found.complete_through)
    at = bisect_right(contexts, to_glsn, key=_first_glsn) - 1
    stop = min(last_llsn_at(contexts, to_glsn), end) if at >= 0 else LLSN(0)
    return _Span(start, stop, contexts, range(_commit_of(contexts, start), at + 1), found.complete_through)


def _entries(driver: ReplicaDriver, span: _Span, asked: api.HeadsArguments) -> Iterator[tuple[Entry, CommitContext]]:
    """Yield at most ``heads_max`` entries without their bodies, each with its commit."""
    commits = _commits(span.contexts, span.places.start, span.places.stop)
    commit = next(commits, None)
    found = driver.storage.heads(span.start, span.stop) if span.start <= span.stop else iter(())
    for entry in islice(found, asked.heads_max):
        while commit is not None and commit.last_llsn < entry.first_llsn:
            commit = next(commits, None)
        if commit is None:
            raise Damaged(f"log stream {asked.stream}: LLSN {entry.first_llsn} has no commit")
        yield entry, commit


def _heads(driver: ReplicaDriver, asked: api.HeadsArguments) -> ReplyWithBody[api.HeadsAnswer]:
    span = _span(driver, asked)
    columns = [array("q") for _ in api.COLUMNS]
    idle = array("q")
    for entry, commit in _entries(driver, span, asked):
        batch = entry.batch
        values = (
            entry.first_llsn,
            commit.glsn_of(entry.first_llsn),
            batch.count,
            commit.time,
            batch.time_max if batch.kind is BatchKind.DATA else api.NOTHING,
            api.NOTHING if batch.declared is None else batch.declared,
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        idle.append(batch.idle)
    begin, through = LLSN(columns[0][0]) if columns[0] else span.start, span.complete_through
    if len(columns[0]) == asked.heads_max:
        through = min(through, GLSN(columns[1][-1] + columns[2][-1] - 1))
    before = _before(driver, span.contexts, begin)
    told = [*columns, idle] if asked.with_idle else columns
    return ReplyWithBody(api.HeadsAnswer(before, through, asked.with_idle), api.pack(told))


def _groups(driver: ReplicaDriver, asked: api.HeadsArguments) -> ReplyWithBody[api.GroupsAnswer]:
    span = _span(driver, asked)
    columns = [array("q") for _ in api.GROUP_COLUMNS]
    seen, last = 0, GLSN(0)
    for entry, commit in _entries(driver, span, asked):
        seen, last = seen + 1, commit.glsn_of(entry.last_llsn)
        group = entry.batch.group
        if group is None and not entry.batch.more:
            continue
        tag = (group.run, group.batch, group.count, group.decided) if group is not None else (0, 0, 0, 0)
        for column, value in zip(columns, (commit.glsn_of(entry.first_llsn), entry.batch.count, *tag), strict=True):
            column.append(value)
    through = min(span.complete_through, last) if seen == asked.heads_max else span.complete_through
    return ReplyWithBody(api.GroupsAnswer(through), api.pack(columns))


Answer = ReplyWithBody[api.ScanAnswer]


def _scan(
    driver: ReplicaDriver, asked: api.ScanArguments, is_near: bool, form_of: FormOf | None
) -> Answer | Needs[Answer]:
    """Scan. ``is_near``: the reader is on this machine. ``form_of``: the reader wants unchecked batches checked."""
    found = find(driver, asked.from_glsn, asked.to_glsn)
    if found.first is None:
        return ReplyWithBody(api.ScanAnswer(0, found.complete_through, crc32c(b"")))
    bytes_max = min(asked.bytes_max, READ_BYTES_MAX)
    if asked.opens_files and is_near:
        bytes_told = max(bytes_max, min(asked.file_bytes_max, api.FILE_BYTES_MAX))
        located = driver.storage.locate(found.first, found.end, bytes_told, api.RUNS_MAX)
        # Batches that must be checked take the slower path below.
        if located is not None and (form_of is None or _all_checked(located.headers)):
            headers = located.headers
            verdicts = repeat(0 if form_of is None else api.CHECKED)
            count, packed = _packed(asked.stream, headers, located.commits, _as_stored(headers), verdicts)
            through = found.complete(located.commits, headers[-1].last_llsn)
            place = (located.path, located.start, located.end - located.start)
            return ReplyWithBody(api.ScanAnswer(count, through, crc32c(packed), *place), packed)
    part = driver.storage.read(found.first, found.end, bytes_max)
    needed = memory_needed(part.frames, asked.projection, form_of)

    def pick() -> Answer:
        headers = [frame.header for frame in part.frames]
        places: Iterable[tuple[int, int, int]] = _as_stored(headers)
        pieces: list[Buffer] = [part.data]
        verdicts: Iterable[int] = repeat(0)
        if asked.projection:
            from cutwater.storagenode.serving.scan_blocks import pick_blocks  # noqa: PLC0415

            places, pieces, verdicts = pick_blocks(part.frames, asked.projection, form_of)
        elif form_of is not None:
            places, verdicts = _looked_into(part.frames, places, form_of)
        count, packed = _packed(asked.stream, headers, part.commits, places, verdicts)
        through = found.complete(part.commits, headers[count - 1].last_llsn)
        return ReplyWithBody(api.ScanAnswer(count, through, crc32c(packed)), [packed, *pieces])

    return Needs(needed, pick) if needed else pick()


def _all_checked(headers: Iterable[FrameHeader]) -> bool:
    return all(header.checked or header.kind is not BatchKind.DATA for header in headers)


def _looked_into(
    frames: Sequence[EntryFrame], places: Iterable[tuple[int, int, int]], form_of: FormOf
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Check the frames. Returns the places of bodies that are not known to be malformed, and the verdict on each."""
    found: list[tuple[int, int, int]] = []
    verdicts: list[int] = []
    room = Room()
    for frame, place in zip(frames, places, strict=True):
        verdict = verdict_on(frame, form_of) if frame.header.kind is BatchKind.DATA else api.CHECKED
        if not room.take(0, 0 if frame.header.checked else inflated(frame.body)):
            break
        verdicts.append(verdict)
        found.append((0, 0, 0) if verdict == api.MALFORMED else place)
    return found, verdicts


def _packed(
    stream: LogStreamId,
    headers: Sequence[FrameHeader],
    commits: Sequence[CommitContext],
    places: Iterable[tuple[int, int, int]],
    verdicts: Iterable[int],
) -> tuple[int, bytes]:
    """Return the number of entries with places, and their encoded description. ``verdicts`` are added to schemas."""
    left = iter(commits)
    # Of the current commit: its last LLSN, the difference between GLSN and LLSN, and its time.
    end, ahead, time = 0, 0, CutTime(0)
    runs = []
    for header, place, verdict in zip(headers, places, verdicts, strict=False):
        first, count = header.first_llsn, header.count
        if first > end:
            commit = next((commit for commit in left if commit.last_llsn >= first), None)
            if commit is not None and commit.first_llsn <= first:
                end, ahead, time = commit.last_llsn, commit.first_glsn - commit.first_llsn, commit.time
        if first + count - 1 > end:
            raise Damaged(f"log stream {stream}: LLSN {first + count - 1} has no commit")
        schema = header.schema + verdict if header.kind is BatchKind.DATA else api.NOTHING
        runs.append((first, first + ahead, count, time, header.time_min, schema, *place))
    return len(runs), api.pack([array("q", column) for column in zip(*runs, strict=True)])


def _as_stored(headers: Iterable[FrameHeader]) -> Iterator[tuple[int, int, int]]:
    """Yield the offset and size of the body of each frame in the joined frames, and its checksum."""
    start = 0
    for header in headers:
        has_rows = header.kind is BatchKind.DATA
        yield (start + header.header_bytes, header.body_bytes, header.checksum) if has_rows else (0, 0, 0)
        start += header.frame_bytes


def _commits(contexts: Sequence[CommitContext], start: int, stop: int) -> Iterator[CommitContext]:
    """Yield commits, loading a few at a time: a range may have many, and a reader asks for part of them."""
    for at in range(start, stop, COMMITS_AT_ONCE):
        yield from contexts[at : min(at + COMMITS_AT_ONCE, stop)]


def _commit_of(contexts: Sequence[CommitContext], llsn: LLSN) -> int:
    """Return the index of the commit that covers this LLSN, or would cover it."""
    return max(0, bisect_right(contexts, llsn, key=attrgetter("first_llsn")) - 1)


def _before(driver: ReplicaDriver, contexts: Sequence[CommitContext], llsn: LLSN) -> api.EventTimeBefore:
    """Return the event time of all earlier records, including trimmed ones: the answer must not depend on how much of a
    trim this replica has heard of. The commit of the last trimmed record is kept."""
    i = bisect_right(contexts, LLSN(llsn - 1), key=attrgetter("first_llsn")) - 1
    running = driver.storage.running_before(llsn)
    committed = contexts[i].time if i >= 0 else None
    return api.EventTimeBefore(running.time_max, running.declared, committed, running.idle)
