"""The client for programs without asyncio: ``AsyncClient`` on an event loop in a thread of its own.

A ``Client`` may be used from several threads. It cannot be used in a process that was forked from the one that made it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, Self, TypeVar

from msgspec import Struct

from cutwater.client.append.declarations import DECLARATION_BYTES, Declared, declared_of, required
from cutwater.client.append.plain_arrow import AppendRecords
from cutwater.client.arguments import check_not_called
from cutwater.client.async_client import AsyncClient
from cutwater.client.blocking import Blocking, blocking, blocking_made, made
from cutwater.client.cluster.cursors import AsyncCursor, NamedCursor
from cutwater.client.convert.encoding import Compression, Limits
from cutwater.client.convert.times import Time
from cutwater.client.errors import ClientClosed
from cutwater.client.loop_thread import LoopThread
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.produce.producer_buffer import Sent
from cutwater.client.produce.sent_future import SentFuture
from cutwater.client.publish.part_writer import AsyncStager
from cutwater.client.subscribe.subscriptions import AsyncSubscription, Skipped, abandon_with
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, check_timeout, check_wait
from cutwater.types import Ack

T = TypeVar("T")

WAKE_SECONDS = 0.001
"""How long threads that wait for room stay asleep while another thread has the lock."""
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


class SendInput(Struct, eq=False):
    """The arguments of ``Producer.send``, until the loop's thread takes them."""

    part: AppendRecords | None
    count: int
    size: int
    seconds: float
    future: SentFuture
    declared: Declared | None


class Producer(Blocking[AsyncProducer]):
    """See ``Client.producer``. Any thread may send, and so may code that interrupts it: a signal handler or a finalizer
    may run in a thread that is inside ``send`` and has the lock. It may even wait there for the loop, so the loop never
    waits for the lock."""

    def __init__(self, loop: LoopThread, wrapped: AsyncProducer) -> None:
        super().__init__(loop, wrapped)
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._shared = threading.RLock()
        """The lock that all futures share."""
        self._given: deque[SendInput] = deque()
        """Sends on their way to the loop's thread, so that a thread that sends much does not wake it each time."""
        self._is_woken = False
        """Whether the loop is about to take them over."""
        self._given_bytes = self._taken_bytes = 0
        """Bytes of all sends so far: ``_given_bytes`` is changed with the lock, ``_taken_bytes`` only by the loop."""
        self._waiting = 0
        self._is_closed = False
        wrapped.on_change = self._wake

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
        producer = self._async
        seconds = producer.timeout if timeout is None else check_timeout(timeout)
        part, count, size = producer.prepare(records, key, timestamp, headers)
        declared = declared_of(watermark, idle) if watermark is not None or idle is not False else None
        return self._hand_in(part, count, size, seconds, declared)

    def declare(
        self, *, watermark: Time | None = None, idle: bool = False, timeout: float | None = None
    ) -> concurrent.futures.Future[Ack]:
        """Declare a watermark, idleness or both without a record, after everything that was sent before, in the log
        stream of this producer. Otherwise as ``send``."""
        seconds = self._async.timeout if timeout is None else check_timeout(timeout)
        return self._hand_in(None, 1, DECLARATION_BYTES, seconds, required(watermark, idle))

    def _hand_in(
        self, part: AppendRecords | None, count: int, size: int, seconds: float, declared: Declared | None
    ) -> concurrent.futures.Future[Ack]:
        producer = self._async
        future = SentFuture(self._shared)
        with self._lock:
            if not self._has_room(size):
                self._wait_for_room(size, seconds)
            if self._is_closed:
                raise ClientClosed(f"producer {producer.id!r} was closed")
            self._give(SendInput(part, count, size, seconds, future, declared))
        return future

    def _give(self, given: SendInput) -> None:
        """Queue a send for the loop. The caller must hold the lock."""
        self._given_bytes += given.size
        self._given.append(given)
        if self._is_woken:
            return
        try:
            self._is_woken = True
            self._loop.call_soon(self._take_over)
        except BaseException:
            self._is_woken = False
            # Its caller gets the error that it was not sent, so it must not be taken over with the next one.
            with suppress(ValueError):
                self._given.remove(given)
                self._given_bytes -= given.size
            raise

    def _hand_over(self) -> None:
        """Wake the loop before waiting for it: if this interrupts ``send``, the loop may not have been woken yet."""
        self._loop.call_soon(self._take_over)

    def _has_room(self, size: int) -> bool:
        held = self._given_bytes - self._taken_bytes + self._async.held_bytes
        return self._is_closed or not held or held + size <= self._async.buffer_bytes

    def _wait_for_room(self, size: int, seconds: float) -> None:
        self._hand_over()
        self._waiting += 1
        try:
            has_room = self._room.wait_for(lambda: self._has_room(size), seconds)
        finally:
            self._waiting -= 1
        if not has_room:
            raise DeadlineExceeded(f"producer {self.id!r} has no room, after {seconds:g} s: nothing was sent")

    def _wake(self) -> None:
        """Wake threads that wait for room; runs on the loop's thread."""
        if not self._waiting:
            return
        if not self._lock.acquire(blocking=False):
            asyncio.get_running_loop().call_later(WAKE_SECONDS, self._wake)
            return
        try:
            self._room.notify_all()
        finally:
            self._lock.release()

    def _take_over(self) -> None:
        """Take over the sends; runs on the loop's thread. The flag is cleared before the first look; otherwise a send
        that is given in between would be forgotten."""
        self._is_woken = False
        now = asyncio.get_running_loop().time()
        sent = list[Sent]()
        # A send that failed in ``_give`` may be gone before it is taken.
        with suppress(IndexError):
            while self._given:
                given = self._given.popleft()
                seconds = given.seconds
                sent.append(
                    Sent(
                        given.part,
                        given.count,
                        given.size,
                        now + seconds,
                        seconds,
                        given.future,
                        declared=given.declared,
                    )
                )
        if not sent:
            return
        try:
            self._async.enqueue(sent)
        except CutwaterError as error:
            for one in sent:
                with suppress(concurrent.futures.InvalidStateError):
                    one.future.set_exception(error)
        self._taken_bytes += sum(one.size for one in sent)
        self._wake()

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was sent before has its outcome. Raises the first failure since the last flush,
        even if its future was already asked."""
        # Earlier sends reach the loop before this does.
        self._hand_over()
        self._loop.run(self._async.flush(timeout=timeout), timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Flush and end. A send without an outcome by then fails: *unknown* if it was sent. This also waits for sends
        whose callers were already told *unknown*; ``AppendUnknown`` says that some still are."""
        with self._lock:
            self._is_closed = True
            self._room.notify_all()
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
    token: str = "",
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
