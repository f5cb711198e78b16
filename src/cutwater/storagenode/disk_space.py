"""Watches the free space of the volumes: a node that runs short refuses new records before writes can fail.

Reads and commits continue then. The reserve is for data that must still be written: commit contexts, hard state, and
entries that were already accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from cutwater.protocol.storage_api import VolumeRoom
from cutwater.runtime import system
from cutwater.types import NodeState

MIB = 1024 * 1024
RESERVE_BYTES = 64 * MIB
RESUME_MARGIN_BYTES_MIN = 4 * MIB
LOOK_EVERY_SECONDS = 0.25
FULL_FOR_SECONDS_MIN = 2.0
"""Minimum time to stay read-only after a write found no space. The file system does not show a quota, for example."""

InThread = Callable[[Callable[[], tuple[VolumeRoom, ...]]], Awaitable[tuple[VolumeRoom, ...]]]


class RoomWatch:
    """Watches free space. ``volumes`` returns the current volumes; ``on_change`` gets the new state of the node and the
    reason; ``backlog`` returns the bytes that were accepted and are not written yet; ``in_thread`` runs a function off
    the event loop."""

    def __init__(
        self,
        volumes: Callable[[], Sequence[Path]],
        reserve_bytes: int,
        on_change: Callable[[NodeState, str], None],
        backlog: Callable[[], int],
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self.rooms: tuple[VolumeRoom, ...] = ()
        self._volumes = volumes
        self._reserve_bytes = reserve_bytes
        self._resume_bytes = reserve_bytes + max(reserve_bytes // 4, RESUME_MARGIN_BYTES_MIN)
        """More than the reserve, so that the node does not change its state with every record."""
        self._on_change, self._backlog, self._in_thread = on_change, backlog, in_thread
        self._free_bytes = 0
        """Free bytes of the volume with the least: measured at the last look, less what was written since."""
        self._state = NodeState.READY
        self._full_until = 0.0

    def look(self) -> None:
        """Measure the free space now."""
        try:
            self.judge(measure(self._volumes()))
        except OSError as error:
            self._cannot_look(error)

    async def watch(self) -> None:
        while True:
            await self.look_aside()
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def look_aside(self) -> None:
        """Measure the free space in another thread: a file system may hang."""
        try:
            self.judge(await self._in_thread(partial(measure, self._volumes())))
        except OSError as error:
            self._cannot_look(error)

    def _cannot_look(self, error: OSError) -> None:
        self._become(NodeState.READ_ONLY, f"a volume cannot be used any more: {error}")

    def take(self, size: int) -> None:
        """Note that ``size`` bytes are about to be written. Near the limit, every batch may measure the free space."""
        self._free_bytes -= size
        if self._free_bytes < self._reserve_bytes and self._state is NodeState.READY:
            self.look()

    def has(self, size: int) -> bool:
        """Whether ``size`` bytes can be written without touching the reserve, as far as is known."""
        return self._state is NodeState.READY and self._free_bytes - size >= self._reserve_bytes

    def found_full(self) -> None:
        """Note that a write found no space, even if the file system reports some."""
        self._full_until = system.monotonic() + FULL_FOR_SECONDS_MIN
        self._become(NodeState.READ_ONLY, "a write found no room")

    def judge(self, rooms: tuple[VolumeRoom, ...]) -> None:
        self.rooms = rooms
        tightest = min(rooms, key=lambda room: room.free_bytes)
        self._free_bytes = tightest.free_bytes - self._backlog()
        free = f"{max(0, self._free_bytes) // MIB} MiB are free on {tightest.path}"
        if self._free_bytes < self._reserve_bytes:
            self._become(NodeState.READ_ONLY, f"{free}, less than the reserve of {self._reserve_bytes // MIB} MiB")
        elif self._free_bytes >= self._resume_bytes and system.monotonic() >= self._full_until:
            self._become(NodeState.READY, free)

    def _become(self, state: NodeState, why: str) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(state, why)


def measure(volumes: Sequence[Path]) -> tuple[VolumeRoom, ...]:
    rooms = []
    for volume in volumes:
        space = system.free_space(volume)
        rooms.append(VolumeRoom(str(volume), space.total_bytes, space.free_bytes))
    return tuple(rooms)
