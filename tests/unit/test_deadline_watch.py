"""One timer for many deadlines: when it fires again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import cast

from cutwater.runtime.deadline_watch import PAUSE_SECONDS_MAX, PRECISION_SECONDS, DeadlineWatch


class Loop:
    """An event loop whose time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.at = inf
        self.fire: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Loop:
        self.at, self.fire = when, callback
        return self

    def cancel(self) -> None:
        self.at = inf


def fired(expire: Callable[[float], float]) -> tuple[Loop, DeadlineWatch]:
    """A watch with a deadline at 101, just after that has passed."""
    loop = Loop()
    watch = DeadlineWatch(cast(asyncio.AbstractEventLoop, loop), expire)
    watch.note(101.0)
    loop.now = 101.0
    loop.fire()
    return loop, watch


def test_the_next_deadline_is_armed_and_none_is_left_for_nothing() -> None:
    assert fired(lambda now: 105.0)[0].at == 105.0
    assert fired(lambda now: inf)[1].armed == inf


def test_a_deadline_that_has_passed_is_looked_at_soon() -> None:
    loop, _ = fired(lambda now: now - 1.0)
    assert loop.now + PRECISION_SECONDS <= loop.at < loop.now + 0.05


def test_a_stall_does_not_delay_the_deadlines_after_it() -> None:
    """A stopped process, or one that waits for a core, uses no processor time."""

    def stalled(now: float) -> float:
        time.sleep(0.05)
        return now - 1.0

    loop, _ = fired(stalled)
    assert loop.at < loop.now + 0.05


def test_work_for_very_many_calls_is_spread_but_within_a_limit() -> None:
    def busy(now: float) -> float:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
        return now - 1.0

    loop, _ = fired(busy)
    assert loop.at == loop.now + PAUSE_SECONDS_MAX
