"""Memory for what has to be decompressed: bodies on their way in that are checked, and columns that readers pick.

The memory of a storage node for this has a limit. Requests wait for memory in turn, for a short time, and are then told
to try again: a few requests for small bodies that become large ones cannot fill the machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from cutwater.errors import ResourceExhausted

BUDGET_BYTES: Final = 512 * 1024 * 1024
"""Twice what a single body may become: there are its columns, and what is made of them."""
WAIT_SECONDS: Final = 2.0
WAITING_MAX: Final = 256
RETRY_MS: Final = 200
LARGE_BYTES: Final = 16 * 1024 * 1024
"""After this many bytes, the memory that the allocator keeps for later is given back."""


class MemoryBudget:
    """Belongs to one event loop. First come, first served: a large request is not overtaken by small ones for ever."""

    def __init__(self, bytes_max: int = BUDGET_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes that are reserved now."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserved(self, size: int, seconds: float = WAIT_SECONDS) -> AsyncIterator[None]:
        """Reserve ``size`` bytes as long as the block lasts; at most ``bytes_max``."""
        size = min(size, self.bytes_max)
        await self._take(size, seconds)
        try:
            yield
        finally:
            if size >= LARGE_BYTES:
                release_unused()
            self.bytes -= size
            self._wake()

    async def _take(self, size: int, seconds: float) -> None:
        if not size:
            # It takes nothing from those that wait.
            return
        if not self._waiting and self.bytes + size <= self.bytes_max:
            self.bytes += size
            return
        if len(self._waiting) >= WAITING_MAX:
            raise self._exhausted(size)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # It was given at the last moment.
                self.bytes -= size
            self._waiting = deque(one for one in self._waiting if one[1] is not turn)
            self._wake()
            if isinstance(error, TimeoutError):
                raise self._exhausted(size) from None
            raise

    def _wake(self) -> None:
        while self._waiting and self.bytes + self._waiting[0][0] <= self.bytes_max:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.bytes += size
                turn.set_result(None)

    def _exhausted(self, size: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"{size} bytes are needed to decompress what is asked for, and {self.bytes} of {self.bytes_max} are in use",
            retry_ms=RETRY_MS,
        )


def release_unused() -> None:
    """What the allocator of Arrow keeps for later; nothing if nobody has used Arrow yet."""
    if "pyarrow" in sys.modules:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415

        pa.default_memory_pool().release_unused()
