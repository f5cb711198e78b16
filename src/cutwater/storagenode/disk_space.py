"""Room on the volumes: a node that runs short of it takes no more records, before it can no longer write anything.

Reads and commits go on then. The reserve is for what must be written all the same: commit contexts, hard state, and the
entries that were taken already.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from cutwater.protocol.storage_api import VolumeRoom
from cutwater.types import NodeState

MIB = 1024 * 1024
RESERVE_BYTES = 64 * MIB
RESUME_MARGIN_BYTES_MIN = 4 * MIB
LOOK_EVERY_SECONDS = 0.25
FULL_FOR_SECONDS_MIN = 2.0
"""After a write found no room. A quota, say, is not seen by looking at the file system."""

InThread = Callable[[Callable[[], tuple[VolumeRoom, ...]]], Awaitable[tuple[VolumeRoom, ...]]]


class RoomWatch:
    """``volumes`` tells which there are now; ``on_change`` is told the new state of the node and why; ``backlog`` tells
    what was taken and is not written; ``in_thread`` does something elsewhere than on the event loop."""

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
        """More than the reserve, so that the node does not change its mind with every record."""
        self._on_change, self._backlog, self._in_thread = on_change, backlog, in_thread
        self._free_bytes = 0
        """Where there is least of it, as far as is known since the last look."""
        self._state = NodeState.READY
        self._full_until = 0.0

    def look(self) -> None:
        """How much room there is now."""
        try:
            self.judge(measure(self._volumes()))
        except OSError as error:
            self._cannot_look(error)

    async def watch(self) -> None:
        while True:
            await self.look_aside()
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def look_aside(self) -> None:
        """The same in another thread: a file system may hang."""
        try:
            self.judge(await self._in_thread(partial(measure, self._volumes())))
        except OSError as error:
            self._cannot_look(error)

    def _cannot_look(self, error: OSError) -> None:
        self._become(NodeState.READ_ONLY, f"a volume cannot be used any more: {error}")

    def take(self, size: int) -> None:
        """So much is about to be written. Near the end, one look per batch is not too much."""
        self._free_bytes -= size
        if self._free_bytes < self._reserve_bytes and self._state is NodeState.READY:
            self.look()

    def has(self, size: int) -> bool:
        """Whether so much can be written and the reserve is still there, as far as is known."""
        return self._state is NodeState.READY and self._free_bytes - size >= self._reserve_bytes

    def found_full(self) -> None:
        """A write found no room, whatever the file system says."""
        self._full_until = time.monotonic() + FULL_FOR_SECONDS_MIN
        self._become(NodeState.READ_ONLY, "a write found no room")

    def judge(self, rooms: tuple[VolumeRoom, ...]) -> None:
        self.rooms = rooms
        tightest = min(rooms, key=lambda room: room.free_bytes)
        self._free_bytes = tightest.free_bytes - self._backlog()
        free = f"{max(0, self._free_bytes) // MIB} MiB are free on {tightest.path}"
        if self._free_bytes < self._reserve_bytes:
            self._become(NodeState.READ_ONLY, f"{free}, less than the reserve of {self._reserve_bytes // MIB} MiB")
        elif self._free_bytes >= self._resume_bytes and time.monotonic() >= self._full_until:
            self._become(NodeState.READY, free)

    def _become(self, state: NodeState, why: str) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(state, why)


def measure(volumes: Sequence[Path]) -> tuple[VolumeRoom, ...]:
    rooms = []
    for volume in volumes:
        stats = os.statvfs(volume)
        rooms.append(VolumeRoom(str(volume), stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize))
    return tuple(rooms)
