"""Two servers, the leader and two flows under one quota, in steps of 10 ms and without connections.

What matters is what both servers let pass together: in every ten seconds, the quota within 10 %.
"""

from __future__ import annotations

from collections import deque

import pytest
from msgspec import Struct, field

from cutwater.access.quota_account import QuotaAccount
from cutwater.access.quota_control import ASK_SECONDS_MAX, ASK_SECONDS_MIN, LESS
from cutwater.core.access.quota_shares import QuotaQuestion, QuotaShares
from cutwater.core.access.quotas import QuotaLimits

LIMIT, STEP = "bytes_in_per_s", 0.01
MB = 1_000_000
SECONDS, SETTLED = 60.0, 5.0


class Flow(Struct):
    """Batches of a size, each so many seconds after the one before; 0.0: as many as pass."""

    size: int
    every: float = 0.0
    due: float = 0.0


class Server(Struct, eq=False):
    name: int
    flow: Flow
    account: QuotaAccount
    ask_at: float = 0.0
    ask_seconds: float = ASK_SECONDS_MIN
    number: int = 0
    passed: deque[tuple[float, int]] = field(default_factory=deque)

    def serve(self, now: float) -> None:
        flow, bucket = self.flow, self.account.buckets[LIMIT]
        while now >= flow.due:
            if not bucket.may_pass(now):
                self.account.note_short(LIMIT, now)
                if self.account.may_get_more(LIMIT):
                    self.ask_at = min(self.ask_at, now + self.ask_seconds)
                return
            self.account.take(LIMIT, flow.size, now)
            self.passed.append((now, flow.size))
            flow.due = now + flow.every

    def ask(self, leader: QuotaShares[int], quotas: dict[str, QuotaLimits], now: float) -> None:
        self.number += 1
        uses = tuple(self.account.uses(now))
        answer = leader.answer(self.name, QuotaQuestion(1, self.number, 1, uses), quotas, [1, 2], now)
        self.ask_at = now + 1.0
        for share in answer.shares:
            before, after = self.account.take_share(LIMIT, share.share, now)
            self.ask_seconds = ASK_SECONDS_MIN if after > before else min(2 * self.ask_seconds, ASK_SECONDS_MAX)
            if after < before * LESS:
                self.ask_at = now


def rates(quota: int, *flows: Flow) -> list[float]:
    """Return the rates of all windows of ten seconds, in parts of the quota."""
    limits = QuotaLimits(bytes_in_per_s=quota)
    leader: QuotaShares[int] = QuotaShares(10.0, -10.0, 1)
    servers = [
        Server(number, flow, QuotaAccount("ann", limits, lambda account, stock: 0, 0.0), number / 2)
        for number, flow in enumerate(flows, 1)
    ]
    found, now = list[float](), 0.0
    for tick in range(int(SECONDS / STEP)):
        now = tick * STEP
        for server in servers:
            server.serve(now)
            if now >= server.ask_at:
                server.ask(leader, {"ann": limits}, now)
        if tick % 10 == 0 and now >= SETTLED + 10.0:
            together = [size for server in servers for at, size in server.passed if at > now - 10.0]
            found.append(sum(together) / 10.0 / quota)
    return found


@pytest.mark.parametrize(
    ("quota", "size", "part"),
    [
        (4 * MB, MB, 0.1),
        (8 * MB, MB, 0.1),
        (8 * MB, 2 * MB, 0.1),
        (8 * MB, MB, 0.25),
        (20 * MB, 2 * MB, 0.05),
        (4 * MB, 2_000, 0.1),
    ],
)
def test_a_busy_server_and_one_with_rare_batches_use_the_quota(quota: int, size: int, part: float) -> None:
    found = rates(quota, Flow(size), Flow(size, every=size / (quota * part)))
    assert min(found) >= 0.9, min(found)
    assert max(found) <= 1.1, max(found)


def test_two_busy_servers_use_the_quota() -> None:
    found = rates(8 * MB, Flow(MB), Flow(MB))
    assert 0.9 <= min(found) <= max(found) <= 1.1
