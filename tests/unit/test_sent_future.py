"""What a producer returns behaves as any future of the standard library does, also with one lock for all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, InvalidStateError, as_completed, wait
from typing import Any

import pytest

from cutwater.client.produce.sent_future import SentFuture, settle_together
from cutwater.errors import AppendUnknown
from cutwater.types import GLSN, LLSN, Ack, LogStreamId

pytestmark = pytest.mark.timeout(60)

SHARED = threading.RLock()


def ack(glsn: int) -> Ack:
    return Ack(GLSN(glsn), LLSN(glsn), LogStreamId(1), 1)


def made(count: int) -> list[SentFuture]:
    return [SentFuture(SHARED) for _ in range(count)]


def settle(futures: list[SentFuture]) -> None:
    settle_together(futures, [ack(i) for i in range(len(futures))])


def elsewhere(work: Callable[[], None]) -> threading.Thread:
    """In another thread, a little later."""
    thread = threading.Timer(0.05, work)
    thread.start()
    return thread


def test_results_are_there_before_and_after_they_are_waited_for() -> None:
    futures = made(3)
    assert not any(future.done() for future in futures)
    with pytest.raises(TimeoutError):
        futures[0].result(0.01)
    with pytest.raises(TimeoutError):
        futures[0].exception(0)
    thread = elsewhere(lambda: settle(futures))
    assert [future.result(30) for future in futures] == [ack(0), ack(1), ack(2)]
    assert [future.exception() for future in futures] == [None] * 3
    assert all(future.done() and not future.cancelled() for future in futures)
    thread.join()


def test_each_has_one_outcome() -> None:
    settled, cancelled, failed = made(3)
    assert cancelled.cancel()
    failed.set_exception(AppendUnknown("nobody knows"))
    settle([settled, cancelled, failed])
    assert settled.result() == ack(0)
    assert not settled.cancel()
    with pytest.raises(InvalidStateError):
        settled.set_exception(AppendUnknown("too late"))
    with pytest.raises(CancelledError):
        cancelled.result()
    with pytest.raises(AppendUnknown):
        failed.result()
    assert isinstance(failed.exception(), AppendUnknown)


def test_callbacks_are_called_once_and_without_a_lock() -> None:
    futures, called = made(3), list[tuple[Future[Ack], bool]]()

    def look(future: Future[Ack]) -> None:
        # Others, which share the lock, can be settled meanwhile.
        settle(made(1))
        called.append((future, future.done()))

    futures[0].add_done_callback(look)
    settle(futures)
    futures[1].add_done_callback(look)
    assert called == [(futures[0], True), (futures[1], True)]


def test_who_comes_while_it_is_settled_is_not_forgotten() -> None:
    """Threads that begin to wait, or cancel, race with the one that settles."""
    for _ in range(300):
        futures = made(4)
        told = threading.Barrier(2)
        heard: list[Future[Ack]] = []

        def come(futures: list[SentFuture] = futures, told: threading.Barrier = told, heard: list[Any] = heard) -> None:
            told.wait(30)
            futures[0].add_done_callback(heard.append)
            futures[1].result(30)
            if not futures[2].cancel():
                assert futures[2].result(30) == ack(2)
            done, _ = wait(futures[3:], 30)
            heard.extend(done)

        thread = threading.Thread(target=come)
        thread.start()
        told.wait(30)
        settle(futures)
        thread.join(30)
        assert heard == [futures[0], futures[3]]


def test_threads_that_use_a_future_at_once_share_one_outcome() -> None:
    """It becomes a standard future once, before or after it is settled, and no callback is lost."""
    for _ in range(200):
        (future,) = made(1)
        begin, heard = threading.Barrier(5), list[Future[Ack]]()

        def use(future: SentFuture = future, begin: threading.Barrier = begin, heard: list[Any] = heard) -> None:
            begin.wait(30)
            future.add_done_callback(heard.append)
            assert future.exception(30) is None

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        begin.wait(30)
        settle([future])
        for thread in threads:
            thread.join(30)
        assert heard == [future] * 4
        assert future.result() == ack(0)


def test_the_standard_library_waits_for_them() -> None:
    futures = made(4)
    thread = elsewhere(lambda: settle(futures[:2]))
    done, waiting = wait(futures, 30, FIRST_COMPLETED)
    assert (done, waiting) == (set(futures[:2]), set(futures[2:]))
    thread.join()
    thread = elsewhere(lambda: settle(futures[2:]))
    assert set(as_completed(futures, 30)) == set(futures)
    thread.join()

    async def with_asyncio() -> Ack:
        (future,) = made(1)
        asyncio.get_running_loop().call_later(0.01, settle, [future])
        return await asyncio.wrap_future(future)

    assert asyncio.run(with_asyncio()) == ack(0)
