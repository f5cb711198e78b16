"""Clusters with access control keep its promises under virtual time, and every run of them can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from cutwater.core.access.access_decisions import (
    AccessDecision,
    AccessMode,
    AllowRights,
    CreateToken,
    RemoveRights,
    SetAccessMode,
)
from cutwater.core.access.rights import parse_pattern
from cutwater.testing.checkers.access import (
    AccessCall,
    AccessHistory,
    CallTime,
    Confirmed,
    Decided,
    check_access,
)
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.options import ShippedOptions, random_options
from cutwater.testing.virtual.simulation import simulate_shipped

LEASE = 10.0
READ = ("read", "topic:a")


def simulate(seed: int, **changes: Any) -> None:
    options = ShippedOptions(**({"seconds": 2.0, "access_changes_every": 0.1, "access_lease": 1.5} | changes))
    result = simulate_shipped(seed, options)
    assert result.violation is None, result.violation
    assert {"allowed", "denied", "change of rights"} <= result.operations.keys()


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


def judged(one: AccessCall, *answers: Confirmed) -> bool:
    """Whether the checker lets a call pass, after a right was given and taken away."""
    history = AccessHistory([one], [ENFORCED, *answers])
    try:
        check_access(history, decisions(TOKEN, ENFORCE, ALLOW, REMOVE), LEASE)
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
