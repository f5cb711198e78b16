"""A worker of the operating system: order, groups, idleness and its end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from cutwater.runtime import system
from cutwater.runtime.worker import ThreadWorker

SECONDS = 10.0


class Steps:
    """Records steps. Each one waits at the gate; ``begun`` is released when it has begun."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.begun, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, items: list[int]) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=SECONDS)
        self.seen.append(items)


def test_everything_that_waits_is_one_step() -> None:
    steps = Steps()
    worker = system.worker("w", steps)
    worker.put(1)
    assert steps.begun.acquire(timeout=SECONDS)
    for item in (2, 3, 4):
        worker.put(item)
    steps.gate.release(2)
    worker.stop()
    assert worker.join(SECONDS)
    assert steps.seen == [[1], [2, 3, 4]]
    assert worker.join(0)


def test_a_worker_ends_after_what_was_put_before_and_ignores_the_rest() -> None:
    seen: list[int] = []
    gate = threading.Event()

    def step(items: list[int]) -> None:
        gate.wait(SECONDS)
        seen.extend(items)

    worker = system.worker("w", step)
    for item in range(1000):
        worker.put(item)
    worker.stop()
    worker.put(1000)
    assert not worker.join(0)
    assert not worker.join(0.01)
    gate.set()
    assert worker.join(SECONDS)
    assert seen == list(range(1000))


def test_a_worker_without_items_can_be_stopped() -> None:
    worker = system.worker("w", lambda items: None)
    worker.stop()
    assert worker.join(SECONDS)


def test_a_worker_is_idle_when_what_a_step_returned_is_called_and_not_before() -> None:
    idle: list[tuple[str, bool]] = []
    told = threading.Event()

    def then() -> None:
        idle.append(("then", worker.is_idle))
        told.set()

    def step(items: list[str]) -> object:
        idle.append(("step", worker.is_idle))
        return then

    worker: ThreadWorker[str] = ThreadWorker("w", step)  # type: ignore[arg-type]
    assert worker.is_idle
    worker.put("a")
    assert told.wait(SECONDS)
    assert idle == [("step", False), ("then", True)]
    worker.stop()
    assert worker.join(SECONDS)
    assert worker.is_idle


def test_a_worker_keeps_no_item_while_it_waits() -> None:
    class Item:
        pass

    done = threading.Event()
    worker = system.worker("w", lambda items: done.set)
    item = Item()
    seen = weakref.ref(item)
    worker.put(item)
    del item
    assert done.wait(SECONDS)
    for _ in range(1000):
        gc.collect()
        if seen() is None:
            break
    assert seen() is None
    worker.stop()
    assert worker.join(SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_raises_ends_the_worker() -> None:
    def step(items: list[int]) -> None:
        raise ZeroDivisionError

    worker = system.worker("w", step)
    worker.put(1)
    assert worker.join(SECONDS)
    assert worker.join(0)
    assert not worker.is_idle
