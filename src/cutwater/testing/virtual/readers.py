"""Clients of a simulated cluster that read what was acknowledged: single records, ranges, the tail and cursors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from cutwater.client.async_client import AsyncClient
from cutwater.client.read.records import Record
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.errors import CutwaterError, Trimmed
from cutwater.testing.checkers.record import AppendOp, CursorOp, ReadOp, TailOp
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.workload import PLAIN, VirtualClient
from cutwater.types import GLSN, CutTime, StorageNodeId

RANGE_RECORDS_MAX = 60


class VirtualReader(VirtualClient):
    """Reads records that were acknowledged, one by one and in ranges, asks for the tail, and keeps a cursor."""

    async def run(self, log: AsyncClient) -> None:
        work: list[Callable[[AsyncClient], Coroutine[Any, Any, None]]] = [
            self._read_one,
            self._read_range,
            self._ask_tail,
        ]
        if self.world.options.cursors_every:
            work += [self._commit_cursor, self._read_cursor]
        while not self.world.is_stopping:
            with suppress(CutwaterError):
                await self.random.choice(work)(log)
            await self.pause(self.world.options.reads_every)

    async def _read_one(self, log: AsyncClient) -> None:
        history = self.world.history
        known = [op for op in history.appends[-200:] if op.ack is not None]
        if not known:
            return
        op = self.random.choice(known)
        assert op.ack is not None
        invoked, run, error, first_left = self.now, None, "", GLSN(0)
        try:
            record = await log.read(op.ack.glsn, stream=self.random.choice((None, op.ack.stream)))
            run = self._run_of(record, op)
        except Trimmed as trimmed:
            error, first_left = "trimmed", trimmed.first_left
        # Replicas trim at different times, so no two reads are of the same node.
        node = StorageNodeId(-len(history.reads) - 1)
        history.reads.append(ReadOp(op, node, op.ack.stream, invoked, self.now, run, error, first_left))

    def _run_of(self, record: Record, op: AppendOp) -> CommittedBatch:
        """The run of the whole append, if the record is its first one."""
        time = CutTime(record.ingested_us)
        whole = h.first_of(record, op)
        return CommittedBatch(record.stream, record.llsn, record.glsn, time, whole)

    async def _read_range(self, log: AsyncClient) -> None:
        """Read a range in one of several ways. It has every record that was acknowledged before."""
        history = self.world.history
        known = [op for op in history.appends if op.ack is not None and history.topic_of(op) == PLAIN]
        if not known:
            return
        start = self.random.choice(known)
        assert start.ack is not None
        begin = start.ack.glsn
        end = begin + self.random.randint(1, RANGE_RECORDS_MAX)
        tail = max(h.last_glsn(op.ack) for op in known if op.ack is not None)
        end = min(end, tail + 1)
        with suppress(Trimmed):
            found = await self._range(log, begin, end)
            if found is not None:
                self._check_range(known, found, begin, end)

    async def _range(self, log: AsyncClient, begin: int, end: int) -> dict[int, bytes] | None:
        match self.random.randrange(3):
            case 0:
                table = await log.table(PLAIN, start=begin, stop=end, columns=["glsn", "value"])
                return dict(zip(table["glsn"].to_pylist(), table["value"].to_pylist(), strict=True))
            case 1:
                return {record.glsn: record.value async for record in log.subscribe(PLAIN, start=begin, stop=end)}
        found: dict[int, bytes] = {}
        async for batch in log.batches(PLAIN, start=begin, stop=end):
            found |= dict(zip(batch["glsn"].to_pylist(), batch["value"].to_pylist(), strict=True))
        return found

    def _check_range(self, known: list[AppendOp], found: dict[int, bytes], begin: int, end: int) -> None:
        for op in known:
            assert op.ack is not None
            for place in range(op.ack.count):
                glsn = op.ack.glsn + place
                if begin <= glsn < end and not found.pop(glsn, b"").startswith(h.prefix_of(op, place)):
                    self.world.violations.append(
                        Violation("3 durable", f"a read from {begin} to {end} has other bytes than append {op.payload}")
                    )
        wrong = [glsn for glsn in found if not begin <= glsn < end]
        if wrong:
            self.world.violations.append(Violation("7 subscribe", f"a read from {begin} to {end} has {wrong[:5]}"))

    async def _ask_tail(self, log: AsyncClient) -> None:
        invoked = self.now
        tail = await log.tail()
        self.world.history.tails.append(TailOp(invoked, self.now, tail))

    async def _commit_cursor(self, log: AsyncClient) -> None:
        known = [op.ack.glsn for op in self.world.history.appends if op.ack is not None]
        if known:
            glsn, invoked = max(known), self.now
            await log.cursor(self.name).commit(glsn)
            self.world.history.cursors.append(CursorOp(self.name, invoked, self.now, GLSN(glsn), is_read=False))

    async def _read_cursor(self, log: AsyncClient) -> None:
        invoked = self.now
        glsn = await log.cursor(self.name).get()
        self.world.history.cursors.append(CursorOp(self.name, invoked, self.now, glsn or GLSN(0), is_read=True))
