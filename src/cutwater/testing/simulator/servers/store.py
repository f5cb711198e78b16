"""The simulated store of the metadata repository: linearizable, fenced, and as slow and lossy as the options say."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from cutwater.core.order.decisions import Cut, Decision
from cutwater.core.order.events import Store
from cutwater.core.order.state import Snapshot
from cutwater.testing.simulator.world import World
from cutwater.types import GLSN, DecisionIndex, LeaderEpoch, MetadataNodeId


class SimLoadedState(Struct, frozen=True):
    leader_epoch: LeaderEpoch
    snapshot: Snapshot
    decisions: tuple[Decision, ...]


class SimulatedStore:
    """``decisions`` holds everything ever stored, for the checkers; clients get the snapshot and what follows it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leader_epoch = LeaderEpoch(0)
        self.decisions: list[Decision] = []
        self.high_watermark = GLSN(0)
        self._snapshot = Snapshot()
        self.is_rolled_back = False

    @property
    def last_index(self) -> DecisionIndex:
        return DecisionIndex(len(self.decisions))

    def acquire(self, node: MetadataNodeId, seen: LeaderEpoch) -> SimLoadedState | None:
        """Become leader unless another node has meanwhile; return what is stored."""
        if self.leader_epoch != seen:
            return None
        self.leader_epoch = LeaderEpoch(self.leader_epoch + 1)
        self.world.trace("leader", node, self.leader_epoch)
        return SimLoadedState(self.leader_epoch, self._snapshot, tuple(self.decisions[self._snapshot.index :]))

    def append(self, write: Store, done: Callable[[DecisionIndex | None], None]) -> None:
        """Append. ``done`` gets the index of the last decision, or None after a refusal; it may never be called."""
        delay = 100 + int(self.world.rng.random() * self.world.options.store_us_max)
        self.world.after(delay // 2, self._append, write, done, delay - delay // 2)

    def _append(self, write: Store, done: Callable[[DecisionIndex | None], None], delay: int) -> None:
        index = self._write(write)
        if not self.world.chance(self.world.options.store_lost_reply):
            self.world.after(delay, done, index)

    def _write(self, write: Store) -> DecisionIndex | None:
        if write.leader_epoch != self.leader_epoch:
            return None
        end = write.after + len(write.decisions)
        if self.last_index == write.after:
            self.decisions.extend(write.decisions)
            for decision in write.decisions:
                if isinstance(decision, Cut):
                    self.high_watermark = decision.high_watermark
            self.world.trace("stored", write.leader_epoch, self.last_index, self.high_watermark)
            return self.last_index
        if self.last_index == end and tuple(self.decisions[write.after :]) == write.decisions:
            # The same decisions again: the first answer was lost.
            return self.last_index
        return None

    def roll_back(self, index: DecisionIndex) -> SimLoadedState:
        """Restore the store to its state after this decision, except the leader's epoch. Returns the state before."""
        newest = SimLoadedState(self.leader_epoch, self._snapshot, tuple(self.decisions))
        del self.decisions[index:]
        self._snapshot = Snapshot() if self._snapshot.index > index else self._snapshot
        self._find_high_watermark()
        self.is_rolled_back = True
        self.world.trace("rolled back", index, self.high_watermark)
        return newest

    def put_back(self, newest: SimLoadedState) -> None:
        """Restore the store to its state before ``roll_back``, except the leader's epoch."""
        self.decisions, self._snapshot = list(newest.decisions), newest.snapshot
        self._find_high_watermark()
        self.is_rolled_back = False
        self.world.trace("put back", self.last_index, self.high_watermark)

    def _find_high_watermark(self) -> None:
        cuts = (decision.high_watermark for decision in self.decisions if isinstance(decision, Cut))
        self.high_watermark = max(cuts, default=GLSN(0))

    def compact(self, leader_epoch: LeaderEpoch, snapshot: Snapshot) -> None:
        if leader_epoch == self.leader_epoch and snapshot.index > self._snapshot.index:
            self._snapshot = snapshot
