"""Rolls the store of the metadata repository back, as when an old backup is restored. Then no client may get an answer
that is older than an earlier one, nothing may be decided, and the leader must halt. Finally the newest store is
restored, as the halt advises, and the cluster continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutwater.core.order.decisions import Seal
from cutwater.core.order.state import OrderState
from cutwater.testing.checkers.guarantees import check_answers
from cutwater.testing.checkers.violation import Violation
from cutwater.types import MILLISECOND, SECOND, DecisionIndex

if TYPE_CHECKING:
    from cutwater.testing.simulator.cluster import SimCluster

SETTLE_US = 600 * MILLISECOND
NOTICE_US = 3 * SECOND
AFTER_US = 500 * MILLISECOND


def run(cluster: SimCluster) -> bool:
    """Roll the store back. Returns whether the cluster can continue: only a store that remembers allows recovery."""
    world, rng = cluster.world, cluster.nemesis.rng
    world.run_until(world.now + SETTLE_US)
    for node in cluster.metadata_nodes:
        node.kill()
    # Let the replicas write what they were told before they are compared with the store.
    world.run_until(world.now + 50 * MILLISECOND)
    index = _older(cluster)
    if index is None:
        return False
    newest = cluster.store.roll_back(index)
    for process in cluster.storage_nodes:
        if rng.random() < 0.5:
            process.kill()
            world.after(rng.randint(0, 100) * MILLISECOND, process.start)
    for node in cluster.metadata_nodes:
        node.start()

    def has_halted() -> bool:
        leader = cluster.leader()
        return leader is not None and leader.halted is not None

    if not world.run_until(world.now + NOTICE_US, has_halted):
        raise Violation("12 one cut sequence", f"no leader noticed that the store was rolled back to decision {index}")
    world.run_until(world.now + AFTER_US)
    check_answers(cluster.record)
    decided = cluster.store.decisions[index:]
    if not all(isinstance(decision, Seal) for decision in decided):
        raise Violation("12 one cut sequence", f"a store that was rolled back to decision {index} went on: {decided}")
    if decided:
        # Storage nodes that were silent for long were excluded by seals, and may know that.
        return False
    for node in cluster.metadata_nodes:
        node.kill()
    cluster.store.put_back(newest)
    for node in cluster.metadata_nodes:
        # The rolled-back store had no snapshot, so the history held all commits of the past.
        node.history_max = 0
        node.start()
    return True


def _older(cluster: SimCluster) -> DecisionIndex | None:
    """Return a decision after which every member of some open stream has committed more, so that the first member to
    report reveals the rollback."""
    index = int(len(cluster.store.decisions) * (0.3 + 0.6 * cluster.nemesis.rng.random()))
    nodes = {node.node: node for node in cluster.storage_nodes}
    while index > 0:
        state = OrderState(None, cluster.store.decisions[:index])
        for stream in state.streams.values():
            disks = [nodes[node].disks.get(stream.stream) for node in stream.members]
            if stream.is_open and all(d is not None and d.synced_committed_end() > stream.committed_end for d in disks):
                return DecisionIndex(index)
        index = index * 4 // 5
    return None
