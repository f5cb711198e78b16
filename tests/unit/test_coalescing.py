"""Which appends of a lane travel together, which do not wait for each other, and what each of them is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cutwater.client.append import batcher
from cutwater.client.append.batcher import QUOTA_DIVISOR, BatchQueue, RoutedAppend
from cutwater.client.append.plain_arrow import AppendRecords, Single
from cutwater.client.append.sender import Shipment
from cutwater.client.errors import ClientClosed
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, DeadlineExceeded, QuotaExceeded, StreamSealed
from cutwater.types import GLSN, LLSN, Ack, Batch, EventTime, LogStreamId, TopicId

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOPIC = TopicInfo(TopicId(1), "t", GLSN(1), 1, 1)


class Sea:
    """Ships a batch at once, or not at all while it hangs; ``sizes`` are those of all batches that left. Answers with
    ``refusal`` if there is one. While it is unreachable, nothing is loaded."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.hangs = self.is_unreachable = False
        self.refusal: Exception | None = None
        self.shipments: list[Shipment] = []
        self.others = False

    def has_way_around(self, topic: Any, pin: Any) -> bool:
        return self.others

    def send(self, shipment: Shipment) -> None:
        self.shipments.append(shipment)
        if self.is_unreachable:
            shipment.trouble = "it cannot be reached"
            return
        try:
            self.sizes.append(shipment.load().count)
        except Exception as error:
            shipment.end(error)
            return
        shipment.may_have_arrived = True
        if self.refusal is not None:
            asyncio.get_running_loop().call_soon(shipment.end, self.refusal)
        elif not self.hangs:
            ack = Ack(GLSN(sum(self.sizes[:-1]) + 1), LLSN(1), LogStreamId(1), self.sizes[-1])
            asyncio.get_running_loop().call_soon(shipment.end, ack)


def encoded(parts: Sequence[AppendRecords]) -> Batch:
    return Batch(len(parts), b"", 0, EventTime(0), EventTime(0))


def lane_to(sea: Sea, encode: Callable[[Sequence[AppendRecords]], Batch] = encoded) -> BatchQueue:
    return BatchQueue(TOPIC, None, sea, encode, 1_000)  # type: ignore[arg-type]


def append(lane: BatchQueue, count: int, seconds: float = 30) -> list[asyncio.Task[Ack]]:
    async def one() -> Ack:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Ack] = loop.create_future()
        at = loop.time() + seconds
        assert lane.take(RoutedAppend(Single(b"x", None, 0), 1, 1, seconds, outcome, at, topic=TOPIC, pin=None))
        return await outcome

    return [asyncio.create_task(one()) for _ in range(count)]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def test_few_appends_do_not_wait_for_a_batch_that_hangs() -> None:
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 10))
    sea.hangs = True
    stuck = append(lane, 10)
    await until(lambda: len(sea.sizes) == 2)
    sea.hangs = False
    (few,) = append(lane, 1)
    await asyncio.wait_for(few, 20)
    assert sea.sizes == [10, 10, 1]
    assert not any(task.done() for task in stuck)
    lane.close()
    for task in stuck:
        task.cancel()


@pytest.mark.parametrize("others", [True, False])
async def test_batches_that_hang_hold_nobody_up_if_another_log_stream_takes_appends(others: bool) -> None:
    sea = Sea()
    lane = lane_to(sea)
    sea.hangs = True
    stuck: list[asyncio.Task[Ack]] = []
    for number in (1, 2):
        stuck += append(lane, 3)
        await until(lambda number=number: len(sea.sizes) == number)  # type: ignore[misc]
    sea.hangs, sea.others = False, others
    waiting = append(lane, 2)
    await asyncio.sleep(0.1)
    assert sea.sizes == [3, 3], "as long as they are not slow, two are under way"
    for shipment in sea.shipments:
        shipment.is_slow = True
        shipment.note_slow()
    await asyncio.sleep(0.02)
    if others:
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert sea.sizes == [3, 3, 2]
    else:
        assert sea.sizes == [3, 3], "there is nowhere else to go"
    lane.close()
    for task in (*stuck, *waiting):
        task.cancel()


async def test_appends_of_one_turn_travel_together_and_each_hears_of_its_own() -> None:
    sea = Sea()
    lane = lane_to(sea)
    acks = await asyncio.gather(*append(lane, 7))
    assert sea.sizes == [7]
    assert [ack.glsn for ack in acks] == list(range(1, 8))
    lane.close()
    with pytest.raises(ClientClosed):
        await append(lane, 1)[0]


async def test_a_failure_is_told_to_all_and_holds_nobody_up() -> None:
    sea, fails = Sea(), list[bool]()

    def encode(parts: Sequence[AppendRecords]) -> Batch:
        if fails and fails.pop(0):
            raise MemoryError("there is none")
        return encoded(parts)

    lane = lane_to(sea, encode)
    # More of them than may be in flight.
    for _ in range(4):
        fails = [True]
        outcomes = await asyncio.gather(*append(lane, 2), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [MemoryError] * 2
    for _ in range(4):
        sea.refusal = StreamSealed("sealed")
        outcomes = await asyncio.gather(*append(lane, 2), return_exceptions=True)
        assert outcomes == [sea.refusal] * 2
    sea.refusal = None
    assert lane.is_idle
    assert lane.bytes == 0
    assert (await append(lane, 1)[0]).count == 1
    lane.close()


async def test_who_gives_up_in_the_queue_is_left_out() -> None:
    sea = Sea()
    lane = lane_to(sea)
    given_up, stays = append(lane, 1), append(lane, 2)
    await asyncio.sleep(0)
    given_up[0].cancel()
    await asyncio.gather(*stays)
    assert sea.sizes == [2]
    given_up = append(lane, 3)
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await until(lambda: lane.is_idle)
    assert sea.sizes == [2]
    lane.close()


async def test_whose_time_is_up_hears_whether_it_may_have_arrived() -> None:
    sea = Sea()
    lane = lane_to(sea)
    sea.hangs = True
    with pytest.raises(AppendUnknown, match="no answer came within"):
        await append(lane, 1, 0.02)[0]
    sea.is_unreachable = True
    with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s: it cannot be reached"):
        await append(lane, 1, 0.02)[0]
    # Two are under way, so this one does not leave the queue.
    with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s$"):
        await append(lane, 1, 0.02)[0]
    late = append(lane, 1)
    await asyncio.sleep(0)
    lane.close()
    with pytest.raises(ClientClosed):
        await late[0]


async def test_batches_are_small_while_a_quota_of_bytes_holds() -> None:
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 20))
    sea.shipments[0].note_quota(QuotaExceeded("ann", "bytes_in_per_s", 5 * QUOTA_DIVISOR, 0.1))
    await asyncio.gather(*append(lane, 20))
    assert sea.sizes == [20, 5, 5, 5, 5]
    lane.close()


async def test_batches_are_as_large_as_usual_when_the_quota_was_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "QUOTA_SECONDS", 0.0)
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 20))
    sea.shipments[0].note_quota(QuotaExceeded("ann", "bytes_in_per_s", 5 * QUOTA_DIVISOR, 0.1))
    await asyncio.sleep(0.01)
    await asyncio.gather(*append(lane, 20))
    assert sea.sizes == [20, 20]
    lane.close()


async def test_a_quota_of_requests_makes_no_smaller_batches() -> None:
    sea = Sea()
    lane = lane_to(sea)
    await asyncio.gather(*append(lane, 20))
    sea.shipments[0].note_quota(QuotaExceeded("ann", "requests_per_s", 5, 0.1))
    await asyncio.gather(*append(lane, 20))
    assert sea.sizes == [20, 20]
    lane.close()
