"""Jobs, operations, agents and errands as calls: what users and operators may ask of the job service.

A call that changes something begins an operation, and returns when the cluster has stored it. Operations go on by
themselves: ``follow_operation`` and ``end_of`` wait for them, and a caller that stops waiting loses nothing. Every
such call has a random operation id, so it is repeated safely until its deadline. An idempotency key makes it safe for
a caller that may have died meanwhile, too: the same call under the same key is the same operation, for 24 hours.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from cutwater.core.jobs import errand_bodies as b
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.jobs.job_records import JobPhase, JobVersion
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import (
    RANDOM_ID_DIGITS,
    IdempotencyKey,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    check_idempotency_key,
    check_random_id,
)
from cutwater.errors import CutwaterError, DeadlineExceeded, NotAnswered, NotFound, Unavailable
from cutwater.protocol.errors import WireError, from_wire
from cutwater.runtime import system
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, Deadline
from cutwater.types import Revision

if TYPE_CHECKING:
    from cutwater.client.async_client import AsyncClient

A = TypeVar("A")

OPERATION_SECONDS = 300.0
"""How long an operation is waited for, unless the caller says otherwise."""
WAIT_MS = 1_000
"""How long the leader may keep a question about something that has not changed. It is less than a client waits for one
node, and as late as a step of an operation is seen at most."""
RETRY_SECONDS = 0.2

Begins = q.SubmitJobRequest | q.UpgradeJobRequest | q.RescaleJobRequest | q.RollBackJobRequest | q.OperateJobRequest
"""Requests that begin an operation."""

_SORTED = msgspec.msgpack.Encoder(order="sorted")


class JobAsking(Protocol):
    """Asks the leader of the metadata repository, as ``Repository.ask`` does."""

    def __call__(
        self, request: Any, expected: type[A], *, timeout_ms: int, idempotent: bool = True
    ) -> Awaitable[A]: ...


class JobCalls:
    """See the module. ``timeout``, in seconds, is what each call may take unless it says otherwise."""

    def __init__(self, ask: JobAsking, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._asking, self._timeout = ask, timeout

    @classmethod
    def of(cls, client: AsyncClient, *, timeout: float = TIMEOUT_SECONDS) -> JobCalls:
        """Return the calls for the cluster, and with the rights, of a client."""
        return cls(client.repository.ask, timeout=timeout)

    async def _ask(
        self, request: q.JobRequest, expected: type[A], timeout: float | None, *, idempotent: bool = True
    ) -> A:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        return await self._asking(request, expected, timeout_ms=deadline.left_ms(), idempotent=idempotent)

    # Operations on jobs.

    async def submit(
        self,
        name: str,
        spec: JobSpec,
        *,
        savepoint: str = "",
        from_job: str = "",
        replay_output: bool = False,
        allow_non_restored_state: bool = False,
        key: str = "",
        timeout: float | None = None,
    ) -> q.OperationAnswer:
        """Make a job and start it: from nothing, or from a savepoint of another job."""
        request = q.SubmitJobRequest(name, spec, new_id(), savepoint, from_job, replay_output, allow_non_restored_state)
        return await self._begin(request, key, timeout)

    async def upgrade(
        self,
        name: str,
        spec: JobSpec,
        *,
        savepoint: str = "",
        replay_output: bool = False,
        allow_non_restored_state: bool = False,
        step_timeout: float = 0,
        key: str = "",
        timeout: float | None = None,
    ) -> q.OperationAnswer:
        """Go on with another specification. ``step_timeout``: how long, in seconds, an agent tries a step before it
        gives up; 0 for its default."""
        request = q.UpgradeJobRequest(
            name, spec, new_id(), savepoint, replay_output, allow_non_restored_state, _ms(step_timeout)
        )
        return await self._begin(request, key, timeout)

    async def rescale(
        self,
        name: str,
        parallelism: int,
        *,
        slots: int = 0,
        step_timeout: float = 0,
        key: str = "",
        timeout: float | None = None,
    ) -> q.OperationAnswer:
        request = q.RescaleJobRequest(name, parallelism, new_id(), slots, _ms(step_timeout))
        return await self._begin(request, key, timeout)

    async def roll_back(
        self, name: str, *, version: int = 0, step_timeout: float = 0, key: str = "", timeout: float | None = None
    ) -> q.OperationAnswer:
        """Go back to an earlier version; 0 stands for the one before."""
        request = q.RollBackJobRequest(name, new_id(), version, _ms(step_timeout))
        return await self._begin(request, key, timeout)

    async def start(
        self,
        name: str,
        *,
        savepoint: str = "",
        replay_output: bool = False,
        allow_non_restored_state: bool = False,
        key: str = "",
        timeout: float | None = None,
    ) -> q.OperationAnswer:
        """Start a job that has ended: from its last stop or checkpoint, or from this savepoint."""
        request = q.OperateJobRequest(
            name, OperationKind.START, new_id(), savepoint, replay_output, allow_non_restored_state
        )
        return await self._begin(request, key, timeout)

    async def operate(
        self,
        name: str,
        kind: OperationKind,
        *,
        step_timeout: float = 0,
        key: str = "",
        timeout: float | None = None,
    ) -> q.OperationAnswer:
        """Stop, cancel, restart or delete a job, or take a savepoint of it."""
        return await self._begin(q.OperateJobRequest(name, kind, new_id(), timeout_ms=_ms(step_timeout)), key, timeout)

    async def _begin(self, request: Begins, key: str, timeout: float | None) -> q.OperationAnswer:
        if key:
            idempotency = IdempotencyKey(key, body_hash(request))
            check_idempotency_key(idempotency)
            request = structs.replace(request, key=idempotency)
        return await self._ask(request, q.OperationAnswer, timeout)

    # Waiting for operations.

    async def operation(self, identifier: str, *, timeout: float | None = None) -> q.OperationAnswer:
        check_random_id("operation", identifier)
        return await self._ask(q.DescribeOperationRequest(identifier), q.OperationAnswer, timeout)

    async def operations(self, name: str, *, limit: int = 100, timeout: float | None = None) -> tuple[Operation, ...]:
        """Return the operations of a job that are still known, the newest first."""
        return (await self._ask(q.ListOperationsRequest(name, limit), q.OperationList, timeout)).operations

    async def follow_operation(
        self, identifier: str, *, timeout: float = OPERATION_SECONDS
    ) -> AsyncIterator[q.OperationAnswer]:
        """Yield the operation as it is, and each time that it has changed, until it is over. Times without a leader are
        waited out. Raises ``DeadlineExceeded`` if it is not over in time; it goes on all the same."""
        check_random_id("operation", identifier)
        deadline = Deadline(timeout)
        seen: q.OperationAnswer | None = None
        wait_ms = 0
        while True:
            request = q.DescribeOperationRequest(identifier, min(wait_ms, deadline.left_ms()))
            found = await self._patiently(request, q.OperationAnswer, deadline)
            if found is not None and found != seen:
                seen = found
                yield found
            if seen is not None and is_over(seen.operation):
                return
            if deadline.is_over:
                raise DeadlineExceeded(
                    f"operation {identifier} is not over after {timeout:g} s"
                    + (f" ({progress_of(seen.operation)})" if seen is not None else "")
                    + ". It goes on by itself"
                )
            wait_ms = WAIT_MS

    async def end_of(self, identifier: str, *, timeout: float = OPERATION_SECONDS) -> Operation:
        """Wait until an operation is over, and return it; raise its error if it failed."""
        last: Operation | None = None
        async for answer in self.follow_operation(identifier, timeout=timeout):
            last = answer.operation
        assert last is not None
        if (error := error_of(last)) is not None:
            raise error
        return last

    async def _patiently(self, request: q.JobRequest, expected: type[A], deadline: Deadline) -> A | None:
        """Ask as long as there is time; None if there was no answer."""
        while True:
            try:
                return await self._ask(request, expected, max(deadline.left, 0.001))
            except CutwaterError as error:
                if not error.retriable:
                    raise
            if deadline.is_over:
                return None
            await deadline.pause(RETRY_SECONDS)

    # Questions about jobs.

    async def jobs(
        self, *, owner: str = "", phase: JobPhase | None = None, timeout: float | None = None
    ) -> tuple[q.JobSummary, ...]:
        """Return all jobs that the caller may see, by name; those of one owner or in one phase, if it is given."""
        deadline = Deadline(self._timeout if timeout is None else timeout)
        found: list[q.JobSummary] = []
        while True:
            after = found[-1].name if found else ""
            page = await self.jobs_page(after=after, owner=owner, phase=phase, timeout=max(deadline.left, 0.001))
            found += page.jobs
            if not page.more:
                return tuple(found)

    async def jobs_page(
        self,
        *,
        after: str = "",
        limit: int = q.JOBS_PAGE_MAX,
        owner: str = "",
        phase: JobPhase | None = None,
        timeout: float | None = None,
    ) -> q.JobList:
        """Return the jobs whose names come after this one."""
        return await self._ask(q.ListJobsRequest(after, limit, owner, phase), q.JobList, timeout)

    async def job(self, name: str, *, timeout: float | None = None) -> q.JobDescription:
        return await self._ask(q.DescribeJobRequest(name), q.JobDescription, timeout)

    async def follow_job(
        self, name: str, *, seen: int = 0, is_progress: bool = False, timeout: float = OPERATION_SECONDS
    ) -> AsyncIterator[q.JobDescription]:
        """Yield the job each time that it has changed after this revision, until the time is up. A caller that goes on
        later gives the revision of the last job that it saw. ``is_progress``: when its progress has changed, too, which
        is seen up to a second later. Raises ``NotFound`` when the job is deleted."""
        deadline = Deadline(timeout)
        progress: q.JobProgress | None = None
        while not deadline.is_over:
            request = q.DescribeJobRequest(name, Revision(seen), min(WAIT_MS, deadline.left_ms()))
            found = await self._patiently(request, q.JobDescription, deadline)
            if found is None:
                continue
            # The caller may have named a revision that does not exist yet: that must not make this loop run free.
            if found.job.revision != seen or (is_progress and found.progress != progress):
                seen, progress = found.job.revision, found.progress
                yield found

    async def version(self, name: str, number: int = 0, *, timeout: float | None = None) -> JobVersion:
        """Return a version of a job; 0 stands for the present one."""
        return (await self._ask(q.FetchVersionRequest(name, number), q.VersionAnswer, timeout)).version

    async def versions(self, name: str, *, timeout: float | None = None) -> tuple[JobVersion, ...]:
        """Return all versions of a job that are kept, the oldest first."""
        deadline = Deadline(self._timeout if timeout is None else timeout)
        found: list[JobVersion] = []
        for number in (await self.job(name, timeout=timeout)).versions:
            try:
                found.append(await self.version(name, number, timeout=max(deadline.left, 0.001)))
            except NotFound:
                # It was dropped meanwhile, as the oldest of too many.
                continue
        return tuple(found)

    async def forget_savepoint(self, name: str, savepoint: str, *, timeout: float | None = None) -> None:
        """Let a savepoint be known by its id no longer. Its files stay."""
        check_random_id("savepoint", savepoint)
        await self._ask(q.ForgetSavepointRequest(name, savepoint), object, timeout, idempotent=False)

    # Errands: what only an agent can answer.

    async def validate(
        self,
        name: str,
        spec: JobSpec,
        *,
        savepoint: str = "",
        allow_non_restored_state: bool = False,
        agent: str = "",
        timeout: float = OPERATION_SECONDS,
    ) -> b.ValidateAnswer:
        """Let an agent load a program, and say what it is and what a savepoint would restore. The job of this name need
        not exist, unless a savepoint of it is named."""
        question = b.ValidateQuestion(allow_non_restored_state)
        request = q.AskAgentRequest(name, ErrandKind.VALIDATE, _body(question), spec, savepoint, agent=agent)
        return await self._errand(request, b.ValidateAnswer, timeout)

    async def describe_savepoint(
        self, name: str, savepoint: str, *, timeout: float = OPERATION_SECONDS
    ) -> dict[str, Any]:
        """Return the manifest of a savepoint of a job."""
        request = q.AskAgentRequest(name, ErrandKind.SAVEPOINT_DESCRIBE, savepoint=savepoint)
        return await self._errand(request, dict[str, Any], timeout)

    async def verify_savepoint(
        self, name: str, savepoint: str, *, timeout: float = OPERATION_SECONDS
    ) -> b.VerifyAnswer:
        """Compare every file of a savepoint with its checksum; raise ``SavepointDamaged`` if one is damaged."""
        request = q.AskAgentRequest(name, ErrandKind.SAVEPOINT_VERIFY, savepoint=savepoint)
        return await self._errand(request, b.VerifyAnswer, timeout)

    async def diff_savepoints(
        self, name: str, savepoint: str, other: str, *, timeout: float = OPERATION_SECONDS
    ) -> dict[str, Any]:
        """Return what has changed from one savepoint of a job to another."""
        request = q.AskAgentRequest(name, ErrandKind.SAVEPOINT_DIFF, savepoint=savepoint, other_savepoint=other)
        return await self._errand(request, dict[str, Any], timeout)

    async def delete_savepoint(self, name: str, savepoint: str, *, timeout: float = OPERATION_SECONDS) -> None:
        """Remove the files of a savepoint, and forget its id."""
        request = q.AskAgentRequest(name, ErrandKind.SAVEPOINT_DELETE, savepoint=savepoint)
        try:
            await self._errand(request, dict[str, Any], timeout)
        except NotFound as error:
            if (await self.job(name)).job.savepoint_of(savepoint) is None:
                raise
            # An earlier call may have ended between the two steps. But the root may also be one that is not mounted.
            raise NotFound(
                f"{error.message}. If its files are gone, `cutwater job forget-savepoint {name} {savepoint}` lets its "
                "id be forgotten"
            ) from error
        try:
            await self.forget_savepoint(name, savepoint)
        except NotFound:
            # It was forgotten with its files.
            return

    async def state(
        self,
        name: str,
        savepoint: str = "",
        *,
        uid: str = "",
        key: Sequence[str] = (),
        limit: int = b.STATE_ROWS,
        timeout: float = OPERATION_SECONDS,
    ) -> b.StateAnswer:
        """Return what a savepoint has of an operator, by key; of the last savepoint of the job, if none is named."""
        if not savepoint:
            known = (await self.job(name)).job.savepoints
            if not known:
                raise NotFound(f"job {name!r} has no savepoint: `cutwater job savepoint {name}` takes one")
            savepoint = known[-1].id
        question = b.StateQuestion(uid, tuple(key), limit)
        request = q.AskAgentRequest(name, ErrandKind.STATE, _body(question), savepoint=savepoint)
        return await self._errand(request, b.StateAnswer, timeout)

    async def log_tail(self, name: str, *, bytes: int = b.LOG_BYTES, timeout: float | None = None) -> b.LogAnswer:
        """Return the last bytes of what the present attempt has printed so far. Its agent must be alive."""
        request = q.AskAgentRequest(name, ErrandKind.LOG, _body(b.LogQuestion(bytes)))
        return await self._errand(request, b.LogAnswer, self._timeout if timeout is None else timeout)

    async def _errand(self, request: q.AskAgentRequest, expected: type[A], timeout: float) -> A:
        """Ask an agent by way of the leader. The same question is the same errand, so it is asked until there is an
        answer; a new leader, which has forgotten it, gives it out again."""
        deadline = Deadline(timeout)
        waiting: NotAnswered | None = None
        while True:
            # The leader answers in time to be heard.
            request = structs.replace(request, wait_ms=min(WAIT_MS, deadline.left_ms() // 2))
            try:
                answer = await self._ask(request, q.ErrandAnswer, max(deadline.left, 0.001))
                return msgspec.json.decode(answer.body, type=expected)
            except msgspec.MsgspecError as error:
                raise Unavailable(f"agent {answer.agent!r} is of another version: {error}") from error
            except CutwaterError as error:
                if isinstance(error, NotAnswered):
                    waiting = error
                if not error.retriable:
                    raise
                if deadline.left <= RETRY_SECONDS:
                    # That the agent works on it says more than that the time is up.
                    raise waiting if waiting is not None else error from None
            await deadline.pause(RETRY_SECONDS)

    # Agents.

    async def agents(self, *, timeout: float | None = None) -> tuple[q.AgentSummary, ...]:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        found: list[q.AgentSummary] = []
        while True:
            after = found[-1].agent.name if found else ""
            page = await self.agents_page(after=after, timeout=max(deadline.left, 0.001))
            found += page.agents
            if not page.more:
                return tuple(found)

    async def agents_page(self, *, after: str = "", timeout: float | None = None) -> q.AgentList:
        return await self._ask(q.ListAgentsRequest(after=after), q.AgentList, timeout)

    async def agent(self, name: str, *, timeout: float | None = None) -> q.AgentSummary:
        found = (await self._ask(q.ListAgentsRequest(name), q.AgentList, timeout)).agents
        if not found:
            raise NotFound(f"there is no agent {name!r}: `cutwater agent list` shows those that exist")
        return found[0]

    async def drain_agent(self, name: str, *, is_draining: bool = True, timeout: float | None = None) -> None:
        """Give an agent no further jobs and move those that can run elsewhere; or let it have jobs again."""
        await self._ask(q.DrainAgentRequest(name, is_draining), object, timeout)

    async def remove_agent(self, name: str, *, timeout: float | None = None) -> None:
        """Forget an agent that is not alive."""
        await self._ask(q.RemoveAgentRequest(name), object, timeout, idempotent=False)


def new_id() -> str:
    """Make the id of an operation."""
    return system.token_hex(RANDOM_ID_DIGITS // 2)


def body_hash(request: Begins) -> str:
    """Return the hash of a request, without what differs each time that it is made."""
    return hashlib.sha256(_SORTED.encode(structs.replace(request, operation="", key=None))).hexdigest()


def is_over(operation: Operation) -> bool:
    return operation.state is not OperationState.RUNNING


def progress_of(operation: Operation) -> str:
    """Say how far an operation has come."""
    step = operation.next_step
    if step is None:
        return f"{operation.kind}: {operation.state}"
    return f"{operation.kind}: step {operation.step + 1} of {len(operation.steps)}, {step}"


def error_of(operation: Operation) -> CutwaterError | None:
    """Return the error with which an operation failed; None if it did not."""
    return None if operation.error is None else as_error(operation.error)


def as_error(error: OperationError) -> CutwaterError:
    """Return an error that is stored as code and message as an exception of the class of that code."""
    return from_wire(WireError(error.code, error.message, False, Raw(b"")))


def _body(question: Struct) -> bytes:
    return msgspec.json.encode(question)


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)
