"""A member that holds its log stream up is noticed, also inside a group, where the durable end of all stands still."""

from __future__ import annotations

import pytest
from msgspec import structs
from order_driver import LS1, N1, N2, N3, Leader, cluster_of, ur

from cutwater.core.order.events import Wake
from cutwater.types import LLSN, MILLISECOND

CHAIN = (N1, N2, N3)


def after_a_while(ends: tuple[int, int, int], *progress: tuple[int, int, int]) -> tuple[bool, str]:
    """All nodes report this again and again, round after round of ``progress``: is the stream open, and why not?"""
    leader = Leader(cluster_of({LS1: CHAIN}, cuts=[{LS1: 5}]))
    for step in range(60):
        leader.pass_time(100 * MILLISECOND)
        for node, end, at in zip(CHAIN, ends, progress[min(step, len(progress) - 1)], strict=True):
            said = structs.replace(ur(LS1, end=end, committed=5, hwm=5), progress=LLSN(at))
            leader.run(leader.report(node, said))
        leader.run(Wake())
    stream = leader.state.streams[LS1]
    return stream.is_open, stream.reason


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_disk_that_hangs_inside_a_group_is_noticed(place: int) -> None:
    progress = [60, 60, 60]
    progress[place] = 10
    is_open, reason = after_a_while((5, 5, 5), tuple(progress))  # type: ignore[arg-type]
    assert not is_open
    assert reason == f"the replica on storage node {CHAIN[place]} makes no progress"


def test_a_disk_that_hangs_before_anything_of_a_group_is_on_it_is_noticed() -> None:
    assert not after_a_while((5, 5, 5), (60, 60, 0))[0]


def test_who_is_slow_inside_a_group_is_not_stuck() -> None:
    assert after_a_while((5, 5, 5), *((6 + 2 * step, 6 + 2 * step, 6 + step) for step in range(60)))[0]


def test_nobody_is_behind_where_all_wait_for_more_of_a_group() -> None:
    assert after_a_while((5, 5, 5), (60, 60, 60))[0]


def test_whoever_lacks_only_what_the_one_before_it_lacks_is_not_to_blame() -> None:
    """The link from the first to the second is cut: the third gets nothing either, and can talk to both."""
    leader = Leader(cluster_of({LS1: CHAIN}, cuts=[{LS1: 5}]))
    while leader.state.streams[LS1].is_open:
        leader.pass_time(100 * MILLISECOND)
        for node, end in zip(CHAIN, (60, 5, 5), strict=True):
            leader.run(leader.report(node, ur(LS1, end=end, committed=5, hwm=5)))
        leader.run(Wake())
    assert [node for node in CHAIN if leader.layer._liveness.is_avoided(LS1, node, leader.now)] == [N2]
