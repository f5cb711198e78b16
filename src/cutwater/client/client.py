"""The client for programs without asyncio: ``AsyncClient`` on an event loop in a thread of its own.

A ``Client`` may be used from several threads. It cannot be used in a process that was forked from the one that made it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, Self, TypeVar

from cutwater.client.arguments import check_not_called
from cutwater.client.async_client import AsyncClient
from cutwater.client.blocking import Blocking, blocking, blocking_made, made
from cutwater.client.cluster.cursors import AsyncCursor, NamedCursor
from cutwater.client.convert.encoding import Compression, Limits
from cutwater.client.convert.times import Time
from cutwater.client.errors import ClientClosed
from cutwater.client.loop_thread import LoopThread
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.produce.producer_queue import SentAppend, declaration
from cutwater.client.produce.sent_future import SentFuture
from cutwater.client.publish.part_writer import AsyncStager
from cutwater.client.subscribe.subscriptions import AsyncSubscription, Skipped, abandon_with
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.runtime import system
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, check_timeout, check_wait
from cutwater.types import Ack

T = TypeVar("T")

HAND_OVER_TURNS = 5
"""How many turns of the loop it takes until a thread has a result that a coroutine returns at once, and some more."""


class Subscription(Blocking[AsyncSubscription[T]], Generic[T]):
    """An iterator. While its user works on some records, the next ones are already being fetched::

    for record in log.subscribe("orders", follow=False):
        print(record.glsn, record.value)
    """

    def __init__(self, loop: LoopThread, wrapped: AsyncSubscription[T]) -> None:
        super().__init__(loop, wrapped)
        self._ready: deque[T] = deque()
        self._ahead: concurrent.futures.Future[list[T]] | None = None
        self._is_over = self._is_closed = False
        # So that its first position is fixed.
        loop.run(wrapped.begun())
        # A user that leaves a loop over it early does not close it, and fetching ahead would never end.
        abandon_with(self, wrapped)

    def __iter__(self) -> Iterator[T]:
        self._check_open()
        return self

    def __next__(self) -> T:
        if not self._ready:
            try:
                self._ready.extend(self._fetched(None))
            except ClientClosed:
                # Closing it ends the loops over it.
                if not self._is_closed:
                    raise
            if not self._ready:
                raise StopIteration
        return self._ready.popleft()

    def take(self, timeout: float | None = None) -> list[T]:
        """Return everything that is ready, at least one item unless the subscription is at its end. Waits at most
        ``timeout`` seconds. Without ``timeout``, a subscription that follows the log waits as long as necessary. With 0
        it returns only what has already arrived. Raises ``DeadlineExceeded`` if nothing has arrived by then."""
        if timeout is not None:
            check_wait(timeout)
        if not self._ready:
            self._ready.extend(self._fetched(timeout))
        taken, self._ready = list(self._ready), deque()
        return taken

    @property
    def trouble(self) -> str:
        """Log streams that cannot be read now, or take no appends, and what to do; empty if all is well."""
        return self._async.trouble

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The latest malformed batches that ``on_malformed="skip"`` has left out."""
        return self._async.skipped

    @property
    def skipped_records(self) -> int:
        """How many positions ``on_malformed="skip"`` has left out."""
        return self._async.skipped_records

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("this subscription was closed: subscribe again")

    def close(self) -> None:
        self._is_closed = True
        if self._ahead is not None:
            self._ahead.cancel()
        self._ready.clear()
        self._loop.run(self._async.close())

    def _fetched(self, timeout: float | None) -> list[T]:
        self._check_open()
        if self._is_over:
            return []
        ahead = self._ahead or self._loop.begin(self._async.take())
        # It is kept if its user is interrupted while waiting, so nothing is lost.
        self._ahead = ahead
        try:
            if timeout == 0 and not ahead.done():
                self._loop.run(_some_turns())
            found = self._loop.wait(ahead, timeout)
            self._check_open()
        except TimeoutError:
            assert timeout is not None, "only what has a limit reaches it"
            raise self._async._nothing_came(timeout) from None
        except CutwaterError:
            self._ahead = None
            # Another thread may have closed it.
            self._check_open()
            raise
        self._is_over = not found
        self._ahead = None if self._is_over else self._loop.begin(self._async.take())
        return found


async def _some_turns() -> None:
    """Give the loop time to hand over what it has."""
    for _ in range(HAND_OVER_TURNS):
        await asyncio.sleep(0)


class Cursor(Blocking[AsyncCursor], NamedCursor):
    """The position of a consumer, kept in the cluster under a name."""

    @property
    def name(self) -> str:
        return self._async.name

    get = blocking(AsyncCursor.get)
    commit = blocking(AsyncCursor.commit)
    drop = blocking(AsyncCursor.drop)


class Producer(Blocking[AsyncProducer]):
    """See ``Client.producer``. Any thread may send, and so may code that interrupts it: a signal handler or a finalizer
    may run in a thread that is inside ``send`` and has the lock. It may even wait there for the loop, so the loop never
    waits for the lock."""

    def __init__(self, loop: LoopThread, wrapped: AsyncProducer) -> None:
        super().__init__(loop, wrapped)
        self._lock = threading.RLock()
        self._shared = threading.RLock()
        """The lock that all futures share."""
        self._given: deque[SentAppend] = deque()
        """Sends on their way to the loop's thread, so that a thread that sends much does not wake it each time."""
        self._is_woken = False
        """Whether the loop is about to take them over."""
        self._given_bytes = self._taken_bytes = 0
        """Bytes of all sends so far: ``_given_bytes`` is changed with the lock, ``_taken_bytes`` only by the loop."""

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def topic(self) -> str:
        return self._async.topic

    def send(
        self,
        records: object,
        *,
        key: object = None,
        timestamp: object = None,
        headers: object = None,
        watermark: Time | None = None,
        idle: bool = False,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Ack]:
        """Hand over one record or several, as for ``append``; several stay together. Returns a future of the
        acknowledgement as soon as there is room for the records.

        After ``timeout`` the future fails: with ``DeadlineExceeded`` if nothing was sent, so that nothing will appear,
        otherwise with ``AppendUnknown``; then the producer still goes on trying. ``watermark`` and ``idle`` are as for
        ``append``, in the log stream of this producer.
        """
        future, seconds = SentFuture(self._shared), self._seconds(timeout)
        self._hand_in(self._async.prepare(future, seconds, watermark, idle, records, key, timestamp, headers))
        return future

    def declare(
        self, *, watermark: Time | None = None, idle: bool = False, timeout: float | None = None
    ) -> concurrent.futures.Future[Ack]:
        """Declare a watermark, idleness or both without a record, after everything that was sent before, in the log
        stream of this producer. Otherwise as ``send``."""
        future = SentFuture(self._shared)
        self._hand_in(declaration(future, self._seconds(timeout), watermark, idle))
        return future

    def _seconds(self, timeout: float | None) -> float:
        return self._async.timeout if timeout is None else check_timeout(timeout)

    def _hand_in(self, append: SentAppend) -> None:
        end = system.monotonic() + append.seconds
        while not self._give(append):
            left = end - system.monotonic()
            if left <= 0:
                # Others may take each room that there is.
                raise DeadlineExceeded(
                    f"producer {self.id!r} has no room, after {append.seconds:g} s: nothing was sent"
                )
            self._hand_over()
            self._loop.run(self._async.wait_for_room(append.size, timeout=append.seconds, left=left), left)

    def _give(self, append: SentAppend) -> bool:
        """Queue a send for the loop, if there is room."""
        with self._lock:
            if self._async.is_closed:
                raise ClientClosed(f"producer {self.id!r} was closed")
            held = self._given_bytes - self._taken_bytes + self._async.held_bytes
            if held and held + append.size > self._async.buffer_bytes:
                return False
            self._given_bytes += append.size
            self._given.append(append)
            if self._is_woken:
                return True
            try:
                self._is_woken = True
                self._hand_over()
            except BaseException:
                self._is_woken = False
                # Its caller gets the error that it was not sent, so it must not be taken over with the next one.
                with suppress(ValueError):
                    self._given.remove(append)
                    self._given_bytes -= append.size
                raise
        return True

    def _hand_over(self) -> None:
        """Wake the loop, also before waiting for it: if this interrupts ``send``, it may not have been woken yet."""
        self._loop.call_soon(self._take_over)

    def _take_over(self) -> None:
        """Take over the sends; runs on the loop's thread. The flag is cleared before the first look; otherwise a send
        that is given in between would be forgotten."""
        self._is_woken = False
        now = asyncio.get_running_loop().time()
        taken = list[SentAppend]()
        # A send that failed in ``_give`` may be gone before it is taken.
        with suppress(IndexError):
            while self._given:
                append = self._given.popleft()
                append.at = now + append.seconds
                taken.append(append)
        try:
            self._async.enqueue(taken)
        except CutwaterError as error:
            for append in taken:
                with suppress(concurrent.futures.InvalidStateError):
                    append.outcome.set_exception(error)
        self._taken_bytes += sum([append.size for append in taken])

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was sent before has its outcome. Raises the first failure since the last flush,
        even if its future was already asked."""
        # Earlier sends reach the loop before this does.
        self._hand_over()
        self._loop.run(self._async.flush(timeout=timeout), timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Flush and end. A send without an outcome by then fails: *unknown* if it was sent. This also waits for sends
        whose callers were already told *unknown*; ``AppendUnknown`` says that some still are."""
        self._hand_over()
        self._loop.run(self._async.close(timeout=timeout), timeout)


class Stager(Blocking[AsyncStager]):
    """See ``Client.stager``."""

    write = blocking(AsyncStager.write)
    finish = blocking(AsyncStager.finish)
    close = blocking(AsyncStager.close)


class Client(Blocking[AsyncClient]):
    """A connection to a log. Made by ``cutwater.connect`` or ``cutwater.open``::

    with cutwater.connect("cutwater://127.0.0.1:7000") as log:
        ack = log.append("orders", b"hello")
        for record in log.subscribe("orders", start=ack.glsn, follow=False):
            print(record.glsn, record.value)
    """

    def __new__(cls, *given: object, **_: object) -> Self:
        check_not_called(cls, given)
        return super().__new__(cls)

    def __init__(self, loop: LoopThread, wrapped: AsyncClient) -> None:
        super().__init__(loop, wrapped)
        self._closing = threading.Lock()
        self._is_closed = False
        loop.at_end(wrapped.close)

    @property
    def cluster(self) -> int:
        return self._async.cluster

    @property
    def servers(self) -> str:
        """The address at which other clients can connect to the same cluster."""
        return self._async.servers

    create_topic = blocking(AsyncClient.create_topic)
    change_topic = blocking(AsyncClient.change_topic)
    delete_topic = blocking(AsyncClient.delete_topic)
    topics = blocking(AsyncClient.topics)
    topic = blocking(AsyncClient.topic)
    trim = blocking(AsyncClient.trim)
    append = blocking(AsyncClient.append, AsyncClient._quick_append)
    declare = blocking(AsyncClient.declare)
    read = blocking(AsyncClient.read)
    tail = blocking(AsyncClient.tail)
    find = blocking(AsyncClient.find)
    table = blocking(AsyncClient.table)
    watermark = blocking(AsyncClient.watermark)
    subscribe = made(AsyncClient.subscribe, Subscription)
    batches = made(AsyncClient.batches, Subscription)
    producer = blocking_made(AsyncClient.producer, Producer)
    cursor = made(AsyncClient.cursor, Cursor)
    open_run = blocking(AsyncClient.open_run)
    check_run = blocking(AsyncClient.check_run)
    find_runs = blocking(AsyncClient.find_runs)
    cluster_key = blocking(AsyncClient.cluster_key)
    stage = blocking(AsyncClient.stage)
    stager = blocking_made(AsyncClient.stager, Stager)
    publish = blocking(AsyncClient.publish)

    def close(self) -> None:
        """Close producers, which lets them finish what was sent, and then everything else. If a log that was opened
        here cannot be closed in time, that is raised, and calling this once more tries again."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        is_over = True
        try:
            self._loop.run(self._async.close())
        except BaseException as error:
            # A log that is still open has its servers on this loop. After a fork they belong to the parent process.
            is_over = self._async._on_close is None or isinstance(error, ClientClosed)
            raise
        finally:
            self._is_closed = is_over
            if is_over:
                self._loop.close()


def connect(
    servers: str,
    *,
    timeout: float = TIMEOUT_SECONDS,
    compression: Compression | None = None,
    cluster: int | None = None,
    token: str | os.PathLike[str] = "",
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
) -> Client:
    """Connect to a cluster: ``cutwater.connect("cutwater://host:port,host:port")``. Close the client when done, best by
    using it in a ``with`` statement. ``AsyncClient.connect`` explains the arguments."""
    loop = LoopThread("cutwater client")
    try:
        client = loop.run(
            AsyncClient.connect(
                servers,
                timeout=timeout,
                compression=compression,
                cluster=cluster,
                token=token,
                tls=tls,
                insecure=insecure,
                limits=limits,
            )
        )
    except BaseException:
        loop.close()
        raise
    return Client(loop, client)
