"""``cutwater job``: pipelines that the cluster keeps running on its agents."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.admin.jobs import JobCalls
from cutwater.cli.commands import job_logs, job_submission
from cutwater.cli.commands.job_waiting import (
    WAIT_SECONDS,
    NameArgument,
    StepTimeoutOption,
    WaitOptions,
    begin,
    finish,
)
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.job_output import (
    jobs_table,
    operation_line,
    runs_line,
    savepoint_line,
    savepoints_table,
    tell_job,
    tell_plain,
    tell_spec,
    versions_table,
)
from cutwater.cli.io.output import show
from cutwater.cli.io.pipeline_output import size
from cutwater.client.convert.json_values import encode
from cutwater.core.jobs.job_records import JobPhase, JobVersion
from cutwater.core.jobs.job_requests import JobDescription, OperationAnswer
from cutwater.core.jobs.operations import Operation, OperationKind
from cutwater.core.text import counted
from cutwater.errors import InvalidArgument, NotFound

app = noun("Jobs: pipelines that the cluster keeps running on its agents.")

command(app, timeout=WAIT_SECONDS)(job_submission.submit)
command(app, timeout=WAIT_SECONDS)(job_submission.validate)
command(app, timeout=WAIT_SECONDS)(job_submission.upgrade)
command(app)(job_logs.logs)


# Questions.


@command(app, "list")
def list_jobs(
    owner: Annotated[str, typer.Option(metavar="NAME", help="Only those of this principal.")] = "",
    phase: Annotated[JobPhase | None, typer.Option(help="Only those in this phase.")] = None,
    *,
    log: ClusterTarget,
) -> None:
    """Show all jobs, and what they are doing."""
    found = log.administer(lambda admin: admin.jobs.jobs(owner=owner, phase=phase))
    show(found, jobs_table(found))


@command(app)
def describe(name: NameArgument, log: ClusterTarget) -> None:
    """Show a job: its version, agent, attempts, last error, progress, savepoints and operations."""
    found = log.administer(lambda admin: admin.jobs.job(name))
    show(found, "\n".join(tell_job(found)))


@command(app)
def versions(
    name: NameArgument,
    number: Annotated[int, typer.Argument(metavar="[VERSION]", min=0, help="Only this one, in full.")] = 0,
    *,
    log: ClusterTarget,
) -> None:
    """Show the versions of a job: with what it ran, runs, and can be rolled back to."""
    if number:
        one = log.administer(lambda admin: admin.jobs.version(name, number))
        show(one, "\n".join((f"version {one.number} of job {name!r}", *(f"  {line}" for line in tell_spec(one.spec)))))
        return

    async def work(jobs: JobCalls) -> tuple[int, tuple[JobVersion, ...]]:
        return (await jobs.job(name)).job.version, await jobs.versions(name)

    present, found = log.administer(lambda admin: work(admin.jobs))
    show({"present": present, "versions": found}, versions_table(found, present))


@command(app, timeout=WAIT_SECONDS)
def savepoints(
    name: NameArgument,
    identifier: Annotated[str, typer.Argument(metavar="[ID]", help="Show this one in full.")] = "",
    other: Annotated[str, typer.Argument(metavar="[OTHER]", help="Show what has changed from it to this one.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file of it with its checksum.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove its files, permanently, and forget its id.")] = False,
    *,
    log: ClusterTarget,
) -> None:
    """Show the savepoints of a job that the cluster knows, or look at one, compare two, check one, or remove one.

    Except for the list, an agent answers that can reach the files.
    """
    if sum((bool(other), verify, delete)) > 1 or (not identifier and (verify or delete)):
        raise InvalidArgument("say one savepoint and --verify or --delete, or two savepoints to compare")
    if not identifier:
        found = log.administer(lambda admin: admin.jobs.job(name)).job.savepoints
        show(found, savepoints_table(found))
    elif delete:
        log.administer(lambda admin: admin.jobs.delete_savepoint(name, identifier, timeout=log.timeout))
        show({"deleted": identifier}, f"deleted savepoint {identifier} of job {name!r}")
    elif verify:
        intact = log.administer(lambda admin: admin.jobs.verify_savepoint(name, identifier, timeout=log.timeout))
        show(intact, f"savepoint {identifier} is intact: {counted(intact.files, 'file')}, {size(intact.bytes)}")
    elif other:
        changed = log.administer(lambda admin: admin.jobs.diff_savepoints(name, identifier, other, timeout=log.timeout))
        show(changed, "\n".join(tell_plain(changed)))
    else:
        told = log.administer(lambda admin: admin.jobs.describe_savepoint(name, identifier, timeout=log.timeout))
        show(told, "\n".join(tell_plain(told)))


@command(app, timeout=WAIT_SECONDS)
def state(
    name: NameArgument,
    uid: Annotated[str, typer.Option(help="One operator; by default all of them.")] = "",
    key: Annotated[
        list[str] | None, typer.Option(help="Only this key; repeat the option for each of its columns.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10_000, help="The most keys to show.")] = 20,
    savepoint: Annotated[str, typer.Option(metavar="ID", help="In this savepoint; by default in the last.")] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Show the state of a job by operator and key, as it is in a savepoint. An agent reads it."""
    found = log.administer(
        lambda admin: admin.jobs.state(name, savepoint, uid=uid, key=key or (), limit=count, timeout=log.timeout)
    )
    lines = [f"{operator}: {encode(row).decode()}" for operator, rows in found.operators.items() for row in rows]
    show(found, "\n".join([*lines, *(["… and more: -n shows them"] if found.more else [])]) or "nothing")


@command(app)
def operations(
    name: NameArgument,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10_000, help="The most to show.")] = 20,
    *,
    log: ClusterTarget,
) -> None:
    """Show what was asked of a job and what became of it, the newest first."""
    found = log.administer(lambda admin: admin.jobs.operations(name, limit=count))
    show(found, "\n".join(f"{operation.id}  {operation_line(operation)}" for operation in found) or "none")


# Operations.


def _running(operation: Operation, job: JobDescription | None) -> str:
    assert job is not None
    return runs_line(operation, job)


def _saved(operation: Operation, job: JobDescription | None) -> str:
    found = job.job.savepoint_of(operation.savepoint) if job is not None else None
    if found is None:
        return f"job {operation.name!r}: the {operation.kind} is {operation.state}"
    stopped = "stopped, with" if operation.kind is OperationKind.STOP else "has"
    return (
        f"job {operation.name!r} {stopped} savepoint {savepoint_line(found)}\n"
        f"  {found.path} below savepoint root {found.root!r}"
    )


@command(app, timeout=WAIT_SECONDS)
def start(
    name: NameArgument,
    from_savepoint: Annotated[
        str, typer.Option(metavar="ID", help="Begin with this savepoint of the job, instead of where it ended.")
    ] = "",
    replay_output: Annotated[
        bool, typer.Option("--replay-output", help="Publish again what is published under its name.")
    ] = False,
    allow_non_restored_state: Annotated[
        bool, typer.Option("--allow-non-restored-state", help="Leave out state that the program does not have.")
    ] = False,
    *,
    options: WaitOptions,
    log: ClusterTarget,
) -> None:
    """Start a job that has ended. It goes on where it ended."""
    if not from_savepoint and (replay_output or allow_non_restored_state):
        raise InvalidArgument("--replay-output and --allow-non-restored-state are about --from-savepoint: name one")

    async def ask(jobs: JobCalls) -> OperationAnswer:
        return await jobs.start(
            name,
            savepoint=from_savepoint,
            replay_output=replay_output,
            allow_non_restored_state=allow_non_restored_state,
            key=options.idempotency_key,
        )

    begin(log, options, ask, _running)


@command(app, timeout=WAIT_SECONDS)
def stop(name: NameArgument, step_timeout: StepTimeoutOption = 0, *, options: WaitOptions, log: ClusterTarget) -> None:
    """Stop a job with a savepoint of exactly what it has published. `start` goes on at the same place."""
    _operate(name, OperationKind.STOP, step_timeout, options, log)


@command(app, timeout=WAIT_SECONDS)
def savepoint(
    name: NameArgument, step_timeout: StepTimeoutOption = 0, *, options: WaitOptions, log: ClusterTarget
) -> None:
    """Take a savepoint of a job, which runs on."""
    _operate(name, OperationKind.SAVEPOINT, step_timeout, options, log)


def _operate(name: str, kind: OperationKind, step_timeout: float, options: WaitOptions, log: ClusterTarget) -> None:
    async def ask(jobs: JobCalls) -> OperationAnswer:
        return await jobs.operate(name, kind, step_timeout=step_timeout, key=options.idempotency_key)

    begin(log, options, ask, _TOLD[kind])


@command(app, timeout=WAIT_SECONDS)
def cancel(name: NameArgument, options: WaitOptions, log: ClusterTarget) -> None:
    """End a job at once. Its checkpoint stays, and `start` goes on from it."""
    _operate(name, OperationKind.CANCEL, 0, options, log)


@command(app, timeout=WAIT_SECONDS)
def restart(name: NameArgument, options: WaitOptions, log: ClusterTarget) -> None:
    """End the processes of a job, and start it again from its checkpoint."""
    _operate(name, OperationKind.RESTART, 0, options, log)


@command(app, timeout=WAIT_SECONDS)
def delete(name: NameArgument, options: WaitOptions, log: ClusterTarget) -> None:
    """End a job, and forget it with its versions and its savepoints' ids. Files of savepoints and checkpoints stay, and
    so does what it has published."""
    _operate(name, OperationKind.DELETE, 0, options, log)


def _ended(operation: Operation, job: JobDescription | None) -> str:
    return f"job {operation.name!r} is {'deleted' if job is None else job.phase}"


def _reached(operation: Operation, job: JobDescription | None) -> str:
    return _TOLD.get(operation.kind, _running)(operation, job)


_TOLD = {
    OperationKind.STOP: _saved,
    OperationKind.SAVEPOINT: _saved,
    OperationKind.CANCEL: _ended,
    OperationKind.DELETE: _ended,
    OperationKind.RESTART: _running,
}


@command(app, timeout=WAIT_SECONDS)
def rescale(
    name: NameArgument,
    parallelism: Annotated[int, typer.Option(min=1, help="How many tasks work at once from now on.")],
    slots: Annotated[int, typer.Option(min=0, help="How many slots of an agent it takes; 0: as many as before.")] = 0,
    step_timeout: StepTimeoutOption = 0,
    *,
    options: WaitOptions,
    log: ClusterTarget,
) -> None:
    """Stop a job with a savepoint, and go on from it with another parallelism. That makes a new version."""

    async def ask(jobs: JobCalls) -> OperationAnswer:
        return await jobs.rescale(
            name, parallelism, slots=slots, step_timeout=step_timeout, key=options.idempotency_key
        )

    begin(log, options, ask, _running)


@command(app, timeout=WAIT_SECONDS)
def rollback(
    name: NameArgument,
    to: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="The version; 0 is the one before the present one.")
    ] = 0,
    step_timeout: StepTimeoutOption = 0,
    *,
    options: WaitOptions,
    log: ClusterTarget,
) -> None:
    """Go back to an earlier version.

    If the present version has not decided a batch yet, the earlier one goes on from the savepoint between them.
    Otherwise it goes on from a new savepoint of the present one, if its program can restore that; if not, this is
    refused and the job runs on. What was published stays published.
    """

    async def ask(jobs: JobCalls) -> OperationAnswer:
        return await jobs.roll_back(name, version=to, step_timeout=step_timeout, key=options.idempotency_key)

    begin(log, options, ask, _running)


@command(app, timeout=WAIT_SECONDS)
def wait(
    name: NameArgument,
    operation: Annotated[
        str, typer.Argument(metavar="[OPERATION]", help="The id of an operation; by default the one in progress.")
    ] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Wait for an operation of a job: the one in progress, or the last one if there is none. Ends as the command would
    have ended that began it."""

    async def find(jobs: JobCalls) -> OperationAnswer:
        if operation:
            return await jobs.operation(operation)
        known = await jobs.operations(name, limit=1)
        if not known:
            raise NotFound(f"no operation of job {name!r} is known any more: `cutwater job describe {name}` shows it")
        return await jobs.operation(known[0].id)

    finish(log, log.administer(lambda admin: find(admin.jobs)), _reached, is_awaited=True)


@command(app, "forget-savepoint")
def forget_savepoint(
    name: NameArgument,
    identifier: Annotated[str, typer.Argument(metavar="ID", help="The id of a savepoint of the job.")],
    log: ClusterTarget,
) -> None:
    """Let a savepoint be known by its id no longer. Its files stay."""
    log.administer(lambda admin: admin.jobs.forget_savepoint(name, identifier))
    show(
        {"forgotten": identifier}, f"savepoint {identifier} of job {name!r} is not known any more; its files are there"
    )
