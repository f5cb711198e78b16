"""Every method of both servers is in a table that says who may call it, and whoever may not is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import msgpack, structs

from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.rights import RIGHTS_OF_KIND, ResourceKind
from cutwater.core.audit.audit_requests import NoteAuditedRequest, RecordDenialsRequest
from cutwater.core.jobs import job_requests as j
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.publish.staged import StagedPart
from cutwater.errors import CutwaterError, InvalidArgument, Refused, Unavailable
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, ClientAnswers, MethodAccess
from cutwater.protocol.errors import Unproven
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS, questions_of
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.protocol.needs import Question, RunNames
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import Batch, ClusterId, EventTime, MetadataNodeId, Part, ProducerId, ProducerTag, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.auth import PeerIdentity
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey
from cutwater.wire.messages import PeerLimits

CLUSTER = ClusterId(1)
RELAYS = {"ask_leader", "ask_leader_as", "change_volumes_as"}
"""Metadata nodes pass requests of clients on with these."""
LIMITS = PeerLimits(1_000, 1_000, 10, 10_000)


class Servers:
    """One server of each kind, in this process, which nobody has joined."""

    def __init__(self, directory: Path) -> None:
        self.metadata = MetadataServer(MetadataOptions(CLUSTER, MetadataNodeId(1)), MemoryStore())
        self.volumes = NodeVolumes([directory], CLUSTER, StorageNodeId(1))
        self.node = StorageNodeServer(NodeOptions("127.0.0.1", 0, ("127.0.0.1:1",), reserve_bytes=0), self.volumes)

    @property
    def methods(self) -> tuple[tuple[Methods, dict[str, MethodAccess]], ...]:
        return (self.metadata._endpoint.methods, METADATA_ACCESS), (self.node._methods, STORAGE_NODE_ACCESS)


def with_servers(directory: Path, test: Callable[[Servers], Awaitable[None]]) -> None:
    async def main() -> None:
        servers = Servers(directory)
        try:
            await servers.metadata.start()
            await servers.node.start()
            async with asyncio.timeout(60):
                await test(servers)
        finally:
            await servers.node.stop(timeout_ms=1_000)
            servers.volumes.release()
            await servers.metadata.stop(timeout_ms=500)

    asyncio.run(main())


def test_the_tables_list_exactly_what_servers_answer(tmp_path: Path) -> None:
    async def test(servers: Servers) -> None:
        for methods, access in servers.methods:
            assert methods.names() == set(access), "entered in the table and not answered, or the other way round"

    with_servers(tmp_path, test)


def test_the_tables_list_everything_that_can_be_described() -> None:
    """Also a method that no server answers yet is entered, so that it cannot be forgotten when one does."""
    described = {
        one.name
        for module in (storage_api, scan_api, metadata_api)
        for one in vars(module).values()
        if isinstance(one, Method | StreamMethod | Notice)
    }
    assert described == set(STORAGE_NODE_ACCESS) | set(METADATA_ACCESS)


def test_the_table_of_requests_lists_every_request() -> None:
    assert set(REQUEST_ACCESS) == set(get_args(r.Request))


def test_nothing_else_is_for_clients() -> None:
    """Written out here, so that nothing that servers say to each other is opened by a slip in the tables."""

    def open_ones(table: dict[str, MethodAccess]) -> set[str]:
        return {name for name, access in table.items() if access.is_for_clients}

    assert open_ones(STORAGE_NODE_ACCESS) == {
        *("append", "read", "follow", "find", "event_time", "fate", "measure", "heads", "groups", "scan"),
        *("stage", "finish_part", "discard_part", "staged", "status", "describe", "verify", "verify_staged"),
    }
    assert open_ones(METADATA_ACCESS) == {"ask", "who_leads", "change_volumes", "check_program", "job_log"}
    is_closed = {request for request, access in REQUEST_ACCESS.items() if not access.is_for_clients}
    assert is_closed == {
        *(r.FoundClusterRequest, r.JoinRequest, r.StagedRequest, r.MakeInternalTopicsRequest, q.NoteTokenUseRequest),
        *(NoteAuditedRequest, RecordDenialsRequest),
    }
    assert [name for name, access in METADATA_ACCESS.items() if access.client_subject is not None] == ["complaint"]
    rows = [*STORAGE_NODE_ACCESS.items(), *METADATA_ACCESS.items()]
    assert {name for name, access in rows if access.is_admission} == {"join", "meet"}
    assert {name for name, access in rows if access.subject is not None} == {
        *("entry_refused", "join", "report", "complaint", "group_outcome", "meet", "follow", "heartbeat", "access")
    }


def is_client_row(access: MethodAccess) -> bool:
    return access.is_for_clients or access.client_subject is not None


def test_every_row_for_clients_says_what_it_needs_and_no_other_does() -> None:
    """'A test enumerates all and fails for one without an entry': needs, or in so many words that there are none."""
    for name, access in [*STORAGE_NODE_ACCESS.items(), *METADATA_ACCESS.items(), *REQUEST_ACCESS.items()]:
        says = bool(access.needs) + (access.answers is not ClientAnswers.ALL)
        assert says == (1 if is_client_row(access) or name in RELAYS else 0), name
    tables: list[dict[Any, MethodAccess]] = [STORAGE_NODE_ACCESS, METADATA_ACCESS, REQUEST_ACCESS]
    rows = [row for table in tables for row in table.items()]
    assert {name for name, access in rows if access.answers is ClientAnswers.OPEN} == {
        *("who_leads", r.ClockRequest, q.WhoAmIRequest, q.CreateChildTokenRequest, q.EndOwnTokenRequest)
    }
    assert {name for name, access in rows if access.answers is ClientAnswers.CARRIED} == {"ask", *RELAYS}
    assert {name for name, access in rows if access.answers is ClientAnswers.FILTERED} == {
        *(r.CatalogRequest, r.EventsRequest, r.DescribeRequest, j.ListJobsRequest)
    }


class Names:
    """Log stream 3 belongs to topic 2, 'orders'; run 1 is named 'etl'. Run 2 has no name,
    and run 5 neither a name nor an opener."""

    def topic_of_stream(self, stream: int) -> str | None:
        return {3: "orders"}.get(stream)

    def topic_of_number(self, topic: int) -> str | None:
        return {2: "orders", 4: "other"}.get(topic)

    def topic_of_part(self, part: str) -> str | None:
        return {"p": "orders"}.get(part)

    def run(self, which: int | str) -> RunNames | None:
        runs: dict[int | str, RunNames] = {1: RunNames("etl", "bob"), 2: RunNames("", "bob"), 5: RunNames("", "")}
        return runs.get({"k1": 1, "k2": 2}.get(which, which) if isinstance(which, str) else which)

    def job_of_operation(self, operation: str) -> str | None:
        return {"1" * 32: "fraud"}.get(operation)

    def principal_of_token(self, token: str) -> str | None:
        return {"t": "alice"}.get(token)

    def conceal_stream(self, stream: int) -> None: ...

    def conceal_number(self, topic: int) -> None: ...


def made(kind: Any, **fields: Any) -> Any:
    """An argument with these fields, whatever the others are."""
    return kind(**{name: fields.get(name) for name in kind.__struct_fields__})


STREAM = {"stream": 3}
TAGGED = Batch(1, b"", 0, EventTime(0), EventTime(0), producer=ProducerTag(ProducerId("app"), 1, 1))  # type: ignore[arg-type]
PARTS = tuple(made(Part, topic=topic) for topic in (4, 2, 2))

METHOD_QUESTIONS: list[tuple[str, Any, str]] = [
    (
        "append",
        made(storage_api.AppendArguments, **STREAM, batch=structs.replace(TAGGED, producer=None)),
        "append topic:orders",
    ),
    (
        "append",
        made(storage_api.AppendArguments, **STREAM, batch=TAGGED),
        "append topic:orders; produce-as producer:app",
    ),
    ("read", made(storage_api.ReadArguments, **STREAM), "read topic:orders"),
    ("read", made(storage_api.ReadArguments, stream=9), "read topic:"),
    ("follow", made(storage_api.ReadArguments, **STREAM), "read topic:orders"),
    ("find", made(storage_api.FindArguments, **STREAM), "read topic:orders"),
    ("event_time", made(storage_api.EventTimeArguments, **STREAM), "read topic:orders"),
    ("fate", made(storage_api.FateArguments, **STREAM, producer="app"), "produce-as producer:app"),
    ("status", None, "describe cluster"),
    ("describe", None, "describe cluster"),
    ("verify", 3, "cluster-operate cluster"),
    ("stage", made(storage_api.StageArguments, part=made(StagedPart, topic=2)), "append topic:orders"),
    ("finish_part", made(storage_api.FinishArguments, part="p"), "append topic:orders"),
    ("finish_part", made(storage_api.FinishArguments, part="q"), ""),
    ("discard_part", "p", "append topic:orders"),
    ("staged", None, "describe cluster"),
    ("verify_staged", None, "cluster-operate cluster"),
    ("measure", made(scan_api.MeasureArguments, **STREAM), "read topic:orders"),
    ("heads", made(scan_api.HeadsArguments, **STREAM), "read topic:orders"),
    ("groups", made(scan_api.HeadsArguments, **STREAM), "read topic:orders"),
    ("scan", made(scan_api.ScanArguments, **STREAM), "read topic:orders"),
    ("change_volumes", made(metadata_api.ChangeVolumes), "cluster-operate cluster"),
    ("check_program", made(metadata_api.CheckProgram), "append topic:_programs"),
    ("job_log", made(metadata_api.JobLogArguments, name="fraud"), "describe job:fraud"),
    ("complaint", made(storage_api.Complaint, **STREAM), "describe topic:orders"),
    ("ask", None, ""),
    ("who_leads", None, ""),
]

REQUEST_QUESTIONS: list[tuple[Any, str]] = [
    (made(r.AddNodeRequest), "cluster-operate cluster"),
    (made(r.RemoveNodeRequest), "cluster-operate cluster"),
    (made(r.CreateTopicRequest, name="orders"), "create topic:orders"),
    (made(r.ChangeTopicRequest, name="orders"), "alter topic:orders"),
    (made(r.DeleteTopicRequest, name="orders"), "delete topic:orders"),
    (made(r.AddStreamRequest, topic="orders"), "alter topic:orders"),
    (made(r.SealRequest, **STREAM), "cluster-operate cluster"),
    (made(r.UnsealRequest, **STREAM), "cluster-operate cluster"),
    (made(r.ReplaceRequest, **STREAM), "cluster-operate cluster"),
    (made(r.LearnRequest, **STREAM), "cluster-operate cluster"),
    (made(r.TrimRequest, topic="orders"), "trim topic:orders"),
    (made(r.OpenProducerRequest, producer="app", topic="orders"), "produce-as producer:app; append topic:orders"),
    (made(r.MoveProducerRequest, producer="app"), "produce-as producer:app"),
    (made(r.RenewProducerRequest, producer="app"), "produce-as producer:app"),
    (made(r.CommitCursorRequest, cursor="c"), "cursor cursor:c"),
    (made(r.ReadCursorRequest, cursor="c"), "describe cursor:c"),
    (made(r.DropCursorRequest, cursor="c"), "cursor cursor:c"),
    (made(r.OpenRunRequest, name="etl"), "publish run:etl"),
    (made(r.OpenRunRequest, name="etl", job_epoch=7), "publish run:etl; act-as principal:job:etl"),
    (made(r.PublishRequest, run=1, parts=(), job_epoch=7), "publish run:etl; act-as principal:job:etl"),
    (made(r.OpenRunRequest, name="", key="new"), "append topic:*"),
    (made(r.OpenRunRequest, name="", key="k1"), "append topic:*; publish run:etl"),
    (made(r.OpenRunRequest, name="", key="k2"), "append topic:*; act-as principal:bob; append topic:*"),
    (made(r.PublishRequest, run=1, parts=PARTS), "publish run:etl; append topic:orders; append topic:other"),
    (made(r.PublishRequest, run=2, parts=PARTS[:1]), "act-as principal:bob; append topic:*; append topic:other"),
    (made(r.PublishRequest, run=5, parts=(made(Part, topic=7),)), "publish run:; append topic:"),
    (made(r.DropRunRequest, run=1), "delete run:etl"),
    (made(r.DropRunRequest, run=2), "delete run:"),
    (made(r.ForgetOutputRequest, name="etl"), "publish run:etl"),
    (r.MakeJobTopicRequest("_programs"), "append topic:_programs"),
    (r.CatalogRequest(), ""),
    (made(r.ClockRequest), ""),
    (made(q.WhoAmIRequest), ""),
    (q.ConfirmAccessRequest(), "cluster-admin cluster"),
    (r.EventsRequest(), ""),
    (r.DescribeRequest(), ""),
    (made(q.CreateTokenRequest), "cluster-admin cluster"),
    (made(q.RevokeTokenRequest), "cluster-admin cluster"),
    (made(q.ExpireTokenRequest), "cluster-admin cluster"),
    (made(q.CreateChildTokenRequest), ""),
    (q.EndOwnTokenRequest(), ""),
    (q.ListTokensRequest(), "cluster-admin cluster"),
    (q.ListTokensRequest("alice"), "describe principal:alice"),
    (q.DescribeTokenRequest("t"), "describe principal:alice"),
    (q.DescribeTokenRequest("u"), "describe principal:"),
    (made(q.AllowRequest), "cluster-admin cluster"),
    (made(q.RemoveRightsRequest), "cluster-admin cluster"),
    (q.ListRulesRequest(), "cluster-admin cluster"),
    (q.ListRulesRequest("alice"), "describe principal:alice"),
    (q.ListRulesRequest("group:w"), "cluster-admin cluster"),
    (made(q.CheckAccessRequest, principal="alice"), "describe principal:alice"),
    (made(q.CreateGroupRequest), "cluster-admin cluster"),
    (made(q.ChangeGroupRequest), "cluster-admin cluster"),
    (made(q.DeleteGroupRequest), "cluster-admin cluster"),
    (made(q.ListGroupsRequest), "cluster-admin cluster"),
    (made(q.SetCertificateRulesRequest), "cluster-admin cluster"),
    (made(q.ListCertificateRulesRequest), "cluster-admin cluster"),
    (made(q.SetQuotaRequest), "cluster-admin cluster"),
    (made(q.RemoveQuotaRequest), "cluster-admin cluster"),
    (q.ListQuotasRequest("alice"), "describe principal:alice"),
    (q.ListPrincipalsRequest(), "cluster-admin cluster"),
    (q.DescribePrincipalRequest("alice"), "describe principal:alice"),
    (made(q.SetAccessModeRequest), "cluster-admin cluster"),
    (made(j.SubmitJobRequest, name="fraud"), "job-submit job:fraud; act-as principal:job:fraud"),
    (
        made(j.SubmitJobRequest, name="fraud", from_job="old"),
        "job-submit job:fraud; act-as principal:job:fraud; job-operate job:old",
    ),
    (made(j.UpgradeJobRequest, name="fraud"), "job-submit job:fraud; act-as principal:job:fraud"),
    (made(j.RescaleJobRequest, name="fraud"), "job-operate job:fraud; act-as principal:job:fraud"),
    (made(j.RollBackJobRequest, name="fraud"), "job-operate job:fraud; act-as principal:job:fraud"),
    (made(j.OperateJobRequest, name="fraud"), "job-operate job:fraud"),
    (made(j.ForgetSavepointRequest, name="fraud"), "job-operate job:fraud"),
    (j.ListJobsRequest(), ""),
    (made(j.DescribeJobRequest, name="fraud"), "describe job:fraud"),
    (made(j.FetchVersionRequest, name="fraud"), "describe job:fraud"),
    (made(j.DescribeOperationRequest, operation="1" * 32), "describe job:fraud"),
    (made(j.DescribeOperationRequest, operation="2" * 32), "describe job:"),
    (made(j.ListOperationsRequest, name="fraud"), "describe job:fraud"),
    (j.AskAgentRequest("fraud", ErrandKind.VALIDATE), "job-submit job:fraud; act-as principal:job:fraud"),
    (j.AskAgentRequest("fraud", ErrandKind.STATE), "job-operate job:fraud"),
    (j.AskAgentRequest("fraud", ErrandKind.SAVEPOINT_DELETE), "job-operate job:fraud"),
    (j.AskAgentRequest("fraud", ErrandKind.LOG), "describe job:fraud"),
    (made(j.FetchProgramPlaceRequest), "describe topic:_programs"),
    (j.ListAgentsRequest(), "describe cluster"),
    (made(j.DrainAgentRequest), "cluster-operate cluster"),
    (made(j.RemoveAgentRequest), "cluster-operate cluster"),
    (made(j.RegisterAgentRequest), "run-jobs cluster"),
    *((made(kind), "run-jobs cluster") for kind in get_args(j.FromAgent)),
]


def told(questions: list[Question]) -> str:
    return "; ".join(f"{right} {resource}" for right, resource in questions)


@pytest.mark.parametrize(("name", "argument", "expected"), METHOD_QUESTIONS)
def test_the_rights_that_a_call_needs_are_found_in_its_argument(name: str, argument: Any, expected: str) -> None:
    access = STORAGE_NODE_ACCESS.get(name) or METADATA_ACCESS[name]
    assert told(access.questions(argument, Names())) == expected


@pytest.mark.parametrize(("request_", "expected"), REQUEST_QUESTIONS, ids=lambda one: type(one).__name__)
def test_the_rights_that_a_request_needs_are_found_in_it(request_: Any, expected: str) -> None:
    assert told(questions_of(request_, Names())) == expected


def test_the_rights_of_every_method_and_request_for_clients_are_tested() -> None:
    rows = [*STORAGE_NODE_ACCESS.items(), *METADATA_ACCESS.items()]
    assert {name for name, *_ in METHOD_QUESTIONS} == {name for name, access in rows if is_client_row(access)}
    asked = {type(request) for request, _ in REQUEST_QUESTIONS}
    assert asked == {kind for kind, access in REQUEST_ACCESS.items() if is_client_row(access)}


def test_every_right_that_is_asked_for_exists_on_that_kind_of_resource() -> None:
    tables: list[MethodAccess] = [*STORAGE_NODE_ACCESS.values(), *METADATA_ACCESS.values(), *REQUEST_ACCESS.values()]
    assert all(need.text for access in tables for need in access.needs)
    asked = [
        question
        for name, argument, _ in METHOD_QUESTIONS
        for question in (STORAGE_NODE_ACCESS.get(name) or METADATA_ACCESS[name]).questions(argument, Names())
    ]
    asked += [question for request, _ in REQUEST_QUESTIONS for question in questions_of(request, Names())]
    for right, resource in asked:
        assert right in RIGHTS_OF_KIND[ResourceKind(resource.kind)]


def test_a_method_that_is_not_listed_cannot_be_answered() -> None:
    methods = Methods({"known": MethodAccess()}, ServerBook())
    methods.answers(Method("known", None, None))(lambda call: None)
    for register in (
        lambda: methods.answers(Method("new", None, None))(lambda call: None),
        lambda: methods.hears(Notice("new", None))(lambda notification: None),
    ):
        with pytest.raises(InvalidArgument, match="new is not in the table"):
            register()


async def refused(connection: Connection, methods: Methods, name: str) -> CutwaterError:
    """What is said to someone who calls a method; the argument does not matter, since nobody looks at it."""
    try:
        if name in methods.requests:
            await connection.call(Method(name, Any, Any), None, timeout_ms=5_000)
        elif name in methods.streams:
            async with connection.open_stream(StreamMethod(name, Any, Any), None) as stream:
                async for _ in stream:
                    break
        else:
            connection.notify(Notice(name, Any), None)
            await connection.closed
            assert connection.error is not None
            return connection.error
    except CutwaterError as error:
        return error
    raise AssertionError(f"{name} was not refused")


@pytest.mark.parametrize("claimed", ["client", STORAGE_NODE, METADATA_NODE])
@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "a key of its own"])
def test_whoever_is_no_server_of_the_cluster_may_call_nothing_that_is_for_servers(
    tmp_path: Path, claimed: str, has_key: bool
) -> None:
    """On loopback without TLS, where everyone is let in, whatever it says that it is."""

    async def test(servers: Servers) -> None:
        stranger = Endpoint(CLUSTER, claimed, "2", key=ServerKey.generate() if has_key else None)
        addresses = servers.metadata.address, servers.node.address
        for (methods, table), address in zip(servers.methods, addresses, strict=True):
            for name, access in table.items():
                if access.is_for_clients or access.client_subject is not None:
                    continue
                if access.is_admission and has_key and claimed in access.servers:
                    # It may ask; what it is told is tested with what decides it.
                    continue
                host, port = parse_address(address)
                connection = await connect(stranger, host, port, timeout_ms=5_000, expect=lambda server: None)
                error = await refused(connection, methods, name)
                expected = Unproven if not has_key or claimed not in access.servers else (Unproven, Unavailable)
                assert isinstance(error, expected), (name, error)
                assert "is refused" in error.message
                connection.abort()

    with_servers(tmp_path, test)


def test_every_client_may_ask_what_is_for_clients(tmp_path: Path) -> None:
    async def test(servers: Servers) -> None:
        for (methods, table), address in zip(
            servers.methods, (servers.metadata.address, servers.node.address), strict=True
        ):
            for name, access in table.items():
                if access.is_for_clients and name in methods.requests:
                    connection = await connect(Endpoint(CLUSTER, "client"), *parse_address(address), timeout_ms=5_000)
                    try:
                        await connection.call(Method(name, Any, Any), None, timeout_ms=5_000)
                    except CutwaterError as error:
                        assert not isinstance(error, Unproven), name  # noqa: PT017
                    connection.abort()

    with_servers(tmp_path, test)


def test_a_client_cannot_change_access_control_while_it_is_off(tmp_path: Path) -> None:
    """Network reach alone must not plant a token for later: the metadata repository refuses it in words."""

    async def test(servers: Servers) -> None:
        connection = await connect(
            Endpoint(CLUSTER, "client"), *parse_address(servers.metadata.address), timeout_ms=5_000
        )
        planted = q.CreateTokenRequest("0" * 16, "0" * 64, "mallory")
        with pytest.raises(Refused, match="cutwater cluster secure"):
            await connection.call(metadata_api.ASK, planted, timeout_ms=5_000)
        with pytest.raises(Unproven):
            await connection.call(metadata_api.ASK, q.NoteTokenUseRequest({"0" * 16: 1}), timeout_ms=5_000)
        listed = await connection.call(metadata_api.ASK, q.ListTokensRequest(), timeout_ms=5_000)
        assert listed.value == q.TokenList(())
        connection.abort()

    with_servers(tmp_path, test)


# The guard by itself.


def peer(server: ProvenServer | None, role: str = "client") -> Peer:
    return Peer(CLUSTER, role, "1", 2, LIMITS, PeerIdentity("someone"), "there:1", server)


BOOK = ServerBook()
BOOK.note(STORAGE_NODE, {1: "a", 2: "b"})
BOOK.note(METADATA_NODE, {1: "m"})
ONE = ProvenServer(STORAGE_NODE, "1", "a")


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (ONE, None),
        (None, Unproven),
        (ProvenServer(STORAGE_NODE, "1", "b"), Unproven),
        (ProvenServer(STORAGE_NODE, "9", "a"), Unavailable),
        (ProvenServer(METADATA_NODE, "1", "m"), Unproven),
        (ProvenServer("client", "1", "a"), Unproven),
    ],
)
def test_only_the_key_that_is_noted_for_that_server_counts(server: ProvenServer | None, error: Any) -> None:
    guard = Guard("replicate", STORAGE_NODE_ACCESS["replicate"], BOOK)
    if error is None:
        guard.check(peer(server))
        return
    with pytest.raises(error):
        guard.check(peer(server))


def test_a_server_speaks_for_itself_alone() -> None:
    guard = Guard("entry_refused", STORAGE_NODE_ACCESS["entry_refused"], BOOK)
    refusal = msgpack.decode(
        msgpack.encode({"stream": 1, "epoch": 1, "node": 1, "reason": ""}), type=storage_api.EntryRefused
    )
    guard.check_argument(peer(ONE), refusal)
    with pytest.raises(Unproven, match="speaks for number 2"):
        guard.check_argument(peer(ONE), structs.replace(refusal, node=StorageNodeId(2)))


def test_a_client_complains_for_itself_and_not_in_the_name_of_a_storage_node() -> None:
    guard = Guard("complaint", METADATA_ACCESS["complaint"], BOOK)
    theirs = storage_api.Complaint(1, storage_api.A_CLIENT, StorageNodeId(2))  # type: ignore[arg-type]
    forged = structs.replace(theirs, complainer=StorageNodeId(1))
    guard.check(peer(None))
    guard.check_argument(peer(None), theirs)
    with pytest.raises(Unproven):
        guard.check_argument(peer(None), forged)
    guard.check_argument(peer(ONE), forged)
    with pytest.raises(Unproven):
        guard.check_argument(peer(ProvenServer(STORAGE_NODE, "2", "b")), forged)
    # A number alone is nothing: the key must be that of the storage node, and a metadata node may have the same number.
    for stranger in (ProvenServer(STORAGE_NODE, "1", "x"), ProvenServer(METADATA_NODE, "1", "m")):
        with pytest.raises(Unproven):
            guard.check_argument(peer(stranger), forged)


def test_refusals_are_logged_and_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("report", METADATA_ACCESS["report"], BOOK)
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            with pytest.raises(Unproven):
                guard.check(peer(None, STORAGE_NODE))
    (record,) = caplog.records
    assert "report of 'storage node' '1' ('someone') at there:1 refused" in record.message
    assert "earlier version: upgrade it" in record.message
