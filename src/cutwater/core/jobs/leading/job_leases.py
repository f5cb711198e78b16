"""Leases of agents: how long each has been silent, by the monotonic clock of one leader.

A lease is for liveness only: the epoch of an assignment is what makes it safe. A new leader, and one that was itself
stopped, grants every agent a full lease, since it does not know what the agents sent meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.types import Instant


class JobLeases:
    """See the module. ``lease_us`` is the length of a lease."""

    def __init__(self, jobs: JobRegistry, lease_us: int) -> None:
        self._jobs, self.lease_us = jobs, lease_us
        self._heard: dict[str, tuple[int, int]] = {}
        """The last session that was heard of each agent, and when."""
        self._all_at: int | None = None
        """When all agents got a full lease. None: this leader has not begun to measure."""

    def hear(self, agent: str, session: int, now: Instant) -> None:
        """Note a request of an agent, when it arrives: a store that is slow does not end leases."""
        known = self._jobs.agents.get(agent)
        if known is not None and known.session == session:
            self._heard[agent] = (session, now.monotonic)

    def grant_all(self, now: Instant) -> None:
        """Grant every agent a full lease from now on."""
        self._all_at = now.monotonic

    def silence(self, agent: AgentRecord, now: Instant) -> int:
        """Return for how long the leader has not heard of an agent, at most since it granted all a lease."""
        session, at = self._heard.get(agent.name, (0, 0))
        if session != agent.session:
            # It registered under an earlier leader, which heard of it.
            at = self._begin(now)
        return max(0, now.monotonic - max(at, self._begin(now)))

    def expired(self, now: Instant) -> Iterator[AgentRecord]:
        """Yield the agents whose leases have ended."""
        self._begin(now)
        for agent in tuple(self._jobs.agents.values()):
            if agent.is_alive and self.silence(agent, now) >= self.lease_us:
                yield agent

    def forget(self) -> None:
        """Forget agents that were removed."""
        self._heard = {name: heard for name, heard in self._heard.items() if name in self._jobs.agents}

    def _begin(self, now: Instant) -> int:
        if self._all_at is None:
            self._all_at = now.monotonic
        return self._all_at
