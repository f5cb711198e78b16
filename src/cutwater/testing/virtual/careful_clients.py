"""Clients of a simulated cluster that judge each call by itself: whether it ends in time, whether an answer that calls
itself complete is complete, and whether records are those that the caller passed.

What they find wrong is raised by ``ShippedSimulation`` at its next look.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.async_client import AsyncClient
from cutwater.errors import CutwaterError, NoRecordHere
from cutwater.testing.checkers.record import AppendOp, TailOp
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.workload import PLAIN, AppendingClient, VirtualClient

GRACE_SECONDS = 0.5
"""A call may take this much longer than its timeout."""
TAILS_AT_ONCE = 3
APPENDS_AT_ONCE = 6
"""More than a client has in flight, so some wait and join others."""


class CarefulAppender(AppendingClient):
    """Appends from memory that it overwrites as soon as the append has begun, and expects an outcome in time."""

    async def run(self, log: AsyncClient) -> None:
        await asyncio.gather(*(self._append_for_ever(log) for _ in range(APPENDS_AT_ONCE)))

    async def _append_for_ever(self, log: AsyncClient) -> None:
        knows_topic = False
        while not self.world.is_stopping:
            op = await self._append(log, reuses_memory=knows_topic)
            # Before the client has looked the topic up, an append copies its records later.
            knows_topic = knows_topic or op.ack is not None
            await self.pause(self.world.options.append_pause)

    async def _append(self, log: AsyncClient, *, reuses_memory: bool) -> AppendOp:
        loop = self.world.loop
        op = self.begin(PLAIN, (1, 2, 5))
        records, memory = _in_memory(h.values_of(op, bytes(self.padding())))
        begun = loop.now
        call = loop.create_task(log.append(PLAIN, records, timestamp=h.times_of(op)))
        await asyncio.sleep(0)
        if reuses_memory:
            memory[:] = bytes(len(memory))
        await self.settle(op, call)
        took, timeout = loop.now - begun, self.world.options.timeout
        if took > timeout + GRACE_SECONDS:
            what = f"append {op.payload} took {took:.3f} s with a timeout of {timeout:g} s"
            self.world.violations.append(Violation("deadline", what))
        return op


class CarefulReader(VirtualClient):
    """Reads single records and whole ranges that were acknowledged before, and asks for the tail several times at
    once."""

    async def run(self, log: AsyncClient) -> None:
        asking = (self._again_and_again(self._ask_tail, log) for _ in range(TAILS_AT_ONCE))
        reading = (self._again_and_again(read, log) for read in (self._read_record, self._read_range))
        await asyncio.gather(*asking, *reading)

    async def _again_and_again(self, work: Any, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            try:
                await work(log)
            except CutwaterError as error:
                self.world.note(f"{self.name}: {error.code}")
            await self.pause(self.world.options.reads_every)

    async def _ask_tail(self, log: AsyncClient) -> None:
        invoked = self.now
        tail = await log.tail()
        self.world.history.tails.append(TailOp(invoked, self.now, tail))

    def _acknowledged(self) -> list[AppendOp]:
        history = self.world.history
        return [op for op in history.appends[-200:] if op.ack is not None and history.topic_of(op) == PLAIN]

    async def _read_record(self, log: AsyncClient) -> None:
        known = self._acknowledged()
        if not known:
            return
        op = self.random.choice(known[-10:])
        assert op.ack is not None
        try:
            await log.read(op.ack.glsn)
        except NoRecordHere as error:
            self._break("3 durable", f"append {op.payload} was acknowledged as {op.ack}, and a read says: {error}")

    async def _read_range(self, log: AsyncClient) -> None:
        known = self._acknowledged()
        if not known:
            return
        start = self.random.choice([op.ack.glsn for op in known if op.ack is not None])
        expected = {op.ack.glsn for op in known if op.ack is not None and op.ack.glsn >= start}
        found = [record.glsn async for record in log.subscribe(PLAIN, start=start, follow=False)]
        if missing := expected.difference(found):
            what = f"a read from {start} to the end of the log was complete without GLSN {min(missing)}"
            self._break("7 subscribe", f"{what}, which was acknowledged before")

    def _break(self, guarantee: str, what: str) -> None:
        self.world.violations.append(Violation(guarantee, what))


class PromptSubscriber(VirtualClient):
    """Follows a topic without faults, and expects each record soon after its acknowledgement."""

    has_end = False

    async def run(self, log: AsyncClient) -> None:
        loop, history, limit = self.world.loop, self.world.history, self.world.options.prompt_seconds
        seen = 0
        waits: dict[int, float] = {}

        async def watch() -> None:
            while True:
                for op in history.appends[-200:]:
                    if op.ack is not None and op.ack.glsn > seen and history.topic_of(op) == PLAIN:
                        waits.setdefault(op.ack.glsn, loop.now)
                for glsn in [glsn for glsn in waits if glsn <= seen]:
                    del waits[glsn]
                late = [glsn for glsn, since in waits.items() if loop.now - since > limit]
                if late:
                    what = f"GLSN {min(late)} was acknowledged {limit:g} s ago and has not come"
                    self.world.violations.append(Violation("7 subscribe", what))
                    return
                await asyncio.sleep(limit / 4)

        watching = loop.create_task(watch())
        async for record in log.subscribe(PLAIN):
            seen = record.glsn
        watching.cancel()


def _in_memory(values: list[bytes]) -> tuple[pa.Array, bytearray]:
    """Return the values as an Arrow array, and the memory in which they are."""
    memory, offsets = bytearray(b"".join(values)), [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    ends = pa.array(offsets, pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(values), [None, ends, pa.py_buffer(memory)]), memory
