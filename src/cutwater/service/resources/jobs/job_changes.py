"""What callers ask of jobs. The answer is an operation, which goes on by itself: 202, with its address."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from cutwater.admin.jobs import JobCalls
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.job_spec import check_job_name
from cutwater.core.jobs.operations import OperationKind
from cutwater.errors import InvalidArgument
from cutwater.service.resources.jobs.agent_answers import ROUTE_SECONDS, WaitQuery, answered
from cutwater.service.resources.jobs.job_views import (
    JOB_IN_PATH,
    JobName,
    OperationView,
    RandomId,
    ValidationView,
    view_operation,
    view_validation,
)
from cutwater.service.resources.jobs.spec_bodies import (
    Parallelism,
    SpecBody,
    SpecChanges,
    Step,
    changed,
    spec_of,
)
from cutwater.service.routes import AnswerWith, RestCall, RestRoute, delete, post

Savepoint = Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")]


class SubmitBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A new job. ``savepoint`` and ``from_job``: begin with the state of this savepoint of another job."""

    name: JobName
    spec: SpecBody
    savepoint: RandomId | None = None
    from_job: JobName | None = None
    replay_output: bool = False
    allow_non_restored_state: bool = False


class UpgradeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The next version of a job: all of it as ``spec``, or what is different in it as ``change``. A job that does not
    run goes on from ``savepoint``, or from that of its last stop. ``step_timeout``: seconds that an agent tries a
    step; 0 leaves it to the agent."""

    spec: SpecBody | None = None
    change: SpecChanges | None = None
    savepoint: RandomId | None = None
    replay_output: bool = False
    allow_non_restored_state: bool = False
    step_timeout: Step = 0


class ValidateBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A specification to look at. ``savepoint`` is one of the job of this name; the job need not exist otherwise."""

    spec: SpecBody
    savepoint: RandomId | None = None
    allow_non_restored_state: bool = False
    agent: Annotated[str, Meta(max_length=255)] = ""


class StepQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``step_timeout``: seconds that an agent tries a step; 0 leaves it to the agent."""

    step_timeout: Step = 0


class StartQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``savepoint``: begin with this savepoint of the job, instead of where it ended. The others are about that."""

    savepoint: Savepoint = ""
    replay_output: bool = False
    allow_non_restored_state: bool = False


class RescaleQuery(StepQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``slots``: how many the job takes from now on; 0 for as many as before."""

    parallelism: Parallelism
    slots: Annotated[int, Meta(ge=0, le=1_024)] = 0


class RollBackQuery(StepQuery, frozen=True, forbid_unknown_fields=True):
    """``to``: the version; 0 is the one before."""

    to: Annotated[int, Meta(ge=0, le=2**31)] = 0


async def submit(call: RestCall[None, SubmitBody]) -> AnswerWith:
    body = call.body
    if (body.savepoint is None) != (body.from_job is None):
        raise InvalidArgument("savepoint and from_job belong together: the savepoint is one of that job")
    found = await JobCalls(call.ask).submit(
        body.name,
        spec_of(body.spec),
        savepoint=body.savepoint or "",
        from_job=body.from_job or "",
        replay_output=body.replay_output,
        allow_non_restored_state=body.allow_non_restored_state,
        key=call.key,
    )
    return _accepted(found)


async def upgrade(call: RestCall[None, UpgradeBody]) -> AnswerWith:
    body, calls, name = call.body, JobCalls(call.ask), call.path["job"]
    if (body.spec is None) == (body.change is None):
        raise InvalidArgument("an upgrade has either a `spec`, the whole of it, or a `change` of the present one")
    if body.spec is not None:
        spec = spec_of(body.spec)
    else:
        assert body.change is not None
        spec = changed((await calls.version(name)).spec, body.change)
    found = await calls.upgrade(
        name,
        spec,
        savepoint=body.savepoint or "",
        replay_output=body.replay_output,
        allow_non_restored_state=body.allow_non_restored_state,
        step_timeout=body.step_timeout,
        key=call.key,
    )
    return _accepted(found)


async def validate(call: RestCall[WaitQuery, ValidateBody]) -> Any:
    body, name = call.body, call.path["job"]
    check_job_name(name)
    return await answered(
        JobCalls(call.ask).validate(
            name,
            spec_of(body.spec),
            savepoint=body.savepoint or "",
            allow_non_restored_state=body.allow_non_restored_state,
            agent=body.agent,
            timeout=call.query.wait,
        ),
        view_validation,
    )


async def start(call: RestCall[StartQuery, None]) -> AnswerWith:
    query = call.query
    if not query.savepoint and (query.replay_output or query.allow_non_restored_state):
        raise InvalidArgument("replay_output and allow_non_restored_state are about a savepoint: name one")
    found = await JobCalls(call.ask).start(
        call.path["job"],
        savepoint=query.savepoint,
        replay_output=query.replay_output,
        allow_non_restored_state=query.allow_non_restored_state,
        key=call.key,
    )
    return _accepted(found)


async def rescale(call: RestCall[RescaleQuery, None]) -> AnswerWith:
    query = call.query
    found = await JobCalls(call.ask).rescale(
        call.path["job"], query.parallelism, slots=query.slots, step_timeout=query.step_timeout, key=call.key
    )
    return _accepted(found)


async def roll_back(call: RestCall[RollBackQuery, None]) -> AnswerWith:
    query = call.query
    found = await JobCalls(call.ask).roll_back(
        call.path["job"], version=query.to, step_timeout=query.step_timeout, key=call.key
    )
    return _accepted(found)


async def stop(call: RestCall[StepQuery, None]) -> AnswerWith:
    return await _operate(call, OperationKind.STOP, call.query.step_timeout)


async def take_savepoint(call: RestCall[StepQuery, None]) -> AnswerWith:
    return await _operate(call, OperationKind.SAVEPOINT, call.query.step_timeout)


async def cancel(call: RestCall[None, None]) -> AnswerWith:
    return await _operate(call, OperationKind.CANCEL)


async def restart(call: RestCall[None, None]) -> AnswerWith:
    return await _operate(call, OperationKind.RESTART)


async def delete_job(call: RestCall[None, None]) -> AnswerWith:
    return await _operate(call, OperationKind.DELETE)


async def _operate(call: RestCall[Any, None], kind: OperationKind, step_timeout: float = 0) -> AnswerWith:
    return _accepted(await JobCalls(call.ask).operate(call.path["job"], kind, step_timeout=step_timeout, key=call.key))


def _accepted(found: q.OperationAnswer) -> AnswerWith:
    view = view_operation(found.operation, found.advice)
    return AnswerWith(view, 202, {"Location": f"/v1/operations/{view.id}"})


BEGINS: dict[str, Any] = {
    "answer": OperationView,
    "status": 202,
    "has_key": True,
    "has_location": True,
    "tag": "jobs",
    "path_types": {"job": JOB_IN_PATH},
}
OPERATES: dict[str, Any] = {**BEGINS, "requests": (q.OperateJobRequest,)}

ROUTES: tuple[RestRoute, ...] = (
    post(
        "/v1/jobs",
        "submit",
        "Make a job and start it",
        submit,
        body=SubmitBody,
        requests=(q.SubmitJobRequest,),
        **BEGINS,
    ),
    post(
        "/v1/jobs/{job}/validate",
        "validate",
        "Let an agent load a program, and tell its plan, its schemas, and what a savepoint would restore",
        validate,
        answer=ValidationView,
        query=WaitQuery,
        body=ValidateBody,
        may_wait=True,
        seconds=ROUTE_SECONDS,
        requests=(q.AskAgentRequest,),
        tag="jobs",
        path_types={"job": JOB_IN_PATH},
    ),
    post(
        "/v1/jobs/{job}/start",
        "start",
        "Start a job that has ended: where it ended, or from a savepoint of it",
        start,
        query=StartQuery,
        **OPERATES,
    ),
    post(
        "/v1/jobs/{job}/stop",
        "stop",
        "Stop a job with a savepoint of exactly what it has published",
        stop,
        query=StepQuery,
        **OPERATES,
    ),
    post("/v1/jobs/{job}/cancel", "cancel", "End a job at once, without a savepoint", cancel, **OPERATES),
    post(
        "/v1/jobs/{job}/restart",
        "restart",
        "End the processes of a job, and start it again from its checkpoint",
        restart,
        **OPERATES,
    ),
    post(
        "/v1/jobs/{job}/savepoints",
        "take_savepoint",
        "Take a savepoint of a job, which runs on",
        take_savepoint,
        query=StepQuery,
        **OPERATES,
    ),
    post(
        "/v1/jobs/{job}/rescale",
        "rescale",
        "Go on with another parallelism, from a savepoint",
        rescale,
        query=RescaleQuery,
        requests=(q.RescaleJobRequest,),
        **BEGINS,
    ),
    post(
        "/v1/jobs/{job}/upgrade",
        "upgrade",
        "Go on with another program or other settings, from a savepoint",
        upgrade,
        body=UpgradeBody,
        requests=(q.UpgradeJobRequest, q.FetchVersionRequest),
        **BEGINS,
    ),
    post(
        "/v1/jobs/{job}/rollback",
        "roll_back",
        "Go back to an earlier version",
        roll_back,
        query=RollBackQuery,
        requests=(q.RollBackJobRequest,),
        **BEGINS,
    ),
    delete(
        "/v1/jobs/{job}",
        "delete_job",
        "End a job, and forget it; files of savepoints stay",
        delete_job,
        **OPERATES,
    ),
)
