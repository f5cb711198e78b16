"""Which appends of a lane travel together, and which do not wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cutwater.client.coalescing import Lane
from cutwater.client.deadlines import Deadline
from cutwater.client.parts import Single
from cutwater.core.requests import TopicInfo
from cutwater.types import GLSN, LLSN, Ack, Batch, EventTime, LogStreamId, TopicId

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOPIC = TopicInfo(TopicId(1), "t", GLSN(1), 1, 1)


class Sea:
    """Ships a batch at once, or not at all while it hangs; ``sizes`` are those of all batches that left."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.hangs = False

    def begin(self, shipment: Any, topic: Any, pin: Any, load: Any, deadline: Any, on_outcome: Any) -> bool:
        batch = load()
        self.sizes.append(batch.count)
        if not self.hangs:
            ack = Ack(GLSN(1), LLSN(1), LogStreamId(1), batch.count)
            asyncio.get_running_loop().call_soon(on_outcome, ack)
        return True


def lane_to(sea: Sea) -> Lane:
    return Lane(TOPIC, None, sea, lambda parts: Batch(len(parts), b"", 0, EventTime(0), EventTime(0)))  # type: ignore[arg-type]


def append(lane: Lane, count: int) -> list[asyncio.Task[Ack]]:
    part = Single(b"x", None, 0)
    return [asyncio.create_task(lane.append(part, 1, 1, Deadline(30))) for _ in range(count)]


async def test_few_appends_do_not_wait_for_a_batch_that_hangs() -> None:
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 10))
    sea.hangs = True
    stuck = append(lane, 10)
    while len(sea.sizes) < 2:
        await asyncio.sleep(0)
    sea.hangs = False
    (few,) = append(lane, 1)
    await asyncio.wait_for(few, 20)
    assert sea.sizes == [10, 10, 1]
    assert not any(task.done() for task in stuck)
    await lane.close()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_appends_of_one_turn_travel_together() -> None:
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 7))
    assert sea.sizes == [7]
    await lane.close()
