"""Calls the members of an etcd cluster: chooses the member, limits each attempt and fails over.

Every request must be safe to execute twice; its author ensures that. When no answer comes, the same request is sent
again, to another member if there is one. A call ends when it has been answered; the caller sets the deadline.

With several members the leader of the etcd cluster is preferred, because the others would only relay writes to it.
All reads are linearizable: a member that is cut off from the majority cannot answer them.

A ``MemberConnection`` reaches one member: ``GrpcConnection`` a real one, ``cutwater.testing.stores`` one of a model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from msgspec import Struct

from cutwater.errors import CutwaterError, InvalidArgument, ReadOnly, Refused
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.address import EtcdAddress, EtcdTls
from cutwater.runtime.permissions import check_secret

ATTEMPT_SECONDS_MIN = 0.5
ATTEMPT_SECONDS_MAX = 8.0
"""Limits of the time that one member may take to answer. The time doubles with every attempt of a call, so that a slow
cluster gets enough time to answer."""
STATUS_SECONDS = 0.5
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 0.5

VERSION_SOUND = (3, 5, 6)
"""Older versions of 3.5 can lose or duplicate transactions when they crash; see docs/metadata-stores.md."""

_OPTIONS: list[tuple[str, Any]] = [
    # This client chooses the member and the time of a retry; it should notice soon that a member is back.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Detects connections that died silently under a watch. etcd refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # The size of what is read is limited when it is written.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class Rpc(Struct, Generic[Request, Answer], frozen=True):
    path: str
    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Answer]


TXN = Rpc[pb.Txn, pb.TxnAnswer]("/etcdserverpb.KV/Txn", pb.Txn.SerializeToString, pb.TxnAnswer.FromString)
RANGE = Rpc[pb.Range, pb.RangeAnswer]("/etcdserverpb.KV/Range", pb.Range.SerializeToString, pb.RangeAnswer.FromString)
COMPACT = Rpc[pb.Compaction, pb.CompactionAnswer](
    "/etcdserverpb.KV/Compact", pb.Compaction.SerializeToString, pb.CompactionAnswer.FromString
)
STATUS = Rpc[pb.Status, pb.StatusAnswer](
    "/etcdserverpb.Maintenance/Status", pb.Status.SerializeToString, pb.StatusAnswer.FromString
)


class WatchStream(Protocol):
    """A call that watches keys, as grpc has it."""

    async def write(self, request: pb.Watch) -> None: ...

    async def read(self) -> pb.WatchAnswer | Any:
        """Return the next answer, or ``grpc.aio.EOF``."""

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode:
        """Wait until the call has ended."""


class MemberConnection(Protocol):
    """A connection to one member. Failures are raised as ``grpc.aio.AioRpcError``."""

    @property
    def endpoint(self) -> str: ...

    async def ask(self, rpc: Rpc[Request, Answer], request: Request, timeout_seconds: float) -> Answer: ...

    def watch(self) -> WatchStream: ...

    async def close(self) -> None: ...


ConnectMembers = Callable[[EtcdAddress], Sequence[MemberConnection]]


class Compacted(CutwaterError):
    """The requested revision has been compacted. The store handles this error itself."""

    code = "etcd_compacted"


class EtcdClient:
    """A client of one etcd cluster. ``trouble`` tells why the last attempt failed; it is empty after success."""

    def __init__(self, members: Sequence[MemberConnection]) -> None:
        assert members
        self._members = list(members)
        self._asked = self._members[0]
        self._is_chosen = False
        self._choosing = asyncio.Lock()
        self._warned = False
        self.trouble = ""

    async def call(self, rpc: Rpc[Request, Answer], request: Request) -> Answer:
        """Send the request until a member answers."""
        attempt_seconds, wait_seconds = ATTEMPT_SECONDS_MIN, RETRY_SECONDS_MIN
        while True:
            if not self._is_chosen:
                await self.choose()
            member = self._asked
            try:
                answer = await member.ask(rpc, request, attempt_seconds)
            except grpc.aio.AioRpcError as error:
                self._judge(member, error)
            else:
                self.trouble = ""
                return answer
            await asyncio.sleep(wait_seconds)
            attempt_seconds = min(attempt_seconds * 2, ATTEMPT_SECONDS_MAX)
            wait_seconds = min(wait_seconds * 2, RETRY_SECONDS_MAX)
            if self._asked is member:
                await self.choose(instead_of=member)

    async def choose(self, instead_of: MemberConnection | None = None) -> None:
        """Ask all members which one leads, and prefer that one; if none knows, use the next one that answers at all."""
        async with self._choosing:
            if instead_of is not None and (self._asked is not instead_of or len(self._members) == 1):
                return
            answers = await asyncio.gather(*(self._status(member) for member in self._members))
            alive = [(member, answer) for member, answer in zip(self._members, answers, strict=True) if answer]
            leading = [(m, a) for m, a in alive if a.leader and a.leader == a.header.member_id]
            if leading:
                # A leader that was cut off may still believe that it leads; the newer term is right.
                self._asked = max(leading, key=lambda pair: pair[1].header.raft_term)[0]
            else:
                others = [member for member, answer in alive if member is not instead_of and not answer.is_learner]
                self._asked = others[0] if others else self._next_after(self._asked)
            self._is_chosen = True

    async def changed(self, key: bytes, after_revision: int) -> None:
        """Wait until the key changes after the revision, or until this can no longer be observed. The member may be cut
        off from the others and miss changes, so the caller must also read the key from time to time."""
        watch = self._asked.watch()
        try:
            await watch.write(pb.Watch(create=pb.WatchCreate(key=key, start_revision=after_revision + 1)))
            while True:
                answer = await watch.read()
                if answer is grpc.aio.EOF or answer.canceled or answer.events:
                    return
        except grpc.aio.AioRpcError as error:
            self.trouble = f"{self._asked.endpoint}: {error.details()}"
            await asyncio.sleep(RETRY_SECONDS_MAX)
        finally:
            watch.cancel()
            # Wait until the call has ended completely.
            await watch.code()

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members))

    async def _status(self, member: MemberConnection) -> pb.StatusAnswer | None:
        try:
            answer = await member.ask(STATUS, pb.Status(), STATUS_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        self._look_at_version(member, answer.version)
        return answer

    def _look_at_version(self, member: MemberConnection, version: str) -> None:
        numbers = version.partition("-")[0].split(".")
        if not self._warned and all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) < VERSION_SOUND:
            self._warned = True
            _log.warning(
                "etcd at %s is version %s, which can lose what it confirmed when it crashes: use %s or newer",
                member.endpoint,
                version,
                ".".join(map(str, VERSION_SOUND)),
            )

    def _next_after(self, member: MemberConnection) -> MemberConnection:
        return self._members[(self._members.index(member) + 1) % len(self._members)]

    def _judge(self, member: MemberConnection, error: grpc.aio.AioRpcError) -> None:
        """Raise errors that a retry would not change; note all others."""
        details = error.details() or ""
        what = f"etcd at {member.endpoint} says: {details}"
        match error.code():
            case grpc.StatusCode.OUT_OF_RANGE:
                raise Compacted(what) from error
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "space exceeded" in details:
                # An earlier attempt may have succeeded, so this error does not say that nothing was written.
                raise ReadOnly(
                    f"{what}: its quota is used up, so it takes no writes; compact and defragment it, then disarm "
                    "its alarm"
                ) from error
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                raise Refused(f"{what}: check the certificate and the role it belongs to") from error
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED:
                raise InvalidArgument(f"{what}: is this an etcd of version 3.4 or newer?") from error
        self.trouble = f"{what} ({error.code().name})"


class GrpcConnection:
    """Implements ``MemberConnection`` over the network."""

    def __init__(self, endpoint: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.endpoint = endpoint
        self._channel = (
            grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        )
        self._methods: dict[str, Any] = {}

    async def ask(self, rpc: Rpc[Request, Answer], request: Request, timeout_seconds: float) -> Answer:
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = self._channel.unary_unary(rpc.path, rpc.encode, rpc.decode)
        answer: Answer = await method(request, timeout=timeout_seconds)
        return answer

    def watch(self) -> WatchStream:
        stream: WatchStream = self._channel.stream_stream(
            "/etcdserverpb.Watch/Watch", pb.Watch.SerializeToString, pb.WatchAnswer.FromString
        )()
        return stream

    async def close(self) -> None:
        await self._channel.close()


def connect_members(address: EtcdAddress) -> list[MemberConnection]:
    """Prepare connections to all members. Nothing is sent yet."""
    credentials = _credentials(address.tls) if address.tls else None
    return [GrpcConnection(endpoint, credentials) for endpoint in address.endpoints]


def _credentials(tls: EtcdTls) -> grpc.ChannelCredentials:
    def content(path: Path | None) -> bytes | None:
        try:
            return path.read_bytes() if path else None
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read ({error.strerror}): it is needed to talk to etcd") from error

    if tls.key is not None:
        check_secret(tls.key, "a private key for etcd")
    return grpc.ssl_channel_credentials(content(tls.ca), content(tls.key), content(tls.cert))
