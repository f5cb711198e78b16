"""Credit on random schedules: messages of any number of senders arrive in any interleaving, and what was promised
holds at every step. At the end everything has arrived, in order, whatever the sizes: nobody waits for ever.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.wire.calls.credits import CreditPool, CreditSender, SendWindow, divide

ITEM_BYTES_MAX = 3_000


class Sender:
    """As ``streams.StreamSender`` behaves, without any I/O."""

    def __init__(self, items: list[int], window: SendWindow) -> None:
        self.items = deque(items)
        self.window = window
        self.to_receiver: deque[tuple[str, tuple[int, ...]]] = deque()
        self.to_sender: deque[tuple[int, int]] = deque()
        self.is_waiting = False

    def backlog(self) -> tuple[int, int]:
        return len(self.items), sum(self.items)

    def step(self) -> bool:
        """Send the next item, or say once that it does not fit."""
        if not self.items or self.is_waiting:
            return False
        size = self.items[0]
        if self.window.fits(size):
            self.window.use(size)
            self.items.popleft()
            self.to_receiver.append(("item", (size, *self.backlog())))
        else:
            self.is_waiting = True
            self.to_receiver.append(("blocked", (size, *self.window.give_back(), *self.backlog())))
        return True

    def hear(self) -> bool:
        if not self.to_sender:
            return False
        items, size = self.to_sender.popleft()
        if items or size:
            self.window.grant(items, size)
            self.is_waiting = False
        elif not self.is_waiting:
            self.to_receiver.append(("blocked", (0, *self.window.give_back(), *self.backlog())))
        return True


class Receiver:
    def __init__(self, pool: CreditPool) -> None:
        self.pool = pool
        self.senders: dict[CreditSender, Sender] = {}
        self.unread: dict[CreditSender, deque[int]] = {}
        self.got: dict[CreditSender, list[int]] = {}

    def add(self, items: list[int]) -> CreditSender:
        member, count, size = self.pool.join()
        self.senders[member] = Sender(items, SendWindow(count, size))
        self.unread[member], self.got[member] = deque(), []
        return member

    def hear(self, member: CreditSender) -> bool:
        channel = self.senders[member].to_receiver
        if not channel:
            return False
        what, values = channel.popleft()
        if what == "item":
            size, *backlog = values
            self.pool.received(member, size, *backlog)
            self.unread[member].append(size)
        else:
            needs, items, size, *backlog = values
            self.pool.blocked(member, needs, items, size, (backlog[0], backlog[1]))
            self.settle()
        return True

    def consume(self, member: CreditSender) -> bool:
        if not self.unread[member]:
            return False
        size = self.unread[member].popleft()
        self.got[member].append(size)
        self.pool.consumed(member, 1, size)
        self.settle()
        return True

    def settle(self) -> None:
        for member, items, size in self.pool.grants():
            self.senders[member].to_sender.append((items, size))

    def check(self) -> None:
        """Invariant 1, from what is really there and not from the pool's own book-keeping."""
        items = size = 0
        for member, sender in self.senders.items():
            sent = [values[0] for what, values in sender.to_receiver if what == "item"]
            given_back = [values[1:3] for what, values in sender.to_receiver if what == "blocked"]
            items += sender.window.items + len(self.unread[member]) + len(sent)
            size += sender.window.bytes + sum(self.unread[member]) + sum(sent)
            items += sum(back[0] for back in given_back) + sum(grant[0] for grant in sender.to_sender)
            size += sum(back[1] for back in given_back) + sum(grant[1] for grant in sender.to_sender)
        pool = self.pool
        assert items + pool.free_items == pool.items_max
        assert size + pool.free_bytes == pool.bytes_max
        assert items <= pool.items_max
        assert size <= max(pool.bytes_max, ITEM_BYTES_MAX)


sizes = st.lists(st.integers(1, ITEM_BYTES_MAX) | st.integers(1, 50), max_size=30)


@given(
    workload=st.lists(sizes, min_size=1, max_size=5),
    items_max=st.integers(10, 60),
    bytes_max=st.integers(20, 2_000),
    schedule=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=300),
)
@settings(max_examples=200)
def test_credit_is_never_exceeded_and_everything_arrives(
    workload: list[list[int]], items_max: int, bytes_max: int, schedule: list[tuple[int, int]]
) -> None:
    receiver = Receiver(CreditPool(items_max, bytes_max, len(workload), ITEM_BYTES_MAX))
    members = [receiver.add(items) for items in workload]

    def act(member: CreditSender, what: int) -> bool:
        sender = receiver.senders[member]
        steps = sender.step, sender.hear, lambda: receiver.hear(member), lambda: receiver.consume(member)
        moved = steps[what]()
        receiver.check()
        return moved

    for who, what in schedule:
        act(members[who % len(members)], what)
    rounds = 0
    while sum(act(member, what) for member in members for what in range(4)):
        rounds += 1
        assert rounds < 5_000, "messages go back and forth and nothing comes of it"
    assert [receiver.got[member] for member in members] == workload


@given(
    workload=st.lists(sizes, min_size=2, max_size=4),
    leaving=st.integers(0, 3),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=100),
)
def test_who_leaves_takes_nothing_along(
    workload: list[list[int]], leaving: int, schedule: list[tuple[int, int]]
) -> None:
    receiver = Receiver(CreditPool(20, 1_000, len(workload), ITEM_BYTES_MAX))
    members = [receiver.add(items) for items in workload]

    def act(member: CreditSender, what: int) -> bool:
        sender = receiver.senders[member]
        return (sender.step, sender.hear, lambda: receiver.hear(member), lambda: receiver.consume(member))[what]()

    for who, what in schedule:
        act(members[who % len(members)], what)
    gone = members.pop(leaving % len(members))
    receiver.pool.leave(gone)
    receiver.pool.consumed(gone, gone.queued_items, gone.queued_bytes)
    receiver.settle()
    while sum(act(member, what) for member in members for what in range(4)):
        pass
    assert all(not receiver.senders[member].items for member in members)
    for member in members:
        receiver.pool.leave(member)
    assert (receiver.pool.free_items, receiver.pool.free_bytes) == (20, 1_000)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 1_000), max_size=20))
def test_divide_keeps_its_promises(amount: int, wanted: list[int]) -> None:
    shares = divide(amount, wanted)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(amount, sum(wanted))
    by_want = [share for _, share in sorted(zip(wanted, shares, strict=True))]
    assert by_want == sorted(by_want)
