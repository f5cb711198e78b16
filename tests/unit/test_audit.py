"""The pure part of the audit: which decisions are recorded, what waits for the log, and how denials are merged."""

from __future__ import annotations

import typing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_kit import CHECKPOINT, J1
from order_driver import LS1, N1, cluster_of

from cutwater.access.denial_counts import Denial
from cutwater.access.denial_log import SPOOL_BYTES_MAX, DenialLog
from cutwater.admin.audit_search import OPERATIONS, AuditQuery, check_operation, in_words
from cutwater.core import requests as r
from cutwater.core.access import access_decisions as a
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import CertificateRule, JobOfToken, PrincipalGroup, make_token, token_hash
from cutwater.core.access.quotas import QuotaLimits
from cutwater.core.access.rights import THE_CLUSTER, Resource, parse_pattern
from cutwater.core.audit import audit_state
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, audit_text, decode_audit, encode_audit
from cutwater.core.audit.audit_requests import AUDIT_PRODUCER, NoteAuditedRequest, RecordDenialsRequest
from cutwater.core.audit.change_records import ALWAYS, IF_ASKED, NEVER, audit_record, operation_name
from cutwater.core.audit.denial_merge import DISTINCT_MAX, SUPPRESSED, DenialKey, DenialMerge, denied_operation, host_of
from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.agents import AgentDescription
from cutwater.core.jobs.job_records import JobSavepoint, RunEnd
from cutwater.core.jobs.operations import Operation, OperationError, OperationKind
from cutwater.core.order import decisions as d
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.request_handling import Surroundings, decide
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import ContradictoryCommand, InvalidArgument, Refused, ResourceExhausted, Unavailable
from cutwater.format.plain_bodies import COUNT_MAX, is_plain, values_body
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    ClusterId,
    CutTime,
    DecisionIndex,
    Epoch,
    JobEpoch,
    JobNumber,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Retention,
    Revision,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)

SECRET = "0123456789abcdef" * 4
BY = RequestOrigin("ann", "request-1", "token-1")
AT = CutTime(1_000_000)
S1, T1, R1, NODE = LogStreamId(1), TopicId(1), RunId(1), StorageNodeId(1)

EXAMPLES: tuple[tuple[d.Decision, str], ...] = (
    (d.Cut(GLSN(2), GLSN(1), CutTime(1), Revision(1), ()), ""),
    (d.Seal(S1, Epoch(1), LLSN(3), (NODE,), "asked", by=BY, at=AT), "topic:orders"),
    (d.Unseal(S1, Epoch(2), LLSN(3), (NODE,), by=BY, at=AT), "topic:orders"),
    (d.Release(S1, by=BY, at=AT), "topic:orders"),
    (d.DropSurvivor(S1, NODE, "broken", by=BY, at=AT), ""),
    (d.AddSurvivor(S1, NODE, by=BY, at=AT), ""),
    (d.FoundCluster(ClusterId(1), SECRET, at=AT), "cluster"),
    (d.AddNode(NODE, "a:1", SECRET, ("/volume",), SECRET, at=AT), "cluster"),
    (d.RemoveNode(NODE, by=BY, at=AT), "cluster"),
    (d.CreateTopic(T1, "orders", 1, schema=SECRET.encode(), by=BY, at=AT), "topic:orders"),
    (d.ChangeTopic(T1, 1, Retention(), by=BY, at=AT), "topic:orders"),
    (d.DeleteTopic(T1, by=BY, at=AT), "topic:orders"),
    (d.CreateStream(S1, T1, (NODE,), GLSN(1), CutTime(1), by=BY), ""),
    (d.AssignReplicas(S1, (NODE,), by=BY, at=AT), "topic:orders"),
    (d.Trim(T1, GLSN(5), by=BY, at=AT), "topic:orders"),
    (d.OpenProducer(ProducerId("p"), ProducerEpoch(1), S1, 1, by=BY), ""),
    (d.MoveProducer(ProducerId("p"), ProducerEpoch(1), S1, Sequence(1), by=BY), ""),
    (d.CommitCursor("c", GLSN(1), by=BY), ""),
    (d.DropCursor("c", by=BY, at=AT), "cursor:c"),
    (d.NoteAudited(1), ""),
    (d.OpenRun(R1, "daily", SECRET, by=BY, at=AT), "run:daily"),
    (d.RaiseRunEpoch(R1, JobEpoch(3), by=BY, at=AT), "run:daily"),
    (d.DecideBatch(R1, BatchNumber(0), (), by=BY), ""),
    (d.GroupPublished(R1, BatchNumber(0), T1, GLSN(1), 1), ""),
    (d.MoveGroup(R1, BatchNumber(0), T1, S1, by=BY), ""),
    (d.ExpireStaged(R1, by=BY), ""),
    (d.DropRun(R1, by=BY, at=AT), "run:daily"),
    (d.ForgetOutput("daily", by=BY, at=AT), "run:daily"),
    (a.CreateToken("0" * 16, SECRET, "bob", by=BY, at=AT), "principal:bob"),
    (a.RevokeToken("0" * 16, by=BY, at=AT), "token:" + "0" * 16),
    (a.ExpireToken("0" * 16, CutTime(1_000_000), by=BY, at=AT), "token:" + "0" * 16),
    (a.NoteTokenUse({"0" * 16: 1}, by=BY), ""),
    (a.AllowRights("bob", ("read",), parse_pattern("topic:orders"), by=BY, at=AT), "principal:bob"),
    (a.RemoveRights("group:ops", ("read",), parse_pattern("topic:orders"), by=BY, at=AT), "group:ops"),
    (a.SetGroup(PrincipalGroup("ops", ("ann", "bob")), by=BY, at=AT), "group:ops"),
    (a.DeleteGroup("ops", by=BY, at=AT), "group:ops"),
    (a.SetCertificateRules((CertificateRule("cn", "*.ops", "{1}"),), by=BY, at=AT), "cluster"),
    (a.SetQuota("bob", QuotaLimits(), by=BY, at=AT), "principal:bob"),
    (a.RemoveQuota("bob", by=BY, at=AT), "principal:bob"),
    (a.SetAccessMode(AccessMode.ENFORCED, by=BY, at=AT), "cluster"),
    (j.RegisterAgent(AgentDescription("new", 1), 7, by=BY, at=AT), "cluster"),
    (j.RegisterAgent(AgentDescription("known", 1), 7, by=BY, at=AT), ""),
    (j.ExpireAgent("known", 7, at=AT), ""),
    (j.DrainAgent("known", True, by=BY, at=AT), "cluster"),
    (j.RemoveAgent("known", by=BY, at=AT), "cluster"),
    (j.BeginOperation(Operation("1" * 32, OperationKind.STOP, J1, "fraud", (), AT), by=BY, at=AT), "job:fraud"),
    (j.ForgetSavepoint(J1, "2" * 32, by=BY, at=AT), "job:fraud"),
    (j.AssignJob(J1, "known", 7, JobEpoch(1), at=AT), ""),
    (j.ReleaseJob(J1, JobEpoch(1), at=AT), ""),
    (j.BeginAttempt(J1, JobEpoch(1), 1, CHECKPOINT, by=BY, at=AT), ""),
    (j.EndAttempt(J1, JobEpoch(1), 1, RunEnd.FAILED, by=BY, at=AT), ""),
    (j.EndAssignment(J1, JobEpoch(1), RunEnd.FAILED, by=BY, at=AT), ""),
    (j.NoteCheckpoint(J1, JobEpoch(1), CHECKPOINT, by=BY), ""),
    (j.NoteFirstBatch(J1, JobEpoch(1), BatchNumber(0), by=BY), ""),
    (j.NoteSavepoint(J1, JobEpoch(1), "1" * 32, 0, JobSavepoint("2" * 32, "r", "p", GLSN(1)), by=BY, at=AT), ""),
    (j.FinishStep("1" * 32, 0, JobEpoch(1), by=BY, at=AT), ""),
    (j.FailOperation("1" * 32, 0, OperationError("x", "y"), by=BY, at=AT), ""),
    (a.CreateToken("0" * 16, SECRET, "job:fraud", of_job=JobOfToken(J1, JobEpoch(1)), by=BY, at=AT), ""),
)


class Names:
    def topic_name(self, topic: TopicId) -> str:
        return "orders"

    def stream_topic_name(self, stream: LogStreamId) -> str:
        return "orders"

    def run_name(self, run: RunId) -> str:
        return "daily"

    def job_name(self, job: JobNumber) -> str:
        return "fraud"

    def knows_agent(self, name: str) -> bool:
        return name == "known"


def record_of(decision: d.Decision) -> AuditRecord | None:
    return audit_record(DecisionIndex(7), decision, Names(), CutTime(5))


def kinds(union: Any) -> list[type]:
    return list(typing.get_args(union))


def test_every_kind_of_decision_is_in_exactly_one_class_and_has_an_example() -> None:
    known = [*kinds(NEVER), *kinds(IF_ASKED), *kinds(ALWAYS)]
    assert sorted(known, key=str) == sorted(kinds(d.Decision), key=str)
    assert {type(decision) for decision, _ in EXAMPLES} == set(kinds(d.Decision))


@pytest.mark.parametrize(("decision", "resource"), EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_change_becomes_a_record_without_secrets(decision: d.Decision, resource: str) -> None:
    record = record_of(decision)
    if not resource:
        assert record is None
        return
    assert record is not None
    by = getattr(decision, "by", None) or RequestOrigin("")
    assert (record.principal, record.request, record.token) == (by.principal, by.request, by.token)
    assert (record.index, record.outcome, record.time) == (7, AuditOutcome.DONE, AT)
    assert record.resource == resource
    assert record.operation == operation_name(type(decision).__name__)
    assert record.detail
    assert SECRET.encode() not in encode_audit(record)
    assert decode_audit(encode_audit(record)) == record
    asked_by_nobody = record_of(msgspec.structs.replace(decision, by=msgspec.UNSET))
    assert (asked_by_nobody is None) == isinstance(decision, IF_ASKED)


def test_details_name_members_and_rules() -> None:
    group = record_of(a.SetGroup(PrincipalGroup("ops", ("ann", "bob"))))
    rules = record_of(a.SetCertificateRules((CertificateRule("cn", "*.ops", "{1}"),)))
    assert group is not None
    assert group.detail == "group ops has the members ann, bob"
    assert rules is not None
    assert rules.detail == "certificates are mapped to principals: cn *.ops is {1}"


def test_a_token_in_a_text_loses_its_secret_and_long_texts_are_cut() -> None:
    token = make_token(b"\1" * 8, b"\2" * 32)
    assert audit_text(f"topic:{token}, and {token}") == f"topic:cwt_{'01' * 8}_…, and cwt_{'01' * 8}_…"
    assert audit_text("cwt_ and cwt_x") == "cwt_ and cwt_x"
    assert len(audit_text("x" * 5_000)) == 2_000
    assert decode_audit(b"no record") is None


# The state.

ON = a.SetAccessMode(AccessMode.ENFORCED, by=BY, at=AT)


def allow(number: int) -> d.Decision:
    return a.AllowRights(f"p{number}", ("read",), parse_pattern("topic:orders"), by=BY, at=AT)


def state_of(*decisions: d.Decision) -> OrderState:
    return OrderState(None, [*cluster_of({LS1: (N1,)}), *decisions])


def test_before_access_control_only_its_own_changes_are_recorded_and_then_all() -> None:
    assert state_of().audit.is_untouched
    assert state_of().snapshot().audit is msgspec.UNSET
    state = state_of(allow(1), d.DropCursor("c", by=BY), ON, d.DropCursor("c", by=BY))
    assert [(one.number, one.operation) for one in state.audit.pending] == [
        *((1, "allow-rights"), (2, "set-access-mode"), (3, "drop-cursor"))
    ]
    assert [one.index for one in state.audit.pending] == [state.index - 3, state.index - 1, state.index]
    state.apply(a.SetAccessMode(AccessMode.OFF, by=BY))
    state.apply(d.DropCursor("c", by=BY))
    assert state.audit.last == 5


def test_a_snapshot_keeps_what_waits_so_decisions_may_be_removed() -> None:
    state = state_of(ON, allow(1), allow(2), d.NoteAudited(1))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()), type=Snapshot)
    again = OrderState(stored)
    for one in (state, again):
        one.apply(allow(3))
        one.apply(d.NoteAudited(3))
        assert [(record.number, record.resource) for record in one.audit.pending] == [(4, "principal:p3")]
    assert state.audit.snapshot() == again.audit.snapshot()
    with pytest.raises(ContradictoryCommand, match="never goes back"):
        state.apply(d.NoteAudited(3))


def test_a_log_that_is_ahead_of_a_restored_store_does_not_swallow_records() -> None:
    state = state_of(ON, allow(1), d.NoteAudited(40))
    assert [record.number for record in state.audit.pending] == [41, 42]
    assert (state.audit.written, state.audit.last) == (40, 42)


def test_a_deleted_topic_has_its_name() -> None:
    seal = d.Seal(LS1, Epoch(1), LLSN(0), (N1,), "its topic is deleted", final=True)
    state = state_of(ON, seal)
    name = state.topics[state.streams[LS1].topic].name
    state.apply(d.DeleteTopic(state.streams[LS1].topic, by=BY))
    assert state.audit.pending[-1].resource == f"topic:{name}"


def around(origin: RequestOrigin | None = BY) -> Surroundings:
    return Surroundings(
        usable=lambda node: True,
        ready=lambda stream, node: True,
        describe=lambda: pytest.fail("nothing is described"),
        time=CutTime(10**15),
        origin=origin,
    )


def test_changes_are_refused_while_too_many_records_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_state, "PENDING_MAX", 3)
    state = state_of(allow(1), ON)
    topic = state.topics[state.streams[LS1].topic].name
    decide(r.CreateTopicRequest("more", 1, 1), state, around())
    state.apply(allow(2))
    for request in (
        r.CreateTopicRequest("more", 1, 1),
        r.TrimRequest(topic, GLSN(1)),
        q.AllowRequest("bob", ("read",), THE_CLUSTER),
    ):
        with pytest.raises(ResourceExhausted, match="3 records of the audit wait"):
            decide(request, state, around())
    # What repairs the log, what takes rights away, and data go on.
    for allowed in (
        r.AddNodeRequest(StorageNodeId(9), "a:1"),
        q.RemoveRightsRequest("p1", parse_pattern("topic:orders")),
        r.CommitCursorRequest("c", GLSN(0)),
        NoteAuditedRequest(1),
    ):
        assert decide(allowed, state, around())[0]
    decide(r.TrimRequest(topic, GLSN(1)), state, around(None))
    state.apply(d.NoteAudited(1))
    assert decide(r.CreateTopicRequest("more", 1, 1), state, around())[0]


def test_requests_about_the_audit() -> None:
    state = state_of(ON, d.NoteAudited(1))
    assert decide(NoteAuditedRequest(1), state, around()) == ((), r.Done())
    with pytest.raises(Refused, match="not decided"):
        decide(RecordDenialsRequest(()), state, around())
    topic = state.topics[state.streams[LS1].topic].name
    opening = r.OpenProducerRequest(ProducerId(AUDIT_PRODUCER), topic, 1)
    for origin in (None, BY):
        with pytest.raises(Refused, match="belongs to the cluster itself"):
            decide(opening, state, around(origin))


def test_a_topic_of_a_user_with_the_name_is_reported_before_anything_changes() -> None:
    state = state_of()
    state.topics[state.streams[LS1].topic].name = "_audit"
    with pytest.raises(Refused, match=r"Nothing was changed.*cutwater topic delete _audit"):
        decide(q.SetAccessModeRequest(AccessMode.PERMISSIVE), state, around())


# Denials.


def key(number: int, operation: str = "append") -> DenialKey:
    return DenialKey(f"p{number}", "127.0.0.1", operation, AuditOutcome.DENIED)


def test_denials_are_merged_per_principal_address_and_operation() -> None:
    merge = DenialMerge()
    for number, operation, resource in ((1, "append", "t"), (1, "append", "t"), (2, "append", "t"), (1, "read", "t")):
        merge.note(key(number, operation), "id", "append", f"topic:{resource}")
    merge.note(key(1), "id", "append", "topic:u")
    found = merge.take(9, "storage node 1", "x")
    assert [(one.principal, one.operation, one.count, one.id) for one in found] == [
        *(("p1", "append", 3, "x-0"), ("p2", "append", 1, "x-1"), ("p1", "read", 1, "x-2"))
    ]
    assert (found[0].resource, found[0].detail) == ("topic:t", "also on others, or for other rights")
    assert found[1].detail == ""
    assert merge.take(10, "storage node 1", "y") == ()


def test_too_many_different_denials_are_counted() -> None:
    merge = DenialMerge()
    for number in range(DISTINCT_MAX + 5):
        merge.note(key(number), "", "append", "topic:t")
    merge.note(key(0), "", "append", "topic:t")
    *records, last = merge.take(9, "here", "x")
    assert len(records) == DISTINCT_MAX
    assert (last.operation, last.suppressed, last.count) == (SUPPRESSED, 5, 0)
    assert sum(one.count + one.suppressed for one in (*records, last)) == DISTINCT_MAX + 6


def test_operations_and_addresses() -> None:
    assert denied_operation("CreateTopicRequest") == operation_name("CreateTopic") == "create-topic"
    assert denied_operation("change_volumes") == "change-volumes"
    assert (host_of("10.0.0.1:5000"), host_of("[::1]:5000"), host_of("nearby")) == ("10.0.0.1", "[::1]", "nearby")


def denial(principal: str) -> Denial:
    verdict = q.AccessVerdict(principal, "append", Resource("topic", "t"), False, None, "no rule", "", q.Missing.RULE)
    return Denial(verdict, "append", "127.0.0.1:5", True)


@pytest.mark.asyncio
async def test_what_cannot_be_delivered_is_kept_within_bounds(tmp_path: Path) -> None:
    spool, delivered = tmp_path / "spool", []

    async def in_thread(work: Any) -> None:
        work()

    async def fail(request: RecordDenialsRequest) -> None:
        raise Unavailable("not now")

    async def take(request: RecordDenialsRequest) -> None:
        delivered.extend(request.records)

    log = DenialLog("here", spool, in_thread)
    noted = 0
    for second in range(12):
        for number in range(900):
            log.note(denial(f"p{second}-{number}"))
            noted += 1
        await log.deliver(fail)
        assert spool.stat().st_size <= SPOOL_BYTES_MAX
        assert spool.stat().st_mode & 0o777 == 0o600
    again = DenialLog("here", spool, in_thread)
    await again.deliver(fail)
    assert again.waiting == log.waiting
    await log.deliver(take)
    await log.deliver(take)
    assert not spool.exists()
    assert len({one.id for one in delivered}) == len(delivered)
    assert sum(one.count + one.suppressed for one in delivered) == noted
    assert any(one.suppressed for one in delivered)
    spool.write_bytes(b"damaged")
    damaged = DenialLog("here", spool, in_thread)
    damaged.note(denial("p"))
    await damaged.deliver(take)
    assert delivered[-1].principal == "p"


# Bytes, and reading.


def test_values_become_a_plain_body() -> None:
    for values in ([b"{}"], [b"a", b"", b"ccc"], [b"x" * 7] * COUNT_MAX):
        body = values_body(values, 12)
        assert is_plain(body, len(values), 12, 12)
        assert b"".join(values) in body
    for count in (0, COUNT_MAX + 1):
        with pytest.raises(ValueError, match="1 to 256 records"):
            values_body([b"x"] * count, 1)


def test_queries() -> None:
    record = AuditRecord(1_700_000_000_000_000, "append", AuditOutcome.DENIED, "ann", "topic:orders")
    time = datetime.fromtimestamp(1_700_000_000, UTC)
    for query in (
        AuditQuery(),
        AuditQuery(since=time, until=time + timedelta(microseconds=1)),
        AuditQuery(principal="ann", operation="append", resource="topic:orders", outcome="denied"),
        AuditQuery(resource="topic:or*"),
    ):
        assert query.selects(record)
    for query in (
        AuditQuery(since=time + timedelta(microseconds=1)),
        AuditQuery(until=time),
        AuditQuery(principal="bob"),
        AuditQuery(operation="read"),
        AuditQuery(resource="topic:or"),
        AuditQuery(resource="topic:x*"),
        AuditQuery(outcome="done"),
    ):
        assert not query.selects(record)


def test_the_hash_of_a_token_is_no_part_of_a_record() -> None:
    token = make_token(b"\1" * 8, b"\2" * 32)
    record = record_of(a.CreateToken("01" * 8, token_hash(token), "bob", by=BY, at=AT))
    assert record is not None
    assert token_hash(token).encode() not in encode_audit(record)


def test_an_operation_that_no_record_has_is_refused() -> None:
    for name in (None, "create-topic", "allow-rights", "append", "follow", "read", "seal", "who-am-i", SUPPRESSED):
        check_operation(name)
    with pytest.raises(InvalidArgument, match=r"no operation 'subscribe'.*a subscription is 'follow'.*, follow, "):
        check_operation("subscribe")
    assert {operation_name(type(decision).__name__) for decision, resource in EXAMPLES if resource} <= OPERATIONS


def test_names_that_clients_make_up_forge_no_record_and_do_not_reach_the_terminal() -> None:
    forged = "topic:x\n2026-11-18T20:00:00.000+00:00  done  admin  allow  eve"
    record = AuditRecord(0, "create-topic", AuditOutcome.DENIED, "eve  done", forged, "\x1b[2J", address="1.2.3.4")
    line = in_words(record)
    assert line.isprintable()
    assert line.split("  ")[1] == "denied"
    quoted = (ascii("eve  done"), ascii(forged))
    assert line.endswith(f"  denied  {quoted[0]}  create-topic  {quoted[1]}  from 1.2.3.4: \\x1b[2J")
    lacking = AuditRecord(0, "follow", AuditOutcome.DENIED, "zoë", "topic:orders", right="read", count=2)
    assert in_words(lacking).endswith("  denied  zoë  follow  topic:orders  lacks read  2 times")
    plain = AuditRecord(0, "create-topic", AuditOutcome.DONE, "zoë", "topic:orders", address="1.2.3.4")
    assert in_words(plain).endswith("  done  zoë  create-topic  topic:orders  from 1.2.3.4")
