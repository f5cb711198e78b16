"""Signals that ask a command for an end: the first counts, and what is done after it is done to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cutwater.cli.framework.interrupts import SIGNALS, Interrupts

pytestmark = pytest.mark.usefixtures("plain_signals")


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


def test_what_was_ignored_when_the_process_began_stays_so() -> None:
    """As `nohup` wants it, and shells for what runs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_these_tests_pass_in_the_background_too() -> None:
    """`nohup make test &` begins with SIGHUP and SIGINT ignored."""
    begin = "import signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGHUP, s.SIGINT, s.SIGQUIT)]\n"
    script = begin + "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-p", "no:cacheprovider", "-k", "not background", str(Path(__file__))]
    told = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert told.returncode == 0, told.stdout
