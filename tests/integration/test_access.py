"""Access control over real connections: what is denied, in which words, and when a right that was taken away ends."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutwater.access.denial_counts import Denial
from cutwater.admin.certificate_builder import AuthorityKind
from cutwater.admin.free_ports import free_addresses
from cutwater.admin.load_test import LoadPlan, own_topic
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster import tls_trouble
from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.tls_trouble import speaks_tls
from cutwater.client.read.range_reader import Ranges
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import LOCAL_ADMIN, CertificateRule, Scope, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NoRecordHere,
    NotFound,
    PermissionDenied,
    Refused,
    Unavailable,
)
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.metadata.stores.store_interface import LoadedState
from cutwater.protocol import metadata_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unauthenticated, Unproven, Untrusted
from cutwater.runtime import system
from cutwater.types import GLSN, LogStreamId, Revision, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import client_tls
from tests.certificate_kit import CertificateKit
from tests.integration.access_cluster import CLUSTER, ROOT, AccessCluster, access_cluster, new_token, until

pytestmark = pytest.mark.asyncio

ON = AccessMode.ENFORCED


def read_arguments(stream: int) -> storage_api.ReadArguments:
    return storage_api.ReadArguments(LogStreamId(stream), GLSN(1), 1_000_000)


class HeldStore(MemoryStore):
    """Cannot be read before ``go``."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.go = asyncio.Event()

    async def load(self) -> LoadedState:
        await self.go.wait()
        return await super().load()


async def stream_of(cluster: AccessCluster, topic: str) -> LogStreamId:
    catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
    number = next(info.topic for info in catalog.topics if info.name == topic)
    return next(info.stream for info in catalog.streams if info.topic == number)


# Credentials.


async def test_while_it_is_off_clients_do_everything_and_cannot_turn_it_on(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster, cluster.client("") as log:
        await log.create_topic("orders")
        ack = await log.append("orders", b"1")
        assert (await log.read(ack.glsn)).value == b"1"
        for request in (q.SetAccessModeRequest(ON), new_token("eve")[1]):
            with pytest.raises(Refused, match="only a caller with the key of a metadata node may change it"):
                await cluster.ask(request)
        assert not cluster.leader.access.copy.is_on
        assert cluster.nodes[1].access.copy.view.revision == 0


async def test_no_credentials_wrong_ones_expired_and_revoked_ones(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("append,read", "topic:a*"))
        places = (cluster.leader.address, cluster.node_addresses[1])
        stranger, _ = new_token("ann")
        for place in places:
            with pytest.raises(Unauthenticated, match="the token is not known here"):
                await cluster.connection(place, stranger)
            with pytest.raises(Unauthenticated, match="the token is not known here"):
                await cluster.connection(place, ann[:-1] + ("0" if ann[-1] != "0" else "1"))
        opened = r.OpenRunRequest("", "a-key")
        for request in (r.CatalogRequest(), r.CreateTopicRequest("a", 1, 1), r.ClockRequest(GLSN(0)), opened):
            with pytest.raises(PermissionDenied, match="a client without credentials lacks the right"):
                await cluster.ask(request)
        connection = await cluster.connection(cluster.node_addresses[1])
        with pytest.raises(PermissionDenied, match="give a token or a client certificate"):
            await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
        connection.abort()
        connection = await cluster.connection(cluster.leader.address)
        with pytest.raises(PermissionDenied, match="give a token or a client certificate"):
            await connection.call(metadata_api.WHO_LEADS, None, timeout_ms=5_000)
        connection.abort()
        await cluster.admin(q.RevokeTokenRequest(token_id(ann) or ""))
        for place in places:
            with pytest.raises(Unauthenticated, match="whether it was revoked"):
                await cluster.connection(place, ann)


async def test_a_token_that_expires_ends_its_connections(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        soon = system.wall_time_ns() // 1_000 + 1_500_000
        ann = await cluster.principal("ann", ("describe", "cluster"), expires=soon)
        connections = [await cluster.connection(at, ann) for at in (cluster.leader.address, cluster.node_addresses[1])]
        await connections[1].call(storage_api.STATUS, None, timeout_ms=5_000)
        await until(lambda: all(connection.is_closed for connection in connections), "both are closed")
        assert all("was revoked or has expired" in str(connection.error) for connection in connections)
        with pytest.raises(Unauthenticated, match="has expired"):
            await cluster.connection(cluster.leader.address, ann)


async def test_certificates_become_principals_by_the_rules(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "authorities")
    async with access_cluster(tmp_path, mode=ON, kit=kit) as cluster:
        await cluster.admin(q.SetCertificateRulesRequest((CertificateRule("cn", "team-*", "{1}"),)))
        await cluster.admin(q.AllowRequest("ann", ("describe",), parse_pattern("cluster")))
        ann, unmapped = cluster.client_tls(kit.client("team-ann")), cluster.client_tls(kit.client("eve"))
        server = cluster.client_tls(kit.server(ServerName(CLUSTER, STORAGE_NODE, 1), "copied"))
        place = cluster.node_addresses[1]

        async def status(tls: ssl.SSLContext, token: str = "") -> Connection:
            connection = await cluster.connection(place, token, tls=tls)
            try:
                await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
            except CutwaterError:
                connection.abort()
                raise
            return connection

        hers = await status(ann)
        assert cluster.nodes[1].access.control.caller(next(iter(_peers(cluster, "ann")))).principal == "ann"
        with pytest.raises(PermissionDenied, match="'eve' stands for no principal"):
            await status(unmapped)
        with pytest.raises(PermissionDenied, match="stands for no principal"):
            await status(server)
        with pytest.raises(Unauthenticated, match=r"a token of the cluster \(cwt_\.\.\.\) or a client certificate"):
            await status(cluster.client_tls())
        (await status(unmapped, cluster.root)).abort()
        await cluster.admin(q.SetCertificateRulesRequest((CertificateRule("cn", "none", "none"),)))
        await until(lambda: hers.is_closed, "its rule is gone")
        assert "the rules for certificates have changed: connect again" in str(hers.error)
        with pytest.raises(PermissionDenied, match="'team-ann' stands for no principal"):
            await status(ann)


def _peers(cluster: AccessCluster, principal: str) -> list[Peer]:
    peers = [connection.peer for connection in cluster.nodes[1]._connections()]
    return [peer for peer in peers if peer is not None and peer.identity.principal == principal]


# Rights.


async def test_a_client_does_what_rules_give_it_and_nothing_else(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=3, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,append,read", "topic:ann.*"), ("cursor", "cursor:ann.*"))
        bob = await cluster.principal("bob", ("read", "topic:ann.out"))
        async with cluster.client(ann) as log, cluster.client(bob) as other:
            for name in ("ann.in", "ann.out"):
                await log.create_topic(name, replication=3)
            ack = await log.append("ann.out", b"1")
            secret = await log.append("ann.in", b"2")
            assert (await other.read(ack.glsn)).value == b"1"
            assert [topic.name for topic in await other.topics()] == ["ann.out"]
            assert [topic.name for topic in await log.topics()] == ["ann.in", "ann.out"]
            with pytest.raises(PermissionDenied) as denied:
                await log.create_topic("orders")
            assert denied.value.message == (
                "ann lacks the right create on topic:orders: no rule gives it; an administrator can, with "
                "`cutwater acl allow ann create topic:orders`"
            )
            with pytest.raises(PermissionDenied, match=r"bob lacks the right append on topic:ann\.out"):
                await other.append("ann.out", b"3")
            with pytest.raises(NoRecordHere) as missing:
                await other.read(secret.glsn)
            assert "ann.in" not in str(missing.value)
            assert "a topic that you may not see" in str(missing.value)
            for name in ("ann.in", "no such topic"):
                with pytest.raises(NotFound) as unknown:
                    await other.append(name, b"4")
                assert unknown.value.message.replace(name, "X") == (
                    "there is no topic 'X'; topics: ann.out. There may be one that you may not see: an administrator "
                    "gives rights on it with `cutwater acl allow`"
                )
            with pytest.raises(NotFound, match=r"there is no topic 'ann\.in'.* one that you may not see"):
                await other.subscribe("ann.in")
            with pytest.raises(PermissionDenied, match=r"bob lacks the right delete on topic:ann\.in"):
                await other.delete_topic("ann.in")
            with pytest.raises(PermissionDenied, match="bob lacks the right delete on topic:none"):
                await other.delete_topic("none")
        counts = cluster.nodes[1].access.control.denials.refused + cluster.nodes[2].access.control.denials.refused
        counts += cluster.nodes[3].access.control.denials.refused
        assert counts["bob", "append"] >= 1
        assert cluster.leader.control.denials.refused["bob", "delete"] == 2


async def test_a_denied_point_read_fails_at_once_and_is_recorded_once(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=3, mode=ON) as cluster:
        carol = await cluster.principal("carol", ("append,create", "topic:orders"))

        def denials() -> int:
            controls = [node.access.control for node in cluster.nodes.values()]
            return sum(n for control in controls for (who, _), n in control.denials.refused.items() if who == "carol")

        async with cluster.client(carol) as log:
            topic = await log.create_topic("orders", replication=3)
            ack = await log.append("orders", b"1")
            with pytest.raises(PermissionDenied, match="carol lacks the right read on topic:orders"):
                await log.read(ack.glsn)
            assert denials() == 1
            with pytest.raises(PermissionDenied, match="carol lacks the right read on topic:orders"):
                await log.watermark("orders", at=ack.glsn)
            assert denials() == 2
        ranges = await Ranges.connect(cluster.servers, Access(token=carol), timeout=20)
        try:
            with pytest.raises(PermissionDenied, match="carol lacks the right read on topic:orders"):
                async for _ in ranges.pieces(topic.streams[0], ack.glsn, ack.glsn, {}, patience=20):
                    pass
            assert denials() == 3
        finally:
            await ranges.close()


async def test_raw_calls_with_numbers_do_not_tell_names(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,append,read", "topic:ann.*"))
        eve = await cluster.principal("eve", ("read", "topic:eve.*"))
        async with cluster.client(ann) as log:
            await log.create_topic("ann.secret")
            await log.append("ann.secret", b"1")
        stream = await stream_of(cluster, "ann.secret")
        connection = await cluster.connection(cluster.node_addresses[1], eve)
        told = []
        for number in (stream, LogStreamId(777)):
            for _ in range(100):
                with pytest.raises((PermissionDenied, Unavailable)) as refused:
                    await connection.call(storage_api.READ, read_arguments(number), timeout_ms=5_000)
                if isinstance(refused.value, PermissionDenied):
                    break
                await asyncio.sleep(0.05)
            told.append(refused.value.message)
        assert told[0] == told[1]
        assert "eve lacks the right read on the topic that this number stands for, or there is none" in told[0]
        connection.abort()


async def test_scopes_limit_a_token(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await cluster.principal("ann", ("create,append,read", "topic:*"))
        narrow = await cluster.principal("ann", scopes=(Scope(("read",), parse_pattern("topic:a*")),))
        root_only_here = await cluster.principal(ROOT, scopes=(Scope(("read",), parse_pattern("topic:*")),))
        with pytest.raises(PermissionDenied, match=r"the scopes of token \w+ do not include the right create"):
            await cluster.ask(r.CreateTopicRequest("a", 1, 1), narrow)
        with pytest.raises(PermissionDenied, match="do not include the right cluster-admin"):
            await cluster.ask(q.ListGroupsRequest(), root_only_here)


async def test_operators_see_what_others_do_not(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,read", "topic:ann.*"))
        ops = await cluster.principal("ops", ("cluster-operate", "cluster"))
        await cluster.ask(r.CreateTopicRequest("ann.a", 1, 1), ann)
        await cluster.admin(r.CreateTopicRequest("secret", 1, 1))
        seen: r.Description = await cluster.ask(r.DescribeRequest(), ann)
        assert ({one.topic for one in seen.streams}, seen.nodes, seen.cluster_key) == ({"ann.a"}, (), "")
        whole: r.Description = await cluster.ask(r.DescribeRequest(), ops)
        # The cluster makes its own topic for the audit meanwhile.
        assert ({one.topic for one in whole.streams} - {"_audit"}, len(whole.nodes)) == ({"ann.a", "secret"}, 1)
        assert whole.cluster_key
        events: r.Events = await cluster.ask(r.EventsRequest(), ann)
        assert events.events == ()
        events = await cluster.ask(r.EventsRequest(), ops)
        kinds = {event.kind for event in events.events}
        assert "CreateTopic" in kinds
        assert not kinds & {"CreateToken", "AllowRights", "SetAccessMode"}
        events = await cluster.admin(r.EventsRequest())
        assert {"CreateToken", "AllowRights", "SetAccessMode"} <= {event.kind for event in events.events}
        with pytest.raises(PermissionDenied, match="ops lacks the right cluster-admin"):
            await cluster.ask(q.SetAccessModeRequest(AccessMode.OFF), ops)


async def test_topics_of_a_principal_that_sees_no_storage_nodes_have_the_usual_copies(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=3, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,append", "topic:ann.*"))
        assert (await cluster.ask(r.DescribeRequest(), ann)).nodes == ()
        async with cluster.client(ann) as log:
            made = await log.create_topic("ann.a")
            one = await log.create_topic("ann.one", replication=1)
        assert (made.replication, one.replication) == (3, 1)
        catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
        replicas = {info.stream: info.replicas for info in catalog.streams}
        assert len(set(replicas[made.streams[0]])) == 3


async def test_decisions_carry_the_principal(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create", "topic:*"))
        await cluster.ask(r.CreateTopicRequest("a", 1, 1), ann, cluster.follower)
        loaded = await cluster.leader._store.load()
        made = [one for one in loaded.decisions if getattr(one, "name", "") == "a"]
        assert [(one.by.principal, one.by.token) for one in made] == [("ann", token_id(ann))]  # type: ignore[union-attr]


async def test_a_part_that_another_principal_staged_is_refused(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        rights = (("create,append,read", "topic:shared"), ("publish", "run:*"))
        ann, bob = [await cluster.principal(name, *rights) for name in ("ann", "bob")]
        async with cluster.client(ann) as hers, cluster.client(bob, timeout=2.0) as his:
            await hers.create_topic("shared")
            run = await hers.open_run("totals", "a key")
            other = await his.open_run("others", "another key")
            part = await hers.stage(run, 0, "shared", [b"a"])
            bound = await hers.stage(other, 0, "shared", [b"stolen"])
            staged = cluster.nodes[1].staging
            assert [held.part.owner for held in staged.held.values()] == ["ann", "ann"]
            with pytest.raises(CutwaterError):
                await his.publish(other, 0, [bound])
            description: r.Description = await cluster.admin(r.DescribeRequest())
            stuck = next(one for one in description.runs if one.name == "others")
            assert "staged by another principal" in stuck.unpublished[0].why
            connection = await cluster.connection(cluster.node_addresses[1], bob)
            assert part is not None
            assert bound is not None
            asked = storage_api.FinishArguments(part.part, staged.held[part.part].size)
            with pytest.raises(Refused, match="staged by another principal"):
                await connection.call(storage_api.FINISH_PART, asked, timeout_ms=5_000)
            connection.abort()
            (published,) = await hers.publish(run, 0, [part])
            assert published.count == 1
            async with hers.subscribe("shared", follow=False) as subscription:
                records = [record.value async for record in subscription]
            assert records == [b"a"]


# Relays.


async def test_a_follower_passes_on_the_original_caller(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=3, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create", "topic:ann.*"))
        follower = cluster.follower
        assert isinstance(await cluster.ask(r.CreateTopicRequest("ann.a", 1, 1), ann, follower), r.Created)
        with pytest.raises(PermissionDenied, match="ann lacks the right create on topic:bob"):
            await cluster.ask(r.CreateTopicRequest("bob", 1, 1), ann, follower)
        with pytest.raises(PermissionDenied, match="a client without credentials"):
            await cluster.ask(r.CatalogRequest(), "", follower)
        catalog: r.Catalog = await cluster.ask(r.CatalogRequest(), ann, follower)
        assert [topic.name for topic in catalog.topics] == ["ann.a"]
        connection = await cluster.connection(follower.address, ann)
        asked = metadata_api.ChangeVolumes(StorageNodeId(1), "/nowhere")
        with pytest.raises(PermissionDenied, match="ann lacks the right cluster-operate on cluster"):
            await connection.call(metadata_api.CHANGE_VOLUMES, asked, timeout_ms=5_000)
        connection.abort()


async def test_a_relayed_request_without_its_caller_is_refused(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        upstream = cluster.follower._upstream
        assert upstream is not None
        with pytest.raises(Unavailable, match="passed on without its original caller"):
            await upstream.call(metadata_api.ASK_LEADER, r.CreateTopicRequest("a", 1, 1), timeout_ms=5_000)
        for origin in (RequestOrigin(""), RequestOrigin(LOCAL_ADMIN), RequestOrigin("nobody-known")):
            asked = metadata_api.RequestOf(r.CreateTopicRequest("a", 1, 1), origin)
            with pytest.raises(PermissionDenied, match="lacks the right create"):
                await upstream.call(metadata_api.ASK_LEADER_AS, asked, timeout_ms=5_000)
        asked = metadata_api.RequestOf(q.NoteTokenUseRequest({}), RequestOrigin(ROOT))
        with pytest.raises(Unproven, match="is for servers of the cluster"):
            await upstream.call(metadata_api.ASK_LEADER_AS, asked, timeout_ms=5_000)


async def test_only_metadata_nodes_say_for_whom_they_ask(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create", "topic:*"))
        asked = metadata_api.RequestOf(q.ListGroupsRequest(), RequestOrigin(ROOT), is_server=True)
        forged = Endpoint(CLUSTER, METADATA_NODE, "1", key=ServerKey.generate())
        for endpoint in (None, forged):
            connection = await cluster.connection(cluster.leader.address, ann, endpoint)
            with pytest.raises((Unproven, Unavailable)):
                await connection.call(metadata_api.ASK_LEADER_AS, asked, timeout_ms=5_000)
            connection.abort()


# Revocation, leases and modes.


async def followed(connection: Connection, stream: LogStreamId) -> Any:
    """Follow a log stream. A replica that was left out, because its node was held up, is learned first."""
    async with asyncio.timeout(60):
        while True:
            following = connection.open_stream(storage_api.FOLLOW, read_arguments(stream))
            try:
                assert (await anext(aiter(following))).value.stream == stream
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                return following


async def test_a_right_that_is_taken_away_ends_a_running_subscription(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=3, metadata=3, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,append,read", "topic:a"))
        async with cluster.client(ann) as log:
            await log.create_topic("a", replication=3)
            await log.append("a", b"1")
            stream = await stream_of(cluster, "a")
            connections = [await cluster.connection(at, ann) for at in cluster.node_addresses.values()]
            following = [await followed(one, stream) for one in connections]
            pattern = parse_pattern("topic:a")
            changed = await cluster.admin(q.RemoveRightsRequest("ann", pattern, ("read",)))
            assert changed.unconfirmed == ()
            for one in following:
                with pytest.raises(PermissionDenied, match="ann lacks the right read on topic:a"):
                    async for _ in one:
                        pass
            await log.append("a", b"2")
            assert not any(connection.is_closed for connection in connections)
            for connection in connections:
                connection.abort()


@pytest.mark.parametrize("lost", ["append", "produce-as", "token"])
async def test_a_right_that_is_taken_away_ends_a_running_producer(tmp_path: Path, lost: str) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("create,append,read", "topic:a"), ("produce-as", "producer:p"))
        async with cluster.client(ann) as log:
            await log.create_topic("a")
            producer = await log.producer("a", id="p")
            await (await producer.send(b"1"))
            takes: dict[str, tuple[r.Request, type[CutwaterError], str]] = {
                "append": (_without_right("topic:a", "append"), PermissionDenied, "lacks the right append on topic:a"),
                "produce-as": (_without_right("producer:p", "produce-as"), PermissionDenied, "lacks the right produce"),
                "token": (q.RevokeTokenRequest(token_id(ann) or ""), Unauthenticated, "whether it was revoked"),
            }
            request, kind, words = takes[lost]
            await cluster.admin(request)
            # It was not taken, and the caller hears that and why.
            with pytest.raises(kind, match=words):
                await (await producer.send(b"2"))
            with pytest.raises(kind, match=words):
                await producer.send(b"3")
            with pytest.raises(kind, match=words):
                await producer.close()
        bob = await cluster.principal("bob", ("read", "topic:a"))
        async with cluster.client(bob) as log, log.subscribe("a", follow=False) as subscription:
            assert [record.value async for record in subscription] == [b"1"]


def _without_right(resource: str, right: str) -> r.Request:
    return q.RemoveRightsRequest("ann", parse_pattern(resource), (right,))


async def test_a_pattern_shows_only_topics_that_may_be_read_and_ends_with_the_right(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await cluster.admin(q.AllowRequest(ROOT, ("append",), parse_pattern("topic:*")))
        bob = await cluster.principal("bob", ("read", "topic:a"))
        async with cluster.client(cluster.root) as log, cluster.client(bob) as his:
            await log.create_topic("a")
            await log.append("a", b"1")
            async with his.subscribe(re.compile("a.*")) as subscription:
                records = aiter(subscription)
                assert (await anext(records)).value == b"1"
                await log.create_topic("a.later")
                await log.append("a.later", b"secret")
                await log.append("a", b"2")
                assert (await anext(records)).value == b"2"
                with pytest.raises(PermissionDenied, match="bob lacks the right read on topic:a: no rule gives it"):
                    await asyncio.gather(
                        anext(records), cluster.admin(q.RemoveRightsRequest("bob", parse_pattern("topic:a")))
                    )


async def test_a_revoked_token_ends_its_connections_before_the_answer(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=3, metadata=3, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        places = [*cluster.addresses, *cluster.node_addresses.values()]
        connections = [await cluster.connection(place, ann) for place in places]
        changed: q.AccessChanged = await cluster.admin(q.RevokeTokenRequest(token_id(ann) or ""))
        assert changed.unconfirmed == ()
        for server in (*cluster.metadata, *cluster.nodes.values()):
            assert server.access.copy.applied >= changed.revision
        await until(lambda: all(connection.is_closed for connection in connections), "all are closed")
        for connection in connections:
            assert isinstance(connection.error, Unauthenticated)
            assert "was revoked or has expired: use another one" in connection.error.message


async def test_what_is_no_token_of_the_cluster_is_told_so(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON, kit=CertificateKit(tmp_path / "kit")) as cluster:
        with pytest.raises(Unauthenticated, match=r"this is no token of the cluster \(cwt_...\)"):
            await cluster.connection(cluster.leader.address, "hello")


async def test_a_load_test_tells_the_right_that_is_missing_first(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        bob = await cluster.principal("bob", ("read", "topic:orders"))
        async with cluster.client(bob) as log:
            with pytest.raises(PermissionDenied, match="bob lacks the right create on topic:cutwater-bench-") as denied:
                async with own_topic(log, LoadPlan(seconds=0.1)):
                    pass
            assert "may be left" not in denied.value.message


async def test_a_client_may_revoke_its_own_token(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        second = await cluster.principal("second", ("cluster-admin", "cluster"))
        third = await cluster.principal("third")
        own, other = token_id(second) or "", token_id(third) or ""
        async with Admin(tuple(cluster.addresses), access=Access(token=second)) as admin:
            assert (await admin.control.revoke_token(other)).unconfirmed == ()
            await admin.control.revoke_token(own)
        known = {token.id for token in (await cluster.admin(q.ListTokensRequest())).tokens}
        assert not known & {own, other}
        with pytest.raises(Unauthenticated):
            await cluster.ask(q.WhoAmIRequest(), second)


async def test_children_of_a_token_end_with_it_at_once(tmp_path: Path) -> None:
    """A service makes them for browsers."""
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        ends = system.wall_time_ns() // 1_000 + 3_600_000_000
        async with Admin(cluster.addresses, timeout_ms=5_000, access=Access(token=ann)) as admin:
            one = await admin.control.create_child_token(ends)
            two = await admin.control.create_child_token(ends, scopes=("describe cluster",))
            assert one.principal == "ann"
            assert one.unconfirmed == two.unconfirmed == ()
            opened = [
                await cluster.connection(at, made.token)
                for at in (cluster.addresses[0], cluster.node_addresses[1])
                for made in (one, two)
            ]
            await opened[3].call(storage_api.STATUS, None, timeout_ms=5_000)
            assert [one.parent for one in await admin.control.tokens("ann")].count(token_id(ann)) == 2
            assert (await admin.control.end_own_token(one.id)).unconfirmed == ()
            assert [connection.is_closed for connection in opened] == [True, False, True, False]
            async with Admin(cluster.addresses, timeout_ms=5_000, access=Access(token=two.token)) as child:
                with pytest.raises(Refused, match="a child has no children"):
                    await child.control.create_child_token(ends)
            with pytest.raises(InvalidArgument, match="make another child instead"):
                await admin.control.rotate_token(two.id, ends)
            await admin.control.end_own_token()
        # The caller's own connection may end before the other server has confirmed that.
        await until(lambda: all(connection.is_closed for connection in opened), "the children have ended")
        for text in (ann, one.token, two.token):
            with pytest.raises(Unauthenticated):
                await cluster.connection(cluster.node_addresses[1], text)


async def test_a_token_that_expired_is_refused_like_one_that_was_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The connection stays, so that the call itself is judged.
    monkeypatch.setattr("cutwater.metadata.node_access.SWEEP_SECONDS", 1_000.0)
    async with access_cluster(tmp_path, mode=ON) as cluster:
        expires = system.wall_time_ns() // 1_000 + 2_000_000
        ann = await cluster.principal("ann", ("read", "topic:a"), expires=expires)
        connection = await cluster.connection(cluster.leader.address, ann)
        await connection.call(metadata_api.ASK, r.CatalogRequest(), timeout_ms=5_000)
        await until(lambda: system.wall_time_ns() // 1_000 > expires, "the token has expired")
        with pytest.raises(Unauthenticated, match=r"token \w+ was revoked or has expired: use another one"):
            await connection.call(metadata_api.ASK, r.CatalogRequest(), timeout_ms=5_000)
        assert cluster.leader.control.denials.refused["ann", "describe"] == 1
        connection.abort()


async def test_a_change_names_the_servers_that_have_not_confirmed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutwater.metadata.request_desk.CONFIRM_SECONDS", 0.3)
    async with access_cluster(tmp_path, nodes=2, metadata=2, mode=ON) as cluster:

        async def silent(*asked: Any) -> Any:
            raise Unavailable("cut off")

        cluster.nodes[2]._metadata.access = silent  # type: ignore[method-assign]
        changed: q.AccessChanged = await cluster.admin(q.CreateGroupRequest("g"))
        assert changed.unconfirmed == ("storage node 2",)


async def test_a_change_is_confirmed_to_the_next_leader_if_the_leader_changes_meanwhile(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=2, metadata=2, mode=ON) as cluster:
        leader, follower, links = cluster.leader, cluster.follower, cluster.nodes[2]._metadata
        tell = links.access

        async def silent(*asked: Any) -> Any:
            raise Unavailable("cut off")

        links.access = silent  # type: ignore[method-assign]
        revision = leader.access.copy.view.revision
        change = asyncio.create_task(cluster.admin(q.CreateGroupRequest("g")))
        await until(lambda: leader.access.copy.view.revision > revision, "the change is stored")
        # As if heartbeats had been late: the follower takes over, and the leader notices that.
        follower._leader_changed.set()
        await until(lambda: follower.leads, "the other one leads")
        links.access = tell  # type: ignore[method-assign]
        changed: q.AccessChanged = await change
        assert changed.unconfirmed == ()
        assert all(server.access.copy.applied > revision for server in (*cluster.metadata, *cluster.nodes.values()))


async def test_the_cluster_says_which_servers_have_still_not_confirmed_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutwater.metadata.request_desk.CONFIRM_SECONDS", 0.3)
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        links = cluster.nodes[1]._metadata
        tell = links.access

        async def silent(*asked: Any) -> Any:
            raise Unavailable("cut off")

        links.access = silent  # type: ignore[method-assign]
        changed: q.AccessChanged = await cluster.admin(q.CreateGroupRequest("g"))
        for revision in (Revision(0), changed.revision):
            assert await cluster.admin(q.ConfirmAccessRequest(revision)) == changed
        links.access = tell  # type: ignore[method-assign]
        await until(lambda: cluster.nodes[1].access.copy.applied == changed.revision, "it has the change")
        for server in cluster.metadata:
            assert await cluster.ask(q.ConfirmAccessRequest(changed.revision), cluster.root, server) == structs.replace(
                changed, unconfirmed=()
            )
        with pytest.raises(InvalidArgument, match="no revision 100"):
            await cluster.admin(q.ConfirmAccessRequest(Revision(100)))


async def test_a_node_that_was_down_when_it_was_turned_on_is_named_until_it_has_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutwater.metadata.request_desk.CONFIRM_SECONDS", 1.0)
    async with access_cluster(tmp_path, nodes=2, lease_seconds=3.0) as cluster:
        await cluster.stop_node(2)
        assert (await cluster.secure(ON)).unconfirmed == ("storage node 2",)
        # Later changes do not wait for it, once the leader has been there for the time of a lease. The question does.
        leader = cluster.leader.access._leader
        await until(lambda: not leader.is_new and (STORAGE_NODE, 2) not in leader.leaseholders(), "its lease is over")
        assert (await cluster.admin(q.CreateGroupRequest("g"))).unconfirmed == ()
        assert (await cluster.admin(q.ConfirmAccessRequest())).unconfirmed == ("storage node 2",)
        await cluster.start_node(2)
        newest = cluster.leader.access.copy.view.revision
        await until(lambda: cluster.nodes[2].access.copy.applied == newest, "it has the rules")
        monkeypatch.undo()
        assert (await cluster.admin(q.ConfirmAccessRequest())).unconfirmed == ()


async def test_a_node_without_contact_is_named_when_the_rules_are_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on allowing everything: before that, no lease ends what it does."""
    monkeypatch.setattr("cutwater.metadata.request_desk.CONFIRM_SECONDS", 1.0)
    async with access_cluster(tmp_path, nodes=2, lease_seconds=0.5, mode=AccessMode.PERMISSIVE) as cluster:
        await cluster.stop_node(2)
        leader = cluster.leader.access._leader
        await until(lambda: not leader.is_new and (STORAGE_NODE, 2) not in leader.leaseholders(), "its lease is over")
        changed: q.AccessChanged = await cluster.admin(q.SetAccessModeRequest(AccessMode.ENFORCED))
        assert changed.unconfirmed == ("storage node 2",)


async def test_a_metadata_node_that_hangs_delays_a_change_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        links = cluster.nodes[1]._metadata
        # Of those that the node has joined, the follower is the first to be asked.
        places = {connection.peer.name: connection for connection in links._joined if connection.peer is not None}
        hung, other = places[str(cluster.follower.options.node)], places[str(cluster.leader.options.node)]
        links._joined.clear()
        links._joined.update({hung: None, other: None})
        links._tells_access = None
        call, asked = hung.call, 0

        async def hang(method: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal asked
            if method is not metadata_api.ACCESS:
                return await call(method, *arguments, **options)
            asked += 1
            raise Unavailable("no answer in time")

        monkeypatch.setattr(hung, "call", hang)
        for number in range(3):
            assert (await cluster.admin(q.CreateGroupRequest(f"g{number}"))).unconfirmed == ()
        assert asked <= 1, "an answer that was on its way may have come from the other one before"


async def test_a_node_without_contact_refuses_clients_when_its_lease_is_over(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON, lease_seconds=1.0) as cluster:
        ann = await cluster.principal("ann", ("create,append,read", "topic:*"), ("describe", "cluster"))
        async with cluster.client(ann) as log:
            await log.create_topic("a")
            await log.append("a", b"1")
        connection = await cluster.connection(cluster.node_addresses[1], ann)
        await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
        await cluster.stop_metadata()
        copy = cluster.nodes[1].access.copy
        await until(lambda: not copy.is_valid, "the lease is over")
        for method, argument in ((storage_api.STATUS, None), (storage_api.READ, read_arguments(1))):
            with pytest.raises(Unavailable, match="no contact to the leader") as stale:
                await connection.call(method, argument, timeout_ms=5_000)
            assert stale.value.retriable
        connection.abort()
        with pytest.raises(Unavailable, match="no contact to the leader"):
            await cluster.connection(cluster.node_addresses[1], ann)
        # The node remembers across a start that access control is on.
        await cluster.stop_node(1)
        await cluster.start_node(1)
        with pytest.raises(Unavailable, match="no contact to the leader"):
            await cluster.connection(cluster.node_addresses[1], ann)
        connection = await cluster.connection(cluster.node_addresses[1])
        with pytest.raises(Unavailable, match="no contact to the leader"):
            await connection.call(storage_api.STATUS, None, timeout_ms=5_000)
        connection.abort()


async def test_a_leader_that_was_replaced_renews_no_lease(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        leader = cluster.leader
        assert leader.term is not None
        cluster.data.leader = structs.replace(cluster.data.leader, epoch=cluster.data.leader.epoch + 1)
        asked = metadata_api.AccessAsk(METADATA_NODE, 2, leader.access.copy.view.revision)
        with pytest.raises(Unavailable, match="another metadata node leads"):
            await leader.access.news_of_leader(asked)


async def test_permissive_mode_records_what_it_would_deny(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=AccessMode.PERMISSIVE) as cluster:
        seen: list[Denial] = []
        cluster.nodes[1].access.control.denials.on_denial = seen.append
        ann = await cluster.principal("ann", ("create,append", "topic:*"))
        async with cluster.client(ann) as log:
            await log.create_topic("a")
            ack = await log.append("a", b"1")
            assert (await log.read(ack.glsn)).value == b"1"
        async with cluster.client("") as log:
            assert [topic.name for topic in await log.topics()] == ["a"]
            await log.append("a", b"2")
        node, leader = cluster.nodes[1].access.control.denials, cluster.leader.control.denials
        assert node.recorded["ann", "read"] >= 1
        assert node.recorded["", "append"] == 1
        assert not node.refused
        assert ("ann", "read") in {(one.verdict.principal, one.verdict.right) for one in seen}
        assert not any(one.is_enforced for one in seen)
        with pytest.raises(PermissionDenied, match="ann lacks the right cluster-admin"):
            await cluster.ask(q.SetAccessModeRequest(AccessMode.OFF), ann)
        assert leader.refused["ann", "cluster-admin"] == 1


async def test_turning_it_on_ends_connections_whose_credentials_were_not_judged(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster:
        places = (cluster.leader.address, cluster.node_addresses[1])
        connections = [await cluster.connection(place) for place in places]
        await cluster.secure()
        await until(lambda: all(connection.is_closed for connection in connections), "both are closed")
        assert all("access control was turned on: connect again" in str(one.error) for one in connections)
        assert cluster.nodes[1].volumes.identity.secured
        await cluster.admin(q.SetAccessModeRequest(AccessMode.OFF))
        assert not cluster.nodes[1].volumes.identity.secured
        async with cluster.client("") as log:
            await log.create_topic("a")
            await log.append("a", b"1")


@pytest.mark.parametrize("mode", [AccessMode.PERMISSIVE, ON])
async def test_a_token_shown_to_a_metadata_node_that_does_not_know_the_rules_yet_counts_later(
    tmp_path: Path, mode: AccessMode
) -> None:
    async with access_cluster(tmp_path, mode=mode) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        await cluster.stop_metadata()
        store = HeldStore(cluster.data)
        await cluster.start_metadata(1, store)
        places = {name: await cluster.connection(cluster.addresses[0], name) for name in (cluster.root, ann, "")}
        assert not cluster.metadata[0].control.is_on, "the node has taken them without knowing the rules"
        request = q.ListRulesRequest("ann")
        early = asyncio.create_task(places[cluster.root].call(metadata_api.ASK, request, timeout_ms=10_000))
        await asyncio.sleep(0.1)
        store.go.set()
        assert (await early).value.rules, "a request that came before the rules is judged by them"
        assert (await places[cluster.root].call(metadata_api.ASK, request, timeout_ms=5_000)).value.rules
        with pytest.raises(PermissionDenied, match="ann lacks the right cluster-admin"):
            await places[ann].call(metadata_api.ASK, q.ListGroupsRequest(), timeout_ms=5_000)
        with pytest.raises((PermissionDenied, Unavailable), match=r"without credentials|connect again"):
            await places[""].call(metadata_api.ASK, q.ListGroupsRequest(), timeout_ms=5_000)


@pytest.mark.parametrize("mode", [AccessMode.PERMISSIVE, ON])
async def test_a_token_shown_while_it_was_off_counts_once_it_is_on(tmp_path: Path, mode: AccessMode) -> None:
    """Also at storage nodes, so that permissive mode records what such a client lacks."""
    async with access_cluster(tmp_path, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        await cluster.admin(q.SetAccessModeRequest(AccessMode.OFF))
        places = (cluster.leader.address, cluster.node_addresses[1])
        roots = [await cluster.connection(place, cluster.root) for place in places]
        anns = [await cluster.connection(place, ann) for place in places]
        await cluster.secure(mode)
        await roots[0].call(metadata_api.ASK, q.ListGroupsRequest(), timeout_ms=5_000)
        with pytest.raises(PermissionDenied, match="ann lacks the right cluster-admin"):
            await anns[0].call(metadata_api.ASK, q.ListGroupsRequest(), timeout_ms=5_000)
        await anns[1].call(storage_api.STATUS, None, timeout_ms=5_000)
        with pytest.raises(PermissionDenied, match="ann lacks the right cluster-operate"):
            await anns[1].call(storage_api.VERIFY_STAGED, None, timeout_ms=5_000)
        assert not any(connection.is_closed for connection in (*roots, *anns))
        assert ("", "describe") not in cluster.nodes[1].access.control.denials.recorded


async def test_a_token_that_is_newer_than_the_known_rules_counts_once_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=AccessMode.PERMISSIVE) as cluster:
        follower = cluster.follower
        taken = follower.access.copy.view
        with monkeypatch.context() as patch:
            patch.setattr(follower.access.copy, "take", lambda rules: None)
            bob = await cluster.principal("bob", ("cluster-admin", "cluster"))
            assert follower.access.copy.view is taken
            connection = await cluster.connection(follower.address, bob)
        await until(lambda: follower.access.copy.view is not taken, "the follower has the rules")
        await connection.call(metadata_api.ASK, q.ListGroupsRequest(), timeout_ms=5_000)


async def test_the_day_of_use_is_noted_once(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        for place in (*cluster.addresses, cluster.node_addresses[1]):
            (await cluster.connection(place, ann)).abort()
        before = (await cluster.leader._store.load()).leader
        node = cluster.nodes[1].access
        for server in cluster.metadata:
            await server.access.use.tell(server.access.desk.ask_as_this_node)
        await node.use.tell(node._tell)
        found: q.TokenList = await cluster.admin(q.DescribeTokenRequest(token_id(ann) or ""))
        assert found.tokens[0].last_used_day > 20_000
        decisions = (await cluster.leader._store.load()).decisions
        noted = [one for one in decisions if type(one).__name__ == "NoteTokenUse"]
        assert sum(token_id(ann) in one.days for one in noted) == 1  # type: ignore[union-attr]
        node.use.note(token_id(ann) or "")
        assert not node.use._pending
        assert (await cluster.leader._store.load()).leader == before


# TLS.


async def test_a_subscription_without_tls_ends_once_the_servers_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_trouble, "PATIENCE_SECONDS", 0.2)
    async with access_cluster(tmp_path) as cluster:
        client = await AsyncClient.connect(cluster.servers)
        try:
            await client.create_topic("rides")
            await client.append("rides", b"1")
            subscription = await client.subscribe("rides", follow=True)
            assert [record.value for record in await subscription.take()] == [b"1"]
            await cluster.stop_node(1)
            await cluster.stop_metadata()
            # What is only down comes back: this alone ends nothing.
            with pytest.raises(DeadlineExceeded):
                await subscription.take(timeout=1.0)
            cluster.kit = CertificateKit(tmp_path / "kit")
            await cluster.start(0)
            with pytest.raises(Untrusted, match="speaks TLS, and this client does not"):
                async with asyncio.timeout(60):
                    await subscription.take()
        finally:
            await client.close()


async def test_a_server_without_tls_is_told_so(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster:
        tls = CertificateKit(tmp_path / "kit").bundle(AuthorityKind.SERVERS)
        with pytest.raises(Untrusted, match="The server may not use TLS: check the address, or connect without TLS"):
            await AsyncClient.connect(cluster.servers, tls=client_tls(tls))


async def test_a_server_that_only_closes_connections_is_not_taken_for_one_with_tls() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        assert not await speaks_tls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert not await speaks_tls(free_addresses(1)[0])
