"""The arithmetic of flow control. Pure.

A receiver reserves room and grants it to the sender as credit. The sender never sends more than its credit.

Credit is counted in items and in bytes. An item uses one item and its size in bytes, and needs both at once. A sender
whose next item does not fit gives all its credit back and says what it needs (``BLOCKED``). So no sender keeps credit
that is too small to use. Otherwise several senders could wait for each other for ever.

A ``CreditPool`` is the room of a receiver for one sender or for several. Its invariants:

1. For items and for bytes: what is granted and not yet used, plus what was received and not yet consumed, is at most
   the room of the pool, at any moment and for any behaviour of the senders. The one exception is an item that is
   larger than the whole pool, up to ``item_bytes_max``: it is let through when nothing else is granted or queued.
2. The sender that has been blocked longest is granted next. It gets all that its next item needs, as soon as that is
   free. The pool asks other senders to give back unused credit for it (with a credit of 0 items and 0 bytes).
3. A sender with nothing to send keeps a little credit, so that it can begin without asking.
4. All other room is divided among the senders by their backlog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutwater.errors import InvalidArgument, ProtocolViolation, ResourceExhausted


class SendWindow:
    """The credit that a sender has left."""

    __slots__ = ("bytes", "items")

    def __init__(self, items: int, size: int) -> None:
        self.items = items
        self.bytes = size

    def fits(self, size: int) -> bool:
        return self.items > 0 and self.bytes >= size

    def use(self, size: int) -> None:
        assert self.fits(size)
        self.items -= 1
        self.bytes -= size

    def grant(self, items: int, size: int) -> None:
        self.items += items
        self.bytes += size

    def give_back(self) -> tuple[int, int]:
        """Take all the credit that is left, to return it to the receiver."""
        left = self.items, self.bytes
        self.items = self.bytes = 0
        return left


def divide(amount: int, wanted: Sequence[int]) -> list[int]:
    """Divide ``amount`` in proportion to what each wants.

    1. No share exceeds what is wanted, and the sum of the shares does not exceed ``amount``.
    2. Nothing is left over while more is wanted.
    3. Wanting more never gives a smaller share.
    """
    assert amount >= 0
    assert all(want >= 0 for want in wanted)
    total = sum(wanted)
    if total <= amount:
        return list(wanted)
    shares = [amount * want // total for want in wanted]
    left = amount - sum(shares)
    # Rounding down took less than one from each share. The shares that lost most get one back first.
    for i in sorted(range(len(wanted)), key=lambda i: (-(amount * wanted[i] % total), -wanted[i]))[:left]:
        shares[i] += 1
    return shares


def _top_up(amount: int, holders: Sequence[tuple[int, int]]) -> list[int]:
    """Divide ``amount`` among holders of (backlog, credit) so that afterwards each has a share by backlog."""
    shares = divide(amount + sum(has for _, has in holders), [backlog for backlog, _ in holders])
    return divide(amount, [max(share - has, 0) for share, (_, has) in zip(shares, holders, strict=True)])


class CreditSender:
    """One sender, as its receiver sees it."""

    __slots__ = (
        "asked_back",
        "backlog_bytes",
        "backlog_items",
        "granted_bytes",
        "granted_items",
        "needs",
        "queued_bytes",
        "queued_items",
    )

    def __init__(self) -> None:
        self.asked_back = False
        self.granted_items = self.granted_bytes = 0
        self.queued_items = self.queued_bytes = 0
        self.backlog_items = self.backlog_bytes = 0
        self.needs = 0
        """Size of its next item in bytes, if it is blocked; otherwise 0."""


class CreditPool:
    """Room for ``items_max`` items and ``bytes_max`` bytes from up to ``senders_max`` senders."""

    __slots__ = (
        "_floor_bytes",
        "_floor_items",
        "_members",
        "bytes_max",
        "free_bytes",
        "free_items",
        "item_bytes_max",
        "items_max",
        "senders_max",
    )

    def __init__(self, items_max: int, bytes_max: int, senders_max: int, item_bytes_max: int) -> None:
        if senders_max < 1 or items_max < 2 * senders_max or bytes_max < 2 * senders_max:
            raise InvalidArgument(
                f"room for {items_max} items and {bytes_max} bytes is too little for {senders_max} senders"
            )
        self.items_max, self.bytes_max, self.senders_max = items_max, bytes_max, senders_max
        self.item_bytes_max = item_bytes_max
        self.free_items, self.free_bytes = items_max, bytes_max
        # Idle senders together keep at most a quarter, so that the rest is free for senders that have something to
        # send.
        self._floor_items = items_max if senders_max == 1 else max(1, items_max // (4 * senders_max))
        self._floor_bytes = bytes_max if senders_max == 1 else bytes_max // (4 * senders_max)
        self._members: dict[CreditSender, None] = {}
        """In the order in which blocked senders are served."""

    def join(self) -> tuple[CreditSender, int, int]:
        """Add a sender, and return it with its first credit."""
        if len(self._members) >= self.senders_max:
            raise ResourceExhausted(f"this pool of credit has {self.senders_max} senders already", retry_ms=1_000)
        member = CreditSender()
        self._members[member] = None
        items, size = min(self._floor_items, self.free_items), min(self._floor_bytes, max(self.free_bytes, 0))
        self._grant(member, items, size)
        return member, items, size

    def leave(self, member: CreditSender) -> None:
        """Remove a sender and free its credit. Items received from it keep their room until they are consumed."""
        if member in self._members:
            del self._members[member]
            self.free_items += member.granted_items
            self.free_bytes += member.granted_bytes
            member.granted_items = member.granted_bytes = 0

    def received(self, member: CreditSender, size: int, backlog_items: int, backlog_bytes: int) -> None:
        """Note a received item. It keeps its room until it is consumed."""
        if member.granted_items < 1 or member.granted_bytes < size:
            raise ProtocolViolation(
                f"an item of {size} bytes came without credit: "
                f"{member.granted_items} items and {member.granted_bytes} bytes were left"
            )
        member.granted_items -= 1
        member.granted_bytes -= size
        member.queued_items += 1
        member.queued_bytes += size
        member.backlog_items, member.backlog_bytes = backlog_items, backlog_bytes
        member.needs, member.asked_back = 0, False

    def blocked(self, member: CreditSender, needs: int, items: int, size: int, backlog: tuple[int, int]) -> None:
        """Take back the credit of a sender that cannot send its next item, or that was asked for its credit."""
        if items > member.granted_items or size > member.granted_bytes:
            raise ProtocolViolation(f"{items} items and {size} bytes of credit came back, more than was granted")
        if needs > self.item_bytes_max:
            raise ResourceExhausted(
                f"the next item has {needs} bytes, more than the {self.item_bytes_max} that the receiver takes",
                retry_ms=1_000,
            )
        member.granted_items -= items
        member.granted_bytes -= size
        self.free_items += items
        self.free_bytes += size
        member.backlog_items, member.backlog_bytes = backlog
        member.asked_back = False
        if needs and not member.needs:
            # Move it behind the other blocked senders: they are served in the order of this table.
            del self._members[member]
            self._members[member] = None
        member.needs = needs

    def consumed(self, member: CreditSender, items: int, size: int) -> None:
        """Free the room of received items that are no longer in memory."""
        assert items <= member.queued_items
        assert size <= member.queued_bytes
        member.queued_items -= items
        member.queued_bytes -= size
        self.free_items += items
        self.free_bytes += size

    def grants(self) -> list[tuple[CreditSender, int, int]]:
        """Return the grants to send now, as (sender, items, bytes).

        Small amounts wait until they are worth a message. 0 items and 0 bytes ask the sender to give its credit back.
        """
        if self.senders_max == 1:
            return self._grants_for_one()
        totals: dict[CreditSender, tuple[int, int]] = {}
        for member, items, size in self._grants_for_several():
            before = totals.get(member, (0, 0))
            totals[member] = before[0] + items, before[1] + size
        return [(member, items, size) for member, (items, size) in totals.items()]

    def _grants_for_one(self) -> list[tuple[CreditSender, int, int]]:
        for member in self._members:
            if not member.needs:
                is_much = 2 * self.free_items >= self.items_max or 2 * self.free_bytes >= self.bytes_max
                if is_much and self.free_bytes > 0:
                    return [self._grant(member, self.free_items, self.free_bytes)]
            elif self._has_room_for(member):
                is_huge, needs = member.needs > self.bytes_max, member.needs
                member.needs = 0
                return [self._grant(member, *((1, needs) if is_huge else (self.free_items, self.free_bytes)))]
        return []

    def _grants_for_several(self) -> Iterator[tuple[CreditSender, int, int]]:
        for blocked in [member for member in self._members if member.needs]:
            if not self._has_room_for(blocked):
                # The sender that has been blocked longest comes first, so no other sender may take what becomes free
                # meanwhile.
                yield from self._ask_back(blocked)
                return
            size, blocked.needs = blocked.needs, 0
            yield self._grant(blocked, 1, size)
        for member in self._members:
            if 2 * member.granted_items <= self._floor_items or 2 * member.granted_bytes <= self._floor_bytes:
                items = min(max(self._floor_items - member.granted_items, 0), self.free_items)
                size = min(max(self._floor_bytes - member.granted_bytes, 0), max(self.free_bytes, 0))
                if items or size:
                    yield self._grant(member, items, size)
        if 4 * self.free_items < self.items_max and 4 * self.free_bytes < self.bytes_max:
            return
        members = list(self._members)
        items_of = _top_up(self.free_items, [(m.backlog_items, m.granted_items) for m in members])
        bytes_of = _top_up(max(self.free_bytes, 0), [(m.backlog_bytes, m.granted_bytes) for m in members])
        for member, items, size in zip(members, items_of, bytes_of, strict=True):
            if items or size:
                yield self._grant(member, items, size)

    def _has_room_for(self, blocked: CreditSender) -> bool:
        is_empty = self.free_items == self.items_max and self.free_bytes == self.bytes_max
        return self.free_items > 0 and (self.free_bytes >= blocked.needs or is_empty)

    def _ask_back(self, blocked: CreditSender) -> Iterator[tuple[CreditSender, int, int]]:
        for member in self._members:
            holds = member.granted_items or member.granted_bytes
            if member is not blocked and holds and not member.asked_back:
                member.asked_back = True
                yield member, 0, 0

    def _grant(self, member: CreditSender, items: int, size: int) -> tuple[CreditSender, int, int]:
        assert 0 <= items <= self.free_items
        assert 0 <= size <= max(self.free_bytes, 0) or self.free_bytes == self.bytes_max
        self.free_items -= items
        self.free_bytes -= size
        member.granted_items += items
        member.granted_bytes += size
        return member, items, size
