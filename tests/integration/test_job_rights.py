"""What jobs, their users and their agents may do over real connections, and that nothing leads around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import make_token, token_hash, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.core.jobs import job_requests as j
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, JobIsolation
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.jobs.job_records import RunEnd
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import IdempotencyKey, OperationKind
from cutwater.errors import AlreadyExists, CutwaterError, Fenced, NotFound, PermissionDenied, Refused, RunFenced
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime import system
from cutwater.types import BatchNumber, CutTime, JobEpoch, JobNumber
from tests.integration.access_cluster import AccessCluster, access_cluster

pytestmark = pytest.mark.asyncio

SPEC = JobSpec("ab" * 32, "fraud.py:p")
ROOTS = (AgentRoot("default", is_shared=True),)


def identifier() -> str:
    return system.token_hex(16)


def agent(name: str) -> AgentDescription:
    return AgentDescription(name, 4, {}, ROOTS, ROOTS, isolation=JobIsolation.SHARED_USER)


class Jobs:
    """Agent ``a`` of principal ``agents`` has the jobs ``fraud`` of ann and ``other`` of bob."""

    def __init__(self, cluster: AccessCluster) -> None:
        self.cluster = cluster
        self.tokens: dict[str, str] = {}

    async def begin(self) -> None:
        for name, *rights in (
            ("agents", ("run-jobs", "cluster")),
            ("rogue", ("run-jobs", "cluster")),
            ("ann", ("job-submit,job-operate", "job:fraud"), ("act-as", "principal:job:fraud")),
            ("bob", ("job-submit,job-operate", "job:other"), ("act-as", "principal:job:other")),
            ("op", ("job-operate", "job:fraud")),
            ("submitter", ("job-submit,job-operate", "job:fraud")),
            ("viewer", ("describe", "job:fraud")),
            ("publisher", ("publish", "run:*"), ("append", "topic:*")),
        ):
            self.tokens[name] = await self.cluster.principal(name, *rights)
        await self.ask("agents", j.RegisterAgentRequest(agent("a"), 1))
        for who, name in (("ann", "fraud"), ("bob", "other")):
            await self.ask(who, j.SubmitJobRequest(name, SPEC, identifier()))

    async def ask(self, who: str, request: Any) -> Any:
        return await self.cluster.ask(request, self.tokens[who])

    async def job(self, name: str) -> tuple[JobNumber, JobEpoch]:
        found: j.JobDescription = await self.cluster.admin(j.DescribeJobRequest(name))
        assert found.job.assignment is not None
        return found.job.number, found.job.assignment.epoch

    async def token(self, name: str, *, by: str = "agents", of_agent: str = "a", session: int = 1) -> str:
        """Make a token of a job, as its agent does, under the name of that principal."""
        text = make_token(system.token_bytes(8), system.token_bytes(32))
        expires = CutTime(system.wall_time_ns() // 1_000 + 60_000_000)
        asked = j.JobTokenRequest(
            of_agent, session, *await self.job(name), token_id(text) or "", token_hash(text), expires
        )
        await self.ask(by, asked)
        self.tokens[f"job:{name}"] = text
        return text


async def refused(work: Any, *kinds: type[CutwaterError]) -> str:
    with pytest.raises(kinds or PermissionDenied) as error:
        await work
    return error.value.message


async def test_a_token_of_a_job_is_for_this_job_only_and_ends_with_its_assignment(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=AccessMode.ENFORCED) as cluster:
        jobs = Jobs(cluster)
        await jobs.begin()
        await jobs.token("fraud")
        me, (number, epoch) = "job:fraud", await jobs.job("fraud")
        who: q.WhoAmI = await jobs.ask(me, q.WhoAmIRequest())
        assert (who.principal, who.is_admin) == ("job:fraud", False)
        # Nothing that an agent may, nothing that users of jobs may, and no further tokens.
        other, other_epoch = await jobs.job("other")
        text = make_token(bytes(8), bytes(32))
        of_token = token_id(text) or "", token_hash(text)
        soon = CutTime(system.wall_time_ns() // 1_000 + 60_000_000)
        for request in (
            j.RegisterAgentRequest(agent("b"), 2),
            j.RenewAgentRequest("a", 1),
            j.WatchAgentRequest("a", 1),
            j.FetchAssignedRequest("a", 1, other, other_epoch),
            j.JobTokenRequest("a", 1, other, other_epoch, *of_token, soon),
            j.JobTokenRequest("a", 1, number, epoch, *of_token, soon),
            j.SubmitJobRequest("more", SPEC, identifier()),
            j.UpgradeJobRequest("fraud", SPEC, identifier()),
            j.OperateJobRequest("other", OperationKind.CANCEL, identifier()),
            j.AskAgentRequest("other", ErrandKind.LOG),
            j.AskAgentRequest("fraud", ErrandKind.VALIDATE, spec=SPEC),
            j.DescribeJobRequest("other"),
            j.FetchProgramPlaceRequest(SPEC.program),
            j.ListAgentsRequest(),
            q.CreateTokenRequest(*of_token, "job:fraud"),
            q.AllowRequest("job:fraud", ("read",), parse_pattern("topic:*")),
            r.OpenRunRequest("other", "key", job_epoch=other_epoch),
            r.OpenRunRequest("fraud", "key", job_epoch=epoch),
        ):
            await refused(jobs.ask(me, request))
        await refused(jobs.ask(me, q.CreateChildTokenRequest(*of_token, soon)), Refused)
        assert (await jobs.ask(me, j.ListJobsRequest())).jobs == ()
        # With the right to publish under its name, the job opens its run, and that of no other.
        await cluster.admin(q.AllowRequest("job:fraud", ("publish",), parse_pattern("run:*")))
        run: r.RunAnswer = await jobs.ask(me, r.OpenRunRequest("fraud", "key", job_epoch=epoch))
        await jobs.ask(me, r.PublishRequest(run.run, BatchNumber(0), (), job_epoch=epoch))
        await refused(jobs.ask(me, r.OpenRunRequest("other", "key", job_epoch=other_epoch)))
        await refused(jobs.ask(me, r.OpenRunRequest("fraud", "key", job_epoch=JobEpoch(epoch + 1))), RunFenced)
        # The token ends with the assignment, also on connections that are open.
        await jobs.ask("agents", j.EndAssignmentRequest("a", 1, number, epoch, RunEnd.FAILED))
        await refused(jobs.ask(me, q.WhoAmIRequest()), Unauthenticated)


async def test_an_agent_gets_tokens_of_the_jobs_that_are_assigned_to_it_only(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=AccessMode.ENFORCED) as cluster:
        jobs = Jobs(cluster)
        await jobs.begin()
        listed: j.AgentList = await jobs.ask("rogue", j.ListAgentsRequest())
        assert [one.agent.session for one in listed.agents] == [1], "it is no secret"
        assert "another principal registered" in await refused(jobs.token("fraud", by="rogue"), Refused)
        assert "another principal" in await refused(jobs.ask("rogue", j.RegisterAgentRequest(agent("a"), 2)), Refused)
        await jobs.ask("rogue", j.RegisterAgentRequest(agent("b"), 5))
        assert "is over" in await refused(jobs.token("fraud", by="rogue", of_agent="b", session=5), Refused)
        await refused(jobs.token("fraud", session=9), Fenced)


async def test_who_lacks_act_as_changes_no_job(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=AccessMode.ENFORCED) as cluster:
        jobs = Jobs(cluster)
        await jobs.begin()
        changes = (
            j.UpgradeJobRequest("fraud", SPEC, identifier()),
            j.RescaleJobRequest("fraud", 2, identifier()),
            j.RollBackJobRequest("fraud", identifier()),
            j.AskAgentRequest("fraud", ErrandKind.VALIDATE, spec=SPEC),
            j.SubmitJobRequest("fraud", SPEC, identifier()),
        )
        for request in changes:
            for who in ("op", "submitter", "viewer", "bob"):
                told = await refused(jobs.ask(who, request))
                assert who in told
        assert "act-as on principal:job:fraud" in await refused(jobs.ask("submitter", changes[1]))
        # No epoch is claimed without it: a high one would shut the job out for good.
        number, epoch = await jobs.job("fraud")
        for claimed in (epoch, JobEpoch(2**40)):
            for name in ("fraud", "a name that no job has"):
                request = r.OpenRunRequest(name, "key", job_epoch=claimed)
                assert "act-as" in await refused(jobs.ask("publisher", request))
        # Who may describe a job may not have a program run with its rights.
        errand = j.AskAgentRequest("fraud", ErrandKind.LOG, spec=structs.replace(SPEC, entry="mine.py:p"))
        assert "takes no specification" in await refused(jobs.ask("viewer", errand), CutwaterError)
        await jobs.ask("op", j.OperateJobRequest("fraud", OperationKind.CANCEL, identifier()))
        assert number == 1


async def test_idempotency_keys_and_operations_are_those_of_their_principal(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=AccessMode.ENFORCED) as cluster:
        jobs = Jobs(cluster)
        await jobs.begin()
        key = IdempotencyKey("nightly", "ab" * 32)
        asked = j.OperateJobRequest("fraud", OperationKind.CANCEL, identifier(), key=key)
        first: j.OperationAnswer = await jobs.ask("ann", asked)
        again = structs.replace(asked, operation=identifier())
        assert (await jobs.ask("ann", again)).operation.id == first.operation.id
        # Another principal that may operate the job has keys of its own.
        own: j.OperationAnswer = await jobs.ask("op", again)
        assert (own.operation.id, own.operation.principal) == (again.operation, "op")
        assert "is another one" in await refused(jobs.ask("op", asked), AlreadyExists)
        await refused(jobs.ask("bob", structs.replace(again, name="fraud")))
        of_bob = j.OperateJobRequest("other", OperationKind.CANCEL, identifier(), key=key)
        assert (await jobs.ask("bob", of_bob)).operation.name == "other"
        for who in ("bob", "publisher"):
            await refused(jobs.ask(who, j.DescribeOperationRequest(first.operation.id)))
            await refused(jobs.ask(who, j.DescribeOperationRequest("f" * 32)))
        await refused(jobs.ask("viewer", j.DescribeOperationRequest("f" * 32)), PermissionDenied, NotFound)
