"""What waits for a share at one server, without connections."""

from __future__ import annotations

import asyncio

import pytest

from cutwater.access.quota_account import IDLE_SECONDS, SHORT_SECONDS, QuotaAccount
from cutwater.access.quota_meter import ASK_SECONDS, QuotaCounters, QuotaMeter
from cutwater.core.access.quotas import QuotaLimits

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
