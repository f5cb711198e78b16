"""Drives the jobs of an ``OrderLayer`` in tests: users and agents ask, time passes, and leaders follow each other."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from job_kit import CHECKPOINT, SPEC, agent, identifier
from msgspec import structs
from order_driver import Leader

from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.job_records import JobRecord, JobSavepoint, RunEnd
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_requests import OrderedAction
from cutwater.core.jobs.operations import Operation, OperationKind, OperationState
from cutwater.core.order.events import Asked, OrderEffect, Reply, Wake
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import Snapshot
from cutwater.core.requests import Request
from cutwater.errors import CutwaterError
from cutwater.types import GLSN, MILLISECOND, BatchNumber, Instant, JobEpoch

A = TypeVar("A")


class JobLeader:
    """One leader after another, with the users and agents of its jobs."""

    def __init__(self) -> None:
        self.leader = Leader()
        self._requests = 0
        self._ids = 0
        self.answers: dict[int, Any] = {}

    @property
    def jobs(self) -> JobRegistry:
        return self.leader.state.jobs

    def job(self, name: str = "fraud") -> JobRecord:
        job = self.jobs.named(name)
        assert job is not None
        return job

    def epoch(self, name: str = "fraud") -> JobEpoch:
        assignment = self.job(name).assignment
        assert assignment is not None
        return assignment.epoch

    def operation(self, identifier: str) -> Operation:
        return self.jobs.operations[identifier]

    def new_id(self) -> str:
        self._ids += 1
        return identifier(self._ids)

    # Requests.

    def send(self, request: Request, principal: str = "") -> int:
        """Ask, and return the number under which ``answers`` will have the answer."""
        self._requests += 1
        origin = RequestOrigin(principal) if principal else None
        self._take(self.leader.run(Asked(self._requests, request, origin)))
        return self._requests

    def ask(self, request: Request, expected: type[A], principal: str = "") -> A:
        number = self.send(request, principal)
        answer = self.answers[number]
        if isinstance(answer, CutwaterError):
            raise answer
        assert isinstance(answer, expected), answer
        return answer

    def _take(self, effects: list[OrderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.answers[effect.request_id] = effect.outcome

    def pass_time(self, ms: int, step_ms: int = 50) -> None:
        """Let time pass, with a wake now and then."""
        for _ in range(0, ms, step_ms):
            now = self.leader.now
            us = step_ms * MILLISECOND
            self.leader.now = Instant(now.monotonic + us, now.wall + us)
            self._take(self.leader.run(Wake()))

    def next_leader(self, *, from_snapshot: bool = True) -> None:
        """Let another leader go on, from a snapshot or from the decisions."""
        old = self.leader
        snapshot = None
        if from_snapshot:
            encoded = msgspec.msgpack.encode(old.state.snapshot())
            snapshot = msgspec.msgpack.decode(encoded, type=Snapshot)
        self.leader = Leader(() if from_snapshot else old.stored, snapshot=snapshot, now=old.now)
        assert self.jobs.snapshot() == old.state.jobs.snapshot()
        self.leader.stored = list(old.stored)

    # Users.

    def submit(self, name: str = "fraud", spec: Any = SPEC, principal: str = "", **fields: Any) -> str:
        found = self.new_id()
        return self.ask(q.SubmitJobRequest(name, spec, found, **fields), q.OperationAnswer, principal).operation.id

    def operate(self, kind: OperationKind, name: str = "fraud", principal: str = "", **fields: Any) -> str:
        request = q.OperateJobRequest(name, kind, self.new_id(), **fields)
        return self.ask(request, q.OperationAnswer, principal).operation.id

    def upgrade(self, spec: Any, name: str = "fraud", **fields: Any) -> str:
        return self.ask(q.UpgradeJobRequest(name, spec, self.new_id(), **fields), q.OperationAnswer).operation.id

    def roll_back(self, name: str = "fraud", version: int = 0) -> str:
        return self.ask(q.RollBackJobRequest(name, self.new_id(), version), q.OperationAnswer).operation.id

    # Agents.

    def register(self, name: str = "a", session: int = 1, principal: str = "", **more: Any) -> q.AgentLease:
        return self.ask(q.RegisterAgentRequest(agent(name, **more), session), q.AgentLease, principal)

    def renew(self, name: str = "a", session: int = 1) -> None:
        self.ask(q.RenewAgentRequest(name, session), q.AgentLease)

    def orders(self, name: str = "a", session: int = 1) -> dict[str, q.JobOrder]:
        answer = self.ask(q.WatchAgentRequest(name, session), q.AgentOrders)
        return {order.name: order for order in answer.orders}

    def obey(self, name: str = "a", session: int = 1) -> bool:
        """Do the next thing that the orders of an agent ask for; return whether there was one."""
        orders = self.orders(name, session)
        done = [self._obey(name, session, order) for order in orders.values()]
        return True in done

    def _obey(self, agent: str, session: int, order: q.JobOrder) -> bool:
        who = (agent, session, order.job, order.epoch)
        job = self.jobs.jobs[order.job]
        assert job.assignment is not None
        if not job.assignment.attempt and order.action is not OrderedAction.END:
            checkpoint = structs.replace(CHECKPOINT, path=f"{order.name}/epoch-{order.epoch}")
            self.ask(q.BeginAttemptRequest(*who, 1, checkpoint), q.ReportNoted)
            return True
        taken = JobSavepoint(self.new_id(), "default", f"{order.name}/{self._ids}", GLSN(self._ids))
        match order.action:
            case OrderedAction.RUN:
                if job.has_come_up:
                    return False
                self.ask(q.NoteBatchRequest(*who, BatchNumber(0)), q.ReportNoted)
            case OrderedAction.SAVEPOINT:
                self.ask(q.NoteSavepointRequest(*who, order.operation, order.step, taken), q.ReportNoted)
            case OrderedAction.STOP:
                self.ask(q.NoteSavepointRequest(*who, order.operation, order.step, taken, True), q.ReportNoted)
            case OrderedAction.VALIDATE:
                assert order.savepoint is not None
                self.ask(q.FinishStepRequest(*who, order.operation, order.step), q.ReportNoted)
            case OrderedAction.END:
                end = RunEnd.RELEASED if order.is_releasing else RunEnd.CANCELLED
                self.ask(q.EndAssignmentRequest(*who, end), q.ReportNoted)
        return True

    def settle(self, *agents: tuple[str, int]) -> None:
        """Let agents do what their orders ask for, until nothing is left to do."""
        while True in [self.obey(*one) for one in agents or (("a", 1),)]:
            pass

    def done(self, identifier: str) -> Operation:
        operation = self.operation(identifier)
        assert operation.state is OperationState.DONE, operation
        return operation
