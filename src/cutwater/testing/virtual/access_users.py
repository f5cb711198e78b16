"""Clients of a simulated cluster with access control: principals with tokens, whose rights come and go.

Each call is noted, with the rights that it needs and whether it was carried out or denied; ``checkers.access`` judges
them. Users also try what nobody may do: a token with a wrong secret, the audit, and parts that another user has staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cutwater.client.async_client import AsyncClient
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.publish.runs import Run
from cutwater.core.requests import PublishedGroup
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Trimmed,
)
from cutwater.protocol.errors import Unauthenticated
from cutwater.testing.checkers.access import AccessCall, CallTime, Needed
from cutwater.testing.checkers.record import AppendOp, PublishOp, SimOutcome
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.workload import AGAIN_SECONDS, AppendingClient
from cutwater.types import BatchNumber, Part

if TYPE_CHECKING:
    from cutwater.testing.virtual.access_workload import AccessWorld
    from cutwater.testing.virtual.simulation import ShippedSimulation

T = TypeVar("T")

TOPICS = ("a.1", "a.2", "b.1")
AUDIT_TOPIC = "_audit"
CURSORS = ("c.1", "c.2")
CALLS_MAX = 12
"""A user connects again after at most so many calls, unless it only appends."""
APPENDS = 1_000
WRONG_SECRETS = 0.15
"""Share of connections for which a user gives a token with a wrong secret."""
PAUSE_SECONDS = 0.04
ATTEMPT_SECONDS = 3.0
FINAL_SECONDS = 5.0
STEAL_SECONDS = 0.5
FOLLOW_SECONDS = 1.0
"""Mean length of a subscription."""
DENIED = (PermissionDenied, Unauthenticated)


class AccessUser(AppendingClient):
    """One principal. It goes on when calls are denied, and connects with another token when its own does not hold."""

    def __init__(
        self, world: ShippedSimulation, access: AccessWorld, name: str, host: str, *, only_appends: bool = False
    ) -> None:
        """``only_appends``: it does nothing else, and keeps its connections, so that it needs no metadata node."""
        super().__init__(world, name, host)
        self.access, self.only_appends = access, only_appends
        self.token = ""
        """The token of this connection, and its id as the checker knows it: empty for a wrong secret."""
        self._id = ""
        self.run_key = f"key of {name}"
        self.committed = -1
        self.bait: tuple[Run, str, Part] | None = None
        self.baits = 0
        self.following: list[AccessCall] = []
        """The subscription that is open now."""
        self.is_checked = False
        """Whether everything was tried once more after the last change of rights."""

    async def connect_and_run(self) -> None:
        # What a process that was killed had open is not open any more.
        self.following = []
        while not self.world.is_stopping:
            log = await self._connect()
            if log is not None:
                await self._work(log, APPENDS if self.only_appends else self.random.randint(3, CALLS_MAX))
        await self._check_at_the_end()

    async def run(self, log: AsyncClient) -> None:
        raise NotImplementedError

    # Noting calls.

    def moment(self) -> CallTime:
        return CallTime(self.now, self.world.loop.now)

    def begin_call(self, what: str, *needs: Needed) -> AccessCall:
        return AccessCall(self.name, self._id, needs, what, self.moment())

    def end_call(self, call: AccessCall, error: CutwaterError | None, *, is_denial: bool = False) -> None:
        """Note a call that ended; one whose error says nothing about rights is not noted."""
        is_denied = is_denial or isinstance(error, DENIED)
        if error is None or is_denied:
            call.end, call.is_done, call.why = self.moment(), error is None, "" if error is None else str(error)
            self.access.history.calls.append(call)
            self.world.cluster.counts["allowed" if error is None else "denied"] += 1
            self.world.note(f"{self.name}: {call.what} {'is done' if error is None else 'is denied'}")

    async def _noted(self, call: AccessCall, work: Awaitable[T], *, names_topic: bool = False) -> T:
        """Wait for a call and note it. ``names_topic``: a topic that is not found may not be described."""
        try:
            found = await work
        except CutwaterError as error:
            self.end_call(call, error, is_denial=names_topic and isinstance(error, NotFound))
            raise
        self.end_call(call, None)
        return found

    # Life.

    async def _connect(self) -> AsyncClient | None:
        """Connect with one of the own tokens, or with a wrong secret. Metadata nodes are asked in any order."""
        texts = self.access.tokens[self.name]
        text = texts[-1] if self.access.is_final else self.random.choice(texts[-2:])
        self.token, self._id = text, text.split("_")[1]
        if self.random.random() < WRONG_SECRETS and not self.access.is_final:
            self.token, self._id = text[:-1] + ("0" if text[-1] != "0" else "1"), ""
        addresses = list(self.world.cluster.addresses)
        self.random.shuffle(addresses)
        servers, timeout = "cutwater://" + ",".join(addresses), self.world.options.timeout
        call = self.begin_call("to connect")
        try:
            log = await self._noted(call, AsyncClient.connect(servers, timeout=timeout, token=self.token))
        except CutwaterError:
            await asyncio.sleep(AGAIN_SECONDS)
            return None
        return log

    async def _work(self, log: AsyncClient, calls: int) -> None:
        following = None if self.only_appends else self.world.loop.create_task(self._follow(log))
        everything: list[Callable[[AsyncClient], Coroutine[Any, Any, object]]] = [
            self._append,
            self._append,
            self._read,
            self._read,
            self._read,
            self._produce,
            self._commit,
            self._get,
            self._publish,
            self._bait,
            self._steal,
        ]
        work = [self._append] if self.only_appends else everything
        try:
            for _ in range(calls):
                if self.world.is_stopping:
                    break
                try:
                    await self.random.choice(work)(log)
                except Unauthenticated:
                    break
                except CutwaterError as error:
                    self.world.note(f"{self.name}: {error.code}")
                await self.pause(PAUSE_SECONDS)
        finally:
            if following is not None:
                following.cancel()
            self.following = []
            await self._close(log)

    async def _close(self, log: AsyncClient | AsyncProducer) -> None:
        try:
            await log.close()
        except CutwaterError as error:
            self.world.note(f"{self.name}: {error.code}")

    # Calls.

    async def _append(self, log: AsyncClient, topic: str = "") -> None:
        topic = topic or self.random.choice(TOPICS)
        call = self.begin_call(f"to append to {topic}", ("append", f"topic:{topic}"))
        op = self._begin(topic, (1, 1, 2))
        values, times = h.values_of(op, b""), h.times_of(op)
        try:
            ack = await log.append(topic, values, timestamp=times)
        except AppendUnknown:
            self.world.history.end(op, self.now, SimOutcome.UNKNOWN)
            return
        except asyncio.CancelledError:
            # The user has lost patience, and nothing will be told of this append.
            self.world.history.end(op, self.now, SimOutcome.UNKNOWN)
            raise
        except CutwaterError as error:
            self.world.history.end(op, self.now, SimOutcome.FAIL)
            self.end_call(call, error, is_denial=isinstance(error, NotFound))
            raise
        self.world.history.end(op, self.now, SimOutcome.OK, ack)
        self.access.positions.setdefault(topic, []).append(ack.glsn)
        call.servers = self.access.nodes_of(ack.stream)
        self.end_call(call, None)

    def _begin(self, topic: str, counts: tuple[int, ...], producer: tuple[str, int] | None = None) -> AppendOp:
        op = self.begin(topic, counts, producer)
        self.access.begun[op.payload] = self.moment()
        return op

    async def _read(self, log: AsyncClient, topic: str = "") -> None:
        topic = topic or self.random.choice((*TOPICS, AUDIT_TOPIC))
        start = self.random.choice(self.access.positions_of(topic)[-20:])
        call = self.begin_call(f"to read {topic}", ("read", f"topic:{topic}"))
        try:
            found = await log.table(topic, start=start, stop=start + 5, columns=["glsn"])
        except CutwaterError as error:
            # The topic of the audit is made when access control is first turned on.
            self.end_call(call, error, is_denial=isinstance(error, NotFound) and topic != AUDIT_TOPIC)
            raise
        if found.num_rows:
            # Otherwise the catalog has answered, for which another right suffices.
            self.end_call(call, None)

    async def _produce(self, log: AsyncClient, topic: str = "") -> None:
        """Open a producer, whose name may be that of another user, and send a little."""
        topic = topic or self.random.choice(TOPICS)
        name = f"p.{topic}"
        needs = (("produce-as", f"producer:{name}"), ("append", f"topic:{topic}"))
        invoked = self.now
        call = self.begin_call(f"to open producer {name} on {topic}", *needs)
        producer = await self._noted(call, log.producer(topic, id=name), names_topic=True)
        holder = self.world.history.opened(name, invoked, self.now)
        try:
            for _ in range(self.random.randint(1, 3)):
                await self._send(producer, topic, name, holder, needs)
        finally:
            await self._close(producer)

    async def _send(self, producer: Any, topic: str, name: str, holder: int, needs: tuple[Needed, ...]) -> None:
        history = self.world.history
        call = self.begin_call(f"to send as {name} to {topic}", *needs)
        op = self._begin(topic, (1, 1, 2), (name, history.next_call(name)))
        op.holder = holder

        def done(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if future.cancelled() or error is not None:
                is_definite = isinstance(error, DeadlineExceeded | InvalidArgument)
                history.end(op, self.now, SimOutcome.FAIL if is_definite else SimOutcome.UNKNOWN)
                if isinstance(error, DENIED):
                    self.end_call(call, error)
            else:
                history.end(op, self.now, SimOutcome.OK, future.result())
                call.servers = self.access.nodes_of(future.result().stream)
                self.end_call(call, None)

        try:
            sent = await producer.send(h.values_of(op, b""), timestamp=h.times_of(op))
        except CutwaterError:
            history.end(op, self.now, SimOutcome.FAIL)
            raise
        except asyncio.CancelledError:
            history.end(op, self.now, SimOutcome.UNKNOWN)
            raise
        sent.add_done_callback(done)
        await asyncio.wait({sent}, timeout=ATTEMPT_SECONDS)

    async def _commit(self, log: AsyncClient, cursor: str = "") -> None:
        cursor = cursor or self.random.choice(CURSORS)
        call = self.begin_call(f"to commit cursor {cursor}", ("cursor", f"cursor:{cursor}"))
        await self._noted(call, log.cursor(cursor).commit(1))

    async def _get(self, log: AsyncClient, cursor: str = "") -> None:
        cursor = cursor or self.random.choice(CURSORS)
        call = self.begin_call(f"to read cursor {cursor}", ("describe", f"cursor:{cursor}"))
        await self._noted(call, log.cursor(cursor).get())

    # Publishing.

    async def _publish(self, log: AsyncClient, topic: str = "") -> None:
        """Publish a batch with a part of the own rows."""
        topic = topic or self.random.choice(TOPICS)
        run = await self._open_run(log)
        # A batch that was decided may be repeated, also when its outcome is unknown.
        batch = max(self.committed, run.last_batch) + self.random.choice((0, 1, 1))
        if batch <= self.committed or batch < 0:
            batch = self.committed + 1
        part = await self._stage(log, run, batch, topic)
        await self._publish_part(log, run, batch, topic, part)
        self.committed = batch

    async def _open_run(self, log: AsyncClient) -> Run:
        name = f"run-{self.name}"
        call = self.begin_call(f"to open run {name}", ("publish", f"run:{name}"))
        return await self._noted(call, log.open_run(name, self.run_key))

    async def _stage(self, log: AsyncClient, run: Run, batch: int, topic: str) -> Part:
        op = self._begin(topic, (1, 2))
        op.outcome, op.part = SimOutcome.UNKNOWN, "not staged"
        rows = [
            {"value": value, "timestamp": time}
            for value, time in zip(h.values_of(op, b""), h.times_of(op), strict=True)
        ]
        call = self.begin_call(f"to stage rows for {topic}", ("append", f"topic:{topic}"))
        part = await self._noted(call, log.stage(run, batch, topic, rows), names_topic=True)
        assert part is not None
        self.world.history.stage(part, [op])
        return part

    async def _publish_part(self, log: AsyncClient, run: Run, batch: int, topic: str, part: Part) -> None:
        self.world.history.offered.append((run.run, batch, (part.part,)))
        needs = (("publish", f"run:{run.name}"), ("append", f"topic:{topic}"))
        call = self.begin_call(f"to publish batch {batch} to {topic}", *needs)
        published = await self._noted(call, log.publish(run, batch, [part]))
        groups = [PublishedGroup(self.world.cluster.topic(g.topic), g.stream, g.glsn, g.count) for g in published]
        self.world.history.published.append(PublishOp(run.run, BatchNumber(batch), tuple(groups)))

    async def _bait(self, log: AsyncClient) -> None:
        """Stage rows that another user will try to publish, in a run of their own."""
        if self.world.options.access != "enforced" or self.bait is not None:
            return
        self.baits += 1
        name, topic = f"run-{self.name}-bait{self.baits}", self.random.choice(TOPICS)
        call = self.begin_call(f"to open run {name}", ("publish", f"run:{name}"))
        run = await self._noted(call, log.open_run(name, f"key of {name}.{self.starts}"))
        self.bait = run, topic, await self._stage(log, run, 0, topic)

    async def _steal(self, log: AsyncClient) -> None:
        """Publish a part that another user has staged. The rights may suffice for its run and topic, but only the
        principal that has staged a part publishes it."""
        user = self.random.choice(self.access.users)
        if user is self or user.bait is None:
            return
        (run, topic, part), user.bait = user.bait, None
        self.world.history.stolen.add(part.part)
        self.world.history.offered.append((run.run, 0, (part.part,)))
        self.access.baits.add(run.run)
        needs = (("publish", f"run:{run.name}"), ("append", f"topic:{topic}"), ("publish", "part:of another principal"))
        call = self.begin_call(f"to publish rows of {user.name}", *needs)
        await self._noted(call, log.publish(run, 0, [part], timeout=STEAL_SECONDS))

    # A subscription.

    async def _follow(self, log: AsyncClient) -> None:
        """Subscribe to a topic. Each record is judged: it must not be delivered if it was appended when the right was
        gone."""
        while True:
            topic = self.random.choice((*TOPICS, AUDIT_TOPIC))
            start = max(self.access.positions_of(topic)) + 1
            subscription = self.begin_call(f"to follow {topic}", ("read", f"topic:{topic}"))
            subscription.is_open = True
            self.following = [subscription]
            try:
                async with asyncio.timeout(self.random.expovariate(1 / FOLLOW_SECONDS)):
                    async for record in log.subscribe(topic, start=start):
                        self._delivered(subscription, topic, record)
            except TimeoutError:
                pass
            except CutwaterError as error:
                self.end_call(subscription, error, is_denial=isinstance(error, NotFound) and topic != AUDIT_TOPIC)
            self.following = []
            await self.pause(PAUSE_SECONDS)

    def _delivered(self, subscription: AccessCall, topic: str, record: Any) -> None:
        begun = self.access.begun.get(h.found_of(record).append, subscription.begin)
        call = self.begin_call(f"to be given a record of {topic}", *subscription.needs)
        call.token, call.begin, call.is_open = subscription.token, max(begun, subscription.begin), True
        call.servers = self.access.nodes_of(record.stream)
        self.end_call(call, None)

    # The end.

    async def _check_at_the_end(self) -> None:
        """When rights do not change any more, each kind of call is carried out or denied, and no longer unavailable."""
        while not self.access.is_final:
            await asyncio.sleep(AGAIN_SECONDS)
        topic = self.random.choice(TOPICS)
        work: list[Callable[[AsyncClient], Coroutine[Any, Any, object]]] = [
            lambda log: self._append(log, topic),
            lambda log: self._read(log, topic),
            lambda log: self._read(log, AUDIT_TOPIC),
            lambda log: self._produce(log, topic),
            lambda log: self._commit(log, CURSORS[0]),
            lambda log: self._publish(log, topic),
        ]
        while work:
            log = await self._connect()
            if log is None:
                if not self.access.has_token(self.name):
                    break
                continue
            while work:
                try:
                    await asyncio.wait_for(work[-1](log), FINAL_SECONDS)
                except (PermissionDenied, NotFound, Trimmed):
                    pass
                except (CutwaterError, TimeoutError) as error:
                    self.world.note(f"{self.name} tries again: {error!r}")
                    await asyncio.sleep(AGAIN_SECONDS)
                    break
                work.pop()
            await self._close(log)
