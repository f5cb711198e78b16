"""Attacks on access control over real connections, each of which would have succeeded in an earlier version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cutwater.access.access_control import Caller
from cutwater.admin.local_admin import ask_as_local_admin
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import CertificateRule, Scope, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.core.publish.staged import PartSize
from cutwater.errors import NotFound, PermissionDenied, Unavailable
from cutwater.metadata.server import MetadataServer
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.access_copy import AccessAsk
from cutwater.protocol.method_access import REQUEST_ACCESS
from cutwater.runtime import system
from cutwater.storagenode.metadata_links import MetadataLinks
from cutwater.types import GLSN, Batch, BatchNumber, EventTime, MetadataNodeId, Revision, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from tests.certificate_kit import CertificateKit
from tests.integration.access_cluster import CLUSTER, AccessCluster, access_cluster, free_addresses, new_token, until

pytestmark = pytest.mark.asyncio

ON = AccessMode.ENFORCED


async def as_storage_node(cluster: AccessCluster, number: int, address: str) -> Connection:
    """Connect as a process that holds the private key of a storage node."""
    endpoint = Endpoint(CLUSTER, STORAGE_NODE, str(number), key=cluster.nodes[number]._key)
    host, port = parse_address(address)
    return await connect(endpoint, host, port, timeout_ms=5_000, expect=lambda server: None)


async def as_local_admin(cluster: AccessCluster, request: q.AccessRequest) -> object:
    return await ask_as_local_admin(cluster.addresses, CLUSTER, MetadataNodeId(1), cluster.keys[0], request)


async def stream_of(cluster: AccessCluster, topic: str) -> r.StreamInfo:
    catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
    number = next(info.topic for info in catalog.topics if info.name == topic)
    return next(info for info in catalog.streams if info.topic == number)


async def test_the_key_of_a_storage_node_gives_no_rights_at_metadata_nodes(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        for server in (cluster.leader, cluster.follower):
            connection = await as_storage_node(cluster, 1, server.address)
            attempts = (
                q.AllowRequest("eve", ("cluster-admin",), parse_pattern("cluster")),
                new_token("eve")[1],
                q.ListTokensRequest(""),
                r.CreateTopicRequest("t", 1, 1),
                r.RemoveNodeRequest(StorageNodeId(1)),
            )
            for request in attempts:
                with pytest.raises(PermissionDenied, match="storage nodes have no rights"):
                    await connection.call(metadata_api.ASK, request, timeout_ms=5_000)
            change = metadata_api.ChangeVolumes(StorageNodeId(1), "/nowhere")
            with pytest.raises(PermissionDenied, match="storage nodes have no rights"):
                await connection.call(metadata_api.CHANGE_VOLUMES, change, timeout_ms=5_000)
            catalog = (await connection.call(metadata_api.ASK, r.CatalogRequest(), timeout_ms=5_000)).value
            assert isinstance(catalog, r.Catalog)
            connection.abort()


async def test_the_key_of_a_storage_node_gives_no_rights_at_storage_nodes(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=2, mode=ON) as cluster:
        await cluster.admin(r.CreateTopicRequest("t", 1, 2))
        ann = await cluster.principal("ann", ("append,read,describe", "topic:t"))
        async with cluster.client(ann) as log:
            # Replication from one storage node to the other needs no rights.
            ack = await log.append("t", b"1")
        stream = await stream_of(cluster, "t")
        connection = await as_storage_node(cluster, 2, cluster.node_addresses[1])
        read = storage_api.ReadArguments(stream.stream, ack.glsn, 1_000)
        append = storage_api.AppendArguments(stream.stream, stream.epoch, Batch(1, b"", 0, EventTime(0), EventTime(0)))
        for method, argument in ((storage_api.READ, read), (storage_api.APPEND, append), (storage_api.STATUS, None)):
            with pytest.raises(PermissionDenied, match="storage node"):
                await connection.call(method, argument, timeout_ms=5_000)
        connection.abort()


async def test_a_node_that_was_added_while_it_was_off_is_no_administrator(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster:
        cluster.node_addresses[7] = free_addresses(1)[0]
        await cluster.start_node(7)
        await cluster.ask(r.AddNodeRequest(StorageNodeId(7), cluster.node_addresses[7]))
        await until(lambda: cluster.nodes[7].metadata_joined == 1, "it has joined")
        await cluster.secure(ON)
        connection = await as_storage_node(cluster, 7, cluster.leader.address)
        with pytest.raises(PermissionDenied):
            await connection.call(metadata_api.ASK, new_token("eve")[1], timeout_ms=5_000)
        connection.abort()


async def test_permissive_mode_lets_only_operators_add_nodes(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=AccessMode.PERMISSIVE) as cluster:
        for token in ("", await cluster.principal("ann", ("append", "topic:*"))):
            with pytest.raises(PermissionDenied, match="cluster-operate"):
                await cluster.ask(r.AddNodeRequest(StorageNodeId(7), "127.0.0.1:1"), token)


# Runs without a name.


async def test_a_run_without_a_name_belongs_to_its_opener(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await cluster.admin(r.CreateTopicRequest("v", 1, 1))
        victim = await cluster.principal("victim", ("append", "topic:v"))
        eve = await cluster.principal("eve", ("append", "topic:*"), ("publish", "run:*"))
        run = await cluster.ask(r.OpenRunRequest("", "key"), victim)
        for request in (r.PublishRequest(run.run, BatchNumber(1 << 40), ()), r.OpenRunRequest("", "key")):
            with pytest.raises(PermissionDenied, match="act-as") as denied:
                await cluster.ask(request, eve)
            assert "victim" not in denied.value.message
        scoped, request = new_token("victim", (Scope(("append",), parse_pattern("topic:v")),))
        await cluster.admin(request)
        assert await cluster.ask(r.OpenRunRequest("", "key"), scoped) == run
        assert await cluster.ask(r.PublishRequest(run.run, BatchNumber(0), ()), victim) == r.PublishAnswer()
        # An administrator may, and a principal that may act as the opener.
        assert (await cluster.admin(r.OpenRunRequest("", "key"))).run == run.run
        await cluster.admin(q.AllowRequest("eve", ("act-as",), parse_pattern("principal:victim")))
        assert await cluster.ask(r.PublishRequest(run.run, BatchNumber(1), ()), eve) == r.PublishAnswer()
        # Who acts as the opener publishes what that one has staged, and what it has staged itself.
        async with cluster.client(victim) as log:
            staged = await log.stage(await log.open_run("", "key"), 2, "v", [b"of the victim"])
        async with cluster.client(eve) as log:
            own = await log.stage(await log.open_run("", "key"), 2, "v", [b"of eve"])
            (published,) = await log.publish(await log.open_run("", "key"), 2, [staged, own])
            assert published.count == 2


async def test_a_run_without_a_name_needs_a_right_to_append(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        nothing = await cluster.principal("nothing", ("read", "topic:*"))
        with pytest.raises(PermissionDenied, match="append"):
            await cluster.ask(r.OpenRunRequest("", "key"), nothing)


async def test_the_name_of_a_run_is_not_told_for_its_key(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        boss = await cluster.principal("boss", ("publish", "run:payroll"))
        eve = await cluster.principal("eve", ("append", "topic:mine"), ("publish", "run:mine"))
        await cluster.ask(r.OpenRunRequest("payroll", "k1"), boss)
        for name in ("", "mine"):
            with pytest.raises(PermissionDenied) as denied:
                await cluster.ask(r.OpenRunRequest(name, "k1"), eve)
            assert "payroll" not in denied.value.message


# Credentials that do not hold any more.


async def test_a_certificate_that_is_not_mapped_any_more_loses_its_connection(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "tls")
    (tmp_path / "cluster").mkdir()
    async with access_cluster(tmp_path / "cluster", kit=kit) as cluster:
        await cluster.secure(AccessMode.PERMISSIVE)
        await cluster.admin(q.SetCertificateRulesRequest((CertificateRule("cn", "*", "{1}"),)))
        evil = await cluster.connection(cluster.leader.address, tls=cluster.client_tls(kit.client("root")))
        await evil.call(metadata_api.ASK, q.ListTokensRequest(""), timeout_ms=5_000)
        await cluster.admin(q.SetCertificateRulesRequest(()))
        await until(lambda: evil.is_closed, "its connection is ended, while the mode is permissive")
        again = await cluster.connection(cluster.leader.address, tls=cluster.client_tls(kit.client("root")))
        with pytest.raises(PermissionDenied):
            await again.call(metadata_api.ASK, q.ListTokensRequest(""), timeout_ms=5_000)
        again.abort()


async def test_an_administrator_token_that_has_expired_counts_for_nothing_in_permissive_mode(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=AccessMode.PERMISSIVE) as cluster:
        expires = system.wall_time_ns() // 1_000 + 1_000_000
        token = await cluster.principal("ann", ("cluster-admin", "cluster"), expires=expires)
        connection = await cluster.connection(cluster.leader.address, token)
        desk, control = cluster.leader.access.desk, cluster.leader.control
        await until(lambda: system.wall_time_ns() // 1_000 > expires, "it has expired")
        row, caller = REQUEST_ACCESS[q.ListTokensRequest], Caller("ann", token_id(token) or "")
        with pytest.raises(PermissionDenied, match="cluster-admin"):
            desk.judge(caller, "ask", row, q.ListTokensRequest(""))
        assert control.is_on
        await until(lambda: connection.is_closed, "its connection is ended")


# Errors.


async def test_errors_do_not_list_what_the_caller_may_not_describe(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await cluster.admin(r.CreateTopicRequest("secret", 1, 1))
        eve = await cluster.principal("eve", ("delete,alter,trim", "topic:mine"), ("publish", "run:mine"))
        requests = (
            r.DeleteTopicRequest("mine"),
            r.AddStreamRequest("mine"),
            r.TrimRequest("mine", GLSN(1)),
            r.ForgetOutputRequest("mine"),
        )
        for request in requests:
            with pytest.raises(NotFound) as error:
                await cluster.ask(request, eve)
            assert error.value.message in ("there is no topic 'mine'", "nothing was published under the name 'mine'")


async def test_a_part_that_was_lost_is_not_found(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        finish = storage_api.FinishArguments("ab" * 16, PartSize(1, 1, 1))
        ann = await cluster.principal("ann", ("append", "topic:mine"))
        for token, expected in ((ann, NotFound), ("", PermissionDenied)):
            connection = await cluster.connection(cluster.node_addresses[1], token)
            with pytest.raises(expected):
                await connection.call(storage_api.FINISH_PART, finish, timeout_ms=5_000)
            connection.abort()


# Storage nodes.


async def test_scans_tell_no_paths_of_files(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster:
        await cluster.ask(r.CreateTopicRequest("t", 1, 1))
        async with cluster.client("") as log:
            ack = await log.append("t", b"1")
        asked = scan_api.ScanArguments(ack.stream, ack.glsn, ack.glsn, 1_000, opens_files=True)
        connection = await cluster.connection(cluster.node_addresses[1])
        told = (await connection.call(scan_api.SCAN, asked, timeout_ms=5_000)).value
        assert told.path
        await cluster.secure(ON)
        ann = await cluster.principal("ann", ("read", "topic:t"))
        connection = await cluster.connection(cluster.node_addresses[1], ann)
        answer = await connection.call(scan_api.SCAN, asked, timeout_ms=5_000)
        assert (answer.value.path, answer.value.runs) == ("", 1)
        assert b"1" in bytes(answer.body)


async def test_a_storage_node_confirms_for_itself_only_and_nothing_that_is_not_decided(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        connection = await as_storage_node(cluster, 1, cluster.leader.address)
        asked = AccessAsk(METADATA_NODE, 1, Revision(10**9))
        await connection.call(metadata_api.ACCESS, asked, timeout_ms=5_000)
        confirmed = cluster.leader.access._leader._confirmed
        assert all(revision < 10**9 for revision in confirmed.values())
        connection.abort()


async def test_a_new_node_serves_no_client_before_it_has_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = MetadataLinks.access

    async def late(self: MetadataLinks, asked: AccessAsk, body: Any) -> Any:
        if asked.number == 2:
            raise Unavailable("the store is slow")
        return await access(self, asked, body)

    monkeypatch.setattr(MetadataLinks, "access", late)
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        cluster.node_addresses[2] = free_addresses(1)[0]
        await cluster.add_node(2)
        await cluster.start_node(2)
        await until(lambda: cluster.nodes[2].metadata_joined == 1, "it has joined")
        # It reports, so it may get log streams by now.
        connection = await cluster.connection(cluster.node_addresses[2])
        with pytest.raises(Unavailable, match="no contact to the leader"):
            await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
        connection.abort()
        monkeypatch.undo()
        copy = cluster.nodes[2].access.copy
        await until(lambda: copy.applied == cluster.leader.access.copy.view.revision, "it has the rules")
        connection = await cluster.connection(cluster.node_addresses[2], ann)
        await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
        connection.abort()


# Requests that are on their way while the rights change.


class HeldStore:
    """Holds back the writes of a leader until ``go``. What is decided meanwhile is not stored."""

    def __init__(self, leader: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
        store, append = leader._store, leader._store.append
        self._go, self.is_waiting = asyncio.Event(), asyncio.Event()

        async def held(*write: Any) -> None:
            self.is_waiting.set()
            await self._go.wait()
            await append(*write)

        monkeypatch.setattr(store, "begin_append", lambda *write: False)
        monkeypatch.setattr(store, "append", held)

    def go(self) -> None:
        self._go.set()


async def requests_arrived(leader: MetadataServer, before: int) -> None:
    await until(lambda: leader.counters.requests > before, "the request waits behind the write")


async def test_a_client_changes_nothing_while_access_control_is_being_turned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with access_cluster(tmp_path, lease_seconds=60) as cluster:
        await cluster.secure(AccessMode.OFF)
        leader = cluster.leader
        held = HeldStore(leader, monkeypatch)
        turning_on = asyncio.create_task(as_local_admin(cluster, q.SetAccessModeRequest(ON)))
        await held.is_waiting.wait()
        before = leader.counters.requests
        attack = asyncio.create_task(cluster.ask(q.AllowRequest("eve", ("cluster-admin",), parse_pattern("cluster"))))
        await requests_arrived(leader, before)
        held.go()
        await turning_on
        # It is denied, or its connection is ended first, since its credentials were not judged.
        with pytest.raises((PermissionDenied, Unavailable)):
            await attack
        assert not (await cluster.admin(q.ListRulesRequest("eve"))).rules


async def test_a_revoked_token_decides_nothing_after_its_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        eve = await cluster.principal("eve", ("cluster-admin", "cluster"), ("create", "topic:*"))
        leader, planted = cluster.leader, new_token("eve")[1]
        connection = await cluster.connection(leader.address, eve)
        held = HeldStore(leader, monkeypatch)
        revoked = asyncio.create_task(cluster.admin(q.RevokeTokenRequest(token_id(eve) or "")))
        await held.is_waiting.wait()
        for request in (planted, r.CreateTopicRequest("planted", 1, 1)):
            before = leader.counters.requests
            attack = asyncio.create_task(connection.call(metadata_api.ASK, request, timeout_ms=5_000))
            await requests_arrived(leader, before)
            attack.add_done_callback(lambda task: task.exception())
        held.go()
        await revoked
        # Behind this, nothing of before waits any more.
        await cluster.principal("ann")
        tokens = (await cluster.admin(q.ListTokensRequest("eve"))).tokens
        assert not tokens
        assert "planted" not in {topic.name for topic in (await cluster.admin(r.CatalogRequest())).topics}
        connection.abort()
