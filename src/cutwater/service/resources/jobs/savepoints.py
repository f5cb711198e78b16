"""Savepoints of jobs, by id, and the state in them. Agents have the files, and look into them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cutwater.admin.jobs import JobCalls
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.errand_bodies import STATE_ROWS
from cutwater.errors import InvalidArgument, NotFound
from cutwater.service.resources.jobs.agent_answers import ROUTE_SECONDS, WaitQuery, answered
from cutwater.service.resources.jobs.job_views import (
    ID_IN_PATH,
    JOB_IN_PATH,
    RandomId,
    SavepointView,
    StateView,
    VerificationView,
    view_savepoint,
    view_state,
    view_verification,
)
from cutwater.service.resources.paging import PageQuery
from cutwater.service.routes import Page, RestCall, RestRoute, delete, get, post

STATE_ROWS_MAX = 10_000
KEY_COLUMNS_MAX = 64


class SavepointAnswer(Struct, frozen=True):
    """A savepoint, and its manifest as ``cutwater savepoint describe -o json`` shows it."""

    savepoint: SavepointView
    manifest: dict[str, Any]


class DiffQuery(WaitQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``other``: the savepoint of the same job to compare with."""

    other: RandomId


class StateQuery(WaitQuery, frozen=True, forbid_unknown_fields=True):
    """``savepoint``: by default the last one. ``uid``: one operator. ``key``: one key, as a list in JSON with a text
    for each of its columns, such as ``["ann"]``."""

    savepoint: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    uid: Annotated[str, Meta(max_length=255)] = ""
    key: Annotated[str, Meta(max_length=4_096)] = ""
    limit: Annotated[int, Meta(ge=1, le=STATE_ROWS_MAX)] = STATE_ROWS


class DeleteSavepointQuery(WaitQuery, frozen=True, forbid_unknown_fields=True):
    """``keep_files``: forget its id only; an operator has its files, or has removed them."""

    keep_files: bool = False


class DeletedSavepoint(Struct, frozen=True):
    deleted: str
    files_kept: bool


async def savepoints(call: RestCall[PageQuery, None]) -> Page[SavepointView]:
    """The list is in the order in which they were taken, so ``after`` is the place of one in it."""
    found = (await JobCalls(call.ask).job(call.path["job"])).job.savepoints
    begin = next((at + 1 for at, one in enumerate(found) if one.id == call.query.after), 0)
    if call.query.after and not begin:
        raise InvalidArgument(
            f"the job has no savepoint {call.query.after[:80]!r} any more: begin again without `after`"
        )
    some = found[begin : begin + call.query.limit]
    is_more = begin + len(some) < len(found)
    return Page(tuple(map(view_savepoint, some)), some[-1].id if is_more else None)


async def savepoint(call: RestCall[WaitQuery, None]) -> Any:
    calls, name, identifier = JobCalls(call.ask), call.path["job"], call.path["savepoint"]
    known = (await calls.job(name)).job.savepoint_of(identifier)
    if known is None:
        raise NotFound(f"job {name!r} has no savepoint {identifier[:80]!r}")

    async def described() -> SavepointAnswer:
        manifest = await calls.describe_savepoint(name, identifier, timeout=call.query.wait)
        return SavepointAnswer(view_savepoint(known), manifest)

    return await answered(described())


async def verify_savepoint(call: RestCall[WaitQuery, None]) -> Any:
    name, identifier = call.path["job"], call.path["savepoint"]
    found = JobCalls(call.ask).verify_savepoint(name, identifier, timeout=call.query.wait)
    return await answered(found, view_verification)


async def diff_savepoints(call: RestCall[DiffQuery, None]) -> Any:
    name, identifier = call.path["job"], call.path["savepoint"]
    found = JobCalls(call.ask).diff_savepoints(name, identifier, call.query.other, timeout=call.query.wait)
    return await answered(found)


async def state(call: RestCall[StateQuery, None]) -> Any:
    query, key = call.query, _key(call.query.key)
    found = JobCalls(call.ask).state(
        call.path["job"], query.savepoint, uid=query.uid, key=key, limit=query.limit, timeout=query.wait
    )
    return await answered(found, view_state)


def _key(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    try:
        found = msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = ()
    if not 1 <= len(found) <= KEY_COLUMNS_MAX:
        raise InvalidArgument(f'key is a list in JSON with a text for each column, such as ["ann"], not {text[:80]!r}')
    return found


async def delete_savepoint(call: RestCall[DeleteSavepointQuery, None]) -> Any:
    calls, name, identifier = JobCalls(call.ask), call.path["job"], call.path["savepoint"]

    async def deleted() -> DeletedSavepoint:
        if call.query.keep_files:
            await calls.forget_savepoint(name, identifier)
        else:
            await calls.delete_savepoint(name, identifier, timeout=call.query.wait)
        return DeletedSavepoint(identifier, call.query.keep_files)

    return await answered(deleted())


OF_JOB: dict[str, Any] = {"tag": "savepoints", "path_types": {"job": JOB_IN_PATH, "savepoint": ID_IN_PATH}}
ASKS: dict[str, Any] = {
    **OF_JOB,
    "may_wait": True,
    "seconds": ROUTE_SECONDS,
}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/jobs/{job}/savepoints",
        "savepoints",
        "The savepoints of a job that are known, the oldest first",
        savepoints,
        answer=Page[SavepointView],
        query=PageQuery,
        requests=(q.DescribeJobRequest,),
        **OF_JOB,
    ),
    get(
        "/v1/jobs/{job}/savepoints/{savepoint}",
        "savepoint",
        "A savepoint, with its manifest",
        savepoint,
        answer=SavepointAnswer,
        query=WaitQuery,
        requests=(q.DescribeJobRequest, q.AskAgentRequest),
        **ASKS,
    ),
    post(
        "/v1/jobs/{job}/savepoints/{savepoint}/verify",
        "verify_savepoint",
        "Compare every file of a savepoint with its checksum",
        verify_savepoint,
        answer=VerificationView,
        query=WaitQuery,
        requests=(q.AskAgentRequest,),
        is_gated=False,
        **ASKS,
    ),
    get(
        "/v1/jobs/{job}/savepoints/{savepoint}/diff",
        "diff_savepoints",
        "What has changed from a savepoint to another",
        diff_savepoints,
        answer=dict[str, Any],
        query=DiffQuery,
        requests=(q.AskAgentRequest,),
        **ASKS,
    ),
    delete(
        "/v1/jobs/{job}/savepoints/{savepoint}",
        "delete_savepoint",
        "Remove the files of a savepoint, and forget its id",
        delete_savepoint,
        answer=DeletedSavepoint,
        query=DeleteSavepointQuery,
        requests=(q.AskAgentRequest, q.DescribeJobRequest, q.ForgetSavepointRequest),
        **ASKS,
    ),
    get(
        "/v1/jobs/{job}/state",
        "state",
        "The state of a job by operator and key, as it is in a savepoint",
        state,
        answer=StateView,
        query=StateQuery,
        requests=(q.DescribeJobRequest, q.AskAgentRequest),
        **ASKS,
    ),
)
