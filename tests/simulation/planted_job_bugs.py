"""Bugs in the job service, and the profile of the simulator that is made for each."""

from __future__ import annotations

from typing import Any

from msgspec import msgpack, structs
from planted_bugs import Patch, PlantedBug, plant

from cutwater.agent import job_work
from cutwater.agent.agent_events import SetDeadline
from cutwater.agent.agent_state import AgentState
from cutwater.agent.job_work import JobWork
from cutwater.core.jobs.job_records import CheckpointPointer, StartPoint
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.leading import assignment, job_desk, job_handling
from cutwater.core.jobs.leading.assignment import FreeSlots
from cutwater.core.jobs.leading.job_leases import JobLeases
from cutwater.core.jobs.operations import OperationStep
from cutwater.core.order import request_handling
from cutwater.core.publish import run_requests
from cutwater.core.publish.runs import RunRegistry


def publisher_of_an_assignment_that_is_over_not_fenced() -> list[Patch]:
    return [(run_requests, "_check_assigned", lambda run, state: None)]


def older_epoch_of_a_run_not_fenced() -> list[Patch]:
    right = run_requests.publish

    def wrong(request, state):
        """Take every driver for the newest one, with what it has staged."""
        run = state.runs.get(request.run)
        if run is None:
            return right(request, state)
        parts = tuple(structs.replace(part, generation=run.generation) for part in request.parts)
        return right(structs.replace(request, job_epoch=run.job_epoch, parts=parts), state)

    return [(request_handling, "publish", wrong)]


def version_that_returns_finds_its_run_fenced() -> list[Patch]:
    return [(RunRegistry, "may_return", lambda self, run, epoch: False)]


def lease_counted_from_the_answer() -> list[Patch]:
    right = AgentState._answered

    def wrong(self, event, now):
        return right(self, structs.replace(event, sent_ms=now), now)

    return [(AgentState, "_answered", wrong)]


def agent_goes_on_when_its_lease_ends() -> list[Patch]:
    """The agent neither looks at its lease nor tells the watchdog when it ends."""
    right = AgentState.handle

    def wrong(self, event, now):
        effects = right(self, event, now)
        return [
            SetDeadline(effect.at_ms + 600_000) if isinstance(effect, SetDeadline) else effect for effect in effects
        ]

    return [(AgentState, "handle", wrong), (AgentState, "_check_lease", lambda self, now: [])]


def new_leader_grants_no_lease() -> list[Patch]:
    """It takes every agent of which it has not heard yet for silent since long ago."""
    return [(JobLeases, "_begin", lambda self, now: now.monotonic - 10 * self.lease_us)]


def keys_forgotten_at_a_snapshot() -> list[Patch]:
    right = JobRegistry.snapshot

    def wrong(self):
        return structs.replace(right(self), keys=())

    return [(JobRegistry, "snapshot", wrong)]


def key_taken_for_any_request() -> list[Patch]:
    right = job_handling._of_key

    def wrong(request, key, jobs, now, principal):
        kept = jobs.keys.get((principal, key.key))
        if kept is None:
            return right(request, key, jobs, now, principal)
        return jobs.operations[kept.operation]

    return [(job_handling, "_of_key", wrong)]


def epochs_given_again_after_a_snapshot() -> list[Patch]:
    right = JobRegistry.snapshot

    def wrong(self):
        return structs.replace(right(self), last_epoch=max(self.epochs, default=0))

    return [(JobRegistry, "snapshot", wrong)]


def savepoint_does_not_end_its_step() -> list[Patch]:
    right = JobRegistry._advance

    def wrong(self, operation, at):
        if operation.next_step is not OperationStep.SAVEPOINT:
            right(self, operation, at)

    return [(JobRegistry, "_advance", wrong)]


def upgrade_begins_from_nothing() -> list[Patch]:
    right = JobRegistry._start

    def wrong(self, job, operation, at):
        right(self, job, operation, at)
        now = self.jobs[job.number]
        if now.version != job.version:
            self._set(structs.replace(now, start=StartPoint()))

    return [(JobRegistry, "_start", wrong)]


def assignment_begins_a_line_of_its_own() -> list[Patch]:
    return [(job_work, "next_checkpoint", _anew)]


def _anew(assigned: Any) -> CheckpointPointer:
    path = f"{assigned.name}/begun-{assigned.epoch}/epoch-{assigned.epoch}"
    return CheckpointPointer(assigned.version.spec.checkpoint_root, path)


def end_reported_while_processes_run() -> list[Patch]:
    """The agent says that none is left when it has told them to end."""

    def wrong(self, now, *, is_gentle):
        return self._end_reported(None)

    return [(JobWork, "_end", wrong)]


def slots_not_counted() -> list[Patch]:
    def wrong(self, job, agent):
        self._owners[agent].setdefault(job.owner, 1)

    return [(FreeSlots, "take", wrong)]


def labels_not_compared() -> list[Patch]:
    right = assignment.why_not_offered

    def wrong(agent, spec):
        return right(agent, structs.replace(spec, labels={}))

    return [(assignment, "why_not_offered", wrong)]


def questions_taken_for_one() -> list[Patch]:
    return [(job_desk, "_question", lambda request, principal: msgpack.encode((principal, request.name)))]


def _plant(bug: Any, seed: int, what: str, **changes: Any) -> tuple[str, PlantedBug]:
    usual = {
        "appenders": 1,
        "seconds": 4.0,
        "jobs": 1,
        "agents": 2,
        "job_users": 2,
        "job_calls_every": 0.2,
        "agent_lease": 1.5,
    }
    return plant(bug, seed, what, **(usual | changes))


JOB_BUGS: dict[str, PlantedBug] = dict(
    (
        _plant(
            publisher_of_an_assignment_that_is_over_not_fenced,
            1,
            "an assignment that is over publishes until a later one has opened the run",
            agents=1,
            agent_silences_every=0.7,
            job_calls_every=1.0,
            seconds=6.0,
        ),
        _plant(
            older_epoch_of_a_run_not_fenced,
            5,
            "a batch is decided for any driver that knows the run",
            agent_silences_every=0.5,
            job_calls_every=1.0,
            seconds=6.0,
        ),
        _plant(
            version_that_returns_finds_its_run_fenced,
            16,
            "a version cannot go on with its run after another one that decided nothing",
            job_calls_every=0.05,
            job_users=3,
            seconds=6.0,
        ),
        _plant(
            lease_counted_from_the_answer,
            6,
            "an agent counts its lease from the answer to its renewal, and not from when it sent it",
            agents=1,
            agent_silences_every=0.3,
            job_calls_every=1.0,
            seconds=6.0,
        ),
        _plant(
            agent_goes_on_when_its_lease_ends,
            1,
            "an agent does not end its jobs when it cannot renew its lease",
            agents=1,
            agent_silences_every=0.3,
            job_calls_every=1.0,
            seconds=6.0,
        ),
        _plant(
            new_leader_grants_no_lease,
            0,
            "a new leader takes agents for silent of which it has not heard",
            kill_every=0.4,
            lag_every=0.05,
            agents=3,
            job_calls_every=1.0,
            down_seconds_max=0.1,
        ),
        _plant(
            keys_forgotten_at_a_snapshot,
            0,
            "a snapshot lacks the idempotency keys",
            is_hasty=True,
            kill_every=0.4,
        ),
        _plant(
            key_taken_for_any_request,
            0,
            "the same key with another request is answered with the operation of the first",
        ),
        _plant(
            epochs_given_again_after_a_snapshot,
            1,
            "a snapshot knows the epochs of present assignments only",
            is_hasty=True,
            kill_every=0.3,
            job_calls_every=0.1,
        ),
        _plant(
            savepoint_does_not_end_its_step,
            2,
            "a step whose savepoint is taken stays the next one",
        ),
        _plant(
            upgrade_begins_from_nothing,
            0,
            "another version begins without the savepoint of the one before",
        ),
        _plant(
            assignment_begins_a_line_of_its_own,
            0,
            "a later assignment does not go on with the checkpoint of the one before",
            agent_faults_every=0.5,
        ),
        _plant(
            end_reported_while_processes_run,
            0,
            "an agent reports the end of a job before its processes are gone",
            job_calls_every=0.1,
        ),
        _plant(
            slots_not_counted,
            2,
            "an agent gets more jobs than it has slots",
            jobs=4,
        ),
        _plant(
            labels_not_compared,
            0,
            "a job is given to an agent that lacks its labels",
        ),
        _plant(
            questions_taken_for_one,
            3,
            "questions of one user about one job get the same answer",
            job_calls_every=0.05,
        ),
    )
)
