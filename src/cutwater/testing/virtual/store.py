"""The store of decisions of a simulated cluster: in memory, or the shipped store for etcd on a model of etcd, or the
shipped store for SQLite on the disk of the only metadata node.

Every metadata node gets a ``WatchedStore`` around its own. It notes what the store confirmed, so that the checkers get
all decisions, also those that snapshots replace, and adds delays and lost answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from cutwater.core.access.access_decisions import AccessDecision
from cutwater.core.order.decisions import Cut, Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import Unavailable
from cutwater.metadata.stores.encoding import StoredBatch
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.metadata.stores.store_interface import (
    TIMEOUT_MS,
    TRIM_TIMEOUT_MS,
    AppendTold,
    LeaderInfo,
    LoadedState,
    MetadataStore,
)
from cutwater.testing.checkers.access import CallTime, Decided
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.stores.etcd_model import EtcdFaults, EtcdModel
from cutwater.testing.virtual.processes import current_process
from cutwater.types import GLSN, ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId


class StoreCopy(Struct, frozen=True):
    """What a store in memory held at some time."""

    leader: LeaderInfo
    snapshot: Snapshot
    batches: tuple[StoredBatch, ...]

    @property
    def decisions(self) -> list[Decision]:
        """The decisions that are not in the snapshot."""
        return [
            decision
            for batch in self.batches
            for index, decision in enumerate(batch.decisions, batch.first)
            if index > self.snapshot.index
        ]


DATABASE = Path("/store/metadata.sqlite")


class SharedStore:
    """What the metadata nodes of a cluster share, and what they were told. ``kind`` is "memory", "etcd" or "sqlite"."""

    def __init__(self, kind: str, cluster: ClusterId, random: Random) -> None:
        self._kind, self._cluster, self._random = kind, cluster, random
        self.etcd = EtcdModel(random) if kind == "etcd" else None
        self._memory = MemoryData()
        self._decisions: dict[DecisionIndex, Decision] = {}
        self.epoch = LeaderEpoch(0)
        """The newest leader epoch that any node was told of."""
        self.high_watermark = GLSN(0)
        """The last position of the cuts that the store has."""
        self.separate: list[Decision] | None = None
        """While an old copy is in place: what was decided on it."""
        self.delay_seconds_max = 0.001
        self.lost_answers = 0.0
        """Share of calls that are carried out and then fail."""
        self.failures = 0.0
        """Share of calls that fail before anything happens."""
        self._offered: dict[DecisionIndex, tuple[Decision, CallTime]] = {}
        self.access: dict[DecisionIndex, Decided] = {}
        """The decisions about access control, and when they were made."""

    async def open(self, random: Random, *, may_wait: bool) -> WatchedStore:
        """Return the store of one metadata node, whose process opens it."""
        inner: MetadataStore
        if self._kind == "sqlite":
            inner = await _open_sqlite(self._cluster, may_wait=may_wait)
        else:
            inner = MemoryStore(self._memory) if self.etcd is None else self.etcd.store(self._cluster)
        return WatchedStore(self, inner, random)

    def calm(self) -> None:
        """End all faults."""
        self.delay_seconds_max, self.lost_answers, self.failures = 0.001, 0.0, 0.0
        if self.etcd is not None:
            self.etcd.faults = EtcdFaults()
            for member in self.etcd.members:
                if member.is_cut_off:
                    self.etcd.rejoin(member)
                if not member.is_up:
                    self.etcd.start(member)

    def copy(self) -> StoreCopy:
        """Return what the store in memory holds now."""
        return StoreCopy(self._memory.leader, self._memory.snapshot, tuple(self._memory.batches))

    def put_back(self, copy: StoreCopy) -> None:
        """Replace what the store in memory holds, while no metadata node runs."""
        self._memory.leader, self._memory.snapshot = copy.leader, copy.snapshot
        self._memory.batches = list(copy.batches)
        self.epoch = copy.leader.epoch

    @property
    def history(self) -> list[Decision]:
        """All decisions, from the first one on, as far as they are known without a gap."""
        found: list[Decision] = []
        while (decision := self._decisions.get(DecisionIndex(len(found) + 1))) is not None:
            found.append(decision)
        return found

    def after(self, index: DecisionIndex) -> list[Decision]:
        """The decisions after this one, as far as they are known without a gap."""
        found: list[Decision] = []
        while (decision := self._decisions.get(DecisionIndex(index + len(found) + 1))) is not None:
            found.append(decision)
        return found

    @property
    def is_near(self) -> bool:
        return self._kind == "sqlite"

    def heard(self, epoch: LeaderEpoch) -> None:
        self.epoch = max(self.epoch, epoch)

    def offered(self, after: DecisionIndex, decisions: tuple[Decision, ...]) -> None:
        """Note when decisions about access control were first given to the store."""
        for index, decision in enumerate(decisions, after + 1):
            if isinstance(decision, AccessDecision):
                known = self._offered.get(DecisionIndex(index))
                if known is None or known[0] != decision:
                    self._offered[DecisionIndex(index)] = decision, _now()

    def confirmed(self, after: DecisionIndex, decisions: tuple[Decision, ...]) -> None:
        """Note decisions that the store has. What it has once, it never has otherwise."""
        if self.separate is not None:
            self.separate += [
                d for i, d in enumerate(decisions, after + 1) if self._decisions.get(DecisionIndex(i)) != d
            ]
            return
        for index, decision in enumerate(decisions, after + 1):
            known = self._decisions.setdefault(DecisionIndex(index), decision)
            if known != decision:
                raise Violation("12 one cut sequence", f"decision {index} was {known}, and is {decision}")
            if isinstance(decision, AccessDecision) and index not in self.access:
                _, offered = self._offered.get(DecisionIndex(index), (decision, _now()))
                self.access[DecisionIndex(index)] = Decided(decision, offered, _now())
            if isinstance(decision, Cut):
                self.high_watermark = max(self.high_watermark, decision.high_watermark)


class WatchedStore:
    """Implements ``MetadataStore`` by another one. The violation that it may find ends the term of a leader."""

    def __init__(self, shared: SharedStore, inner: MetadataStore, random: Random) -> None:
        self._shared, self._inner, self._random = shared, inner, random

    async def _way_there(self) -> None:
        await self._pause()
        if self._random.random() < self._shared.failures:
            raise Unavailable("the simulated store cannot be reached")

    async def _way_back(self) -> None:
        await self._pause()
        if self._random.random() < self._shared.lost_answers:
            raise Unavailable("the answer of the simulated store got lost")

    async def _disk_has_it(self) -> None:
        """Wait until the time is over that the disk has charged to the event loop of this process."""
        if self._shared.is_near:
            await asyncio.sleep(0)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.random() * self._shared.delay_seconds_max)

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo:
        await self._way_there()
        found = await self._inner.leader(timeout_ms=timeout_ms)
        self._shared.heard(found.epoch)
        await self._way_back()
        return found

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        await self._way_there()
        epoch = await self._inner.acquire(node, address, seen, timeout_ms=timeout_ms)
        await self._disk_has_it()
        self._shared.heard(epoch)
        await self._way_back()
        return epoch

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState:
        await self._way_there()
        state = await self._inner.load(timeout_ms=timeout_ms)
        self._shared.confirmed(state.snapshot.index, state.decisions)
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
        self._shared.offered(after, decisions)
        await self._way_there()
        await self._inner.append(epoch, after, decisions, timeout_ms=timeout_ms)
        await self._disk_has_it()
        self._shared.confirmed(after, decisions)
        await self._way_back()

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        """Pass it on if the store is as near as it can be: then nothing is lost or delayed between the two."""
        self._shared.offered(after, decisions)

        def heard(error: Exception | None) -> None:
            if error is None:
                # The event loop may have waited for the disk, and its process may be killed before that is over.
                asyncio.get_running_loop().call_soon(self._shared.confirmed, after, decisions)
            told(error)

        return self._shared.is_near and self._inner.begin_append(epoch, after, decisions, heard)

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        await self._way_there()
        await self._inner.trim(epoch, snapshot, timeout_ms=timeout_ms)
        await self._way_back()

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        await self._way_there()
        await self._inner.announce(node, key, timeout_ms=timeout_ms)
        await self._way_back()

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        await self._way_there()
        return await self._inner.members(timeout_ms=timeout_ms)

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        return self._inner.watch_leader()

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        await self._inner.close(timeout_ms=timeout_ms)


def _now() -> CallTime:
    loop: Any = asyncio.get_running_loop()
    return CallTime(loop.callbacks, loop.now)


async def _open_sqlite(cluster: ClusterId, *, may_wait: bool) -> SqliteStore:
    """Open the database on the disk of the current process."""
    # It needs a library that only tests have.
    sqlite_disk = import_module("cutwater.testing.stores.sqlite_disk")
    process = current_process()
    disk = process.disk if process is not None else None
    assert process is not None
    assert disk is not None

    def charge(seconds: float) -> None:
        disk.charged_seconds += seconds

    engine = sqlite_disk.DiskSqlite(disk, Random(process.random.getrandbits(64)), charge)
    process.at_death.append(engine.kill)
    disk.make_dir(DATABASE.parent)
    return await SqliteStore.open(DATABASE, cluster, may_wait=may_wait, engine=engine)
