"""A cursor: the position of a consumer, kept in the cluster under a name."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cutwater.client.arguments import check_number
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.names import check_name
from cutwater.core.requests import CommitCursorRequest, CursorAt, Done, DropCursorRequest, ReadCursorRequest
from cutwater.errors import InvalidArgument
from cutwater.runtime.deadlines import Deadline, check_timeout
from cutwater.types import GLSN


class NamedCursor(ABC):
    """A position from which a subscription may start. Cursors of the same name are the same, whichever client uses
    them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the cluster keeps it."""


class AsyncCursor(NamedCursor):
    """Holds the last GLSN that its consumer has processed. ``subscribe(..., start=cursor)`` continues after it."""

    def __init__(self, repository: Repository, name: str, timeout: float) -> None:
        check_name("cursor", name)
        self._repository, self._name, self._timeout = repository, name, timeout

    @property
    def name(self) -> str:
        return self._name

    async def get(self, *, timeout: float | None = None) -> GLSN | None:
        """Return the position of the cursor; None if nothing was ever committed under its name."""
        at = await self._repository.ask(ReadCursorRequest(self.name), CursorAt, timeout_ms=self._ms(timeout))
        return at.glsn

    async def commit(self, glsn: int, *, timeout: float | None = None) -> None:
        """Note that everything up to this GLSN is processed; 0 means nothing yet. Durable when it returns."""
        glsn = check_number("glsn", glsn, "a position")
        if glsn < 0:
            raise InvalidArgument(f"a cursor cannot be at GLSN {glsn}: positions begin with 1, and 0 is before them")
        request = CommitCursorRequest(self.name, GLSN(glsn))
        await self._repository.ask(request, Done, timeout_ms=self._ms(timeout))

    async def drop(self, *, timeout: float | None = None) -> None:
        """Forget the cursor."""
        await self._repository.ask(DropCursorRequest(self.name), Done, timeout_ms=self._ms(timeout))

    def _ms(self, timeout: float | None) -> int:
        return Deadline(check_timeout(self._timeout if timeout is None else timeout)).left_ms()
