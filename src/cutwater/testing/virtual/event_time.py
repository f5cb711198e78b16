"""Clients of a simulated cluster that declare watermarks and idleness, with records and without, and that ask for the
watermark at any position. The answers are compared with the log at the end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cutwater.client.async_client import AsyncClient
from cutwater.core.order.decisions import Trim
from cutwater.errors import AppendUnknown, CutwaterError, Trimmed
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.history import DeclareOp, WatermarkOp
from cutwater.testing.virtual.workload import PLAIN, AppendingClient, VirtualClient
from cutwater.types import MILLISECOND, EventTime

LAG_US_MAX = 100 * MILLISECOND
QUESTION_EVERY = 2
"""Declarations for each question of a reader, which reads much of the log."""
BOUNDS_US = (None, None, 0, 50 * MILLISECOND)
"""How much disorder the strategies expect that are asked for; None is for those that go by declarations."""
IDLE_AFTER_US = (200 * MILLISECOND, 30_000 * MILLISECOND)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class VirtualDeclarer(AppendingClient):
    """Declares that no earlier records follow, for one log stream or all of them, or with the records of an append."""

    async def run(self, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            await self.pause(self.world.options.declare_every)
            # No two declarations are the same, so that each is found again in the log.
            time = self.world.history.new_declaration(self.world.event_time() - self.random.randint(0, LAG_US_MAX))
            is_idle = self.random.random() < 0.2
            if self.random.random() < 0.5:
                await self._declare_with_records(log, time, is_idle=is_idle)
            else:
                await self._declare(log, time, is_idle=is_idle)

    async def _declare_with_records(self, log: AsyncClient, time: EventTime, *, is_idle: bool) -> None:
        op = self.begin(PLAIN, (1, 2))
        h.declare_with(op, time, is_idle=is_idle)
        values, times = h.values_of(op, bytes(self.padding())), h.times_of(op)
        await self.settle(op, log.append(PLAIN, values, timestamp=times, watermark=h.at(time), idle=is_idle))

    async def _declare(self, log: AsyncClient, time: EventTime, *, is_idle: bool) -> None:
        declared = DeclareOp(self.now, PLAIN, time, is_idle)
        self.world.history.declared[time] = declared
        stream = self._last[1] if self._last is not None and self.random.random() < 0.5 else None
        try:
            declared.acks += await log.declare(PLAIN, watermark=h.at(time), idle=is_idle, stream=stream)
        except CutwaterError as error:
            # Some log streams may have it, if it was for all of them.
            is_definite = stream is not None and not isinstance(error, AppendUnknown)
            declared.is_refused = is_definite
            self.world.note(f"{self.name}: {error.code}")
        else:
            self.world.note(f"{self.name} has declared {time} in {len(declared.acks)} log streams")


class WatermarkReader(VirtualClient):
    """Asks for the watermark after a position of the past, or the last one."""

    async def run(self, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            await self.pause(QUESTION_EVERY * self.world.options.declare_every)
            try:
                await self._ask(log)
            except CutwaterError as error:
                self.world.note(f"{self.name}: {error.code}")

    async def _ask(self, log: AsyncClient) -> None:
        tail = await log.tail()
        glsn = tail if self.random.random() < 0.5 else self.random.randint(0, tail)
        bound, idle = self.random.choice(BOUNDS_US), self.random.choice(IDLE_AFTER_US)
        try:
            found = await log.watermark(
                PLAIN,
                at=glsn,
                bound=timedelta(microseconds=bound or 0),
                punctuated=bound is None,
                idle_after=timedelta(microseconds=idle),
            )
        except Trimmed:
            return
        topic = self.world.cluster.topic(PLAIN)
        decisions = self.world.cluster.store.history
        is_trimmed = any(isinstance(decision, Trim) and decision.topic == topic for decision in decisions)
        watermark = None if found is None else (found - _EPOCH) // timedelta(microseconds=1)
        self.world.history.watermarks.append(WatermarkOp(topic, glsn, bound, idle, watermark, is_trimmed))
        self.world.note(f"{self.name} was told that the watermark at {glsn} is {watermark}")
