"""Signals that ask a command for an end: the first counts, and what is done after it is done to its end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from cutwater.cli.interrupts import SIGNALS, Interrupts


@pytest.mark.parametrize("number", SIGNALS)
def test_cleaning_up_after_the_first_signal_is_not_disturbed_by_others(number: signal.Signals) -> None:
    done: list[str] = []

    def signalled() -> None:
        for one in (number, signal.SIGINT):
            os.kill(os.getpid(), one)

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            signalled()
            await asyncio.sleep(0)
            done.append("in the loop")

    before = [signal.getsignal(one) for one in SIGNALS]
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(work())
        signalled()
        done.append("after it")
    assert done == ["in the loop", "after it"]
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_an_event_loop_the_first_signal_interrupts(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        os.kill(os.getpid(), number)
