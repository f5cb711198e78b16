"""Ranges of the log for those who read them in parallel: what lies where, and the records of one log stream.

Whoever plans asks ``Ranges`` for the catalog, for sizes and for the headers of batches; whoever reads takes ``pieces``
of one log stream, from whichever replica answers. Nothing is skipped or repeated over a change of replica: each
question names the position that comes next, and what it gives is complete up to where it says.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct

from cutwater.client.access import ANYONE, Access
from cutwater.client.catalogs import Catalogs, View
from cutwater.client.deadlines import Deadline
from cutwater.client.feeds import Feed, Selection
from cutwater.client.nodes import Nodes
from cutwater.client.reading import Reading
from cutwater.client.records import Layout, runs_of
from cutwater.client.repository import Repository, parse_servers
from cutwater.client.watermarks import marks_between
from cutwater.core.clock import Mark
from cutwater.core.requests import Catalog, CatalogRequest, StreamInfo, TopicInfo
from cutwater.core.subscription import Run
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, ProtocolViolation, Trimmed, Unavailable
from cutwater.types import GLSN, LLSN, ClusterId, CutTime, LogStreamId, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.options import MIB
from cutwater.wire.scan_api import (
    COLUMNS,
    HEADS,
    HEADS_MAX,
    MEASURE,
    EventTimeBefore,
    HeadsArguments,
    MeasureAnswer,
    MeasureArguments,
    unpack,
)
from cutwater.wire.storage_api import READ, Columns, ReadArguments

ASK_MS_MAX = 10_000
READ_BYTES = 2 * MIB
RETRY_SECONDS_MIN = 0.005
RETRY_SECONDS_MAX = 0.5
COMPLAIN_MS_MAX = 2_000

T = TypeVar("T")


class Heads(Struct, frozen=True):
    """The headers of batches of one log stream, column by column as in ``wire.scan_api``, and what came before."""

    before: EventTimeBefore
    columns: tuple[array[int], ...]


class Ranges:
    def __init__(self, repository: Repository, catalogs: Catalogs, nodes: Nodes) -> None:
        """For ``connect``; ``repository`` has answered before."""
        self._repository, self._catalogs, self._nodes = repository, catalogs, nodes
        self._reading = Reading(catalogs, nodes)

    @classmethod
    async def connect(cls, servers: str, access: Access = ANYONE, *, timeout: float) -> Ranges:
        repository = Repository(Endpoint(ClusterId(ANY_CLUSTER), "client"), parse_servers(servers), access)
        try:
            catalog = await repository.ask(CatalogRequest(), Catalog, timeout_ms=Deadline(timeout).left_ms())
        except BaseException:
            repository.close()
            raise
        catalogs = Catalogs(repository)
        catalogs.take(catalog)
        complain = partial(repository.complain, timeout_ms=COMPLAIN_MS_MAX)
        return cls(repository, catalogs, Nodes(Endpoint(repository.cluster, "client"), access, complain))

    async def close(self) -> None:
        await self._catalogs.close()
        await self._nodes.close()
        self._repository.close()

    # Planning.

    async def view(self, timeout: float) -> View:
        """The catalog as of now. A metadata repository that is gone may come back before the time is up."""
        deadline = Deadline(timeout)
        while True:
            try:
                return await self._catalogs.fresh(deadline)
            except CutwaterError as error:
                if not error.retriable or isinstance(error, DeadlineExceeded):
                    raise

    async def find(self, time: CutTime, streams: Sequence[StreamInfo], view: View, timeout: float) -> GLSN:
        """The first position of these log streams that was committed at or after a time."""
        return await self._reading.find(time, streams, view, Deadline(timeout))

    async def marks(self, after: GLSN, through: GLSN, timeout: float) -> list[Mark]:
        return await marks_between(self._repository, after, through, Deadline(timeout))

    async def measure(self, info: StreamInfo, positions: Sequence[GLSN], timeout: float) -> MeasureAnswer:
        """How much of a log stream lies up to each of these positions, by a replica that has all of it."""
        deadline = Deadline(timeout)

        async def ask(connection: Connection) -> MeasureAnswer:
            arguments = MeasureArguments(info.stream, tuple(positions))
            answer = (await connection.call(MEASURE, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))).value
            if answer.complete_through < min(positions[-1], info.last_glsn):
                raise _Behind(info.stream, positions[-1])
            return answer

        return await self._reading.ask(info, ask, deadline)

    async def heads(self, info: StreamInfo, from_glsn: GLSN, to_glsn: GLSN, timeout: float) -> Heads:
        """All headers of a range. ``Trimmed`` if it begins below what is left."""
        deadline = Deadline(timeout)
        before: EventTimeBefore | None = None
        columns = tuple(array("q") for _ in COLUMNS)
        # A log stream that is sealed hears of no more cuts, but the catalog knows that it has nothing more.
        to_glsn = min(to_glsn, info.last_glsn)
        while before is None or from_glsn <= to_glsn:
            found, through = await self._reading.ask(info, _heads(info, from_glsn, to_glsn, deadline), deadline)
            before = before or found.before
            for column, more in zip(columns, found.columns, strict=True):
                column.extend(more)
            from_glsn = GLSN(through + 1)
        return Heads(before, columns)

    def feed(self, selection: Selection, start: GLSN, view: View) -> Feed:
        """For whoever waits for something new: runs come with no more than their event times."""

        def projection(topic: TopicInfo) -> Mapping[int, Columns]:
            return Layout(self._catalogs.view.schema(topic), ["timestamp"]).projection

        feed = Feed(self._catalogs, self._nodes, selection, projection, start, {})
        feed.begin(view)
        return feed

    # Reading.

    async def pieces(
        self, stream: LogStreamId, first: GLSN, last: GLSN, projection: Mapping[int, Columns], *, patience: float
    ) -> AsyncIterator[list[Run]]:
        """The runs of one log stream that have positions from ``first`` to ``last``, some at a time, complete: whatever
        replica answers has applied all that it is asked for. ``last`` is a position that the log has reached. Raises
        ``Trimmed`` if the next of them is gone, and ``DeadlineExceeded`` after ``patience`` seconds without progress.
        """
        replicas = _Replicas(self._catalogs, self._nodes, stream)
        before: LLSN | None = None
        while first <= last:
            asked = first
            runs, through = await replicas.ask(asked, last, dict(projection), Deadline(patience))
            for run in runs:
                if before is not None and run.first_llsn != before + 1:
                    raise ProtocolViolation(f"log stream {stream}: after LLSN {before} a replica gave {run.first_llsn}")
                before = run.last_llsn
            first = GLSN(through + 1)
            wanted = [run for run in runs if run.last_glsn >= asked and run.first_glsn <= last]
            if wanted:
                yield wanted


class _Replicas:
    """One replica of a log stream as long as it answers, then another one."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes, stream: LogStreamId) -> None:
        self._catalogs, self._nodes, self._stream = catalogs, nodes, stream
        self._turn = 0

    async def ask(
        self, first: GLSN, last: GLSN, projection: dict[int, Columns], deadline: Deadline
    ) -> tuple[tuple[Run, ...], GLSN]:
        """Runs from a position on, and up to where they are complete, which is at least that position."""
        wait = RETRY_SECONDS_MIN
        trouble = "it has no replica"
        tried = 0
        while True:
            node = self._replica()
            if node is not None:
                try:
                    return await self._read(node, first, projection, deadline)
                except (Trimmed, InvalidArgument, ProtocolViolation):
                    raise
                except CutwaterError as error:
                    trouble = error.message
                    if not isinstance(error, _Behind):
                        self._nodes.unreachable(self._stream, node)
                self._turn += 1
            tried += 1
            if deadline.left <= wait:
                raise DeadlineExceeded(
                    f"log stream {self._stream} could not be read at GLSN {first} (up to {last} is wanted), after "
                    f"{deadline.seconds:g} s: {trouble}"
                )
            if tried % max(1, len(self._members())) == 0:
                # All have been asked. Perhaps others hold it by now.
                await deadline.pause(wait)
                wait = min(wait * 2, RETRY_SECONDS_MAX)
                try:
                    await self._catalogs.fresh(deadline)
                except CutwaterError as error:
                    trouble = error.message

    def _members(self) -> tuple[StorageNodeId, ...]:
        info = self._catalogs.view.streams.get(self._stream)
        # The head last, because it has the most to do.
        return () if info is None else tuple(dict.fromkeys((*reversed(info.chain), *info.replicas)))

    def _replica(self) -> StorageNodeId | None:
        members = self._members()
        return members[self._turn % len(members)] if members else None

    async def _read(
        self, node: StorageNodeId, first: GLSN, projection: dict[int, Columns], deadline: Deadline
    ) -> tuple[tuple[Run, ...], GLSN]:
        address = self._catalogs.view.address(node)
        connection = await self._nodes.connection(address, deadline)
        arguments = ReadArguments(self._stream, first, READ_BYTES, projection)
        received = await connection.call(READ, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))
        through = received.value.complete_through
        if through < first:
            raise _Behind(self._stream, first)
        return runs_of(received.value, received.body), through


class _Behind(Unavailable):
    """Nothing is wrong with the replica, it only needs a moment."""

    def __init__(self, stream: LogStreamId, glsn: GLSN) -> None:
        super().__init__(f"a replica of log stream {stream} has not come to GLSN {glsn} yet")


def _heads(
    info: StreamInfo, from_glsn: GLSN, to_glsn: GLSN, deadline: Deadline
) -> Callable[[Connection], Awaitable[tuple[Heads, GLSN]]]:
    async def ask(connection: Connection) -> tuple[Heads, GLSN]:
        arguments = HeadsArguments(info.stream, from_glsn, to_glsn, HEADS_MAX)
        received = await connection.call(HEADS, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))
        through = received.value.complete_through
        if through < min(from_glsn, to_glsn):
            raise _Behind(info.stream, to_glsn)
        return Heads(received.value.before, unpack(received.body)), through

    return ask
