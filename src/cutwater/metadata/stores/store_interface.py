"""The store of the metadata repository: one sequence of decisions, a snapshot of its beginning, and who leads.

The leader epoch fences: it only grows, by compare-and-swap, and whoever writes names the epoch it was given. What a
deposed leader sends arrives too late, however long it was on its way. No clock is part of this.

Three implementations keep this contract, and one conformance suite runs on all of them: ``memory_store`` for tests,
``sqlite_store`` for a metadata repository of one node, ``etcd_store`` for one of several.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from msgspec import Struct

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.types import DecisionIndex, LeaderEpoch, MetadataNodeId

TIMEOUT_MS = 5_000
"""How long a call may take if the caller does not say."""

TRIM_TIMEOUT_MS = 30_000
"""A snapshot may be large, and nobody waits for it."""


class LeaderInfo(Struct, frozen=True):
    """Who leads, and where it is reached. In epoch 0 nobody has ever led."""

    epoch: LeaderEpoch
    node: MetadataNodeId
    address: str


NOBODY = LeaderInfo(LeaderEpoch(0), MetadataNodeId(0), "")


class Loaded(Struct, frozen=True):
    """What is stored, as of one moment. ``decisions`` are those after ``snapshot.index``, without a gap."""

    leader: LeaderInfo
    snapshot: Snapshot
    decisions: tuple[Decision, ...]


AppendTold = Callable[[Exception | None], None]


class MetadataStore(Protocol):
    """All calls are made on the event loop's thread and never block it.

    When the time of a call is up it raises ``DeadlineExceeded``; a write may then have happened or not, or may still
    happen, until another epoch leads. When the store cannot do it now, it raises another ``Unavailable``. ``close``
    ends all calls that are under way with ``Unavailable``.
    """

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo: ...

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        """Lead from now on, in the epoch that is returned; it is durable, and all earlier ones are fenced. Raises
        ``LeaderFenced`` if ``seen`` is not the present epoch: someone was faster."""

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> Loaded: ...

    async def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Store the decisions right after decision ``after``: all or none, durable on return. Without decisions,
        confirm against the store that the epoch leads. Raises ``LeaderFenced`` if another epoch leads, or if ``after``
        is not the last decision stored; but the last append may be repeated, decision for decision, because its first
        result may have been lost. Raises ``ResourceExhausted`` if too much is stored that was not trimmed."""

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        """The same without a task, if the store is near; False if nothing was begun. ``told`` is called once with the
        outcome, perhaps before this returns. Whoever gets an error calls ``append``, which gets it, too, or succeeds.
        """

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        """The snapshot takes the place of all decisions up to its index. Appends go on meanwhile. An older snapshot
        than the one stored changes nothing. Raises ``LeaderFenced`` if another epoch leads."""

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Let the other metadata nodes know the public key of this one, durably; it takes the place of an earlier
        one. It need not lead: a process that can write to the store counts as a metadata node."""

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        """The public keys of all metadata nodes that have announced one."""

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        """Who leads now, then whoever leads next, as soon as it is known. An epoch that is over by then is skipped.
        Goes on when the store cannot be reached for a while; ends with ``Unavailable`` when it is closed."""

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """End what is under way and let go of files and connections. A second time it does nothing."""
