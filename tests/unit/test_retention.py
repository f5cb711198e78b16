"""Which position retention trims at: from the answers of replicas alone, some of which may be behind."""

from __future__ import annotations

import asyncio

from order_driver import LS1, LS2, N1, T1, cluster_of

from cutwater.core.order import decisions as d
from cutwater.core.order.state import OrderState
from cutwater.core.requests import Answer, Done, Request, TrimRequest
from cutwater.metadata.retention import RetentionTrimmer
from cutwater.protocol.storage_api import FindAnswer, FindArguments
from cutwater.types import GLSN, SECOND, LogStreamId
from cutwater.types import Retention as Keep


class Asked(RetentionTrimmer):
    """Answers as the test says, instead of asking storage nodes."""

    def __init__(
        self, state: OrderState, answers: dict[LogStreamId, FindAnswer], within: dict[LogStreamId, int]
    ) -> None:
        self.decided: list[Request] = []
        self.shares: dict[LogStreamId, int] = {}
        self._answers, self._within = answers, within

        async def decide(request: Request) -> Answer:
            self.decided.append(request)
            return Done()

        async def connect(address: str) -> object:
            raise AssertionError(address)

        super().__init__(state, connect, decide)  # type: ignore[arg-type]

    async def _ask(self, stream: object, arguments: FindArguments) -> FindAnswer:
        answer = self._answers[arguments.stream]
        if not arguments.bytes_max:
            return answer
        self.shares[arguments.stream] = arguments.bytes_max
        return FindAnswer(GLSN(self._within[arguments.stream]), answer.complete_through, answer.size_bytes)


def state(keep: Keep, cuts: list[dict[LogStreamId, int]]) -> OrderState:
    decisions = cluster_of({LS1: (N1,), LS2: (N1,)}, cuts=cuts)
    return OrderState(None, [*decisions, d.ChangeTopic(T1, 0, keep)])


def trims(asked: Asked) -> list[int]:
    asyncio.run(asked.enforce())
    return [request.before for request in asked.decided if isinstance(request, TrimRequest)]


def test_what_a_replica_has_not_heard_of_yet_is_kept() -> None:
    found = state(Keep(time_us=SECOND), [{LS1: 5}, {LS1: 1}])
    assert found.high_watermark == 6
    behind = {LS1: FindAnswer(None, GLSN(5))}
    assert trims(Asked(found, behind, {})) == [6], "GLSN 6 is new, and the replica has applied 5"


def test_the_oldest_stream_decides() -> None:
    found = state(Keep(time_us=SECOND), [{LS1: 5, LS2: 5}])
    answers = {LS1: FindAnswer(GLSN(4), GLSN(10)), LS2: FindAnswer(GLSN(9), GLSN(10))}
    assert trims(Asked(found, answers, {})) == [4]


def test_a_topic_below_its_size_is_left_alone_and_shares_follow_sizes() -> None:
    cuts = [{LS1: 5, LS2: 5}]
    answers = {LS1: FindAnswer(GLSN(1), GLSN(10), 600), LS2: FindAnswer(GLSN(6), GLSN(10), 6)}
    assert trims(Asked(state(Keep(bytes=1_000), cuts), answers, {LS1: 3, LS2: 6})) == []
    asked = Asked(state(Keep(bytes=303), cuts), answers, {LS1: 3, LS2: 6})
    assert trims(asked) == [3]
    assert asked.shares == {LS1: 300, LS2: 3}


def test_a_topic_with_nothing_left_is_not_trimmed_again() -> None:
    found = state(Keep(time_us=SECOND), [{LS1: 5}])
    found.apply(d.Trim(T1, GLSN(6)))
    assert trims(Asked(found, {}, {})) == []
