"""The audit over real connections: every change once and in order, denials, and no secrets."""

from __future__ import annotations

import asyncio
import json
import os
import random
import stat
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cutwater.access.denial_log import DenialLog
from cutwater.admin.local_admin import ask_as_local_admin
from cutwater.admin.local_cluster import CLUSTER_ID
from cutwater.client.async_client import AsyncClient
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import token_hash, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, decode_audit
from cutwater.core.audit.audit_requests import (
    AUDIT_PRODUCER,
    DENIALS_MAX,
    NoteAuditedRequest,
    RecordDenialsRequest,
)
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import CutwaterError, InvalidArgument, PermissionDenied, Refused, Unavailable
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.metadata.stores.open_store import sqlite_key_file
from cutwater.protocol import storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.metadata_api import ASK
from cutwater.types import (
    GLSN,
    Batch,
    BatchKind,
    EventTime,
    MetadataNodeId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Retention,
    Sequence,
)
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import load_or_make
from tests.integration.access_cluster import CLUSTER, ORDER, ROOT, AccessCluster, access_cluster, new_token, until
from tests.integration.real_cluster import kill, restart, running_cluster

pytestmark = pytest.mark.asyncio

ON = AccessMode.ENFORCED
Records = list[AuditRecord]


async def values_of(cluster: AccessCluster) -> list[bytes]:
    """Return the values of all records in the topic of the audit."""
    async with cluster.client(cluster.root) as log:
        return [bytes(record.value) async for record in log.subscribe("_audit", follow=False)]


async def audited(cluster: AccessCluster) -> list[AuditRecord]:
    found = [decode_audit(value) for value in await values_of(cluster)]
    return [record for record in found if record is not None]


async def eventually(holds: Callable[[Records], bool], cluster: AccessCluster) -> Records:
    async with asyncio.timeout(20):
        while not holds(found := await audited(cluster)):
            await asyncio.sleep(0.1)
    return found


async def written(cluster: AccessCluster) -> None:
    """Wait until all changes are in the log."""

    def holds() -> bool:
        leading = [server for server in cluster.metadata if server.leads]
        audit = leading[0].term.layer.state.audit if leading and leading[0].term is not None else None
        return audit is not None and audit.is_on and not audit.pending

    await until(holds, "the audit is in the log")


async def restart_leader(cluster: AccessCluster) -> None:
    """Stop the leader without warning to its audit, wait for another one, and start it again as a follower."""
    leader = cluster.leader
    place = cluster.metadata.index(leader)
    await leader.stop(timeout_ms=0)
    others = [server for server in cluster.metadata if server is not leader]
    await until(lambda: any(server.leads for server in others), "another one leads")
    options = MetadataOptions(
        CLUSTER,
        MetadataNodeId(place + 1),
        port=parse_address(cluster.addresses[place])[1],
        order=ORDER,
        key=cluster.keys[place],
    )
    cluster.metadata[place] = MetadataServer(options, MemoryStore(cluster.data))
    await cluster.metadata[place].start()


async def test_every_change_is_in_the_audit_once_and_in_order_over_leader_changes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with access_cluster(tmp_path, nodes=3, metadata=3, mode=ON) as cluster:
        done: list[str] = []

        async def change(number: int) -> None:
            """Ask until it is done. A repetition of a change that was made changes nothing more."""
            request = q.AllowRequest(f"p{number}", ("read",), parse_pattern(f"topic:t{number}"))
            while True:
                try:
                    await cluster.ask(request, cluster.root, rng.choice(cluster.metadata))
                    break
                except (CutwaterError, StopIteration, OSError):
                    await asyncio.sleep(0.02)
            done.append(f"principal:p{number}")

        async def changes() -> None:
            for first in range(0, 120, 4):
                await asyncio.gather(*(change(number) for number in range(first, first + 4)))

        changing = asyncio.ensure_future(changes())
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            await restart_leader(cluster)
        await changing
        await written(cluster)
        records = await audited(cluster)
        assert [record.number for record in records] == list(range(1, len(records) + 1))
        indexes = [record.index for record in records]
        assert indexes == sorted(set(indexes))
        allowed = [record for record in records if record.operation == "allow-rights"]
        assert sorted(record.resource for record in allowed) == sorted([*done, f"principal:{ROOT}"])
        assert {record.outcome for record in records} == {AuditOutcome.DONE}
        assert all(record.principal == ROOT and record.request and record.token for record in allowed[1:])


async def test_a_leader_that_ends_between_append_and_note_doubles_nothing(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        await written(cluster)
        for number in range(3):
            leader = cluster.leader
            assert leader.term is not None
            decide = leader.term.audit._decide

            async def deaf(request: r.Request, origin: RequestOrigin | None = None, decide: Any = decide) -> Any:
                if isinstance(request, NoteAuditedRequest):
                    raise Unavailable("the store does not answer")
                return await decide(request, origin)

            leader.term.audit._decide = deaf
            resource = f"principal:p{number}"
            await cluster.admin(q.AllowRequest(f"p{number}", ("read",), parse_pattern("topic:t")))
            await eventually(lambda found, name=resource: any(one.resource == name for one in found), cluster)
            assert [one.resource for one in leader.term.layer.state.audit.pending] == [resource]
            await restart_leader(cluster)
            await written(cluster)
        records = await audited(cluster)
        assert [one.resource for one in records][-3:] == ["principal:p0", "principal:p1", "principal:p2"]
        assert [one.number for one in records] == list(range(1, len(records) + 1))


async def test_the_audit_moves_to_another_log_stream(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        for number in range(3):
            await cluster.admin(q.AllowRequest(f"p{number}", ("read",), parse_pattern("topic:t")))
            await written(cluster)
            assert cluster.leader.term is not None
            state = cluster.leader.term.layer.state
            topic = state.topic_named("_audit")
            assert topic is not None
            stream = next(stream for stream in state.streams_of(topic.topic) if not stream.final)
            await cluster.admin(r.SealRequest(stream.stream, final=True))
        await cluster.admin(q.AllowRequest("last", ("read",), parse_pattern("topic:t")))
        await written(cluster)
        assert len(state.streams_of(topic.topic)) == 4
        records = await audited(cluster)
        assert [one.number for one in records] == list(range(1, len(records) + 1))
        assert records[-1].resource == "principal:last"


async def test_every_change_is_in_the_audit_once_although_the_metadata_node_is_killed(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, storage_nodes=1) as cluster:
        store = tmp_path / "metadata.sqlite"
        key = load_or_make([sqlite_key_file(store)])
        address = cluster.servers.removeprefix("cutwater://")
        token, create = new_token(ROOT)
        for request in (
            q.AllowRequest(ROOT, ("cluster-admin",), parse_pattern("cluster")),
            create,
            q.SetAccessModeRequest(ON),
        ):
            await ask_as_local_admin([address], CLUSTER_ID, MetadataNodeId(1), key, request)
        server = cluster.metadata[0]

        async def change(number: int) -> None:
            request = q.AllowRequest(f"p{number}", ("read",), parse_pattern("topic:t"))
            async with asyncio.timeout(60):
                while True:
                    try:
                        connection = await connect(
                            Endpoint(CLUSTER_ID, "test"), *parse_address(address), timeout_ms=2_000, token=token
                        )
                        try:
                            await connection.call(ASK, request, timeout_ms=2_000)
                            return
                        finally:
                            connection.abort()
                    except CutwaterError:
                        await asyncio.sleep(0.05)

        changing = asyncio.ensure_future(one_by_one(change, 60))
        for _ in range(3):
            await asyncio.sleep(0.4)
            kill(server)
            await restart(tmp_path, cluster, server)
            server = cluster.metadata[0]
        await changing
        expected = [f"principal:{ROOT}", *(f"principal:p{number}" for number in range(60))]
        async with await AsyncClient.connect(cluster.servers, token=token) as log:
            async with asyncio.timeout(30):
                while True:
                    values = [bytes(one.value) async for one in log.subscribe("_audit", follow=False)]
                    records = [one for one in map(decode_audit, values) if one is not None and one.number]
                    allowed = [one.resource for one in records if one.operation == "allow-rights"]
                    if len(allowed) >= len(expected):
                        break
                    await asyncio.sleep(0.1)
        assert allowed == expected
        assert [one.number for one in records] == list(range(1, len(records) + 1))
        assert [one.index for one in records] == sorted({one.index for one in records})


async def one_by_one(work: Callable[[int], Awaitable[None]], count: int) -> None:
    for number in range(count):
        await work(number)


async def test_denials_are_merged_counted_and_have_no_secret(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, metadata=2, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "topic:*"))
        await cluster.admin(r.CreateTopicRequest("orders", 1, 1))
        async with cluster.client(ann) as log:
            for _ in range(5):
                with pytest.raises(PermissionDenied):
                    await log.append("orders", b"a value that is no business of the audit")
        for server in cluster.metadata:
            for _ in range(3):
                with pytest.raises(PermissionDenied):
                    # A client may give a whole token where a name is expected.
                    await cluster.ask(r.DeleteTopicRequest(ann), ann, server)
        servers = [*cluster.metadata, *cluster.nodes.values()]

        def denied(records: Records) -> Records:
            return [record for record in records if record.outcome is AuditOutcome.DENIED]

        found = denied(await eventually(lambda all_: sum(one.count for one in denied(all_)) >= 11, cluster))
        assert len({record.id for record in found}) == len(found)
        appends = [record for record in found if record.operation == "append"]
        assert sum(record.count for record in appends) == 5
        assert len(appends) <= 3
        assert {(one.principal, one.right, one.resource, one.address) for one in appends} == {
            ("ann", "append", "topic:orders", "127.0.0.1")
        }
        assert {record.server for record in appends} == {"storage node 1"}
        deletes = [record for record in found if record.operation == "delete-topic"]
        assert sum(record.count for record in deletes) == 6
        everything = b"\n".join(await values_of(cluster))
        for secret in (ann, cluster.root):
            assert secret.encode() not in everything
            assert secret.rpartition("_")[2].encode() not in everything
            assert token_hash(secret).encode() not in everything
            assert (token_id(secret) or "?").encode() in everything
        assert b"no business" not in everything
        assert all(server.access.denials.waiting == 0 for server in servers)


async def test_denials_wait_in_a_file_while_the_only_storage_node_is_down(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await written(cluster)
        spool = tmp_path / "spool"
        log = cluster.leader.access.denials
        log._spool = spool
        eve = await cluster.principal("eve")
        await written(cluster)
        await cluster.stop_node(1)
        for _ in range(3):
            with pytest.raises(PermissionDenied):
                await cluster.ask(r.DeleteTopicRequest("orders"), eve)

        def kept() -> int:
            found = [decode_audit(line) for line in spool.read_bytes().splitlines()] if spool.exists() else []
            return sum(one.count for one in found if one is not None)

        # They may be of two seconds, which reach the file one after the other.
        await until(lambda: kept() == 3, "the denials are in the file")
        assert stat.S_IMODE(spool.stat().st_mode) == 0o600
        # A change pends in the state meanwhile, and nothing waits for it.
        await cluster.admin(q.AllowRequest("eve", ("read",), parse_pattern("topic:orders")))
        assert cluster.leader.term is not None
        assert [one.resource for one in cluster.leader.term.layer.state.audit.pending] == ["principal:eve"]
        # Another process takes the file over.
        again = DenialLog("another process", spool, cluster.leader.access._in_thread)
        await again.deliver(unavailable)
        assert again.waiting == log.waiting > 0
        await cluster.start_node(1)
        await until(lambda: not spool.exists(), "the denials are delivered")
        await written(cluster)
        records = await audited(cluster)
        assert sum(one.count for one in records if one.operation == "delete-topic") == 3
        assert [one.resource for one in records if one.operation == "allow-rights"][-1] == "principal:eve"
        numbers = [one.number for one in records if one.number]
        assert numbers == list(range(1, len(numbers) + 1))


async def unavailable(request: RecordDenialsRequest) -> None:
    raise Unavailable("the log takes no appends")


async def test_trimming_the_audit_needs_its_own_right_and_is_recorded(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await written(cluster)
        async with cluster.client(cluster.root) as log:
            end = await log.tail()
        with pytest.raises(PermissionDenied, match="root lacks the right trim on topic:_audit"):
            await cluster.admin(r.TrimRequest("_audit", GLSN(end)))
        keeper = await cluster.principal("keeper", ("trim", "topic:_audit"))
        await cluster.ask(r.TrimRequest("_audit", GLSN(end)), keeper)
        await written(cluster)
        trims = [record for record in await audited(cluster) if record.operation == "trim"]
        assert [(one.principal, one.resource, one.outcome) for one in trims] == [
            ("keeper", "topic:_audit", AuditOutcome.DONE)
        ]
        reader = await cluster.principal("reader", ("audit-read", "cluster"))
        other = await cluster.principal("other", ("read", "topic:*"))
        async with cluster.client(reader) as log:
            assert [one async for one in log.subscribe("_audit", follow=False)]
        async with cluster.client(other) as log:
            with pytest.raises(CutwaterError, match="no topic '_audit'"):
                await anext(log.subscribe("_audit", follow=False))


async def settled(connection: Connection, arguments: storage_api.AppendArguments) -> None:
    """Append until the node is sure about the number of the log stream: a denial before would tell that it exists."""
    async with asyncio.timeout(20):
        while True:
            try:
                await connection.call(storage_api.APPEND, arguments, timeout_ms=5_000)
                return
            except Unavailable:
                await asyncio.sleep(0.02)


async def test_permissive_mode_protects_the_audit(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=AccessMode.PERMISSIVE) as cluster:
        await written(cluster)
        catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
        (stream,) = catalog.streams
        writer = await cluster.principal("writer", ("append", "topic:_audit"))
        tag = ProducerTag(ProducerId(AUDIT_PRODUCER), ProducerEpoch(1_000), Sequence(0))
        fence = Batch(1, b"", 0, EventTime(0), EventTime(0), kind=BatchKind.FENCE, producer=tag)
        for token, lacks in (
            ("", "append on topic:_audit|the topic that"),
            (writer, "produce-as on producer:_cutwater"),
        ):
            connection = await cluster.connection(cluster.node_addresses[1], token)
            arguments = storage_api.AppendArguments(stream.stream, stream.epoch, fence)
            with pytest.raises(PermissionDenied, match=lacks):
                await settled(connection, arguments)
            connection.abort()
        shorter = r.ChangeTopicRequest("_audit", retention=Retention(time_us=1))
        for request in (shorter, r.TrimRequest("_audit", GLSN(2))):
            with pytest.raises(PermissionDenied, match="topic:_audit"):
                await cluster.ask(request)
        # The rest goes on as before, and so does the audit.
        await cluster.ask(r.CreateTopicRequest("made", 1, 1))
        await written(cluster)
        assert [one.operation for one in await audited(cluster)][-1] == "create-topic"
        # When it is off again, every client may do everything, but not end the audit for good.
        await cluster.admin(q.SetAccessModeRequest(AccessMode.OFF))
        await until(lambda: not cluster.nodes[1].access.control.is_on, "it is off")
        connection = await cluster.connection(cluster.node_addresses[1])
        with pytest.raises(Refused, match="belongs to the cluster itself"):
            await settled(connection, arguments)
        connection.abort()
        await written(cluster)


async def test_a_storage_node_reports_only_denials_and_only_its_own(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster:
        await written(cluster)
        endpoint = Endpoint(CLUSTER, STORAGE_NODE, "1", key=cluster.nodes[1]._key)
        connections = [
            await connect(endpoint, *parse_address(one.address), timeout_ms=5_000, expect=lambda server: None)
            for one in cluster.metadata
        ]
        forged = (
            AuditRecord(1, "create-token", AuditOutcome.DONE, "root"),
            AuditRecord(1, "create-token", AuditOutcome.DENIED, "root", number=7),
            AuditRecord(1, "create-token", AuditOutcome.DENIED, "root", index=7),
            AuditRecord(1, "append", AuditOutcome.DENIED, "x" * 100_000),
        )
        for connection, record in product(connections, forged):
            with pytest.raises(InvalidArgument, match="no denial"):
                await connection.call(ASK, RecordDenialsRequest((record,)), timeout_ms=5_000)
        denials = tuple(AuditRecord(1, "x", AuditOutcome.DENIED, id=str(i)) for i in range(DENIALS_MAX + 1))
        with pytest.raises(InvalidArgument, match="257 records"):
            await connections[0].call(ASK, RecordDenialsRequest(denials), timeout_ms=5_000)
        other = AuditRecord(1, "x", AuditOutcome.DENIED, id="7", server="metadata repository 1")
        for connection in connections:
            await connection.call(ASK, RecordDenialsRequest((other,)), timeout_ms=5_000)
            connection.abort()
        found = await eventually(lambda all_: any(one.id == "7" for one in all_), cluster)
        assert {one.server for one in found if one.id == "7"} == {"storage node 1"}
        assert not [one for one in found if one.operation == "create-token" and one.time == 1]


async def test_a_cluster_without_access_control_has_no_audit(tmp_path: Path) -> None:
    async with access_cluster(tmp_path) as cluster:
        await cluster.ask(r.CreateTopicRequest("orders", 1, 1))
        assert cluster.leader.term is not None
        state = cluster.leader.term.layer.state
        assert state.audit.is_untouched
        assert [topic.name for topic in state.topics.values()] == ["orders"]
        with pytest.raises(Refused, match="belongs to the cluster itself"):
            await cluster.ask(r.OpenProducerRequest(ProducerId(AUDIT_PRODUCER), "orders", 1))


async def test_the_command_line_searches_the_audit(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await cluster.principal("ann", ("read", "topic:orders"))
        await written(cluster)
        reader = await cluster.principal("reader", ("audit-read", "cluster"))

        async def search(token: str, *arguments: str) -> tuple[int | None, str]:
            command = [sys.executable, "-m", "cutwater.cli", "audit", *arguments, "--servers", cluster.servers]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=PIPE, stderr=STDOUT, env={**os.environ, "CUTWATER_TOKEN": token}
            )
            try:
                told, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
            return process.returncode, told.decode()

        code, told = await search(reader, "search", "--resource", "principal:ann", "-o", "json", "--since", "-5m")
        assert code == 0, told
        assert [json.loads(line)["operation"] for line in told.splitlines()] == ["allow-rights", "create-token"]
        code, told = await search(reader, "search", "--operation", "set-access-mode")
        assert code == 0, told
        assert "done" in told
        assert told.rstrip().endswith("access control is enforced")
        code, told = await search(cluster.root, "search", "--principal", "nobody-like-this")
        assert (code, told) == (0, "")
        nobody = await cluster.principal("nobody", ("read", "topic:*"))
        code, told = await search(nobody, "search")
        assert code != 0
        assert "audit-read" in told


async def test_the_command_line_follows_the_audit(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=ON) as cluster:
        await written(cluster)
        command = [sys.executable, "-m", "cutwater.cli", "audit", "tail", "--since", "-1h", "-o", "json"]
        process = await asyncio.create_subprocess_exec(
            *(*command, "--operation", "create-topic", "--servers", cluster.servers),
            stdout=PIPE,
            env={**os.environ, "CUTWATER_TOKEN": cluster.root},
        )
        assert process.stdout is not None
        try:
            first = json.loads(await process.stdout.readline())
            assert (first["resource"], first.get("principal", "")) == ("topic:_audit", "")
            await cluster.admin(r.CreateTopicRequest("orders", 1, 1))
            second = json.loads(await process.stdout.readline())
            assert (second["resource"], second["principal"]) == ("topic:orders", ROOT)
            assert second["number"] > first["number"]
        finally:
            process.kill()
            await process.wait()
