"""Clusters with access control keep its promises under virtual time, and every run of them can be replayed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from cutwater.core.access.access_decisions import (
    AccessDecision,
    AccessMode,
    AllowRights,
    CreateToken,
    RemoveRights,
    SetAccessMode,
    SetQuota,
)
from cutwater.core.access.quotas import QuotaLimits
from cutwater.core.access.rights import parse_pattern
from cutwater.testing.checkers.access import (
    AccessCall,
    AccessHistory,
    CallTime,
    Confirmed,
    Decided,
    ServerClocks,
    check_access,
)
from cutwater.testing.checkers.quotas import Passed, check_quota
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import access_users
from cutwater.testing.virtual.options import ShippedOptions, random_options
from cutwater.testing.virtual.simulation import simulate_shipped
from cutwater.types import CutTime

LEASE = 10.0
READ = ("read", "topic:a")


def simulate(seed: int, **changes: Any) -> None:
    options = ShippedOptions(**({"seconds": 2.0, "access_changes_every": 0.1, "access_lease": 1.5} | changes))
    result = simulate_shipped(seed, options)
    assert result.violation is None, result.violation
    assert {"allowed", "denied", "change of rights"} <= result.operations.keys()


@pytest.mark.parametrize("limit", ["requests_per_s", "bytes_in_per_s"])
def test_quotas_and_tokens_that_expire_while_servers_die(limit: str) -> None:
    simulate(1, access="enforced", access_flood=limit, access_expiry=True, kill_every=0.6, cut_off_every=1.0)


@pytest.mark.parametrize("mode", ["enforced", "permissive", "off"])
def test_access_control_while_servers_die(mode: str) -> None:
    simulate(1, access=mode, kill_every=0.4, partition_every=1.0, half_open_every=0.5)


def test_a_call_over_an_old_connection_is_told_to_connect_again() -> None:
    """It was denied when its follower did not know yet that access control is on, and the leader did."""
    simulate(2, access="off", access_changes_every=0.3, access_lease=LEASE)


@pytest.mark.parametrize("seed", [0, 1])
def test_changes_do_not_wait_for_a_node_that_is_gone(seed: int) -> None:
    """Followers relayed its reports, so it counted as connected for ever: no change was answered in time any more,
    and rows that another principal had tried to publish were not dropped."""
    options = {"metadata_nodes": 3, "storage_nodes": 3, "replication": 2}
    simulate(seed, access="enforced", disk_loss="empty", reset_every=0.5, **options)


def test_users_that_lose_patience_with_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last appends had no outcome, for which the simulation waited in vain."""
    usual, tried = asyncio.wait_for, Counter[str]()

    async def impatient(work: Any, seconds: float) -> Any:
        tried[work.__name__] += 1
        return await usual(work, seconds if tried[work.__name__] > 1 else 0.0001)

    monkeypatch.setattr(access_users.asyncio, "wait_for", impatient)
    simulate(1, access="enforced")
    assert tried["_append"] > 1


def test_the_same_seed_gives_the_same_trace_with_access_control() -> None:
    """The secrets and ids of tokens come from the simulated chance."""
    seed = next(seed for seed in range(100) if random_options(seed).access)
    program = [sys.executable, "-m", "cutwater.testing.simulate", "--profile", "random", "--seed", str(seed)]
    traces = {simulate_shipped(seed, random_options(seed)).trace_hash}
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, check=False)
        traces.add(told.stdout.splitlines()[-1])
    assert len(traces) == 1


# The checker itself.


def decisions(*changes: AccessDecision) -> list[Decided]:
    """Each was offered and stored at a second of its own, from 1 on."""
    return [Decided(change, CallTime(i * 10, i), CallTime(i * 10 + 1, i)) for i, change in enumerate(changes, 1)]


TOKEN = CreateToken(id="1", sha256="", principal="ann")
ENFORCE = SetAccessMode(mode=AccessMode.ENFORCED)
ALLOW = AllowRights(subject="ann", rights=("read",), pattern=parse_pattern("topic:a"))
REMOVE = RemoveRights(subject="ann", rights=("read",), pattern=parse_pattern("topic:a"))
ENFORCED = Confirmed(2, CallTime(25, 2.5), is_mode=True)


def call(order: int, seconds: float, *, is_done: bool, servers: frozenset[int] = frozenset()) -> AccessCall:
    moment = CallTime(order, seconds)
    return AccessCall("ann", "1", (READ,), "to read", moment, moment, is_done, servers)


def judged(
    one: AccessCall,
    *answers: Confirmed,
    changes: tuple[AccessDecision, ...] = (TOKEN, ENFORCE, ALLOW, REMOVE),
    clocks: ServerClocks | None = None,
) -> bool:
    """Whether the checker lets a call pass, after a right was given and taken away."""
    history = AccessHistory([one], [ENFORCED, *answers])
    try:
        check_access(history, decisions(*changes), LEASE, clocks)
    except Violation as error:
        return error.guarantee != "access"
    return True


def test_what_is_allowed_is_not_denied() -> None:
    assert judged(call(35, 3.5, is_done=True))
    assert judged(call(35, 3.5, is_done=False)), "a server may not know it yet"
    assert not judged(call(35, 3.5, is_done=False), Confirmed(3, CallTime(33, 3.3)))


def test_before_a_change_is_offered_nothing_acts_by_it() -> None:
    assert not judged(call(28, 2.8, is_done=True))


def test_the_old_answer_ends_with_the_lease() -> None:
    assert judged(call(50, 4.0 + LEASE - 0.1, is_done=True))
    assert not judged(call(50, 4.0 + LEASE + 0.1, is_done=True))


def test_the_old_answer_ends_when_all_servers_have_confirmed() -> None:
    assert not judged(call(50, 5.0, is_done=True), Confirmed(4, CallTime(45, 4.5)))
    assert judged(call(44, 4.4, is_done=True), Confirmed(4, CallTime(45, 4.5)))


def test_a_server_that_is_named_may_give_the_old_answer_and_others_not() -> None:
    named = Confirmed(4, CallTime(45, 4.5), frozenset((2,)))
    assert judged(call(50, 5.0, is_done=True), named)
    assert judged(call(50, 5.0, is_done=True, servers=frozenset((1, 2))), named)
    assert not judged(call(50, 5.0, is_done=True, servers=frozenset((1, 3))), named)


def test_a_revoked_right_denies() -> None:
    assert judged(call(50, 5.0, is_done=False), Confirmed(4, CallTime(45, 4.5)))


def expiring(*, is_done: bool, at: float, drift: float = 0.0, is_open: bool = False) -> bool:
    """Whether the checker lets a call pass with a token that ends at second 10."""
    token = structs.replace(TOKEN, expires=CutTime(10_000_000))
    one = call(50, at, is_done=is_done)
    one.is_open = is_open
    clocks = ServerClocks(drift=drift, stall_seconds=2.0)
    return judged(one, changes=(token, ENFORCE, ALLOW), clocks=clocks)


def test_a_token_ends_when_it_expires() -> None:
    assert expiring(is_done=True, at=9.9)
    assert not expiring(is_done=True, at=10.1)
    assert expiring(is_done=False, at=10.1)
    assert not judged(call(50, 9.9, is_done=False), Confirmed(3, CallTime(33, 3.3)), changes=(TOKEN, ENFORCE, ALLOW)), (
        "without an end it holds"
    )


def test_clocks_that_drift_say_less_about_the_end_of_a_token() -> None:
    assert expiring(is_done=True, at=10.9, drift=0.1)
    assert not expiring(is_done=True, at=11.2, drift=0.1)
    assert expiring(is_done=False, at=9.2, drift=0.1)


def test_an_open_subscription_ends_a_moment_after_its_token() -> None:
    assert expiring(is_done=True, at=12.9, is_open=True)
    assert not expiring(is_done=True, at=13.1, is_open=True)


def quota(*passed: Passed, starts: int = 1) -> bool:
    """Whether the checker of quotas lets it pass: 10 in a second, and 100 from second 20 on."""
    changes = [
        Decided(SetQuota(subject="ann", limits=QuotaLimits(requests_per_s=limit)), CallTime(0, at), CallTime(0, at))
        for limit, at in ((10, 0.0), (100, 20.0))
    ]
    try:
        check_quota("ann", "requests_per_s", passed, changes, lease_seconds=LEASE, starts=starts)
    except Violation as error:
        return error.guarantee != "quota"
    return True


def test_what_passes_in_any_time_is_bounded() -> None:
    steady = [Passed(i / 10, i / 10 + 0.05, 1) for i in range(100)]
    assert quota(*steady)
    assert not quota(*steady, *steady)
    assert not quota(*(Passed(5.0, 6.0, 1) for _ in range(15)))
    assert quota(*(Passed(5.0, 6.0, 1) for _ in range(15)), starts=3), "a server that starts again owes nothing"
    assert quota(*(Passed(20.5, 21.5, 1) for _ in range(120)))
    assert quota(Passed(1.0, 1.1, 50)), "a request may be larger than the quota of a second"
    assert not quota(Passed(1.0, 1.1, 50), Passed(1.2, 1.3, 50))
