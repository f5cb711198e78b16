"""What waits for a share at one server, without connections."""

from __future__ import annotations

import asyncio

import pytest

from cutwater.access.quota_account import COUNT_SECONDS, IDLE_SECONDS, SHORT_SECONDS, QuotaAccount
from cutwater.access.quota_meter import ASK_SECONDS, QuotaCounters, QuotaMeter
from cutwater.core.access.quotas import QuotaLimits
from cutwater.errors import QuotaExceeded

pytestmark = pytest.mark.asyncio


async def test_a_refusal_expects_that_a_small_share_grows() -> None:
    loop = asyncio.get_running_loop()
    account = QuotaAccount("ann", QuotaLimits(bytes_in_per_s=1_000), lambda account, stock: 0, loop.time())
    meter = QuotaMeter("ann", QuotaCounters(), lambda: None)
    meter.set_accounts((account,))
    account.take_share("bytes_in_per_s", 100_000, loop.time())
    assert meter.refusal(account, "bytes_in_per_s", 20.0).retry_after == 2.0, "with a tenth, it would take 20 seconds"
    assert meter.refusal(account, "bytes_in_per_s", 2.0).retry_after == ASK_SECONDS
    assert meter.refusal(account, "bytes_in_per_s", 0.3).retry_after == 0.3
    account.take_share("bytes_in_per_s", 1_000_000, loop.time())
    assert meter.refusal(account, "bytes_in_per_s", 20.0).retry_after == 20.0
    meter.stop()


async def test_an_item_that_waits_for_long_still_wants_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + passed)
    account = QuotaAccount("ann", QuotaLimits(bytes_out_per_s=1_000), lambda account, stock: 0, loop.time())
    meter = QuotaMeter("ann", QuotaCounters(), lambda: None)
    meter.set_accounts((account,))
    item = asyncio.create_task(meter.pay_item(100))
    await asyncio.sleep(0)
    for _ in range(3):
        # The leader has no share for it, or there is no leader.
        passed += SHORT_SECONDS + IDLE_SECONDS
        meter.keep_asking()
        (use,) = account.uses(loop.time())
        assert use.limit == "bytes_out_per_s"
        assert use.wants > 0
        account.take_share(use.limit, 0, loop.time())
        meter.pump()
        assert not item.done()
    account.take_share("bytes_out_per_s", 1_000_000, loop.time())
    meter.pump()
    await item
    passed += SHORT_SECONDS + IDLE_SECONDS
    meter.keep_asking()
    assert account.uses(loop.time()) == [], "nothing waits any more, so the share is given back"
    meter.stop()


async def test_a_share_that_suffices_is_kept_and_not_doubled_again() -> None:
    limit, now = "bytes_in_per_s", 1_000.0
    account = QuotaAccount("ann", QuotaLimits(bytes_in_per_s=1_000), lambda account, stock: 0, now)

    def wants(at: float) -> int:
        (use,) = account.uses(at)
        return use.wants

    account.take_share(limit, 100_000, now)
    account.take(limit, 10, now)
    account.note_short(limit, now + 0.1)
    assert wants(now + 0.2) == 200_000, "something had to wait with the present share"
    account.take_share(limit, 200_000, now + 0.3)
    assert wants(now + 0.4) == 160_000, "nothing has waited since: the leader adds a quarter"
    assert wants(now + 1.4) == 160_000
    account.note_short(limit, now + 1.5)
    assert wants(now + 1.6) == 400_000
    account.take_share(limit, 400_000, now + 1.7)
    account.take(limit, 10, now + 6.0)
    assert wants(now + 6.0) < 100_000, "what was not needed for so long is given back"


async def test_a_large_group_is_not_counted_for_each_that_waits() -> None:
    loop, counted, held = asyncio.get_running_loop(), 0, 3

    def count(account: QuotaAccount, stock: str) -> int:
        nonlocal counted
        counted += 1
        return held

    account = QuotaAccount("group:g", QuotaLimits(subscriptions=3), count, loop.time())
    account.take_share("subscriptions", 3, loop.time())
    meters = [QuotaMeter(f"p{i}", QuotaCounters(), lambda: None) for i in range(300)]
    for meter in meters:
        meter.set_accounts((account,))
    began = loop.time()
    waiting = [asyncio.create_task(meter.room("subscriptions", 1)) for meter in meters]
    await asyncio.wait(waiting)
    assert all(isinstance(one.exception(), QuotaExceeded) for one in waiting)
    assert counted <= 2 + (loop.time() - began) / COUNT_SECONDS
    # What becomes free is found.
    late = asyncio.create_task(meters[0].room("subscriptions", 1))
    await asyncio.sleep(0)
    held = 2
    await late
    account.take_share("subscriptions", 2, loop.time())
    with pytest.raises(QuotaExceeded):
        await meters[0].room("subscriptions", 1)
    account.take_share("subscriptions", 3, loop.time())
    assert meters[0].lacking("subscriptions", 1) is None, "a larger share counts at once"
    for meter in meters:
        meter.stop()
