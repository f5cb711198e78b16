"""The leader's part in jobs: it decides requests about them, assigns jobs to agents, and lets questions wait.

Nothing here has to survive the leader. The next one measures leases anew, and callers that waited, or that sent an
errand, ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TypeVar

from msgspec import Struct, msgpack, structs

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.rights import CLUSTER, Resource, ResourceKind, Right
from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.job_records import JobRecord, RunEnd
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import check_sha256
from cutwater.core.jobs.leading import agent_handling, errand_handling, job_answers
from cutwater.core.jobs.leading.assignment import FreeSlots, advice, assign, moves
from cutwater.core.jobs.leading.errand_board import ErrandBoard
from cutwater.core.jobs.leading.job_handling import Begins, begin_operation, find_job, forget_savepoint, is_over
from cutwater.core.jobs.leading.job_leases import JobLeases
from cutwater.core.order.decisions import Decision
from cutwater.core.order.events import Asked, RequestId
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import CutwaterError
from cutwater.types import MILLISECOND, SECOND, CutTime, Instant, JobNumber, LeaderEpoch

LEASES_EVERY_US = 200 * MILLISECOND
"""How often leases are looked at. A job moves at most this late."""
ASSIGNED_PER_TURN_MAX = 64
"""Jobs that are assigned, or moved, in one write."""
WAITERS_MAX = 2_048
"""Questions of users that wait. Beyond, they are answered at once."""

WAITING = q.DescribeJobRequest | q.DescribeOperationRequest | q.WatchAgentRequest | q.AskAgentRequest
"""Questions that may wait."""

JobOutcome = tuple[tuple[Decision, ...], q.JobAnswer | None]
A = TypeVar("A")


class _Waiter(Struct, frozen=True):
    """A question that waits. ``errands``: how often the errands of the agent had changed when it came."""

    asked: Asked
    request: q.JobRequest
    errands: int = 0


class JobDesk:
    """See the module."""

    def __init__(self, jobs: JobRegistry, access: AccessState, leader_epoch: LeaderEpoch, lease_us: int) -> None:
        self._jobs, self._access, self._leader_epoch = jobs, access, leader_epoch
        self.leases = JobLeases(jobs, lease_us)
        self.errands = ErrandBoard(jobs)
        self._progress: dict[JobNumber, q.JobProgress] = {}
        self._waiters: dict[RequestId, _Waiter] = {}
        self._deadlines: list[tuple[int, RequestId]] = []
        """When waiting ends, as a heap. Questions that were answered are still in it."""
        self._answered_at = -1
        """The revision at which it was last looked for questions that have an answer."""
        self._leases_at = 0
        """When leases are looked at next."""
        self._looked_at = -1
        """The revision at which it was last looked for jobs to assign or move."""
        self._unplaced: dict[JobNumber, tuple[int, int]] = {}
        """Jobs for which there was no agent: their revision, and that of all agents then."""
        self._room_changed = 0
        """How often agents, or their free slots, have changed."""
        self._avoided: dict[JobNumber, tuple[str, int, int]] = {}
        """Agents and their sessions that gave a job back without being asked to, and until when this counts."""
        self._errand_changed = False
        self._last_errand = 0

    # Requests.

    def decide(self, now: Instant, request: q.JobRequest, time: CutTime, origin: RequestOrigin | None) -> JobOutcome:
        """Return the decisions, and the answer to give once they are stored. It is None if the request has to wait."""
        principal = origin.principal if origin is not None else ""
        if isinstance(request, q.FromAgent):
            return self._from_agent(request, now, time, origin)
        match request:
            case q.ListJobsRequest():
                return (), job_answers.list_jobs(request, self._jobs, self._sees(origin))
            case q.DescribeJobRequest():
                return (), self._describe(request)
            case q.FetchVersionRequest():
                return (), job_answers.fetch_version(request, self._jobs)
            case q.DescribeOperationRequest():
                operation = job_answers.find_operation(self._jobs, request.operation)
                is_waiting = request.wait_ms > 0 and not is_over(operation)
                return (), None if is_waiting else self._operation_answer(request.operation)
            case q.ListOperationsRequest():
                return (), job_answers.list_operations(request, self._jobs)
            case q.ListAgentsRequest():
                return (), job_answers.list_agents(
                    request, self._jobs, self._sees(origin), lambda agent: self.leases.silence(agent, now)
                )
            case q.FetchProgramPlaceRequest():
                check_sha256("program", request.sha256)
                return (), q.ProgramPlaces(self._jobs.programs_stored.get(request.sha256, ()))
            case q.AskAgentRequest():
                return (), self._ask_agent(request, now, principal)
            case q.ForgetSavepointRequest():
                return self._noted(forget_savepoint(request, self._jobs))
            case q.DrainAgentRequest():
                return agent_handling.drain(request, self._jobs), q.ReportNoted(self._jobs.revision)
            case q.RemoveAgentRequest():
                return agent_handling.remove(request, self._jobs), q.ReportNoted(self._jobs.revision)
            case q.RegisterAgentRequest():
                return agent_handling.register(request, self._jobs, _speaker(origin)), self._lease()
            case _:
                return self._begin(request, time, principal)

    def _begin(self, request: Begins, time: CutTime, principal: str) -> JobOutcome:
        decisions, operation = begin_operation(request, self._jobs, time, principal)
        return decisions, q.OperationAnswer(operation)

    def _noted(self, decision: j.JobDecision | None) -> JobOutcome:
        return () if decision is None else (decision,), q.ReportNoted(self._jobs.revision)

    def _sees(self, origin: RequestOrigin | None) -> job_answers.Sees:
        """Return what tells whether the caller may describe a job. Names of servers begin with ``_``."""
        if self._access.mode is not AccessMode.ENFORCED or origin is None or origin.principal.startswith("_"):
            return lambda name: True
        view = self._access.view

        def sees(name: str) -> bool:
            resource = Resource(ResourceKind.JOB, name)
            return view.decide(origin.principal, Right.DESCRIBE, resource, origin.token).is_allowed

        return sees

    def _describe(self, request: q.DescribeJobRequest) -> q.JobDescription | None:
        job = find_job(self._jobs, request.name)
        if request.wait_ms > 0 and job.revision == request.seen:
            return None
        return job_answers.describe_job(job, self._jobs, self._progress_of(job), self._avoided_by(job))

    def _progress_of(self, job: JobRecord) -> q.JobProgress | None:
        progress, assignment = self._progress.get(job.number), job.assignment
        is_present = progress is not None and assignment is not None and progress.epoch == assignment.epoch
        return progress if is_present else None

    def _avoided_by(self, job: JobRecord) -> tuple[tuple[str, int], ...]:
        avoided = self._avoided.get(job.number)
        return () if avoided is None else (avoided[:2],)

    def _operation_answer(self, identifier: str) -> q.OperationAnswer:
        operation = job_answers.find_operation(self._jobs, identifier)
        job = self._jobs.jobs.get(operation.job)
        return q.OperationAnswer(operation, "" if job is None or is_over(operation) else advice(job, self._jobs))

    def settled(self, answer: A) -> A:
        """Return an answer as it is after its decisions were folded."""
        settled: object = answer
        if isinstance(answer, q.OperationAnswer) and answer.operation.id in self._jobs.operations:
            settled = self._operation_answer(answer.operation.id)
        elif isinstance(answer, q.ReportNoted | q.AgentLease):
            settled = structs.replace(answer, revision=self._jobs.revision)
        return settled  # type: ignore[return-value]

    # Agents.

    def _from_agent(
        self, request: q.FromAgent, now: Instant, time: CutTime, origin: RequestOrigin | None
    ) -> JobOutcome:
        agent = agent_handling.session_of(request, self._jobs, _speaker(origin))
        match request:
            case q.RenewAgentRequest():
                self._note_progress(agent, request.progress)
                return (), self._lease()
            case q.WatchAgentRequest():
                if request.wait_ms > 0 and request.seen == agent.revision:
                    return (), None
                return (), self._orders(agent)
            case q.LeaveAgentRequest():
                reason = "the agent ended, and no process of a job is left there"
                return self._noted(j.ExpireAgent(agent.name, agent.session, reason))
            case q.FetchAssignedRequest():
                job, _ = agent_handling.assigned(self._jobs, agent.name, request.job, request.epoch)
                return (), job_answers.assigned_job(job, request.epoch)
            case q.AnswerErrandRequest():
                errand_handling.answer(request, self.errands)
                self._errand_changed = True
                return (), q.ReportNoted(self._jobs.revision)
            case q.JobTokenRequest():
                may_run = (
                    origin is not None
                    and self._access.view.decide(origin.principal, Right.RUN_JOBS, CLUSTER, origin.token).is_allowed
                )
                return errand_handling.grant_token(
                    request, self._jobs, self._access, self.errands, time, may_run=may_run
                )
            case _:
                return agent_handling.report(request, self._jobs), q.ReportNoted(self._jobs.revision)

    def _lease(self) -> q.AgentLease:
        return q.AgentLease(self.leases.lease_us // MILLISECOND, self._jobs.revision)

    def _orders(self, agent: AgentRecord) -> q.AgentOrders:
        orders = job_answers.orders_of(agent, self._jobs)
        return q.AgentOrders(agent.revision, orders, agent.is_draining, self.errands.for_agent(agent.name))

    def _note_progress(self, agent: AgentRecord, progress: tuple[q.JobProgress, ...]) -> None:
        for one in progress:
            job = self._jobs.jobs.get(one.job)
            assignment = job.assignment if job is not None else None
            if assignment is not None and (assignment.agent, assignment.epoch) == (agent.name, one.epoch):
                self._progress[one.job] = one

    def _ask_agent(self, request: q.AskAgentRequest, now: Instant, principal: str) -> q.ErrandAnswer | None:
        question = _question(request, principal)
        known = self.errands.find(question, now)
        if known is None:
            self._last_errand += 1
            identifier = f"{self._leader_epoch}-{self._last_errand}"
            errand_handling.give_out(identifier, question, request, self._jobs, self.errands, now, principal)
            self._errand_changed = True
        elif known.is_answered:
            return errand_handling.take_answer(known, self.errands)
        if request.wait_ms > 0:
            return None
        raise errand_handling.not_answered(self.errands.of(question))

    # What follows without a request.

    def hear(self, asked: Asked, now: Instant) -> None:
        """Note that an agent is alive, when its request arrives. Nobody else keeps its lease."""
        if not isinstance(asked.request, q.FromAgent):
            return
        try:
            agent = agent_handling.session_of(asked.request, self._jobs, _speaker(asked.origin))
        except CutwaterError:
            return
        self.leases.hear(agent.name, agent.session, now)

    def due(self, now: Instant) -> Iterator[j.JobDecision]:
        """Yield what is to be decided now. The caller applies each decision before it asks for the next."""
        jobs = self._jobs
        if now.monotonic >= self._leases_at:
            self._leases_at = now.monotonic + LEASES_EVERY_US
            for agent in self.leases.expired(now):
                silent = self.leases.silence(agent, now) / SECOND
                yield j.ExpireAgent(agent.name, agent.session, f"nothing was heard of it for {silent:.1f} s")
            self._forgive(now)
        if jobs.revision != self._looked_at:
            yield from self._place()
        if not self.errands.is_empty:
            for _ in self.errands.give_up(now):
                self._errand_changed = True

    def _place(self) -> Iterator[j.JobDecision]:
        """Assign jobs that wait, the oldest first, and move jobs away from agents that drain."""
        jobs, placed, is_complete = self._jobs, 0, True
        room: FreeSlots | None = None
        for number in tuple(jobs.waiting):
            job = jobs.jobs[number]
            if self._unplaced.get(number) == (job.revision, self._room_changed):
                continue
            if placed >= ASSIGNED_PER_TURN_MAX:
                is_complete = False
                break
            room = room or FreeSlots(jobs)
            decision = assign(job, jobs, room, self._avoided_by(job))
            if decision is None:
                self._unplaced[number] = (job.revision, self._room_changed)
                continue
            placed += 1
            yield decision
        if any(agent.is_draining and agent.is_alive for agent in jobs.agents.values()):
            yield from tuple(moves(jobs, room or FreeSlots(jobs)))
        if is_complete:
            self._looked_at = jobs.revision

    def note(self, decision: Decision, now: Instant) -> None:
        """Note a decision that was applied."""
        match decision:
            case j.RegisterAgent():
                self._room_changed += 1
                self.leases.hear(decision.agent.name, decision.session, now)
            case j.ExpireAgent() | j.DrainAgent():
                self._room_changed += 1
            case j.RemoveAgent():
                self._room_changed += 1
                self.leases.forget()
            case j.EndAssignment():
                self._room_changed += 1
                self._note_end(decision, now)
            case j.AssignJob():
                self._unplaced.pop(decision.job, None)
                self._avoided.pop(decision.job, None)
            case j.BeginOperation() | j.FinishStep() | j.FailOperation():
                self._forget_jobs()

    def _note_end(self, decision: j.EndAssignment, now: Instant) -> None:
        self._progress.pop(decision.job, None)
        job = self._jobs.jobs.get(decision.job)
        if job is None or decision.end is not RunEnd.RELEASED or not job.attempts:
            return
        agent = self._jobs.agents.get(job.attempts[-1].agent)
        if agent is not None and job.attempts[-1].epoch == decision.epoch and not agent.is_draining:
            self._avoided[job.number] = (agent.name, agent.session, now.monotonic + self.leases.lease_us)

    def _forgive(self, now: Instant) -> None:
        """Give jobs again to agents that gave them back long ago, and yet go on."""
        for number in [number for number, (_, _, until) in self._avoided.items() if until <= now.monotonic]:
            del self._avoided[number]
            self._unplaced.pop(number, None)
            self._looked_at = -1

    def _forget_jobs(self) -> None:
        """Forget what is known of jobs that were deleted."""
        known = self._jobs.jobs
        self._progress = {number: its for number, its in self._progress.items() if number in known}
        self._unplaced = {number: its for number, its in self._unplaced.items() if number in known}
        self._avoided = {number: its for number, its in self._avoided.items() if number in known}

    # Questions that wait.

    def wait(self, asked: Asked, now: Instant) -> bool:
        """Keep a question that has no answer yet. Return False if too many wait already. Agents always may."""
        request = asked.request
        assert isinstance(request, WAITING)
        if len(self._waiters) >= WAITERS_MAX and not isinstance(request, q.WatchAgentRequest):
            return False
        until = now.monotonic + min(request.wait_ms, q.WAIT_MS_MAX) * MILLISECOND
        errands = self.errands.changes(request.agent) if isinstance(request, q.WatchAgentRequest) else 0
        self._waiters[asked.request_id] = _Waiter(asked, request, errands)
        heappush(self._deadlines, (until, asked.request_id))
        return True

    @property
    def has_questions(self) -> bool:
        """Whether questions wait."""
        return bool(self._waiters)

    def take_ready(self, now: Instant) -> list[Asked]:
        """Remove and return the questions that have an answer now, or whose time is up: to be answered at once."""
        ready: list[RequestId] = []
        while self._deadlines and self._deadlines[0][0] <= now.monotonic:
            ready.append(heappop(self._deadlines)[1])
        if self._jobs.revision != self._answered_at or self._errand_changed:
            self._answered_at, self._errand_changed = self._jobs.revision, False
            ready += [request_id for request_id, waiter in self._waiters.items() if self._has_answer(waiter)]
        waiters = [self._waiters.pop(request_id) for request_id in ready if request_id in self._waiters]
        return [structs.replace(one.asked, request=structs.replace(one.request, wait_ms=0)) for one in waiters]

    def take_waiting(self) -> list[Asked]:
        waiters, self._waiters = self._waiters, {}
        self._deadlines.clear()
        return [waiter.asked for waiter in waiters.values()]

    def _has_answer(self, waiter: _Waiter) -> bool:
        request, jobs = waiter.request, self._jobs
        match request:
            case q.WatchAgentRequest():
                agent = jobs.agents.get(request.agent)
                if agent is None or agent.session != request.session or not agent.is_alive:
                    return True
                return agent.revision != request.seen or self.errands.changes(agent.name) != waiter.errands
            case q.DescribeJobRequest():
                job = jobs.named(request.name)
                return job is None or job.revision != request.seen
            case q.DescribeOperationRequest():
                operation = jobs.operations.get(request.operation)
                return operation is None or is_over(operation)
            case q.AskAgentRequest():
                principal = waiter.asked.origin.principal if waiter.asked.origin is not None else ""
                errand = self.errands.of(_question(request, principal))
                return errand is None or errand.is_answered
        return True


def _speaker(origin: RequestOrigin | None) -> str | None:
    """Return the principal that speaks for an agent; None while access control is off."""
    return None if origin is None else origin.principal


def _question(request: q.AskAgentRequest, principal: str) -> bytes:
    """Return what tells an errand from others: the principal, and what it asks."""
    return msgpack.encode((principal, structs.replace(request, wait_ms=0)))
