"""Streams in need of repair go before streams that can wait."""

from __future__ import annotations

from cutwater.core.order.planning.repair_queue import RepairQueue
from cutwater.types import LogStreamId


def ids(*numbers: int) -> list[LogStreamId]:
    return [LogStreamId(n) for n in numbers]


def test_urgent_streams_go_first_and_patient_ones_get_the_room_that_is_left() -> None:
    queue = RepairQueue()
    queue.add_patient(ids(1, 2, 3, 4))
    queue.add_all(ids(9, 3))
    queue.add(LogStreamId(8))
    assert queue.take(2) == ids(3, 9)
    assert queue.take(2) == ids(1, 8), "what was planned as urgent does not come again"
    assert queue.take(5) == ids(2, 4)
    assert len(queue) == 0


def test_deleted_streams_leave_the_queue() -> None:
    queue = RepairQueue()
    queue.add_patient(ids(1, 2))
    queue.add_all(ids(3, 4))
    queue.keep({LogStreamId(2), LogStreamId(3)})
    assert queue.take(9) == ids(2, 3)
