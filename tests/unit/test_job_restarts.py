from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.errors import (
    InvalidArgument,
    NotFound,
    PipelineFailed,
    Refused,
    RunFenced,
    SavepointDamaged,
    StagedExpired,
    Trimmed,
    Unavailable,
    WrongEpoch,
)
from cutwater.jobs.restarts import (
    DEFAULT,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    Restarts,
    Strategy,
    is_hopeless,
    parse,
    written,
)
from cutwater.types import GLSN, Epoch, LogStreamId, RunId

MINUTE = 60_000


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", NoRestart()),
        ("fixed", FixedDelay(5_000, 3)),
        ("fixed:delay=5s,attempts=3", FixedDelay(5_000, 3)),
        (" fixed: attempts=7, delay=250ms ", FixedDelay(250, 7)),
        ("exponential:initial=1s,max=60s,multiplier=2,jitter=0.1,reset=10m", DEFAULT),
        ("exponential:initial=0s,jitter=0", ExponentialDelay(initial_ms=0, jitter=0.0)),
        ("rate:failures=3,per=5m,delay=5s", FailureRate(3, 5 * MINUTE, 5_000)),
    ],
)
def test_strategies_are_read_as_they_are_written(text: str, strategy: Strategy) -> None:
    assert parse(text) == strategy
    assert parse(written(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no restart strategy: write none, fixed:delay=5s,attempts=3, exponential:initial=1s,max=1m"),
        ("always", "is no restart strategy"),
        ("none:delay=5s", "'none' has no 'delay'; it has nothing to set"),
        ("fixed:wait=5s", "'fixed' has no 'wait'; it has delay, attempts, as in fixed:delay=5s,attempts=3"),
        ("fixed:delay=5", "delay in 'fixed:delay=5' is '5': a unit is missing, write '5ms', '5s' or '5m'"),
        ("fixed:delay=-5s", "must be at least 0 ms"),
        ("fixed:attempts=0", "attempts is '0', and must be a whole number from 1 on"),
        ("fixed:attempts=x", "attempts is 'x', and must be a whole number from 1 on"),
        ("fixed:attempts=1,attempts=2", "says 'attempts' twice"),
        ("exponential:jitter=0.7", "jitter is '0.7', and must be a number from 0.0 to 0.5"),
        ("exponential:multiplier=nan", "multiplier is 'nan', and must be a number from 1.0 on"),
        ("exponential:initial=2m", "the first delay is longer than the longest"),
    ],
)
def test_what_is_no_strategy_is_refused_with_what_is_one(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
    assert told in caught.value.message


def test_none_gives_up_at_once() -> None:
    assert Restarts(NoRestart()).failed(0, 0.0) is None


def test_a_fixed_delay_has_so_many_attempts_in_all() -> None:
    restarts = Restarts(FixedDelay(100, 2))
    assert [restarts.failed(at, 0.0) for at in (0, 1_000, 10**9)] == [100, 100, None]
    assert restarts.count == 2


def test_an_exponential_delay_grows_and_begins_anew() -> None:
    restarts = Restarts(ExponentialDelay(1_000, 5_000, 2.0, 0.1, 10 * MINUTE))
    now, waits = 0, []
    for _ in range(5):
        waits.append(restarts.failed(now, 0.0))
        now += (waits[-1] or 0) + 1
    assert waits == [1_000, 2_000, 4_000, 5_000, 5_000]
    # What counts is how long it ran, not how long it waited.
    assert restarts.failed(now + 10 * MINUTE - 2, 0.0) == 5_000
    assert restarts.failed(now + 30 * MINUTE, 1.0) == 1_100
    assert restarts.failed(now + 30 * MINUTE + 1_100, -1.0) == 1_800


def test_a_rate_gives_up_when_failures_come_too_fast() -> None:
    restarts = Restarts(FailureRate(2, 1_000, 10))
    assert [restarts.failed(at, 0.0) for at in (0, 500, 1_000, 1_499)] == [10, 10, 10, None]


@given(
    st.builds(
        ExponentialDelay,
        initial_ms=st.integers(0, 5_000),
        max_ms=st.integers(5_000, 100_000),
        multiplier=st.floats(1, 10),
        jitter=st.floats(0, 0.5),
        reset_ms=st.integers(0, 10**6),
    ),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1, 1)), max_size=40),
)
def test_a_delay_is_never_longer_than_the_longest_and_its_jitter(
    strategy: ExponentialDelay, failures: list[tuple[int, float]]
) -> None:
    restarts, now = Restarts(strategy), 0
    for ran, chance in failures:
        now += ran
        wait = restarts.failed(now, chance)
        assert wait is not None
        assert 0 <= wait <= strategy.max_ms * (1 + strategy.jitter) + 1
        now += wait


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        (InvalidArgument("x"), True),
        (NotFound("x"), True),
        (Refused("x"), True),
        (RunFenced("n", RunId(1), RunId(2)), True),
        (Trimmed(GLSN(1), GLSN(2)), True),
        (SavepointDamaged("x"), True),
        (ImportError("x"), True),
        (SyntaxError("x"), True),
        (WrongEpoch(LogStreamId(1), Epoch(1), Epoch(2)), False),
        (StagedExpired(RunId(1), 1, 2), False),
        (Unavailable("x"), False),
        (PipelineFailed("x", pipeline="p", uid="u", glsn=GLSN(1)), False),
        (OSError("x"), False),
    ],
)
def test_which_errors_are_worth_another_start(error: BaseException, hopeless: bool) -> None:
    assert is_hopeless(error) is hopeless
