"""Puts an old copy of the metadata store back, as an operator might who restores a backup by mistake.

No client may then get an answer that is older than an earlier one, nothing may be decided, and the leader must halt.
Finally the newest store comes back, as the halt advises, and the cluster goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cutwater.core.order.decisions import Seal
from cutwater.core.order.state import OrderState
from cutwater.errors import OrderLayerLostMemory
from cutwater.testing.checkers.guarantees import check_answers
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.store import StoreCopy

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

SETTLE_SECONDS = 1.0
NOTICE_SECONDS = 15.0
AFTER_SECONDS = 0.5
LOOK_SECONDS = 0.02
DOWN_SECONDS_MAX = 0.1


async def roll_back(world: ShippedSimulation, backup: StoreCopy) -> bool:
    """Put the backup in place of the store for a while. Return whether the cluster can go on afterwards."""
    cluster, store, random = world.cluster, world.cluster.store, world.random
    await asyncio.sleep(SETTLE_SECONDS)
    _stop(world)
    # Storage nodes write what they were told before they are compared with the backup.
    await asyncio.sleep(0.1)
    newest = store.copy()
    if not _is_behind(world, backup):
        _start(world)
        return True
    world.note("the operator puts back an old copy of the store")
    store.put_back(backup)
    decided = store.separate = []
    for machine in cluster.nodes:
        if machine.is_running and random.random() < 0.5:
            machine.kill()
            world.loop.call_later(random.uniform(0.0, DOWN_SECONDS_MAX), machine.start)
    _start(world)
    await _until_halted(world)
    await asyncio.sleep(AFTER_SECONDS)
    check_answers(world.history)
    if not all(isinstance(decision, Seal) for decision in decided):
        raise Violation("12 one cut sequence", f"a leader on an old copy of its store decided {decided}")
    _stop(world)
    store.put_back(newest)
    store.separate = None
    world.note("the operator puts the newest store back")
    _start(world)
    world.loop.alarms[:] = [alarm for alarm in world.loop.alarms if not isinstance(alarm, OrderLayerLostMemory)]
    # Storage nodes that were silent for long were excluded by seals, which the newest store does not know of.
    return not decided


def _stop(world: ShippedSimulation) -> None:
    for machine in world.cluster.metadata:
        if machine.is_running:
            machine.kill()


def _start(world: ShippedSimulation) -> None:
    for machine in world.cluster.metadata:
        machine.start()


async def _until_halted(world: ShippedSimulation) -> None:
    deadline = world.loop.now + NOTICE_SECONDS
    while (leader := world.cluster.leader()) is None or leader.halted is None:
        if world.loop.now > deadline:
            raise Violation("12 one cut sequence", "no leader noticed that its store is an old copy")
        await asyncio.sleep(LOOK_SECONDS)


def _is_behind(world: ShippedSimulation, backup: StoreCopy) -> bool:
    """Whether every member of some open log stream has committed more than the backup knows, so that the first one to
    report reveals it."""
    state = OrderState(backup.snapshot, backup.decisions)
    for stream in state.streams.values():
        replicas = [world.replica(node, stream.stream) for node in stream.members]
        if stream.is_open and all(r is not None and r.durable_committed_end > stream.committed_end for r in replicas):
            return True
    return False
