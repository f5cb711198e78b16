"""Any sequence of calls has the same outcome on a real store as in memory.

A failure shows its seed. To have it again: STORE_SEED=n python -m pytest tests/integration/stores/test_store_random.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable
from random import Random

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import CutwaterError
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.types import DecisionIndex, LeaderEpoch, MetadataNodeId
from tests.integration.stores.conftest import Backend
from tests.integration.stores.store_kit import Begun, History

STEPS = 150
SEED = int(os.environ.get("STORE_SEED", time.time_ns() % 1_000_000))


class Twins:
    """A store and its twin in memory, asked the same things. ``snapshots`` are of the decisions stored, by index."""

    def __init__(self, backend: Backend, random: Random) -> None:
        self.backend, self.random = backend, random
        self.oracle = MemoryStore()
        self.real: MetadataStore = self.oracle
        self.epoch = LeaderEpoch(0)
        self.history = History(random.randrange(10**6))
        self.snapshots = [Snapshot()]
        self.last_append: tuple[DecisionIndex, int] = (DecisionIndex(0), 0)

    async def both(self, what: str, *args: object) -> bool:
        """Whether it succeeded, on both, with the same result or the same error."""
        outcomes = [await outcome(getattr(store, what)(*args)) for store in (self.real, self.oracle)]
        assert outcomes[0] == outcomes[1], (what, args)
        return not isinstance(outcomes[0], tuple)

    async def both_append(self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]) -> bool:
        """The same for an append, which the store may also get as a leader appends: begun first."""
        if self.random.random() < 0.5:
            return await self.both("append", epoch, after, decisions)
        begun = Begun(self.real, epoch, after, decisions)
        real = await outcome(begun.finish())
        assert real == await outcome(self.oracle.append(epoch, after, decisions)), (epoch, after, decisions)
        return not isinstance(real, tuple)

    async def step(self) -> None:
        steps = [
            self.acquire,
            self.append,
            self.append,
            self.append,
            self.repeat,
            self.misplace,
            self.trim,
            self.reopen,
        ]
        weights = [2, 10, 10, 10, 4, 4, 5, 1]
        await self.random.choices(steps, weights)[0]()
        await self.both("load")

    async def acquire(self) -> None:
        seen = LeaderEpoch(max(0, self.epoch + self.random.choice((-1, 0, 0, 0, 1))))
        node = MetadataNodeId(self.random.randint(1, 3))
        if await self.both("acquire", node, f"host-{node}:9000", seen):
            self.epoch = LeaderEpoch(self.epoch + 1)
        await self.both("leader")

    async def append(self) -> None:
        count, after = self.random.choice((0, 1, 1, 2, 12)), DecisionIndex(len(self.snapshots) - 1)
        fork = History()
        fork.state, fork.random = OrderState(self.snapshots[-1]), self.random
        fork.made = list(self.history.made[: len(self.snapshots) - 1])
        decisions = fork.next(count)
        if await self.both_append(self.some_epoch(), after, decisions) and decisions:
            self.last_append = (after, count)
            for decision in decisions:
                self.history.state.apply(decision)
                self.history.made.append(decision)
                self.snapshots.append(self.history.state.snapshot())

    async def repeat(self) -> None:
        after, count = self.last_append
        shorter = self.random.choice((0, 0, 0, 1))
        decisions = tuple(self.history.made[after : after + count - shorter])
        await self.both_append(self.some_epoch(), after, decisions)

    async def misplace(self) -> None:
        last = len(self.snapshots) - 1
        after = DecisionIndex(max(0, last + self.random.choice((-3, -1, 1, 2))))
        if after != last:
            decisions = tuple(self.history.made[: self.random.randint(0, 2)])
            await self.both_append(self.some_epoch(), after, decisions)

    async def trim(self) -> None:
        await self.both("trim", self.some_epoch(), self.random.choice(self.snapshots[-30:]))

    async def reopen(self) -> None:
        self.real = await self.backend.reopen()

    def some_epoch(self) -> LeaderEpoch:
        return LeaderEpoch(max(0, self.epoch + self.random.choice((0,) * 12 + (-1, 1))))


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except CutwaterError as error:
        return (type(error), error.message)


async def test_random_calls_end_as_in_memory(backend: Backend) -> None:
    print(f"to have this again: STORE_SEED={SEED} python -m pytest {__file__}")
    twins = Twins(backend, Random(SEED))
    twins.real = await backend.open()
    for _ in range(STEPS):
        await twins.step()
