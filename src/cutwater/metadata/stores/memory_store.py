"""Stores decisions in memory, as the simplest form of the contract. For tests and experiments; nothing is durable.

Several stores on one ``MemoryData`` behave like several metadata nodes on one etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.metadata.stores.encoding import StoredBatch
from cutwater.metadata.stores.store_calls import Calls, Changes
from cutwater.metadata.stores.store_interface import (
    NO_LEADER,
    TIMEOUT_MS,
    TRIM_TIMEOUT_MS,
    AppendTold,
    LeaderInfo,
    LoadedState,
)
from cutwater.metadata.stores.store_rules import elsewhere, loaded, not_stored, require_leader, too_late
from cutwater.types import DecisionIndex, LeaderEpoch, MetadataNodeId


class MemoryData:
    """The stored data. Clear ``running`` to let all calls hang, as if a disk or the network hung."""

    WHERE = "the store in memory"

    def __init__(self) -> None:
        self.leader = NO_LEADER
        self.snapshot = Snapshot()
        self.batches: list[StoredBatch] = []
        self.members: dict[MetadataNodeId, str] = {}
        self.changes = Changes()
        self.running = asyncio.Event()
        self.running.set()

    @property
    def last(self) -> DecisionIndex:
        return self.batches[-1].end if self.batches else DecisionIndex(0)

    def acquire(self, node: MetadataNodeId, address: str, seen: LeaderEpoch) -> LeaderEpoch:
        if self.leader.epoch != seen:
            raise too_late(self.leader, seen)
        self.leader = LeaderInfo(LeaderEpoch(seen + 1), node, address)
        self.changes.tell()
        return self.leader.epoch

    def load(self) -> LoadedState:
        return loaded(self.leader, self.snapshot, self.batches, self.WHERE)

    def append(self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]) -> None:
        require_leader(self.leader, epoch)
        batch = StoredBatch(epoch, DecisionIndex(after + 1), decisions)
        if self.last == after:
            if decisions:
                self.batches.append(batch)
        elif not (decisions and self.batches and self.batches[-1] == batch):
            raise elsewhere(self.last, after)

    def trim(self, epoch: LeaderEpoch, snapshot: Snapshot) -> None:
        require_leader(self.leader, epoch)
        if snapshot.index > self.last:
            raise not_stored(snapshot, self.last)
        if snapshot.index > self.snapshot.index:
            self.snapshot = snapshot
            self.batches = [batch for batch in self.batches if batch.end >= snapshot.index]


class MemoryStore:
    """Implements ``MetadataStore``."""

    def __init__(self, data: MemoryData | None = None) -> None:
        self.data = data or MemoryData()
        self._calls = Calls(MemoryData.WHERE)

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo:
        async with self._calls.call("leader", timeout_ms):
            await self.data.running.wait()
            return self.data.leader

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        async with self._calls.call("acquire", timeout_ms):
            await self.data.running.wait()
            return self.data.acquire(node, address, seen)

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState:
        async with self._calls.call("load", timeout_ms):
            await self.data.running.wait()
            return self.data.load()

    async def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        async with self._calls.call("append", timeout_ms):
            await self.data.running.wait()
            self.data.append(epoch, after, decisions)

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        return False

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        async with self._calls.call("trim", timeout_ms):
            await self.data.running.wait()
            self.data.trim(epoch, snapshot)

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        async with self._calls.call("announce", timeout_ms):
            await self.data.running.wait()
            self.data.members[node] = key

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        async with self._calls.call("members", timeout_ms):
            await self.data.running.wait()
            return dict(self.data.members)

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        return self.data.changes.watch_leader(self._calls, self.leader)

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        await self._calls.close()
        self.data.changes.tell()
