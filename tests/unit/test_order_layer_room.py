"""A member whose disk is full is left out, as long as the others can go on without it."""

from __future__ import annotations

import pytest

from cutwater.core.order import decisions as d
from cutwater.types import MILLISECOND, NodeState
from tests.unit.order_driver import LS1, N1, N2, N3, Leader, cluster_of, stores, ur


def sealed(leader: Leader, full: tuple[int, ...]) -> list[str]:
    """Why the stream was sealed after the nodes have said how they are, if it was."""
    for node in (N1, N2, N3):
        state = NodeState.READ_ONLY if node in full else NodeState.READY
        leader.run(leader.report(node, ur(LS1, end=4, committed=4, hwm=4), node_state=state))
    decided = stores(leader.wake_after(20 * MILLISECOND))
    return [decision.reason for decision in decided if isinstance(decision, d.Seal)]


@pytest.mark.parametrize(
    ("full", "reasons"),
    [
        ((), []),
        ((N1,), ["storage node 1 has no room left"]),
        ((N3,), ["storage node 3 has no room left"]),
        ((N1, N2), ["storage node 1 has no room left"]),
        ((N1, N2, N3), []),
    ],
)
def test_a_full_member_is_left_out_unless_all_are(full: tuple[int, ...], reasons: list[str]) -> None:
    leader = Leader(cluster_of({LS1: (N1, N2, N3)}, cuts=[{LS1: 4}]))
    assert sealed(leader, full) == reasons
