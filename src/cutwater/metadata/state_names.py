"""Names of what requests name by number, from the leader's state."""

from __future__ import annotations

from collections.abc import Callable

from cutwater.core.order.state import OrderState
from cutwater.protocol.needs import RunNames
from cutwater.types import LogStreamId, RunId, TopicId


class StateNames:
    """See ``protocol.needs.NameLookup``. ``state`` returns the state, or None while this node does not lead."""

    def __init__(self, state: Callable[[], OrderState | None]) -> None:
        self._state = state

    def topic_of_stream(self, stream: LogStreamId) -> str | None:
        state = self._state()
        known = state.streams.get(stream) if state is not None else None
        return None if known is None else self.topic_of_number(known.topic)

    def topic_of_number(self, topic: TopicId) -> str | None:
        state = self._state()
        known = state.topics.get(topic) if state is not None else None
        return None if known is None else known.name

    def topic_of_part(self, part: str) -> str | None:
        return None

    def run(self, which: RunId | str) -> RunNames | None:
        state = self._state()
        if state is None:
            return None
        known = state.runs.with_key(which) if isinstance(which, str) else state.runs.get(which)
        return None if known is None else RunNames(known.name, known.opener or "")

    def job_of_operation(self, operation: str) -> str | None:
        state = self._state()
        known = state.jobs.operations.get(operation) if state is not None else None
        return None if known is None else known.name

    def principal_of_token(self, token: str) -> str | None:
        state = self._state()
        known = state.access.tokens.get(token) if state is not None else None
        return None if known is None else known.principal

    def conceal_stream(self, stream: LogStreamId) -> None:
        """Nothing differs: the leader knows all names at once."""

    def conceal_number(self, topic: TopicId) -> None:
        """Nothing differs."""
