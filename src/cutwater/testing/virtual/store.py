"""The store of decisions of a simulated cluster: ``MemoryStore`` with delays and lost answers, and a full history."""

from __future__ import annotations

import asyncio
from random import Random

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import Unavailable
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.metadata.stores.store_interface import TIMEOUT_MS, TRIM_TIMEOUT_MS, LeaderInfo, LoadedState
from cutwater.types import DecisionIndex, LeaderEpoch, MetadataNodeId


class StoreData(MemoryData):
    """The data that all metadata nodes share. ``history`` keeps every decision, also when snapshots replace them."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Decision] = []
        self.delay_seconds_max = 0.001
        self.lost_answers = 0.0
        """Share of calls that are carried out and then fail."""
        self.failures = 0.0
        """Share of calls that fail before anything happens."""

    def append(self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]) -> None:
        before = self.last
        super().append(epoch, after, decisions)
        if self.last != before:
            self.history += decisions


class SimStore(MemoryStore):
    """The store as one metadata node sees it."""

    def __init__(self, data: StoreData, random: Random) -> None:
        super().__init__(data)
        self._shared, self._random = data, random

    async def _way_there(self) -> None:
        await self._pause()
        if self._random.random() < self._shared.failures:
            raise Unavailable("the simulated store cannot be reached")

    async def _way_back(self) -> None:
        await self._pause()
        if self._random.random() < self._shared.lost_answers:
            raise Unavailable("the answer of the simulated store got lost")

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.random() * self._shared.delay_seconds_max)

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo:
        await self._way_there()
        found = await super().leader(timeout_ms=timeout_ms)
        await self._way_back()
        return found

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        await self._way_there()
        epoch = await super().acquire(node, address, seen, timeout_ms=timeout_ms)
        await self._way_back()
        return epoch

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState:
        await self._way_there()
        state = await super().load(timeout_ms=timeout_ms)
        await self._way_back()
        return state

    async def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        await self._way_there()
        await super().append(epoch, after, decisions, timeout_ms=timeout_ms)
        await self._way_back()

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        await self._way_there()
        await super().trim(epoch, snapshot, timeout_ms=timeout_ms)
        await self._way_back()
