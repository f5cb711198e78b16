"""Threads that bring work to an event loop, and are interrupted at the worst moments."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cutwater.client.loop_thread import LoopThread
from cutwater.errors import DeadlineExceeded
from cutwater.runtime.event_loop import new_event_loop

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test loop")
    yield thread
    thread.close()


async def one() -> int:
    return 1


def interrupt(loop: LoopThread, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> list[int]:
    """The next call that wakes the loop is interrupted, before or after that; how often it was woken since."""
    real, calls = loop._call_soon, [0]

    def call_soon(function: Callable[[], None]) -> None:
        calls[0] += 1
        if calls[0] > 1 or after:
            real(function)
        if calls[0] == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_call_soon", call_soon)
    return calls


def test_who_waits_for_a_loop_that_is_stuck_leaves_in_time(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.client.loop_thread.STUCK_SECONDS", 0.05)
    disk_answers, begun = threading.Event(), list[int]()

    async def late() -> None:
        begun.append(1)

    loop.call_soon(lambda: _wait_for(disk_answers))
    with pytest.raises(DeadlineExceeded, match=r"for 0\.05 s, as a disk"):
        loop.run(late(), 0.01)
    monkeypatch.setattr("cutwater.client.loop_thread.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("cutwater.client.loop_thread.STUCK_SECONDS_MAX", 0.07)
    with pytest.raises(DeadlineExceeded, match=r"for 0\.07 s, as a disk"):
        loop.run(late())
    disk_answers.set()
    assert loop.run(one()) == 1
    assert not begun, "what was given up is not done any more"


def test_a_loop_that_is_merely_slow_is_waited_for(loop: LoopThread) -> None:
    async def slow() -> int:
        await asyncio.sleep(0.1)
        return 2

    assert loop.run(slow(), 0.01) == 2


def _wait_for(event: threading.Event) -> None:
    event.wait(30)


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_the_loop_is_woken_stops_nobody_else(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    begun: list[int] = []

    async def slow() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    interrupt(loop, monkeypatch, after=after)
    with pytest.raises(KeyboardInterrupt):
        loop.run(slow())
    for _ in range(3):
        assert loop.run(one()) == 1
    assert loop.run(_others()) == 0, "what was given up is not done any more"
    assert after or not begun


async def _others() -> int:
    await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1


def test_who_relied_on_the_one_that_was_interrupted_is_let_in(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    relied = threading.Event()
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(loop.run(one())), daemon=True)
    real = loop._call_soon

    def call_soon(function: Callable[[], None]) -> None:
        if not relied.is_set():
            relied.set()
            other.start()
            while len(loop._visits) < 2:
                pass
            raise KeyboardInterrupt
        real(function)

    monkeypatch.setattr(loop, "_call_soon", call_soon)
    with pytest.raises(KeyboardInterrupt):
        loop.run(one())
    other.join(20)
    assert found == [1]


def test_a_process_without_standard_descriptors_can_close_its_loop() -> None:
    """Of a descriptor with such a number libuv ends the process that closes it."""
    program = """
import os
os.closerange(0, 3)
from cutwater.runtime.event_loop import new_event_loop
new_event_loop().close()
taken = os.open(os.devnull, os.O_RDONLY)
os._exit(0 if taken == 3 else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_so_can_one_where_there_is_no_null_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "devnull", str(tmp_path / "none"))
    new_event_loop().close()
