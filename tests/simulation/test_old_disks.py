"""A storage node whose disk is as it was some starts ago counts its starts from there, and is heard all the same."""

from __future__ import annotations

import asyncio
from unittest import mock

from cutwater.testing.virtual.nemesis import VirtualNemesis
from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped

SEED = 1


def test_a_node_that_counts_its_starts_from_an_old_disk_is_heard() -> None:
    right = VirtualNemesis.start

    def start(self: VirtualNemesis) -> None:
        right(self)

        async def put_back() -> None:
            machine = self._cluster.nodes[0]
            before = machine.disk.copy()
            for _ in range(2):
                await asyncio.sleep(0.8)
                machine.kill()
                await asyncio.sleep(0.05)
                machine.start()
            await asyncio.sleep(1.0)
            machine.kill()
            machine.replace_disk(before, "gets its disk back as it was")
            machine.start()

        self._tasks.append(self._world.loop.create_task(put_back()))

    # The option says that an alarm is right; it may put back another disk, too.
    options = ShippedOptions(metadata_nodes=1, producers=0, seconds=4.0, reads_every=1.0, disk_loss="old")
    with mock.patch.object(VirtualNemesis, "start", start):
        result = simulate_shipped(SEED, options)
    assert result.violation is None, f"seed {SEED}: {result.violation}"
