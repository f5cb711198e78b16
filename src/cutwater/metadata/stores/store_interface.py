"""The interface of the metadata store: one sequence of decisions, a snapshot of its beginning, and the leader.

The leader epoch fences writers. It only grows, by compare-and-swap, and every write names the epoch of its writer. A
write of a deposed leader is refused, however late it arrives. Clocks play no part in this.

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
"""Default time limit of a call."""

TRIM_TIMEOUT_MS = 30_000
"""Time limit of a trim: a snapshot may be large, and no client waits for it."""


class LeaderInfo(Struct, frozen=True):
    """The leader and its address. In epoch 0 there has never been a leader."""

    epoch: LeaderEpoch
    node: MetadataNodeId
    address: str


NO_LEADER = LeaderInfo(LeaderEpoch(0), MetadataNodeId(0), "")


class LoadedState(Struct, frozen=True):
    """Everything stored, as of one moment. ``decisions`` are those after ``snapshot.index``, without a gap."""

    leader: LeaderInfo
    snapshot: Snapshot
    decisions: tuple[Decision, ...]


AppendTold = Callable[[Exception | None], None]


class MetadataStore(Protocol):
    """Stores decisions. All calls are made on the event loop's thread and never block it.

    When a call's time is up it raises ``DeadlineExceeded``. A write may then have happened or not, and may still happen
    until another epoch leads. When the store cannot serve the call now, it raises another ``Unavailable``. ``close``
    ends all calls in progress with ``Unavailable``.
    """

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo: ...

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        """Become the leader in the epoch that is returned. It is durable, and all earlier epochs are fenced. Raises
        ``LeaderFenced`` if ``seen`` is not the current epoch, because another node was faster."""

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState: ...

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
        result may have been lost. Raises ``ResourceExhausted`` if too many decisions are not trimmed."""

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        """Append without a task, if the store is local. Returns False if nothing was begun. Otherwise ``told`` is
        called once with the outcome, possibly before this returns. After an error the caller calls ``append``, which
        raises the error again or succeeds."""

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        """Replace all decisions up to the index of the snapshot by the snapshot. Appends continue meanwhile. A snapshot
        older than the stored one changes nothing. Raises ``LeaderFenced`` if another epoch leads."""

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Publish this node's public key to the other metadata nodes, durably; it replaces an earlier one. The node
        need not lead: a process that can write to the store counts as a metadata node."""

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        """Return the public keys of all metadata nodes that have announced one."""

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        """Yield the current leader, then every later one as soon as it is known. Skips epochs that are already over.
        Continues while the store cannot be reached; ends with ``Unavailable`` when the store is closed."""

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """End calls in progress and release files and connections. A second call does nothing."""
