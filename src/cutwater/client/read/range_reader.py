"""Reads ranges of the log in parallel: finds what lies where, and reads the records of one log stream.

A planner asks ``Ranges`` for the catalog, for sizes and for the headers of batches. A reader takes ``pieces`` of one
log stream from any replica that answers. A change of replica skips and repeats nothing: each request names the next
position, and each answer says up to where it is complete."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from msgspec.structs import replace

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.holder_file import with_secret
from cutwater.client.cluster.metadata_client import Repository, parse_servers
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import watched
from cutwater.client.read.point_reads import NOT_ALLOWED, Behind, PointReads
from cutwater.client.read.watermarks import marks_between
from cutwater.client.subscribe.stream_readers import Feed, Selection, reading_order
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.requests import Catalog, CatalogRequest, StreamInfo
from cutwater.errors import (
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    InvalidArgument,
    Malformed,
    ProtocolViolation,
    ResourceExhausted,
    Trimmed,
)
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import FRAME_BYTES_MAX
from cutwater.protocol.methods import Body, Received
from cutwater.protocol.scan_api import (
    CHECKED,
    COLUMNS,
    GROUP_COLUMNS,
    GROUPS,
    HEADS,
    HEADS_MAX,
    MALFORMED,
    MEASURE,
    NOTHING,
    RUN_COLUMNS,
    SCAN,
    EventTimeBefore,
    GroupsAnswer,
    HeadsAnswer,
    HeadsArguments,
    MeasureAnswer,
    MeasureArguments,
    ScanAnswer,
    ScanArguments,
    unpack,
)
from cutwater.protocol.storage_api import Columns
from cutwater.runtime import system
from cutwater.runtime.deadlines import Deadline
from cutwater.runtime.local_files import MachineFiles
from cutwater.types import GLSN, LLSN, ClusterId, CutTime, LogStreamId, StorageNodeId
from cutwater.wire.addresses import is_loopback, parse_address
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.options import MIB

_log = logging.getLogger(__name__)

ASK_MS_MAX = 10_000
SCAN_BYTES = 4 * MIB
"""Bytes that are read at a time: enough that a request costs little, and few enough to be held twice."""
FILE_BYTES = 32 * MIB
"""How many bytes of a file one answer of a storage node may describe."""
RETRY_SECONDS_MIN = 0.005
RETRY_SECONDS_MAX = 0.5
COMPLAIN_MS_MAX = 2_000

FIRST_LLSN, FIRST_GLSN, COUNT, TIME, TIME_MIN, SCHEMA, OFFSET, _BYTES, CHECKSUM = range(len(RUN_COLUMNS))
"""Indexes of the columns of runs."""
BatchArrays: TypeAlias = "tuple[array[int], ...]"


class Heads(Struct, frozen=True):
    """The headers of batches of one log stream, column by column as in ``protocol.scan_api``, and the event time before
    them. ``idle`` has 1 for each batch that declares its log stream idle, otherwise 0."""

    before: EventTimeBefore
    columns: tuple[array[int], ...]
    idle: array[int]


class RowBlock(NamedTuple):
    """A record batch with the rows of a run, and of the following runs that have no block of their own."""

    schema: int
    first_run: int
    body: memoryview
    checked: bool = False
    """Whether a storage node has found it to be well-formed."""


class Scanned(Struct, frozen=True):
    """Runs of one log stream, column by column as in ``protocol.scan_api``, and the blocks with their rows, verified.
    ``is_stored``: blocks have all columns, even those that were not asked for."""

    runs: BatchArrays
    blocks: tuple[RowBlock, ...]
    is_stored: bool = False
    malformed: tuple[tuple[GLSN, GLSN], ...] = ()
    """Positions whose rows are left out, because the stored batch is malformed. They count as fences do."""

    def __len__(self) -> int:
        return len(self.runs[0])

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.runs[FIRST_LLSN][-1] + self.runs[COUNT][-1] - 1)

    @property
    def last_glsn(self) -> GLSN:
        return GLSN(self.runs[FIRST_GLSN][-1] + self.runs[COUNT][-1] - 1)


def scanned(asked: ScanArguments, answer: ScanAnswer, body: Body) -> Scanned:
    """Return a storage node's answer, after checking that it is plausible. Blocks are views of the answer: nothing is
    copied."""
    runs, data = _told(asked, answer, body)
    malformed, checked = _verdicts(runs)
    return Scanned(runs, _blocks(asked.stream, runs, data, checked), malformed=malformed)


def _verdicts(runs: BatchArrays) -> tuple[tuple[tuple[GLSN, GLSN], ...], bytearray]:
    """Take the verdicts of the storage node out of the runs: malformed positions, and which runs are checked."""
    schemas = runs[SCHEMA]
    checked = bytearray(len(schemas))
    malformed: list[tuple[GLSN, GLSN]] = []
    for number, schema in enumerate(schemas):
        if schema < CHECKED:
            continue
        if schema & MALFORMED:
            glsn = runs[FIRST_GLSN][number]
            malformed.append((GLSN(glsn), GLSN(glsn + runs[COUNT][number] - 1)))
            schemas[number] = NOTHING
        else:
            checked[number] = 1
            schemas[number] = schema - CHECKED
    return tuple(malformed), checked


def _told(asked: ScanArguments, answer: ScanAnswer, body: Body) -> tuple[BatchArrays, memoryview]:
    """Return the runs of an answer, and the bytes after them."""
    size = answer.runs * len(RUN_COLUMNS) * 8
    data = memoryview(body)
    if size > len(data):
        raise ProtocolViolation(f"log stream {asked.stream}: {answer.runs} runs do not fit into {len(data)} bytes")
    if crc32c(data[:size]) != answer.checksum:
        raise Damaged(f"what was told of the batches from GLSN {asked.from_glsn} on arrived damaged: read it again")
    runs = unpack(data[:size], len(RUN_COLUMNS))
    next_llsn, free = (runs[FIRST_LLSN][0], 0) if answer.runs else (0, 0)
    for llsn, glsn, count in zip(*runs[:TIME], strict=True):
        if llsn != next_llsn or count < 1 or not free <= glsn <= asked.to_glsn or glsn + count <= asked.from_glsn:
            raise ProtocolViolation(
                f"log stream {asked.stream}: {count} records from GLSN {glsn} and LLSN {llsn} on cannot be here"
            )
        next_llsn, free = llsn + count, glsn + count
    return runs, data[size:]


def _blocks(
    stream: LogStreamId, runs: BatchArrays, data: memoryview, checked: bytearray, start: int = 0
) -> tuple[RowBlock, ...]:
    """Return the verified blocks of runs. ``data`` begins at offset ``start``."""
    blocks: list[RowBlock] = []
    places = zip(runs[FIRST_GLSN], *runs[SCHEMA:], strict=True)
    for number, (glsn, schema, offset, length, crc) in enumerate(places):
        if schema == NOTHING:
            continue
        if length:
            begin = offset - start
            block = data[begin : begin + length] if begin >= 0 else data[:0]
            if len(block) != length or crc32c(block) != crc:
                raise Damaged(f"the batch at GLSN {glsn} arrived damaged: read it again")
            blocks.append(RowBlock(schema, number, block, bool(checked[number])))
        elif not blocks or blocks[-1].schema != schema:
            raise ProtocolViolation(f"log stream {stream}: the batch at GLSN {glsn} came without its rows")
    return tuple(blocks)


class BatchesInFile(Struct, frozen=True):
    """Runs whose rows are in a file; the storage node has only said where. The described part of the file begins at
    ``start``; the rows lie from ``begin`` to ``end`` in it. The runs are complete from ``from_glsn`` through
    ``through``."""

    stream: LogStreamId
    runs: BatchArrays
    path: str
    start: int
    begin: int
    end: int
    from_glsn: GLSN
    through: GLSN
    checked: bytearray

    def read(self) -> Scanned:
        """Read the rows. Raises ``OSError`` if the file does not exist, or this process may not read it."""
        if self.begin == self.end:
            return Scanned(self.runs, (), is_stored=True)
        # Arrow's allocator reuses memory; fresh memory would cost as much as reading does.
        data = memoryview(pa.allocate_buffer(self.end - self.begin))
        size = system.made(MachineFiles).read_into(self.path, data, self.start + self.begin)
        return Scanned(self.runs, _blocks(self.stream, self.runs, data[:size], self.checked, self.begin), True)


def in_file(asked: ScanArguments, answer: ScanAnswer, body: Body) -> list[BatchesInFile]:
    """Split what a storage node has described of a file into parts to read one at a time."""
    stream = asked.stream
    if not 0 < answer.bytes <= FRAME_BYTES_MAX or answer.start < 0:
        raise ProtocolViolation(f"log stream {stream}: {answer.bytes} bytes at {answer.start} are no entries")
    runs, _ = _told(asked, answer, body)
    malformed, checked = _verdicts(runs)
    if malformed:
        raise ProtocolViolation(f"log stream {stream}: rows at GLSN {malformed[0][0]} are told of that do not come")
    cuts: list[tuple[int, int, int]] = []
    first = begin = end = 0
    for number, (offset, length) in enumerate(zip(*runs[OFFSET:CHECKSUM], strict=True)):
        if not length:
            continue
        if not end <= offset <= offset + length <= answer.bytes:
            raise ProtocolViolation(f"log stream {stream}: {length} bytes at {offset} are not among {answer.bytes}")
        if end == begin:
            begin = offset
        elif offset + length - begin > SCAN_BYTES:
            cuts.append((first, begin, end))
            first, begin = number, offset
        end = offset + length
    cuts.append((first, begin, end))
    found = []
    from_glsn = asked.from_glsn
    for i, (first, begin, end) in enumerate(cuts):
        stop, through = answer.runs, answer.complete_through
        if i + 1 < len(cuts):
            stop = cuts[i + 1][0]
            through = GLSN(runs[FIRST_GLSN][stop] - 1)
        own = tuple(column[first:stop] for column in runs)
        place = (answer.path, answer.start, begin, end)
        found.append(BatchesInFile(stream, own, *place, from_glsn, through, checked[first:stop]))
        from_glsn = GLSN(through + 1)
    return found


class Ranges:
    def __init__(self, repository: Repository, catalogs: Catalogs, nodes: Nodes) -> None:
        """Use ``connect`` instead; ``repository`` must have answered before."""
        self._repository, self._catalogs, self._nodes = repository, catalogs, nodes
        self._reading = PointReads(catalogs, nodes, ASK_MS_MAX)

    @classmethod
    async def connect(cls, servers: str, access: Access = ANYONE, *, timeout: float) -> Ranges:
        access = with_secret(servers, access)
        repository = Repository(Endpoint(ClusterId(ANY_CLUSTER), "client"), parse_servers(servers), access)
        try:
            catalog = await repository.ask(CatalogRequest(), Catalog, timeout_ms=Deadline(timeout).left_ms())
        except BaseException:
            repository.close()
            raise
        catalogs = Catalogs(repository)
        catalogs.take(catalog)
        complain = partial(repository.complain, timeout_ms=COMPLAIN_MS_MAX)
        nodes = Nodes(Endpoint(repository.cluster, "client"), access, complain, catalogs.nodes_at)
        return cls(repository, catalogs, nodes)

    async def close(self) -> None:
        await self._catalogs.close()
        await self._nodes.close()
        self._repository.close()

    # Planning.

    async def view(self, timeout: float) -> CatalogView:
        """Return the catalog as of now. A metadata repository that is gone may come back before the time is up."""
        deadline = Deadline(timeout)
        while True:
            try:
                return await self._catalogs.fresh(deadline)
            except CutwaterError as error:
                if not error.retriable or isinstance(error, DeadlineExceeded):
                    raise

    async def find(self, time: CutTime, streams: Sequence[StreamInfo], view: CatalogView, timeout: float) -> GLSN:
        """Return the first position of these log streams that was committed at or after a time."""
        return await self._reading.find(time, streams, view, Deadline(timeout))

    async def marks(self, after: GLSN, through: GLSN, timeout: float) -> list[TimeMark]:
        return await marks_between(self._repository, after, through, Deadline(timeout))

    async def measure(self, info: StreamInfo, positions: Sequence[GLSN], timeout: float) -> MeasureAnswer:
        """Return how much of a log stream lies up to each of these positions, from a replica that has all of it."""

        def accept(received: Received[MeasureAnswer]) -> MeasureAnswer:
            if received.value.complete_through < min(positions[-1], info.last_glsn):
                raise Behind(info.stream, positions[-1])
            return received.value

        arguments = MeasureArguments(info.stream, tuple(positions))
        return await self._reading.ask(info, MEASURE, arguments, accept, Deadline(timeout))

    async def heads(self, info: StreamInfo, from_glsn: GLSN, to_glsn: GLSN, timeout: float) -> Heads:
        """Return all headers of a range. Raises ``Trimmed`` if the range begins before the first record left."""
        deadline = Deadline(timeout)
        before: EventTimeBefore | None = None
        columns = tuple(array("q") for _ in COLUMNS)
        idle = array("q")
        # A sealed log stream gets no more cuts, but the catalog knows where it ends.
        to_glsn = min(to_glsn, info.last_glsn)

        def accept(received: Received[HeadsAnswer]) -> tuple[HeadsAnswer, BatchArrays]:
            if received.value.complete_through < min(from_glsn, to_glsn):
                raise Behind(info.stream, to_glsn)
            return received.value, unpack(received.body, len(COLUMNS) + received.value.with_idle)

        while before is None or from_glsn <= to_glsn:
            arguments = HeadsArguments(info.stream, from_glsn, to_glsn, HEADS_MAX, with_idle=True)
            answer, found = await self._reading.ask(info, HEADS, arguments, accept, deadline)
            before = before or answer.before
            for column, more in zip(columns, found[: len(COLUMNS)], strict=True):
                column.extend(more)
            # A storage node of a version before idleness could be declared does not report it, and has none.
            idle.extend(found[-1] if answer.with_idle else array("q", bytes(found[0].itemsize * len(found[0]))))
            from_glsn = GLSN(answer.complete_through + 1)
        return Heads(before, columns, idle)

    async def groups(
        self, info: StreamInfo, from_glsn: GLSN, to_glsn: GLSN, timeout: float
    ) -> tuple[BatchArrays, GLSN]:
        """Return what runs have published in a range, column by column as in ``protocol.scan_api``, and the position up
        to which that is complete: at least ``from_glsn``. Raises ``Trimmed`` if the range begins before the first
        record left."""

        def accept(received: Received[GroupsAnswer]) -> tuple[BatchArrays, GLSN]:
            through = received.value.complete_through
            if through < from_glsn:
                raise Behind(info.stream, to_glsn)
            return unpack(received.body, len(GROUP_COLUMNS)), through

        arguments = HeadsArguments(info.stream, from_glsn, to_glsn, HEADS_MAX)
        return await self._reading.ask(info, GROUPS, arguments, accept, Deadline(timeout))

    def feed(self, selection: Selection, start: GLSN, view: CatalogView) -> Feed:
        """Return a feed for callers that wait for new entries, declarations included. Its runs have only event
        times."""
        return Feed(self._catalogs, self._nodes, selection, ["timestamp"], view, start, fences=True)

    # Reading.

    async def pieces(
        self,
        stream: LogStreamId,
        first: GLSN,
        last: GLSN,
        projection: Mapping[int, Columns],
        *,
        patience: float,
        skips_malformed: bool = False,
    ) -> AsyncIterator[Scanned]:
        """Yield the runs of one log stream that have positions from ``first`` to ``last``, some at a time. They are
        complete: every replica that answers has applied all that it is asked for. ``last`` is a position that the log
        has reached. Raises ``Trimmed`` if the next of them is gone, ``DeadlineExceeded`` after ``patience`` seconds
        without progress, and ``Malformed`` if a stored batch is malformed, unless ``skips_malformed`` is set.
        """
        replicas = _Replicas(self._catalogs, self._nodes, stream)
        before: int | None = None
        while first <= last:
            asked = ScanArguments(stream, first, last, SCAN_BYTES, dict(projection))
            found, through = await replicas.ask(asked, Deadline(patience))
            if len(found):
                llsn = found.runs[FIRST_LLSN][0]
                if before is not None and llsn != before + 1:
                    raise ProtocolViolation(f"log stream {stream}: after LLSN {before} a replica gave {llsn}")
                before = found.last_llsn
                if found.malformed and not skips_malformed:
                    view = self._catalogs.view
                    topic = view.names.get(view.streams[stream].topic, "") if stream in view.streams else ""
                    why = "its content is not sound (`cutwater verify` says what is wrong)"
                    raise Malformed(*found.malformed[0], topic, why)
                yield found
            first = GLSN(through + 1)


class _Replicas:
    """Reads from one replica of a log stream as long as it answers, then from another."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes, stream: LogStreamId) -> None:
        self._catalogs, self._nodes, self._stream = catalogs, nodes, stream
        self._turn = 0
        self._opens_files = True
        """Whether files of storage nodes on this machine are opened directly, until that fails once."""
        self._stored: deque[BatchesInFile] = deque()
        """The next rows in a file, if a storage node has described more than was read."""

    async def ask(self, asked: ScanArguments, deadline: Deadline) -> tuple[Scanned, GLSN]:
        """Return runs from a position on, and the position up to which they are complete, at least the asked one."""
        wait = RETRY_SECONDS_MIN
        trouble = "it has no replica"
        tried = 0
        while True:
            if members := self._members():
                node = members[self._turn % len(members)]
                try:
                    return await self._scan(node, asked, deadline)
                except (Trimmed, InvalidArgument, ProtocolViolation, *NOT_ALLOWED):
                    raise
                except CutwaterError as error:
                    trouble = error.message
                    if isinstance(error, ResourceExhausted):
                        # The node is busy, and nothing is wrong with it.
                        await deadline.pause(min(error.retry_ms / 1_000, max(deadline.left, 0.0)))
                    elif not isinstance(error, Behind):
                        self._nodes.unreachable(self._stream, node)
                self._turn += 1
            tried += 1
            if deadline.left <= wait:
                raise DeadlineExceeded(
                    f"log stream {self._stream} could not be read at GLSN {asked.from_glsn} (up to {asked.to_glsn} is "
                    f"wanted), after {deadline.seconds:g} s: {trouble}"
                )
            if tried % max(1, len(self._members())) == 0:
                # All replicas have been asked. Other nodes may hold the log stream by now.
                await deadline.pause(wait)
                wait = min(wait * 2, RETRY_SECONDS_MAX)
                try:
                    await self._catalogs.fresh(deadline)
                except NOT_ALLOWED:
                    raise
                except CutwaterError as error:
                    trouble = error.message

    def _members(self) -> tuple[StorageNodeId, ...]:
        info = self._catalogs.view.streams.get(self._stream)
        return () if info is None else reading_order(info)

    async def _scan(self, node: StorageNodeId, asked: ScanArguments, deadline: Deadline) -> tuple[Scanned, GLSN]:
        if not self._stored or self._stored[0].from_glsn != asked.from_glsn:
            self._stored.clear()
            address = self._catalogs.view.address(node)
            opens_files = self._opens_files and is_loopback(parse_address(address)[0])
            arguments = replace(asked, opens_files=opens_files, file_bytes_max=FILE_BYTES, tells_checked=True)
            async with watched(self._catalogs, self._nodes, self._stream, node):
                connection = await self._nodes.connection(address, deadline)
                received = await connection.call(SCAN, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))
            answer = received.value
            if answer.complete_through < asked.from_glsn:
                raise Behind(self._stream, asked.from_glsn)
            if not answer.path:
                return scanned(asked, answer, received.body), answer.complete_through
            self._stored.extend(in_file(asked, answer, received.body))
        stored = self._stored.popleft()
        try:
            async with asyncio.timeout(deadline.left):
                return await asyncio.to_thread(stored.read), stored.through
        except TimeoutError:
            self._stored.clear()
            raise DeadlineExceeded(
                f"the files of log stream {self._stream} were not read within {deadline.seconds:g} s: see to the disk"
            ) from None
        except (OSError, Damaged) as error:
            # The storage node can read its own files, or knows how to handle their damage.
            _log.info("log stream %s is read through its storage node: %s", self._stream, error)
            self._opens_files = False
            self._stored.clear()
            return await self._scan(node, asked, deadline)
