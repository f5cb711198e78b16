"""Queries of a simulated cluster that read the log as Spark does: a planner takes a range of positions and divides it
into parts of log streams, and tasks scan the parts, from any replica that answers.

A streaming query keeps its offset when it is killed, and reads a range that it had begun once more. Other queries read
any range that lies in the past. What they found is compared with the log at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.client.cluster.credentials import Access
from cutwater.client.read.range_reader import COUNT, FIRST_GLSN, FIRST_LLSN, SCHEMA, Ranges, Scanned
from cutwater.client.read.records import ColumnLayout
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, Trimmed
from cutwater.protocol.scan_api import NOTHING, UNKNOWN
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.history import ScanOp
from cutwater.testing.virtual.workload import AGAIN_SECONDS, TYPED, VirtualClient
from cutwater.types import GLSN, LogStreamId

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

PARTS_MAX = 3
"""A log stream's range is divided into at most this many parts."""
ATTEMPTS_MAX = 3
RANGE_POSITIONS_MAX = 300
TASKS_LATE = 0.4
"""Share of ranges whose tasks begin some time after the plan was made."""

Part = tuple[StreamInfo, GLSN, GLSN]
Heads = list[tuple[int, int, int]]


class VirtualScanner(VirtualClient):
    """One query over one topic."""

    def __init__(self, world: ShippedSimulation, name: str, host: str, topic: str) -> None:
        super().__init__(world, name, host)
        self.topic = topic
        self.offset = GLSN(0)
        """Everything up to here was read, as the checkpoint says."""
        self._planned: GLSN | None = None
        """The end of the range that was begun."""

    async def run(self, log: AsyncClient) -> None:
        ranges = None
        while ranges is None:
            try:
                ranges = await Ranges.connect(
                    log.servers, Access(token=self.world.cluster.token), timeout=self.world.options.timeout
                )
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
        while not self.world.is_stopping:
            try:
                await (self._read_next(ranges) if self.random.random() < 0.6 else self._read_old(ranges))
            except CutwaterError as error:
                self.world.note(f"{self.name}: {error.code}")
            await self.pause(self.world.options.scans_every)

    async def _read_next(self, ranges: Ranges) -> None:
        """Read the next range of the streaming query."""
        view = await ranges.view(self.world.options.timeout)
        if self._planned is None:
            self._planned = view.catalog.high_watermark
        await self._read(ranges, view, self.offset, self._planned)
        self.offset, self._planned = self._planned, None

    async def _read_old(self, ranges: Ranges) -> None:
        """Read any range of the past, as a query over a part of the log does."""
        view = await ranges.view(self.world.options.timeout)
        end = GLSN(self.random.randint(0, view.catalog.high_watermark))
        await self._read(ranges, view, GLSN(max(0, end - self.random.randint(1, RANGE_POSITIONS_MAX))), end)

    async def _read(self, ranges: Ranges, view: CatalogView, start: GLSN, end: GLSN) -> None:
        """Read the positions above ``start`` up to ``end``."""
        topic = view.topics[self.topic]
        scan = ScanOp(topic.topic, start, end)
        parts: list[Part] = []
        for info in view.streams_of(topic.topic):
            parts += await self._plan(ranges, topic, info, scan)
        layout = ColumnLayout(view.schema(topic), self._columns())
        self.random.shuffle(parts)
        if self.random.random() < TASKS_LATE:
            await asyncio.sleep(self.random.uniform(0.0, 0.3))
        await asyncio.gather(*(self._task(ranges, part, layout, scan) for part in parts))
        self.world.note(
            f"{self.name} has read {len(scan.found)} records from {start + 1} to {end} in {len(parts)} parts"
        )
        self.world.history.scans.append(scan)

    def _columns(self) -> list[str] | None:
        """Choose what to read: all columns, or those that say which record it is."""
        if self.random.random() < 0.5:
            return None
        return ["append", "place", "count", "timestamp"] if self.topic == TYPED else ["value", "timestamp"]

    # Planning.

    async def _plan(self, ranges: Ranges, topic: TopicInfo, info: StreamInfo, scan: ScanOp) -> list[Part]:
        timeout = self.world.options.timeout
        first, last = GLSN(max(scan.start, info.created_at) + 1), min(scan.end, info.last_glsn)
        if first > last:
            return []
        if first < topic.trimmed_before:
            trimmed = (GLSN(first - 1), GLSN(topic.trimmed_before - 1))
            before, gone = (await ranges.measure(info, trimmed, timeout)).llsns
            if before != gone or before == UNKNOWN:
                scan.gaps.append((first, topic.trimmed_before))
            first = topic.trimmed_before
        if first > last:
            return []
        count = min(self.random.randint(1, PARTS_MAX), last - first + 1)
        width = last - first + 1
        positions = tuple(GLSN(first - 1 + width * i // count) for i in range(count + 1))
        if count > 1:
            sizes = (await ranges.measure(info, positions, timeout)).bytes
            assert list(sizes) == sorted(sizes)
        return [(info, GLSN(positions[i] + 1), positions[i + 1]) for i in range(count)]

    # Tasks.

    async def _task(self, ranges: Ranges, part: Part, layout: ColumnLayout, scan: ScanOp) -> None:
        """Read one part. An attempt that fails is repeated from the beginning."""
        info, first, last = part
        heads = await self._heads(ranges, part) if self.random.random() < 0.3 else None
        for attempt in range(1, ATTEMPTS_MAX + 1):
            task = ScanOp(scan.topic, scan.start, scan.end)
            try:
                runs = await self._attempt(ranges, info.stream, (first, last), layout, task)
            except CutwaterError:
                if attempt == ATTEMPTS_MAX:
                    raise
                continue
            if heads is not None and not task.gaps and runs != heads:
                what = f"log stream {info.stream} from {first} to {last}: headers say {heads}, and a scan found {runs}"
                self.world.violations.append(Violation("scan", what))
            scan.found += task.found
            scan.gaps += task.gaps
            return

    async def _heads(self, ranges: Ranges, part: Part) -> Heads | None:
        """Return first LLSN, first GLSN and number of records of each batch, as headers say; None if some are gone."""
        try:
            found = await ranges.heads(*part, self.world.options.timeout)
        except Trimmed:
            return None
        return list(zip(*found.columns[:3], strict=True))

    async def _attempt(
        self, ranges: Ranges, stream: LogStreamId, wanted: tuple[GLSN, GLSN], layout: ColumnLayout, task: ScanOp
    ) -> Heads:
        first, last = wanted
        runs: Heads = []
        patience = self.world.options.timeout
        while first <= last:
            try:
                async for found in ranges.pieces(stream, first, last, layout.projection, patience=patience):
                    _take(stream, found, (first, last), layout, task)
                    runs += zip(*found.runs[: COUNT + 1], strict=True)
                    first = GLSN(found.last_glsn + 1)
                return runs
            except Trimmed as error:
                task.gaps.append((first, error.first_left))
                first = max(error.first_left, first)
        return runs


def _take(stream: LogStreamId, scanned: Scanned, wanted: tuple[GLSN, GLSN], layout: ColumnLayout, task: ScanOp) -> None:
    """Add the records of a piece that are in the range."""
    blocks = scanned.blocks
    for i, block in enumerate(blocks):
        runs = range(block.first_run, blocks[i + 1].first_run if i + 1 < len(blocks) else len(scanned))
        data = [run for run in runs if scanned.runs[SCHEMA][run] != NOTHING]
        places = _places(scanned, data)
        rows = layout.rows(
            block.schema, block.body, len(places), places[0][1], is_stored=scanned.is_stored, checked=block.checked
        )
        for (llsn, glsn), found in zip(places, h.found_in(rows), strict=True):
            if wanted[0] <= glsn <= wanted[1]:
                task.found.append((glsn, stream, llsn, found))


def _places(scanned: Scanned, runs: Sequence[int]) -> list[tuple[int, int]]:
    """Return LLSN and GLSN of each record."""
    return [
        (scanned.runs[FIRST_LLSN][run] + i, scanned.runs[FIRST_GLSN][run] + i)
        for run in runs
        for i in range(scanned.runs[COUNT][run])
    ]
