"""Notes on which day each token was used last: at most once a day for each token, and many together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cutwater.core.access.access_requests import NoteTokenUseRequest
from cutwater.core.access.principals import DAY_US
from cutwater.errors import CutwaterError
from cutwater.runtime import system

_log = logging.getLogger(__name__)

TELL_SECONDS = 10.0

Tell = Callable[[NoteTokenUseRequest], Awaitable[object]]


class TokenUse:
    """The use of tokens at one server. Nothing is lost if it is told late, or twice."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    def note(self, token: str) -> None:
        today = system.wall_time_ns() // 1_000 // DAY_US
        if self._told.get(token, -1) < today:
            self._pending[token] = today

    async def tell(self, tell: Tell) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        try:
            await tell(NoteTokenUseRequest(pending))
        except CutwaterError as error:
            _log.info("the use of tokens cannot be noted now: %s", error.message)
            self._pending = {**pending, **self._pending}
            return
        # Only those of today matter: yesterday's would be noted again.
        latest = max(pending.values())
        self._told = {token: day for token, day in {**self._told, **pending}.items() if day >= latest}

    async def tell_for_ever(self, tell: Tell, *, every_seconds: float = TELL_SECONDS) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            await self.tell(tell)
