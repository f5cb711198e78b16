"""Attacks on real processes by clients that pass themselves off as servers: with a token, with a client certificate,
and by anyone on loopback. After each of them the cluster goes on, and has exactly what was appended."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec import Struct

import cutwater
from cutwater.admin.operations import Admin
from cutwater.client.cluster.credentials import Access
from cutwater.core import requests as r
from cutwater.core.messages import Replicate, SealReplica
from cutwater.errors import CutwaterError, Refused, Unavailable, WrongIdentity
from cutwater.format.checksum import crc32c
from cutwater.protocol import metadata_api, storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    ClusterId,
    Entry,
    Epoch,
    EventTime,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import client_tls
from tests.integration.sn_process import COMMAND, SECONDS_MAX, environment

pytestmark = pytest.mark.timeout(240)

TOKEN = "a-token-that-nobody-guesses"
CLUSTER = ClusterId(1)
NODES = 3
TOPIC = "orders"
MORE = 7
"""How many records that never existed are claimed."""


class Target(Struct):
    """A cluster of processes, and how its clients are let in."""

    metadata: str
    nodes: dict[int, str]
    directory: Path
    access: dict[str, dict[str, Any]]
    """By the name of the way: arguments of ``connect``."""
    admin: Access
    log: cutwater.Client
    sent: list[bytes] = []

    def append(self) -> None:
        """One more record, and everything is there, in order."""
        self.sent.append(b"record %d" % len(self.sent))
        self.log.append(TOPIC, self.sent[-1], timeout=30)
        found = [record.value for record in self.log.subscribe(TOPIC, follow=False)]
        assert found == self.sent


def process(stack: ExitStack, log: Path, *arguments: str) -> str:
    """The address of a server that runs until the stack ends."""
    errors = stack.enter_context(log.open("wb"))
    started = subprocess.Popen(
        [*COMMAND, *arguments, "--listen", "127.0.0.1:0", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment(),
    )

    def end() -> None:
        started.kill()
        started.wait(SECONDS_MAX)
        assert started.stdout is not None
        started.stdout.close()

    stack.callback(end)
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line, log.read_text()[-2_000:]
    return str(json.loads(line)["address"])


def cluster(stack: ExitStack, directory: Path, flags: list[str], access: dict[str, dict[str, Any]]) -> Target:
    store = f"sqlite:{directory / 'metadata.sqlite'}"
    metadata = process(
        stack, directory / "mr.log", "mr", "start", "--cluster-id", "1", "--id", "1", "--store", store, *flags
    )
    nodes = {}
    for number in range(1, NODES + 1):
        volume = directory / f"volume{number}"
        volume.mkdir()
        which = ("--cluster-id", "1", "--id", str(number), "--volumes", str(volume), "--metadata", metadata)
        nodes[number] = process(stack, directory / f"sn{number}.log", "sn", "start", *which, *flags)
    shown = next(iter(access.values()))
    admin = Access(tls=shown.get("tls"), token=shown.get("token", ""))

    async def set_up() -> None:
        async with Admin((metadata,), timeout_ms=30_000, access=admin) as operator:
            await asyncio.gather(*(operator.add_storage_node(address) for address in nodes.values()))

    asyncio.run(set_up())
    log = cutwater.connect(f"cutwater://{metadata}", tls=shown.get("tls"), token=shown.get("token", ""), timeout=60)
    stack.callback(log.close)
    log.create_topic(TOPIC, streams=1, replication=NODES)
    target = Target(metadata, nodes, directory, access, admin, log)
    target.append()
    return target


@pytest.fixture(scope="module")
def on_loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with ExitStack() as stack:
        yield cluster(stack, tmp_path_factory.mktemp("plain"), [], {"anyone": {}})


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    files = {
        name: directory / name for name in ("ca", "server.pem", "server.key", "client.pem", "client.key", "tokens")
    }
    authority.cert_pem.write_to_path(str(files["ca"]))
    for name, host in (("server", "127.0.0.1"), ("client", "client.example")):
        issued = authority.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(str(files[f"{name}.pem"]))
        issued.private_key_pem.write_to_path(str(files[f"{name}.key"]))
        files[f"{name}.key"].chmod(0o600)
    files["tokens"].write_text(f"billing {TOKEN}\n")
    files["tokens"].chmod(0o600)
    flags = ["--tls-ca", str(files["ca"]), "--tls-certificate", str(files["server.pem"])]
    flags += ["--tls-key", str(files["server.key"]), "--tokens", str(files["tokens"])]
    access: dict[str, dict[str, Any]] = {
        "certificate": {"tls": client_tls(files["ca"], files["client.pem"], files["client.key"])},
        "token": {"tls": client_tls(files["ca"]), "token": TOKEN},
    }
    with ExitStack() as stack:
        yield cluster(stack, directory, flags, access)


@pytest.fixture(params=["anyone", "token", "certificate"])
def forger(request: pytest.FixtureRequest) -> Forger:
    target = request.getfixturevalue("on_loopback" if request.param == "anyone" else "with_tls")
    return Forger(target, request.param)


class Forger:
    """A client that is let in, and says of itself whatever it likes."""

    def __init__(self, target: Target, way: str) -> None:
        self.target, self._way = target, way
        self.key = ServerKey.generate()

    async def connection(self, address: str, role: str, name: str, *, has_key: bool) -> Connection:
        shown = self.target.access[self._way]
        tls: ssl.SSLContext | None = shown.get("tls")
        endpoint = Endpoint(CLUSTER, role, name, key=self.key if has_key else None)
        host, port = parse_address(address)
        return await connect(
            endpoint,
            host,
            port,
            timeout_ms=10_000,
            tls=tls,
            server_hostname=host if tls is not None else None,
            token=shown.get("token", ""),
            expect=lambda server: None,
        )

    async def guises(self, address: str, number: int, act: Callable[[Connection], Awaitable[None]]) -> None:
        """As a client, as one that claims to be a storage node, and as one that proves a key of its own."""
        for role, has_key in (("client", False), (STORAGE_NODE, False), (STORAGE_NODE, True)):
            connection = await self.connection(address, role, str(number), has_key=has_key)
            try:
                await act(connection)
            finally:
                connection.abort()

    async def tell(self, connection: Connection, notice: Any, argument: object, body: bytes = b"") -> None:
        """What is told is refused, and with it the connection."""
        connection.notify(notice, argument, body)
        async with asyncio.timeout(20):
            await connection.closed
        assert isinstance(connection.error, Unproven), connection.error

    async def ask(self, request: Any) -> Any:
        connection = await self.connection(self.target.metadata, "client", "", has_key=False)
        try:
            return (await connection.call(metadata_api.ASK, request, timeout_ms=20_000)).value
        finally:
            connection.abort()

    async def status(self, number: int) -> storage_api.ReplicaStatus:
        connection = await self.connection(self.target.nodes[number], "client", "", has_key=False)
        try:
            status = (await connection.call(storage_api.STATUS, None, timeout_ms=20_000)).value
        finally:
            connection.abort()
        return next(iter(status.replicas))

    def report(self, number: int, status: storage_api.ReplicaStatus, epoch: int, high_watermark: int) -> Report:
        """Of a start that comes after all others, so that nothing newer is heard of the real one."""
        replica = UncommitReport(
            status.stream,
            status.epoch,
            ReplicaState.RUNNING,
            GLSN(high_watermark),
            LLSN(status.committed_end + 1),
            MORE,
        )
        return Report(
            StorageNodeId(number), Incarnation(1 << 40), 1 << 40, LeaderEpoch(epoch), NodeState.READY, (replica,)
        )


async def goes_on(forger: Forger) -> None:
    """Nothing was halted, sealed or moved, and what is appended is what is read."""
    await asyncio.to_thread(forger.target.append)
    description: r.Description = await forger.ask(r.DescribeRequest())
    assert description.halted == ""
    assert {int(node.node): node.address for node in description.nodes} == forger.target.nodes
    (stream,) = description.streams
    assert stream.is_open
    assert stream.missing == ()


def test_a_report_that_knows_a_later_leader_halts_nothing(forger: Forger) -> None:
    async def main() -> None:
        status = await forger.status(1)
        forged = forger.report(1, status, epoch=1 << 30, high_watermark=1)
        metadata = forger.target.metadata
        await forger.guises(metadata, 1, lambda to: forger.tell(to, storage_api.REPORT, forged))
        await forger.guises(metadata, 1, lambda to: forger.tell(to, metadata_api.REPORT_UP, forged))
        await goes_on(forger)

    asyncio.run(main())


def test_a_report_of_a_later_high_watermark_halts_nothing(forger: Forger) -> None:
    async def main() -> None:
        forged = forger.report(2, await forger.status(2), epoch=1, high_watermark=1 << 40)
        await forger.guises(forger.target.metadata, 2, lambda to: forger.tell(to, storage_api.REPORT, forged))
        await goes_on(forger)

    asyncio.run(main())


def test_reports_of_all_nodes_commit_nothing_that_never_existed(forger: Forger) -> None:
    async def main() -> None:
        before: r.Catalog = await forger.ask(r.CatalogRequest())
        statuses = {number: await forger.status(number) for number in forger.target.nodes}
        for notice in (storage_api.REPORT, metadata_api.REPORT_UP):
            for number, status in statuses.items():
                forged = forger.report(number, status, 1, int(status.complete_through))

                async def report(to: Connection, notice: Any = notice, forged: Report = forged) -> None:
                    await forger.tell(to, notice, forged)

                await forger.guises(forger.target.metadata, number, report)
        await asyncio.sleep(0.2)
        after: r.Catalog = await forger.ask(r.CatalogRequest())
        assert after.streams[0].committed_end == before.streams[0].committed_end
        await goes_on(forger)

    asyncio.run(main())


def test_nobody_moves_the_address_of_a_storage_node(forger: Forger) -> None:
    async def main() -> None:
        target = forger.target
        connection = await forger.connection(target.nodes[3], "client", "", has_key=False)
        said = (await connection.call(storage_api.DESCRIBE, None, timeout_ms=20_000)).value
        connection.abort()
        assert said.node_key == "", "what nobody needs to know"
        elsewhere = "127.0.0.1:1"
        joining = storage_api.JoinArguments(
            StorageNodeId(3), said.node_key, said.cluster_key, elsewhere, Incarnation(1 << 40), ("/tmp",)
        )

        async def join(to: Connection) -> None:
            for method in (storage_api.JOIN, metadata_api.JOIN_LEADER):
                with pytest.raises((Unproven, WrongIdentity)):
                    await to.call(method, joining, timeout_ms=20_000)

        await forger.guises(target.metadata, 3, join)
        with pytest.raises(Unproven):
            await forger.ask(r.JoinRequest(StorageNodeId(3), elsewhere, "", (), forger.key.public))
        with pytest.raises(Refused):
            await forger.ask(r.AddNodeRequest(StorageNodeId(3), elsewhere, "", (), forger.key.public))
        await forger.ask(
            r.AddNodeRequest(StorageNodeId(3), target.nodes[3], "", ("/tmp",), forger.key.public, renews=True)
        )
        await goes_on(forger)

    asyncio.run(main())


def test_nobody_replicates_to_a_storage_node_or_gives_it_orders(forger: Forger) -> None:
    async def main() -> None:
        for number, address in forger.target.nodes.items():
            status = await forger.status(number)
            body = b"a record that never existed"
            batch = Batch(1, b"", crc32c(body), EventTime(1), EventTime(1))
            entry = Replicate(status.stream, Entry(LLSN(status.durable_end + 1), status.epoch, batch))
            seal = SealReplica(status.stream, LeaderEpoch(1 << 30), Epoch(status.epoch), LLSN(status.committed_end))
            refusal = storage_api.EntryRefused(status.stream, status.epoch, StorageNodeId(1), "because")
            peers = storage_api.Addresses({StorageNodeId(1): "127.0.0.1:1"}, {StorageNodeId(1): forger.key.public})
            for notice, argument, data in (
                (storage_api.REPLICATE, entry, body),
                (storage_api.ENTRY_REFUSED, refusal, b""),
                (storage_api.LEADER_SAYS, seal, b""),
                (storage_api.ADDRESSES, peers, b""),
            ):
                # In the name of a node that there is, and of one that there is not.
                for name in (1 + number % NODES, 9):
                    connection = await forger.connection(address, STORAGE_NODE, str(name), has_key=True)
                    connection.notify(notice, argument, data)
                    async with asyncio.timeout(20):
                        await connection.closed
                    assert isinstance(connection.error, Unproven | Unavailable), connection.error
            after = await forger.status(number)
            assert (after.durable_end, after.state) == (status.durable_end, ReplicaState.RUNNING)
        await goes_on(forger)

    asyncio.run(main())


def test_nobody_adds_a_volume_to_a_storage_node_directly(forger: Forger, tmp_path: Path) -> None:
    async def main() -> None:
        async def add(to: Connection) -> None:
            for method in (storage_api.ADD_VOLUME, storage_api.REMOVE_VOLUME):
                with pytest.raises(Unproven):
                    await to.call(method, str(tmp_path), timeout_ms=20_000)

        await forger.guises(forger.target.nodes[1], 2, add)
        assert list(tmp_path.iterdir()) == []
        await goes_on(forger)

    asyncio.run(main())


def test_nobody_reads_replicas_or_staged_parts_as_a_peer(forger: Forger) -> None:
    async def main() -> None:
        stream = LogStreamId(1)

        async def read(to: Connection) -> None:
            for method, argument in (
                (storage_api.COPY, storage_api.CopyArguments(stream, LLSN(1))),
                (storage_api.FETCH, storage_api.FetchArguments("part", 0, 1_000)),
                (storage_api.KEEP_UP, storage_api.KeepUpArguments(stream, Epoch(1))),
            ):
                with pytest.raises(Unproven):
                    await to.call(method, argument, timeout_ms=20_000)

        await forger.guises(forger.target.nodes[1], 2, read)
        await goes_on(forger)

    asyncio.run(main())


def test_what_was_refused_is_in_the_log_of_the_server_and_does_not_fill_it(on_loopback: Target) -> None:
    forger = Forger(on_loopback, "anyone")
    log = on_loopback.directory / "mr.log"

    async def main() -> None:
        forged = forger.report(1, await forger.status(1), epoch=1 << 30, high_watermark=1)
        for _ in range(50):
            connection = await forger.connection(on_loopback.metadata, STORAGE_NODE, "1", has_key=False)
            await forger.tell(connection, storage_api.REPORT, forged)
        await goes_on(forger)

    before = log.read_text().count("has not proved to be one")
    asyncio.run(main())
    told = log.read_text().count("has not proved to be one")
    assert told > 0
    assert told - before <= 12, "at most one in five seconds, and it took no minute"


def test_an_operator_changes_volumes_through_the_metadata_repository(with_tls: Target, tmp_path: Path) -> None:
    async def main() -> None:
        async with Admin((with_tls.metadata,), timeout_ms=30_000, access=with_tls.admin) as admin:
            for change in (admin.add_volume, admin.remove_volume):
                found = await change(StorageNodeId(1), str(tmp_path))
                is_there = str(tmp_path) in [volume.path for volume in found.volumes]
                assert is_there == (change == admin.add_volume)
                keys = list(tmp_path.rglob("server-key"))
                assert len(keys) == int(is_there)
                assert all(key.stat().st_mode & 0o077 == 0 for key in keys)
            with pytest.raises(CutwaterError, match="there is no storage node 9"):
                await admin.add_volume(StorageNodeId(9), str(tmp_path))
        await goes_on(Forger(with_tls, "token"))

    asyncio.run(main())
