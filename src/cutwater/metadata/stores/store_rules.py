"""Rules that all stores share: when a write is refused, and which decisions remain after a trim.

A trim keeps the batch in which the snapshot ends, although the snapshot contains all of it or its beginning. Batches
are stored whole, and the last one must remain so that a repeated append is recognized.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import InvalidArgument, LeaderFenced
from cutwater.metadata.stores.encoding import StoredBatch
from cutwater.metadata.stores.store_errors import DamagedStore
from cutwater.metadata.stores.store_interface import NO_LEADER, LeaderInfo, LoadedState
from cutwater.types import DecisionIndex, LeaderEpoch


def too_late(leader: LeaderInfo, seen: LeaderEpoch) -> LeaderFenced:
    return LeaderFenced(f"{_led_by(leader)}, so no node can take over from epoch {seen}: read the leader again")


def require_leader(leader: LeaderInfo, epoch: LeaderEpoch) -> None:
    if leader.epoch != epoch or epoch == NO_LEADER.epoch:
        raise LeaderFenced(f"{_led_by(leader)}, so nothing can be stored in epoch {epoch}: step down")


def elsewhere(last: DecisionIndex, after: DecisionIndex) -> LeaderFenced:
    return LeaderFenced(
        f"the last decision stored is {last}, so nothing can follow decision {after}: step down and load what is stored"
    )


def not_stored(snapshot: Snapshot, last: DecisionIndex) -> InvalidArgument:
    return InvalidArgument(
        f"a snapshot of decision {snapshot.index} cannot be stored, because the last decision stored is {last}: "
        "store the decisions first"
    )


def loaded(leader: LeaderInfo, snapshot: Snapshot, batches: Iterable[StoredBatch], where: str) -> LoadedState:
    """Return what is stored, after checking that it is consistent: the batches hold all decisions after the snapshot
    without a gap, and no batch has a later epoch than the leader."""
    decisions: list[Decision] = []
    end: DecisionIndex | None = None
    for batch in batches:
        if batch.epoch > leader.epoch:
            raise DamagedStore(where, f"decision {batch.first} is of epoch {batch.epoch}, but {_led_by(leader)}")
        if end is None and batch.first > snapshot.index + 1:
            raise DamagedStore(where, f"decisions {snapshot.index + 1} to {batch.first - 1} are missing")
        if end is not None and batch.first != end + 1:
            raise DamagedStore(where, f"decision {batch.first} follows decision {end}")
        end = batch.end
        decisions += batch.decisions[max(0, snapshot.index + 1 - batch.first) :]
    if snapshot.index > (end or 0):
        raise DamagedStore(where, f"the snapshot is of decision {snapshot.index}, but the last one is {end or 0}")
    return LoadedState(leader, snapshot, tuple(decisions))


def _led_by(leader: LeaderInfo) -> str:
    return f"metadata node {leader.node} leads in epoch {leader.epoch}" if leader.epoch else "no node has ever led"
