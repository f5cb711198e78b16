"""Holds back what a principal asks of this server, so that its quotas hold (ADR 0054).

Calls first get slower: up to ``WAIT_SECONDS_MAX`` they wait here, before anything was done for them, in order. That is
less than the time after which clients take a storage node for silent. What would wait longer is refused with
``QuotaExceeded``, which says when to try again. What waits is bounded in number and bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from cutwater.access.quota_account import QuotaAccount
from cutwater.errors import CutwaterError, QuotaExceeded, Unavailable
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Mapping

WAIT_SECONDS_MAX = 0.25
WAITING_MAX = 1_024
WAITING_BYTES_MAX = 8 * 1024 * 1024
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 30.0
ASK_SECONDS = 0.5
"""When to try again if the share of this server is not known yet, or something held must be given back first."""
PUMP_SECONDS_MIN = 0.001
ANSWER_DIVISOR = 10
ANSWER_BYTES_MIN = 4_096
ANSWER_BYTES_MAX = 1 << 40
CONNECTIONS_WAITING_MAX = 32
"""Connections of one principal that wait for a place. Their calls wait, too."""

BYTES_IN, BYTES_OUT, REQUESTS = "bytes_in_per_s", "bytes_out_per_s", "requests_per_s"
CONNECTIONS, SUBSCRIPTIONS, STAGED = "connections", "subscriptions", "staged_bytes"


class QuotaCounters(Struct):
    """What was held back since the process started, by the name of the limit."""

    delayed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    delayed_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Waiting:
    """Something that waits. ``until``: when it is refused, None for never."""

    __slots__ = ("costs", "go", "is_over", "limit", "refuse", "since", "until")

    def __init__(
        self,
        costs: Mapping[str, int],
        go: Callable[[], None],
        refuse: Callable[[QuotaExceeded], None],
        until: float | None,
        since: float,
        limit: str,
    ) -> None:
        self.costs, self.go, self.refuse, self.until, self.since, self.limit = costs, go, refuse, until, since, limit
        self.is_over = False


class _Lane:
    """What waits for the same limits, in order."""

    def __init__(self, meter: QuotaMeter, limits: tuple[str, ...]) -> None:
        self._meter, self._limits = meter, limits
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._ahead: Counter[str] = Counter()
        """What everything that waits will cost."""
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self,
        costs: Mapping[str, int],
        go: Callable[[], None],
        refuse: Callable[[QuotaExceeded], None],
        until: float | None,
    ) -> _Waiting | None:
        """Let it begin, now or later, or refuse it. Returns it if it waits."""
        now = self._loop.time()
        if not self._queue and self._is_open(now):
            self._meter.pay(costs, now)
            go()
            return None
        wait, account, limit = self._wait(now)
        self._meter.short(account, limit, now)
        is_late = until is not None and wait != inf and now + wait > until
        if is_late or len(self._queue) >= WAITING_MAX or (self._queue and self._ahead[BYTES_IN] >= WAITING_BYTES_MAX):
            refuse(self._meter.refusal(account, limit, ASK_SECONDS if wait == inf else wait))
            return None
        self._meter.counters.delayed[limit] += 1
        waiting = _Waiting(costs, go, refuse, until, now, limit)
        self._queue.append(waiting)
        self._ahead.update(costs)
        self._arm(now)
        return waiting

    def leave(self, waiting: _Waiting) -> None:
        """Give up: nobody waits for it any more."""
        if not waiting.is_over:
            waiting.is_over = True
            self._ahead.subtract(waiting.costs)

    def keep_asking(self, now: float) -> None:
        """Note what is waited for. An item may wait for longer than the note of its beginning counts."""
        if any(not one.is_over for one in self._queue):
            for account, limit, bucket in self._meter.buckets(self._limits):
                if not bucket.may_pass(now):
                    account.note_short(limit, now)

    def pump(self) -> None:
        """Let begin what may begin now, and refuse what has waited for too long."""
        now = self._loop.time()
        while self._queue:
            head = self._queue[0]
            if not head.is_over:
                is_open = self._is_open(now)
                if not is_open and (head.until is None or now < head.until):
                    break
                self.leave(head)
                self._queue.popleft()
                self._meter.counters.delayed_seconds[head.limit] += now - head.since
                if is_open:
                    self._meter.pay(head.costs, now)
                    head.go()
                else:
                    wait, account, limit = self._wait(now)
                    head.refuse(self._meter.refusal(account, limit, ASK_SECONDS if wait == inf else wait))
            else:
                self._queue.popleft()
        self._arm(now)

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        head = next((one for one in self._queue if not one.is_over), None)
        if head is None:
            self._queue.clear()
            return
        wait = max((w for _, _, w in self._waits(now, ahead=False)), default=0.0)
        at = now + max(wait, PUMP_SECONDS_MIN) if wait != inf else inf
        at = min(at, inf if head.until is None else max(head.until, now + PUMP_SECONDS_MIN))
        if at != inf:
            self._timer = self._loop.call_at(at, self.pump)

    def _is_open(self, now: float) -> bool:
        return all(bucket.may_pass(now) for _, _, bucket in self._meter.buckets(self._limits))

    def _waits(self, now: float, *, ahead: bool) -> Iterable[tuple[QuotaAccount, str, float]]:
        for account, limit, bucket in self._meter.buckets(self._limits):
            yield account, limit, bucket.wait_seconds(self._ahead[limit] if ahead else 0, now)

    def _wait(self, now: float) -> tuple[float, QuotaAccount, str]:
        """Return how long something must wait that comes now, and because of which limit."""
        found = [(wait, account, limit) for account, limit, wait in self._waits(now, ahead=True)]
        return max(found, key=lambda one: one[0])

    def stop(self) -> None:
        """Let everything begin: no quota applies any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._queue = self._queue, deque()
        self._ahead.clear()
        for one in waiting:
            if not one.is_over:
                one.is_over = True
                one.go()


class _Doorway(Struct, eq=False):
    """A connection that waits for a place, with its calls. They get the error if there is none."""

    timer: asyncio.TimerHandle
    since: float
    calls: list[Callable[[CutwaterError | None], None]] = field(default_factory=list)


class QuotaMeter:
    """The meter of one principal: all its connections to this server, and all quotas that apply to it. ``hungry`` is
    called when this server needs a larger share."""

    def __init__(self, principal: str, counters: QuotaCounters, hungry: Callable[[], None]) -> None:
        self.principal, self.counters, self._hungry = principal, counters, hungry
        self._loop = asyncio.get_running_loop()
        self.accounts: tuple[QuotaAccount, ...] = ()
        self.connections: set[Connection] = set()
        """Connections that have a place."""
        self._waiting: dict[Connection, _Doorway] = {}
        self.answer_bytes_max = ANSWER_BYTES_MAX
        self._in, self._out = _Lane(self, (BYTES_IN, REQUESTS)), _Lane(self, (BYTES_OUT, REQUESTS))
        self._items = _Lane(self, (BYTES_OUT,))
        self._lanes = self._in, self._out, self._items

    def set_accounts(self, accounts: tuple[QuotaAccount, ...]) -> None:
        for account in self.accounts:
            account.meters.discard(self)
        self.accounts = accounts
        for account in accounts:
            account.meters.add(self)
        limits = [limit for account in accounts if (limit := account.limit(BYTES_OUT)) is not None]
        self.answer_bytes_max = max(ANSWER_BYTES_MIN, min(limits, default=ANSWER_BYTES_MAX) // ANSWER_DIVISOR)
        self.pump()

    def pump(self) -> None:
        """Go on: shares or limits have changed."""
        for connection in list(self._waiting):
            if self._has_place():
                self._let_in(connection)
        self._note_waiting()
        for lane in self._lanes:
            lane.pump()

    def keep_asking(self) -> None:
        """Called before the leader is asked."""
        now = self._loop.time()
        for lane in self._lanes:
            lane.keep_asking(now)

    # For the lanes.

    def buckets(self, limits: tuple[str, ...]) -> Iterable[tuple[QuotaAccount, str, Any]]:
        for account in self.accounts:
            for limit in limits:
                bucket = account.buckets.get(limit)
                if bucket is not None:
                    yield account, limit, bucket

    def pay(self, costs: Mapping[str, int], now: float) -> None:
        for account in self.accounts:
            for limit, cost in costs.items():
                account.take(limit, cost, now)

    def short(self, account: QuotaAccount, limit: str, now: float, missing: int = 0) -> None:
        account.note_short(limit, now, missing)
        if account.may_get_more(limit):
            self._hungry()

    def refusal(self, account: QuotaAccount, limit: str, wait: float) -> QuotaExceeded:
        self.counters.refused[limit] += 1
        # The share may grow meanwhile.
        wait = min(wait, max(ASK_SECONDS, wait * account.part(limit)))
        retry_after = round(min(max(wait, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX), 3)
        return QuotaExceeded(account.subject, limit, account.limit(limit) or 0, retry_after)

    # For connections, see ``CallMeter``.

    def enter(self, call: Call[Any], begin: Callable[[], None], *, brings_data: bool) -> None:
        doorway = self._waiting.get(call.connection)
        if doorway is not None:

            def go_on(error: CutwaterError | None) -> None:
                if error is None:
                    self._enter(call, begin, brings_data=brings_data)
                else:
                    call.fail(error)

            doorway.calls.append(go_on)
            return
        self._enter(call, begin, brings_data=brings_data)

    def _enter(self, call: Call[Any], begin: Callable[[], None], *, brings_data: bool) -> None:
        if call.is_cancelled:
            call.fail(_given_up())
            return
        lane = self._in if brings_data else self._out
        until = min(self._loop.time() + WAIT_SECONDS_MAX, call.deadline)
        waiting = lane.enter({REQUESTS: 1, BYTES_IN: call.size}, begin, call.fail, until)
        if waiting is not None:

            def cancelled() -> None:
                lane.leave(waiting)
                call.fail(_given_up())

            call.on_cancel(cancelled)

    async def enter_stream(self, call: Call[Any]) -> None:
        doorway = self._waiting.get(call.connection)
        if doorway is not None:
            let_in: asyncio.Future[CutwaterError | None] = self._loop.create_future()
            doorway.calls.append(lambda error: None if let_in.done() else let_in.set_result(error))
            if (error := await let_in) is not None:
                raise error
        await self._passed(self._out, {REQUESTS: 1, BYTES_IN: call.size}, self._loop.time() + WAIT_SECONDS_MAX)
        await self.room(SUBSCRIPTIONS, 1)

    async def pay_item(self, size: int) -> None:
        if self._items_are_limited():
            await self._passed(self._items, {BYTES_OUT: size}, None)

    def _items_are_limited(self) -> bool:
        return any(BYTES_OUT in account.buckets for account in self.accounts)

    async def _passed(self, lane: _Lane, costs: Mapping[str, int], until: float | None) -> None:
        passed: asyncio.Future[None] = self._loop.create_future()

        def go() -> None:
            if not passed.done():
                passed.set_result(None)

        def refuse(error: QuotaExceeded) -> None:
            if not passed.done():
                passed.set_exception(error)

        waiting = lane.enter(costs, go, refuse, until)
        try:
            await passed
        finally:
            if waiting is not None:
                lane.leave(waiting)

    def takes_notice(self, size: int) -> bool:
        now = self._loop.time()
        may_pass = all(bucket.may_pass(now) for _, _, bucket in self.buckets((REQUESTS, BYTES_IN)))
        if may_pass:
            self.pay({REQUESTS: 1, BYTES_IN: size}, now)
        return may_pass

    def sent(self, size: int) -> None:
        self.pay({BYTES_OUT: size}, self._loop.time())

    # Connections, subscriptions and staged bytes.

    def lacking(self, stock: str, more: int) -> QuotaAccount | None:
        """Return an account that has no room for so much more."""
        now = self._loop.time()
        return next((account for account in self.accounts if not account.has_room(stock, more, now)), None)

    async def room(self, stock: str, more: int) -> None:
        """Return when so much more may be held here, or raise."""
        until = self._loop.time() + WAIT_SECONDS_MAX
        began: float | None = None
        while (account := self.lacking(stock, more)) is not None:
            now = self._loop.time()
            began = now if began is None else began
            self.short(account, stock, now, more)
            if now >= until:
                raise self.refusal(account, stock, ASK_SECONDS)
            await asyncio.sleep(PUMP_SECONDS_MIN * 10)
        if began is not None:
            for account in self.accounts:
                account.note_enough(stock)
            self.counters.delayed[stock] += 1
            self.counters.delayed_seconds[stock] += self._loop.time() - began

    def _has_place(self) -> bool:
        return self.lacking(CONNECTIONS, 1) is None

    def join(self, connection: Connection) -> None:
        """Take in a connection that was opened. It has no place before there is room for it."""
        connection.use_meter(self)
        account = self.lacking(CONNECTIONS, 1)
        if account is None:
            self.connections.add(connection)
            return
        self.short(account, CONNECTIONS, self._loop.time(), len(self._waiting) + 1)
        if len(self._waiting) >= CONNECTIONS_WAITING_MAX:
            connection.fail(self.refusal(account, CONNECTIONS, ASK_SECONDS))
            return
        self.counters.delayed[CONNECTIONS] += 1
        timer = self._loop.call_later(WAIT_SECONDS_MAX, self._turn_away, connection)
        self._waiting[connection] = _Doorway(timer, self._loop.time())

    def keep(self, connection: Connection) -> None:
        """Take in a connection that was opened before this quota."""
        connection.use_meter(self)
        self.connections.add(connection)

    def lose(self, connection: Connection, error: CutwaterError | None = None) -> None:
        self.connections.discard(connection)
        doorway = self._waiting.pop(connection, None)
        if doorway is not None:
            doorway.timer.cancel()
            for go_on in doorway.calls:
                go_on(error or _given_up())

    @property
    def is_unused(self) -> bool:
        return not self.connections and not self._waiting

    def _let_in(self, connection: Connection) -> None:
        doorway = self._waiting.pop(connection)
        doorway.timer.cancel()
        self.counters.delayed_seconds[CONNECTIONS] += self._loop.time() - doorway.since
        self.connections.add(connection)
        for account in self.accounts:
            account.note_enough(CONNECTIONS)
        for go_on in doorway.calls:
            go_on(None)

    def _note_waiting(self) -> None:
        if self._waiting and (account := self.lacking(CONNECTIONS, 1)) is not None:
            self.short(account, CONNECTIONS, self._loop.time(), len(self._waiting))

    def _turn_away(self, connection: Connection) -> None:
        account = self.lacking(CONNECTIONS, 1)
        if account is None:
            self._let_in(connection)
        else:
            error = self.refusal(account, CONNECTIONS, ASK_SECONDS)
            connection.fail(error)
            self.lose(connection, error)

    def stop(self) -> None:
        """No quota applies to the principal any more."""
        self.set_accounts(())
        for connection in list(self._waiting):
            self._let_in(connection)
        for lane in self._lanes:
            lane.stop()
        for connection in self.connections:
            connection.use_meter(None)
        self.connections.clear()


def _given_up() -> Unavailable:
    return Unavailable("the caller did not wait: nothing was done")
