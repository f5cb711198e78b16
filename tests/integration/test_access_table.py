"""Every call of ``docs/access-table.md`` on real servers: refused in words, never late, and audited or counted."""

from __future__ import annotations

import asyncio
import enum
import ssl
import types
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NewType, get_args, get_origin

import pytest
from msgspec import NODEFAULT, Struct, UnsetType, structs

from cutwater.admin.certificate_builder import AuthorityKind, issue_client
from cutwater.admin.private_authority import now
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import CreateChildTokenRequest, EndOwnTokenRequest
from cutwater.core.access.principals import token_id
from cutwater.core.audit.audit_record import decode_audit
from cutwater.core.audit.denial_merge import denied_operation
from cutwater.errors import CutwaterError
from cutwater.metadata.metrics import MetadataCollector
from cutwater.protocol import storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.methods import Notice, StreamMethod
from cutwater.runtime import system
from cutwater.storagenode.metrics import NodeCollector
from cutwater.types import CutTime
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_certificates import ServerName
from tests.access_table import STRANGERS, Caller, Outcome, Row, expected, rows
from tests.certificate_kit import CertificateKit
from tests.integration.access_cluster import CLUSTER, AccessCluster, access_cluster, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

CALL_MS = 5_000
AGAIN_MAX = 100
SECRET = "payroll"
"""The name of a topic that no caller here may describe."""
CHILD = "c" * 16
"""The id of a child of the caller's token."""


# Arguments.


def least(kind: Any) -> Any:
    """The least value of a type: what decodes on the other side."""
    if isinstance(kind, NewType):
        return least(kind.__supertype__)
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        some = [one for one in get_args(kind) if one is not UnsetType]
        return None if type(None) in some else least(some[0])
    if origin in (tuple, list, dict, frozenset, set):
        return origin()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, Struct):
        needed = (
            field for field in structs.fields(kind) if field.default is NODEFAULT and field.default_factory is NODEFAULT
        )
        return kind(**{field.name: least(field.type) for field in needed})
    return {int: 1, str: "a", bytes: b"", bool: False, float: 1.0, None: None, type(None): None}[kind]


class Arguments:
    """Arguments about things that exist: a topic that no caller may describe, with its log stream, a run and a part."""

    def __init__(self, stream: int, run: int, part: str) -> None:
        self.stream, self.run, self.part = stream, run, part

    def of(self, row: Row, caller: Caller) -> Any:
        if row.access.client_subject is not None and caller in (Caller.NOBODY, Caller.OTHER):
            return structs.replace(least(row.method._decode_argument.__self__.type), complainer=storage_api.A_CLIENT)
        if row.name == storage_api.DISCARD_PART.name:
            return self.part
        if row.request is CreateChildTokenRequest:
            return CreateChildTokenRequest(CHILD, "0" * 64, CutTime(system.wall_time_ns() // 1_000 + 60_000_000))
        if row.request is EndOwnTokenRequest:
            # Calls are made in the order of the table, and the caller's own token is still needed.
            return EndOwnTokenRequest(CHILD)
        kind = row.request or row.method._decode_argument.__self__.type
        made = least(kind)
        known = {"stream": self.stream, "run": self.run, "part": self.part}
        if not isinstance(made, Struct):
            return made
        kinds = {field.name: field.type for field in structs.fields(type(made))}
        named = {name: value for name, value in known.items() if name in kinds}
        return structs.replace(made, **{name: v for name, v in named.items() if isinstance(v, _plain(kinds[name]))})


def _plain(kind: Any) -> Any:
    kind = kind.__supertype__ if isinstance(kind, NewType) else kind
    return kind if isinstance(kind, type) else ()


async def prepare(cluster: AccessCluster, **options: Any) -> Arguments:
    async with cluster.client(cluster.root, **options) as log:
        await log.create_topic(SECRET)
        await log.append(SECRET, b"1")
        run = await log.open_run("", "a key")
        part = await log.stage(run, 0, SECRET, [b"a"])
    assert part is not None
    catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
    number = next(info.topic for info in catalog.topics if info.name == SECRET)
    stream = next(info.stream for info in catalog.streams if info.topic == number)
    return Arguments(int(stream), int(run.run), part.part)


# What servers count.


def counted(cluster: AccessCluster) -> dict[str, float]:
    """The metrics of all servers about refused calls and connections, added up."""
    found: dict[str, float] = {}
    collectors = [MetadataCollector(server) for server in cluster.metadata]
    for collector in [*collectors, *map(NodeCollector, cluster.nodes.values())]:
        for metric in collector.collect():  # type: ignore[attr-defined]
            for sample in metric.samples:
                name = sample.name.removeprefix("cutwater_mr_").removeprefix("cutwater_sn_")
                if name in ("calls_unproven_total", "calls_denied_total", "connections_not_let_in_total"):
                    key = name + "".join(f" {value}" for value in sample.labels.values())
                    found[key] = found.get(key, 0) + sample.value
    return found


def counts_of(cluster: AccessCluster, name: str) -> float:
    return sum(value for key, value in counted(cluster).items() if key.startswith(name))


# Calls.


class Attack:
    """Makes calls with one credential, on one connection for each server while it lasts."""

    def __init__(self, cluster: AccessCluster, reach: Callable[[str], Any]) -> None:
        self.cluster, self._connect = cluster, reach
        self._open: dict[str, Connection] = {}

    async def connection(self, server: str) -> Connection:
        found = self._open.get(server)
        if found is None or found.is_closed:
            address = self.cluster.node_addresses[1] if server == STORAGE_NODE else self.cluster.leader.address
            found = self._open[server] = await self._connect(address)
        return found

    async def call(self, row: Row, argument: Any) -> tuple[str, str, Any]:
        """Return the code of the outcome, the message, and the answer."""
        connection, method = await self.connection(row.server), row.method
        try:
            if isinstance(method, Notice):
                return await self._notify(connection, method, argument)
            if isinstance(method, StreamMethod):
                async with connection.open_stream(method, argument) as stream, asyncio.timeout(CALL_MS / 1_000):
                    async for item in stream:
                        return Outcome.ANSWERED, "", item.value
                return Outcome.ANSWERED, "", None
            answer = await connection.call(method, argument, timeout_ms=CALL_MS)
        except CutwaterError as error:
            return error.code, error.message, error
        return Outcome.ANSWERED, "", answer.value

    async def _notify(self, connection: Connection, notice: Any, argument: Any) -> tuple[str, str, Any]:
        """A notice has no answer. The connection ends if it is refused; a denial is only counted and audited."""
        before = counts_of(self.cluster, "calls_denied_total")
        connection.notify(notice, argument)
        await until(
            lambda: connection.is_closed or counts_of(self.cluster, "calls_denied_total") > before,
            f"{notice.name} is refused or denied",
            seconds=CALL_MS / 1_000,
        )
        if not connection.is_closed:
            return Outcome.DENIED, "an administrator", None
        assert connection.error is not None
        return connection.error.code, connection.error.message, connection.error

    def close(self) -> None:
        for connection in self._open.values():
            connection.abort()


@asynccontextmanager
async def attack(cluster: AccessCluster, reach: Callable[[str], Any]) -> AsyncIterator[Attack]:
    found = Attack(cluster, reach)
    try:
        yield found
    finally:
        found.close()


WAYS_OUT = (
    "administrator",
    "give a token",
    "ask as a principal",
    "own data",
    "does so by itself",
    "speaks for itself",
    "with the volumes it had",
)


async def told(attacker: Attack, row: Row, argument: Any) -> tuple[str, str, Any]:
    """Make a call, and make it again if it is about a number: what the caller may not describe is answered like what a
    storage node does not know yet, so the caller is told to try again first."""
    for _ in range(AGAIN_MAX):
        code, message, answer = await attacker.call(row, argument)
        if code != "unavailable" or not any(need.is_by_number for need in row.access.needs):
            break
        assert message.endswith("does not exist: nothing was done, try again"), message
        await asyncio.sleep(0.05)
    return code, message, answer


async def judge_all(attacker: Attack, caller: Caller, arguments: Arguments) -> list[Row]:
    """Make every call, compare the outcome with the table, and return what was denied."""
    denied, wrong = [], []
    for row in rows():
        wanted = expected(row, caller)
        if wanted is Outcome.MAY:
            continue
        before = counted(attacker.cluster)
        code, message, answer = await told(attacker, row, arguments.of(row, caller))
        if caller is not Caller.NODE_2:
            # Storage nodes know the names of topics.
            assert SECRET not in f"{message}{answer}", (row.name, message)
        plain = Outcome.ANSWERED if wanted is Outcome.FILTERED else wanted
        if code != plain:
            wrong.append(f"{caller}: {row.server} {row.name}: {wanted} is expected, and it gets {code}: {message}")
            continue
        if plain is Outcome.ANSWERED:
            continue
        assert any(way in message for way in WAYS_OUT), (row.name, message)
        assert counted(attacker.cluster) != before, f"{row.name} is refused, and no server counts it"
        if wanted is Outcome.DENIED:
            denied.append(row)
            assert not isinstance(answer, CutwaterError) or answer.right  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)
    return denied


def endpoint(cluster: AccessCluster, claimed: int, key: int) -> Endpoint:
    return Endpoint(CLUSTER, STORAGE_NODE, str(claimed), key=cluster.nodes[key]._key)


async def as_node(
    cluster: AccessCluster, address: str, claimed: int, *, key: int, tls: ssl.SSLContext | None = None
) -> Connection:
    """Connect as a process that says that it is this storage node, and proves to hold the key of that one."""
    host, port = parse_address(address)
    name = host if tls is not None else None
    proving = endpoint(cluster, claimed, key)
    return await connect(
        proving, host, port, timeout_ms=CALL_MS, tls=tls, server_hostname=name, expect=lambda server: None
    )


async def audited(cluster: AccessCluster, wanted: set[str], principal: str, **options: Any) -> None:
    """Wait until the audit has denials of these operations to the principal."""
    found: set[str] = set()
    async with asyncio.timeout(30), cluster.client(cluster.root, **options) as log:
        while wanted - found:
            async with log.subscribe("_audit", follow=False) as subscription:
                records = [decode_audit(bytes(record.value)) async for record in subscription]
            found = {one.operation for one in records if one and one.outcome == "denied" and one.principal == principal}
            await asyncio.sleep(0.2)


# The tests.


async def test_every_call_without_tls(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=2, mode=AccessMode.ENFORCED) as cluster:
        arguments = await prepare(cluster)
        async with attack(cluster, cluster.connection) as nobody:
            denied = await judge_all(nobody, Caller.NOBODY, arguments)
        async with attack(cluster, lambda at: as_node(cluster, at, 1, key=2)) as node:
            await judge_all(node, Caller.NODE_2_AS_1, arguments)
        await audited(cluster, {denied_operation(row.name) for row in denied}, "")


async def test_every_call_over_tls(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "tls")
    (tmp_path / "cluster").mkdir()
    async with access_cluster(tmp_path / "cluster", nodes=2, mode=AccessMode.ENFORCED, kit=kit) as cluster:
        options = {"tls": cluster.client_tls()}
        arguments = await prepare(cluster, **options)
        other = await cluster.principal("other", ("read", "topic:mine"), ("publish", "run:mine"))
        async with attack(cluster, lambda at: cluster.connection(at, other)) as client:
            denied = await judge_all(client, Caller.OTHER, arguments)
        files = kit.server(ServerName(CLUSTER, STORAGE_NODE, 2))
        tls = cluster.client_tls(files)
        async with attack(cluster, lambda at: as_node(cluster, at, 2, key=2, tls=tls)) as node:
            await judge_all(node, Caller.NODE_2, arguments)
        await audited(cluster, {denied_operation(row.name) for row in denied}, "other", **options)


async def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    """Over TLS, on both kinds of servers: no call can be made, so none is tried."""
    kit, foreign = CertificateKit(tmp_path / "tls"), CertificateKit(tmp_path / "foreign")
    (tmp_path / "cluster").mkdir()
    async with access_cluster(tmp_path / "cluster", nodes=2, mode=AccessMode.ENFORCED, kit=kit) as cluster:
        expires = system.wall_time_ns() // 1_000 + 1_000_000
        expired = await cluster.principal("late", ("cluster-admin", "cluster"), expires=expires)
        revoked = await cluster.principal("gone", ("cluster-admin", "cluster"))
        await cluster.admin(q.RevokeTokenRequest(token_id(revoked) or ""))
        await until(lambda: system.wall_time_ns() // 1_000 > expires, "the token has expired")
        clients = cluster.client_tls(kit.client("ann"))
        old = issue_client(kit.authority(AuthorityKind.CLIENTS), "ann", now=now() - timedelta(days=50), days=10)
        long_ago = kit.write("old", old)
        two = cluster.client_tls(kit.server(ServerName(CLUSTER, STORAGE_NODE, 2)))
        shown: list[dict[str, Any]] = [
            {},
            {"tls": cluster.client_tls(foreign.client("ann"))},
            {"tls": cluster.client_tls(long_ago)},
            {"token": expired},
            {"token": revoked},
            {"tls": clients, "endpoint": endpoint(cluster, 1, key=2)},
            {"tls": two, "endpoint": endpoint(cluster, 1, key=2)},
        ]
        for stranger, credentials in zip(STRANGERS, shown, strict=True):
            for address in (cluster.leader.address, cluster.node_addresses[1]):
                name = f"connections_not_let_in_total {stranger.reason}"
                before = counts_of(cluster, name)
                async with asyncio.timeout(10):
                    error = await refused(cluster, address, credentials)
                assert error.code in stranger.codes, (stranger.name, error)
                assert stranger.words in error.message, (stranger.name, error.message)
                await until(lambda n=name, b=before: counts_of(cluster, n) > b, f"{stranger.name} is counted")


async def refused(cluster: AccessCluster, address: str, credentials: dict[str, Any]) -> CutwaterError:
    try:
        connection = await cluster.connection(address, **credentials)
    except CutwaterError as error:
        return error
    # With TLS 1.3, a client hears later that its certificate was refused.
    try:
        await connection.call(storage_api.STATUS, None, timeout_ms=CALL_MS)
    except CutwaterError as error:
        return error
    raise AssertionError("it was let in")
