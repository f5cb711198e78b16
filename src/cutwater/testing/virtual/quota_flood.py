"""Clients of one principal under a quota, which append as fast as they may, and what passed of that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cutwater.client.async_client import AsyncClient
from cutwater.errors import CutwaterError
from cutwater.testing.checkers.quotas import Passed, check_quota
from cutwater.testing.checkers.record import SimOutcome
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.workload import AGAIN_SECONDS, PLAIN, AppendingClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutwater.testing.checkers.access import Decided
    from cutwater.testing.virtual.simulation import ShippedSimulation

FLOOD = "flood"
"""The principal of these clients."""
RIGHTS, PATTERN = ("append", "describe"), f"topic:{PLAIN}"
FLOODERS = 4
PADDING_BYTES = 4_000
QUOTAS = (30, 40)
"""Requests per second; with a quota of bytes, so many values."""
BYTES, REQUESTS = "bytes_in_per_s", "requests_per_s"


class QuotaFlood:
    """The principal, its quota, and what passed."""

    def __init__(self, world: ShippedSimulation) -> None:
        self._world = world
        self.limit = world.options.access_flood
        self.token = ""
        self.passed: list[Passed] = []

    def limits(self, requests: int) -> dict[str, int]:
        return {self.limit: requests * (PADDING_BYTES if self.limit == BYTES else 1)}

    def note(self, begin: float, op_bytes: int) -> None:
        cost = op_bytes if self.limit == BYTES else 1
        self.passed.append(Passed(begin, self._world.loop.now, cost))
        self._world.cluster.counts["under a quota"] += 1

    def check(self, decided: Sequence[Decided], lease_seconds: float) -> None:
        starts = sum(machine.starts for machine in self._world.cluster.nodes)
        check_quota(FLOOD, self.limit, self.passed, decided, lease_seconds=lease_seconds, starts=starts)


class Flooder(AppendingClient):
    """One client. After the faults it goes on until something has passed."""

    def __init__(self, world: ShippedSimulation, flood: QuotaFlood, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.flood = flood

    async def connect_and_run(self) -> None:
        has_passed = False
        while not (self.world.is_stopping and has_passed):
            log = await self._connect()
            if log is not None:
                has_passed = await self._append_all(log)
                await log.close()

    async def run(self, log: AsyncClient) -> None:
        raise NotImplementedError

    async def _connect(self) -> AsyncClient | None:
        cluster, timeout = self.world.cluster, self.world.options.timeout
        try:
            return await AsyncClient.connect(cluster.servers, timeout=timeout, token=self.flood.token)
        except CutwaterError:
            await asyncio.sleep(AGAIN_SECONDS)
            return None

    async def _append_all(self, log: AsyncClient) -> bool:
        """Append until it is time to stop; return whether something has passed since the faults ended."""
        has_passed = False
        while not (self.world.is_stopping and has_passed):
            begin, is_healed = self.world.loop.now, self.world.is_healed
            op = self.begin(PLAIN, (1,))
            values = h.values_of(op, bytes(PADDING_BYTES))
            await self.settle(op, log.append(PLAIN, values, timestamp=h.times_of(op)))
            if op.outcome is SimOutcome.OK:
                self.flood.note(begin, sum(map(len, values)))
                has_passed = has_passed or is_healed
            elif self.world.is_stopping:
                break
            else:
                await asyncio.sleep(AGAIN_SECONDS)
        return has_passed
