"""A model of an etcd cluster for the shipped ``EtcdStore``: members that agree, and everything that goes wrong between.

The members share one ``EtcdData``, because a sound etcd answers as one machine would. What differs is whether a member
answers at all. A request may be refused, lost or late; its answer may be lost, or an error although the request was
executed; a member may be down, stopped or cut off; the leader may change. A caller cannot tell these apart, and that
is the point.

Requests are served in a context of their own. A simulated process that is killed takes back nothing that it has sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from random import Random
from typing import Any, TypeVar

import grpc
import grpc.aio
from msgspec import Struct

from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.address import EtcdAddress
from cutwater.metadata.etcd.client import COMPACT, RANGE, STATUS, TXN, Rpc
from cutwater.metadata.stores.etcd_store import EtcdStore
from cutwater.testing.stores.etcd_data import EtcdData, EtcdRefusal
from cutwater.types import ClusterId

REQUEST_SECONDS = 7.0
"""How long etcd itself waits for a majority before it answers that the request timed out."""
ELECTION_SECONDS = (0.5, 1.5)
VERSION = "3.6.0"
FIRST_MEMBER_ID = 0x1000

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_DISTURBED = (
    "etcdserver: leader changed",
    "etcdserver: request timed out",
    "etcdserver: request timed out, possibly due to previous leader failure",
    "etcdserver: request timed out, possibly due to connection lost",
)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class EtcdFaults(Struct, frozen=True):
    """How likely each fault is, per request. A request has at most one of those up to ``busy``."""

    refused: float = 0.0
    """There is no connection: the request is not executed, and the caller knows soon."""
    lost: float = 0.0
    """The request is lost: it is not executed, and the caller hears nothing."""
    answer_lost: float = 0.0
    """The request is executed, and the caller hears nothing."""
    reset: float = 0.0
    """The connection breaks: the request is executed or not, and the caller hears of an error."""
    disturbed: float = 0.0
    """The leader changes meanwhile: as after a reset, but with an error of etcd."""
    late: float = 0.0
    """The request is executed up to ``late_seconds_max`` later, possibly long after the caller gave it up."""
    busy: float = 0.0
    """Too many requests: it is not executed."""
    compacted: float = 0.0
    """Another program lets etcd forget all old revisions right before the request. May come with any of the others."""
    delay_seconds_max: float = 0.002
    """The way of a request, and the way of its answer, take up to this long."""
    late_seconds_max: float = 10.0


CALM = EtcdFaults()


class _Call:
    """A request on its way. ``answer`` belongs to the caller, which may have given it up."""

    def __init__(self, path: str, data: bytes, answer: asyncio.Future[bytes], fault: str, late_seconds: float) -> None:
        self.path, self.data, self.answer, self.fault, self.late_seconds = path, data, answer, fault, late_seconds
        self.is_dropped = False

    def succeed(self, data: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(data)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(rpc_error(code, details))


class ModelMember:
    """One member. ``running`` is cleared while its process is stopped; cut off, it does not reach the other members."""

    def __init__(self, number: int) -> None:
        self.id = FIRST_MEMBER_ID + number
        self.endpoint = f"etcd-{number}:2379"
        self.is_up = True
        self.is_cut_off = False
        self.believed: tuple[int, int] = (0, 0)
        """The leader and the term that it knew when it last reached the others."""
        self.running = asyncio.Event()
        self.running.set()
        self.calls: dict[_Call, None] = {}
        self.ended = asyncio.Event()
        """Set when the member dies; replaced when it starts again."""


class EtcdModel:
    """A cluster. Use it on one event loop; ``close`` ends what is still on its way."""

    def __init__(self, random: Random, *, members: int = 3, faults: EtcdFaults = CALM) -> None:
        self.random, self.faults = random, faults
        self.data = EtcdData()
        self.data.changed.append(lambda *_: self._tell_watchers())
        self.members = [ModelMember(number) for number in range(1, members + 1)]
        self.term = 1
        self.leader: ModelMember | None = self.members[0]
        self.trace: Callable[[str], None] = lambda text: None
        """Called with every fault and every executed request."""
        self.news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_electing = False
        self._note_leader()

    @property
    def address(self) -> EtcdAddress:
        return EtcdAddress(tuple(member.endpoint for member in self.members), "model")

    def store(self, cluster: ClusterId) -> EtcdStore:
        """Return a store as one metadata node would have it."""
        return EtcdStore(self.address, cluster, self.connect)

    def connect(self, address: EtcdAddress) -> list[ModelConnection]:
        by_endpoint = {member.endpoint: member for member in self.members}
        return [ModelConnection(self, by_endpoint[endpoint]) for endpoint in address.endpoints]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Faults of members.

    def kill(self, member: ModelMember) -> None:
        """Kill a member. What it was asked is executed or not, without an answer. It loses nothing that it stored."""
        self.trace(f"{member.endpoint} is killed")
        member.is_up = False
        member.ended.set()
        for call in member.calls:
            call.is_dropped = self.random.random() < 0.5
            call.fail(UNAVAILABLE, "Socket closed")
        self._check_leader()

    def start(self, member: ModelMember) -> None:
        self.trace(f"{member.endpoint} starts")
        member.is_up, member.ended = True, asyncio.Event()
        self._check_leader()

    def cut_off(self, member: ModelMember) -> None:
        """Separate a member from the others, but not from its clients."""
        self.trace(f"{member.endpoint} is cut off")
        member.is_cut_off = True
        self._check_leader()

    def rejoin(self, member: ModelMember) -> None:
        self.trace(f"{member.endpoint} is back")
        member.is_cut_off = False
        self._check_leader()

    def stop(self) -> None:
        """Stop all processes of the cluster, as with SIGSTOP."""
        for member in self.members:
            member.running.clear()

    def go_on(self) -> None:
        for member in self.members:
            member.running.set()
        self._tell_watchers()

    def change_leader(self) -> None:
        """Let another member lead, if one can."""
        others = [member for member in self._majority() if member is not self.leader]
        if others:
            self._elect(self.random.choice(others))

    def _majority(self) -> list[ModelMember]:
        able = [member for member in self.members if member.is_up and not member.is_cut_off]
        return able if len(able) > len(self.members) // 2 else []

    def _check_leader(self) -> None:
        able = self._majority()
        if self.leader is not None and self.leader not in able:
            self.leader = None
        self._note_leader()
        if self.leader is None and able and not self._is_electing:
            self._is_electing = True
            self._spawn(self._election())

    async def _election(self) -> None:
        await asyncio.sleep(self.random.uniform(*ELECTION_SECONDS))
        self._is_electing = False
        able = self._majority()
        if able and self.leader is None:
            self._elect(self.random.choice(able))

    def _elect(self, member: ModelMember) -> None:
        self.leader, self.term = member, self.term + 1
        self.trace(f"{member.endpoint} leads in term {self.term}")
        self._note_leader()

    def _note_leader(self) -> None:
        if self.leader is not None:
            for member in self._majority():
                member.believed = (self.leader.id, self.term)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    # Requests.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that no client can stop."""
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def delay(self) -> float:
        return self.random.uniform(0.0, self.faults.delay_seconds_max)

    def draw_fault(self) -> str:
        chance = self.random.random()
        for name in ("refused", "lost", "answer_lost", "reset", "disturbed", "late", "busy"):
            chance -= getattr(self.faults, name)
            if chance < 0:
                return name
        return ""

    def begin(self, member: ModelMember, path: str, data: bytes) -> asyncio.Future[bytes]:
        """Send a request. The answer may never come; it is an ``AioRpcError`` if the request or the way failed."""
        fault = "" if path == STATUS.path else self.draw_fault()
        late_seconds = self.random.uniform(0.0, self.faults.late_seconds_max) if fault == "late" else 0.0
        if fault:
            self.trace(f"{path} to {member.endpoint}: {fault}")
        call = _Call(path, data, asyncio.get_running_loop().create_future(), fault, late_seconds)
        member.calls[call] = None
        self._spawn(self._carry(member, call))
        return call.answer

    async def _carry(self, member: ModelMember, call: _Call) -> None:
        try:
            await asyncio.sleep(self.delay() + call.late_seconds)
            if not member.is_up or call.fault == "refused":
                call.fail(UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")
            elif call.fault != "lost":
                await self._serve(member, call, call.fault)
        finally:
            del member.calls[call]

    async def _serve(self, member: ModelMember, call: _Call, fault: str) -> None:
        await member.running.wait()
        if fault == "busy":
            call.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
            return
        is_executed = fault not in ("reset", "disturbed") or self.random.random() < 0.5
        answer = await self._execute(member, call) if is_executed and not call.is_dropped else None
        await asyncio.sleep(self.delay())
        match fault:
            case "answer_lost":
                return
            case "reset":
                call.fail(UNAVAILABLE, "Socket closed")
            case "disturbed":
                call.fail(UNAVAILABLE, self.random.choice(_DISTURBED))
            case _ if answer is not None:
                call.succeed(answer)

    async def _execute(self, member: ModelMember, call: _Call) -> bytes | None:
        """Execute the request and return the answer, unless the answer is an error."""
        try:
            if call.path == STATUS.path:
                leader, term = member.believed
                header = pb.Header(member_id=member.id, raft_term=term, revision=self.data.revision)
                return pb.StatusAnswer(header=header, version=VERSION, leader=leader).SerializeToString()
            if self.leader is None or member not in self._majority():
                await asyncio.sleep(REQUEST_SECONDS)
                raise EtcdRefusal(UNAVAILABLE, "etcdserver: request timed out")
            if self.random.random() < self.faults.compacted and self.data.compacted < self.data.revision:
                self.data.compact(pb.Compaction(revision=self.data.revision))
            answer = self._applied(call)
            answer.header.member_id, answer.header.raft_term = member.id, self.term
            self.trace(f"{call.path} executed at revision {self.data.revision}")
            return answer.SerializeToString()
        except EtcdRefusal as refusal:
            self.trace(f"{call.path} refused: {refusal}")
            call.fail(refusal.code, refusal.details)
            return None

    def _applied(self, call: _Call) -> pb.RangeAnswer | pb.TxnAnswer | pb.CompactionAnswer:
        match call.path:
            case RANGE.path:
                return self.data.range(pb.Range.FromString(call.data))
            case TXN.path:
                return self.data.txn(pb.Txn.FromString(call.data))
            case COMPACT.path:
                return self.data.compact(pb.Compaction.FromString(call.data))
        raise EtcdRefusal(grpc.StatusCode.UNIMPLEMENTED, f"unknown method {call.path}")


class ModelConnection:
    """Implements ``MemberConnection``: what one client has to one member."""

    def __init__(self, model: EtcdModel, member: ModelMember) -> None:
        self._model, self._member = model, member
        self.endpoint = member.endpoint

    async def ask(self, rpc: Rpc[Request, Answer], request: Request, timeout_seconds: float) -> Answer:
        answer = self._model.begin(self._member, rpc.path, rpc.encode(request))
        try:
            async with asyncio.timeout(timeout_seconds):
                return rpc.decode(await answer)
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

    def watch(self) -> ModelWatch:
        return ModelWatch(self._model, self._member)

    async def close(self) -> None:
        """There is nothing to release."""


class ModelWatch:
    """Implements ``WatchStream`` for one key. It may break, or hear nothing more and not notice."""

    def __init__(self, model: EtcdModel, member: ModelMember) -> None:
        self._model, self._member = model, member
        self._ended = member.ended
        self._request = pb.WatchCreate()
        self._is_created = False
        self._fault = ""

    async def write(self, request: pb.Watch) -> None:
        self._request = request.create
        self._fault = self._model.draw_fault()
        await self._go()

    async def read(self) -> pb.WatchAnswer:
        await self._go()
        header = pb.Header(member_id=self._member.id, revision=self._model.data.revision)
        if not self._is_created:
            self._is_created = True
            return pb.WatchAnswer(header=header, created=True)
        if self._fault in ("lost", "answer_lost"):
            await self._ended.wait()
            await self._go()
        while True:
            if 0 < self._request.start_revision < self._model.data.compacted:
                return pb.WatchAnswer(header=header, canceled=True)
            events = self._model.data.changes_of(self._request.key, self._request.start_revision)
            if events and self._is_in_touch():
                self._request.start_revision = events[-1].kv.mod_revision + 1
                return pb.WatchAnswer(header=header, events=events)
            await self._wait(self._model.news)

    def cancel(self) -> bool:
        return True

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def _is_in_touch(self) -> bool:
        return self._member.running.is_set() and self._member in self._model._majority()

    async def _go(self) -> None:
        await asyncio.sleep(self._model.delay())
        if self._ended.is_set() or self._fault in ("refused", "reset", "disturbed"):
            raise rpc_error(UNAVAILABLE, "Socket closed")

    async def _wait(self, news: asyncio.Event) -> None:
        """Wait for news of the cluster, which also come when a member starts, goes on or ends."""
        await news.wait()
        await self._go()


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
