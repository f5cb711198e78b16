"""Limits the memory for decompression: for checking incoming bodies, and for columns that readers select.

Requests wait for memory in turn, for a short time, and are then told to try again. So a few requests for small bodies
that expand to large ones cannot fill the memory of the machine.
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
"""Twice the largest size of a single decompressed body: it holds the columns and what is made from them."""
WAIT_SECONDS: Final = 2.0
WAITING_MAX: Final = 256
RETRY_MS: Final = 200
LARGE_BYTES: Final = 16 * 1024 * 1024
"""After a reservation of at least this many bytes, memory that the allocator keeps is returned to the system."""


class MemoryBudget:
    """Belongs to one event loop. First come, first served, so small requests cannot overtake a large one forever."""

    def __init__(self, bytes_max: int = BUDGET_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes that are reserved now."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserved(self, size: int, seconds: float = WAIT_SECONDS) -> AsyncIterator[None]:
        """Reserve ``size`` bytes, at most ``bytes_max``, while the block runs."""
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
            # It takes nothing from requests that wait.
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
                # The memory was granted at the last moment.
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
    """Give unused memory of Arrow's allocator back to the system, if Arrow was imported at all."""
    if "pyarrow" in sys.modules:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415

        pa.default_memory_pool().release_unused()
