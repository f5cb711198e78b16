"""How a receiver divides its room: examples. What always holds is in ``property/test_wire_credit_schedules.py``."""

from __future__ import annotations

import pytest

from cutwater.errors import InvalidArgument, ProtocolViolation, ResourceExhausted
from cutwater.wire.calls.credits import CreditPool, SendWindow, divide


@pytest.mark.parametrize(
    ("amount", "wanted", "shares"),
    [
        (10, [], []),
        (10, [3, 4], [3, 4]),
        (10, [10, 10], [5, 5]),
        (10, [30, 10], [8, 2]),
        (10, [90, 9, 1], [9, 1, 0]),
        (0, [5, 5], [0, 0]),
        (1, [1, 1, 1], [1, 0, 0]),
        (100, [0, 1_000, 0], [0, 100, 0]),
    ],
)
def test_divide_by_what_is_wanted(amount: int, wanted: list[int], shares: list[int]) -> None:
    assert divide(amount, wanted) == shares


def test_a_sender_uses_what_it_was_given_and_no_more() -> None:
    window = SendWindow(2, 100)
    assert window.fits(100)
    assert not window.fits(101)
    window.use(60)
    assert not window.fits(41)
    window.grant(0, 1)
    window.use(41)
    assert not window.fits(0)
    window.grant(1, 5)
    assert window.give_back() == (1, 5)
    assert not window.fits(0)


def test_one_sender_has_all_the_room_and_gets_it_back_in_halves() -> None:
    pool = CreditPool(8, 1_000, 1, 5_000)
    member, items, size = pool.join()
    assert (items, size) == (8, 1_000)
    for _ in range(4):
        pool.received(member, 100, 0, 0)
        pool.consumed(member, 1, 100)
        if pool.free_items < 4:
            assert pool.grants() == []
    assert pool.grants() == [(member, 4, 400)]


def test_an_item_without_credit_is_a_violation() -> None:
    pool = CreditPool(2, 100, 1, 1_000)
    member, _, _ = pool.join()
    with pytest.raises(ProtocolViolation, match="without credit"):
        pool.received(member, 101, 0, 0)
    pool.received(member, 1, 0, 0)
    pool.received(member, 1, 0, 0)
    with pytest.raises(ProtocolViolation, match="without credit"):
        pool.received(member, 1, 0, 0)


def test_nobody_gives_back_more_than_they_had() -> None:
    pool = CreditPool(2, 100, 1, 1_000)
    member, _, _ = pool.join()
    with pytest.raises(ProtocolViolation, match="more than was granted"):
        pool.blocked(member, 10, 3, 0, (1, 10))


def test_a_blocked_sender_waits_until_its_item_has_room() -> None:
    pool = CreditPool(8, 1_000, 1, 5_000)
    member, _, _ = pool.join()
    pool.received(member, 600, 1, 500)
    pool.blocked(member, 500, 7, 400, (1, 500))
    assert pool.grants() == []
    pool.consumed(member, 1, 600)
    assert pool.grants() == [(member, 8, 1_000)]


def test_an_item_larger_than_the_room_comes_alone() -> None:
    pool = CreditPool(8, 1_000, 1, 5_000)
    member, _, _ = pool.join()
    pool.received(member, 10, 0, 0)
    pool.blocked(member, 4_000, 7, 990, (1, 4_000))
    assert pool.grants() == []
    pool.consumed(member, 1, 10)
    assert pool.grants() == [(member, 1, 4_000)]
    pool.received(member, 4_000, 0, 0)
    assert pool.grants() == []
    pool.consumed(member, 1, 4_000)
    assert pool.grants() == [(member, 8, 1_000)]


def test_an_item_larger_than_anyone_takes_is_refused() -> None:
    pool = CreditPool(8, 1_000, 1, 5_000)
    member, _, _ = pool.join()
    with pytest.raises(ResourceExhausted, match="5001 bytes, more than the 5000"):
        pool.blocked(member, 5_001, 8, 1_000, (1, 5_001))


def test_room_is_divided_by_backlog() -> None:
    pool = CreditPool(400, 400_000, 2, 400_000)
    busy, _, _ = pool.join()
    calm, _, _ = pool.join()
    pool.received(busy, 10, 3_000, 3_000_000)
    pool.received(calm, 10, 1_000, 1_000_000)
    grants = {member: (items, size) for member, items, size in pool.grants()}
    held = {member: (member.granted_items, member.granted_bytes) for member in (busy, calm)}
    assert set(grants) == {busy, calm}
    assert 2.5 < held[busy][0] / held[calm][0] < 3.5
    assert 2.5 < held[busy][1] / held[calm][1] < 3.5
    assert pool.free_bytes == pool.free_items == 0


def test_idle_senders_keep_little() -> None:
    pool = CreditPool(400, 400_000, 4, 400_000)
    for _ in range(4):
        pool.join()
    assert pool.grants() == []
    assert (pool.free_items, pool.free_bytes) == (300, 300_000)


def test_credit_that_is_not_used_is_asked_back_for_who_needs_it() -> None:
    pool = CreditPool(40, 1_000, 2, 1_000)
    idle, items, size = pool.join()
    needy, its_items, its_bytes = pool.join()
    pool.blocked(needy, 900, its_items, its_bytes, (1, 900))
    assert pool.grants() == [(idle, 0, 0)]
    assert pool.grants() == [], "it was asked already"
    pool.blocked(idle, 0, items, size, (0, 0))
    grants = {member: (items, size) for member, items, size in pool.grants()}
    assert grants[needy][1] >= 900


def test_who_is_blocked_longest_comes_first() -> None:
    pool = CreditPool(40, 1_000, 2, 1_000)
    first, _, _ = pool.join()
    second, _, _ = pool.join()
    pool.received(second, 100, 1, 100)
    pool.blocked(first, 950, first.granted_items, first.granted_bytes, (1, 950))
    pool.blocked(second, 10, second.granted_items, second.granted_bytes, (1, 10))
    assert pool.grants() == [], "a small item would fit, but the large one would then wait for ever"
    pool.consumed(second, 1, 100)
    member, _, size = pool.grants()[0]
    assert member is first
    assert size >= 950


def test_room_of_who_leaves_is_free_at_once_but_not_that_of_what_is_unread() -> None:
    pool = CreditPool(8, 1_000, 1, 1_000)
    member, _, _ = pool.join()
    pool.received(member, 300, 0, 0)
    pool.leave(member)
    pool.leave(member)
    assert (pool.free_items, pool.free_bytes) == (7, 700)
    pool.consumed(member, 1, 300)
    assert (pool.free_items, pool.free_bytes) == (8, 1_000)


def test_a_pool_has_as_many_senders_as_it_was_made_for() -> None:
    pool = CreditPool(8, 1_000, 2, 1_000)
    pool.join()
    pool.join()
    with pytest.raises(ResourceExhausted):
        pool.join()


@pytest.mark.parametrize(("items", "size", "senders"), [(1, 10, 1), (10, 1, 1), (10, 10, 0), (10, 10, 6)])
def test_a_pool_without_room_is_refused(items: int, size: int, senders: int) -> None:
    with pytest.raises(InvalidArgument):
        CreditPool(items, size, senders, 10)
