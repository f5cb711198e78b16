"""The errands of one leader: questions to agents that are not answered, and answers that nobody has taken yet.

Identical questions of one principal are one errand, so a caller whose answer was lost asks again. An errand that nobody
asks for any more is given up.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from cutwater.core.jobs.errands import Errand
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import ResourceExhausted
from cutwater.types import SECOND, Instant

OPEN_MAX = 128
"""Number of errands. Each may have an answer of 1 MiB."""
OPEN_PER_PRINCIPAL_MAX = 16
OPEN_PER_ORDERS_MAX = 4
"""Number of errands that an agent gets at once, so that its orders fit into one message."""
ASKED_EVERY_US = 15 * SECOND
"""How long an errand is kept since it was last asked for."""


class OpenErrand(Struct):
    """An errand, the question from which it was made, and what came of it."""

    question: bytes
    errand: Errand
    agent: str
    session: int
    asked_at: int
    body: bytes | None = None
    error: OperationError | None = None

    @property
    def is_answered(self) -> bool:
        return self.body is not None or self.error is not None


class ErrandBoard:
    """See the module."""

    def __init__(self, jobs: JobRegistry) -> None:
        self._jobs = jobs
        self._open: dict[str, OpenErrand] = {}
        self._of_question: dict[bytes, str] = {}
        self._changed: dict[str, int] = {}
        """How often the errands of an agent have changed."""

    def find(self, question: bytes, now: Instant) -> OpenErrand | None:
        """Return the errand that was made from this question, and note that a caller wants it."""
        identifier = self._of_question.get(question)
        found = None if identifier is None else self._open[identifier]
        if found is not None:
            found.asked_at = now.monotonic
        return found

    def of(self, question: bytes) -> OpenErrand | None:
        identifier = self._of_question.get(question)
        return None if identifier is None else self._open[identifier]

    def get(self, identifier: str) -> OpenErrand | None:
        return self._open.get(identifier)

    def check_room(self, principal: str) -> None:
        own = sum(1 for known in self._open.values() if known.errand.principal == principal)
        if len(self._open) >= OPEN_MAX or own >= OPEN_PER_PRINCIPAL_MAX:
            raise ResourceExhausted(
                f"{len(self._open)} questions to agents are not answered ({own} of {principal or 'this caller'})",
                retry_ms=1_000,
            )

    def add(self, question: bytes, errand: Errand, agent: str, session: int, now: Instant) -> None:
        self._open[errand.id] = OpenErrand(question, errand, agent, session, now.monotonic)
        self._of_question[question] = errand.id
        self._note(agent)

    def answer(self, identifier: str, agent: str, body: bytes, error: OperationError | None) -> None:
        """Note an answer. One to an errand that was given up changes nothing."""
        found = self._open.get(identifier)
        if found is None or found.agent != agent or found.is_answered:
            return
        found.body, found.error = (None, error) if error is not None else (body, None)
        self._note(agent)

    def remove(self, identifier: str) -> None:
        """Remove an errand whose answer was taken, or that was given up."""
        found = self._open.pop(identifier, None)
        if found is not None:
            del self._of_question[found.question]
            self._note(found.agent)

    def for_agent(self, agent: str) -> tuple[Errand, ...]:
        """Return the oldest errands that an agent has not answered."""
        its = (known.errand for known in self._open.values() if known.agent == agent and not known.is_answered)
        return tuple(errand for errand, _ in zip(its, range(OPEN_PER_ORDERS_MAX), strict=False))

    def changes(self, agent: str) -> int:
        """Return how often the errands of the agent have changed."""
        return self._changed.get(agent, 0)

    def give_up(self, now: Instant) -> Iterator[str]:
        """Remove what nobody asks for any more, and errands to sessions that are over. Yield the agents concerned."""
        for identifier, known in tuple(self._open.items()):
            agent = self._jobs.agents.get(known.agent)
            is_over = agent is None or not agent.is_alive or agent.session != known.session
            if (is_over and not known.is_answered) or known.asked_at + ASKED_EVERY_US <= now.monotonic:
                self.remove(identifier)
                yield known.agent

    @property
    def is_empty(self) -> bool:
        return not self._open

    def _note(self, agent: str) -> None:
        self._changed[agent] = self._changed.get(agent, 0) + 1
