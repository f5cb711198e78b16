"""What commands about jobs share: the job that they are about, and waiting for the operation that they begin."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cutwater.admin.jobs import JobCalls, as_error, error_of
from cutwater.cli.framework.command import Bundle
from cutwater.cli.framework.exit_codes import INTERRUPTED, Settings
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.job_output import OperationDisplay, step_line
from cutwater.cli.io.output import show
from cutwater.core.jobs.job_records import JobPhase
from cutwater.core.jobs.job_requests import JobDescription, OperationAnswer
from cutwater.core.jobs.operations import Operation, OperationError, OperationKind, OperationState, OperationStep
from cutwater.errors import DeadlineExceeded, NotFound, Refused

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
WAIT_SECONDS = 300.0
"""What a command that waits for an operation may take by default."""
UP_SECONDS = 90.0
"""How long a program that was started may take until it shows that it works. Spark takes most of it."""
_BEGINNING = (OperationKind.SUBMIT, OperationKind.START, OperationKind.RESTART)
"""Operations that are over when the program begins."""
_BEGUN = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.WAITING)


@dataclass(frozen=True)
class WaitOptions(Bundle):
    """Whether a command waits for the operation that it begins, and how it may be repeated."""

    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is over; otherwise it goes on by itself.")
    ] = True
    idempotency_key: Annotated[
        str,
        typer.Option(
            "--idempotency-key",
            metavar="TEXT",
            help="The same command with the same key does nothing twice, for 24 hours.",
        ),
    ] = ""


StepTimeoutOption = Annotated[
    float,
    typer.Option(
        "--step-timeout", metavar="SECONDS", min=0, help="How long an agent tries a step; 0 leaves it to the agent."
    ),
]


def begin(
    log: ClusterTarget,
    options: WaitOptions,
    ask: Callable[[JobCalls], Awaitable[OperationAnswer]],
    tell: Callable[[Operation, JobDescription | None], str],
) -> None:
    """Begin an operation and wait for it, as the options say. ``tell`` words what was reached."""
    answer = log.administer(lambda admin: ask(admin.jobs))
    finish(log, answer, tell, is_awaited=options.wait)


def finish(
    log: ClusterTarget,
    answer: OperationAnswer,
    tell: Callable[[Operation, JobDescription | None], str],
    *,
    is_awaited: bool,
) -> None:
    """Show an operation that was begun, or wait for it and show how it ended."""
    if answer.advice:
        print(f"note: {answer.advice}", file=sys.stderr)
    operation, job = answer.operation, None
    if is_awaited:
        operation, job = wait_for(log, operation)
        line = tell(operation, job)
    else:
        line = f"{step_line(operation)}. It goes on by itself; {how_to_wait(log, operation)}"
    told: dict[str, Any] = {"operation": operation, "job": job, "advice": answer.advice}
    show(told, line)


def wait_for(log: ClusterTarget, operation: Operation) -> tuple[Operation, JobDescription | None]:
    """Wait until an operation is over. Return it, and the job if there still is one; raise if it failed."""
    display = OperationDisplay()
    last = operation

    async def followed(calls: JobCalls) -> JobDescription | None:
        nonlocal last
        async for answer in calls.follow_operation(operation.id, timeout=log.timeout):
            last = answer.operation
            display.show(last, answer.advice)
        if last.state is OperationState.DONE and last.kind in _BEGINNING:
            display.note(f"job {last.name!r}: its program starts")
            # Its program may fail because of something that is not found.
            return await _until_up(calls, last, min(log.timeout, UP_SECONDS))
        try:
            return await calls.job(operation.name)
        except NotFound:
            return None

    try:
        job = log.administer(lambda admin: followed(admin.jobs))
    except KeyboardInterrupt:
        display.close()
        print(f"not waited for any longer: {step_line(last)}. It goes on; {how_to_wait(log, last)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except DeadlineExceeded as error:
        error.message += f"; {how_to_wait(log, last)}"
        raise
    finally:
        display.close()
    raise_if_failed(last)
    return last, job


async def _until_up(calls: JobCalls, operation: Operation, timeout: float) -> JobDescription:
    """Wait until the program of a job that was started has shown that it works, or does not. One that says neither in
    time is taken as it is: its input may be empty."""
    found = await calls.job(operation.name)
    async for found in calls.follow_job(operation.name, timeout=timeout, is_progress=True):
        job, progress = found.job, found.progress
        epoch = job.assignment.epoch if job.assignment is not None else None
        is_up = progress is not None and progress.epoch == epoch
        if operation.kind is OperationKind.SUBMIT and job.has_come_up:
            is_up = True
        # The failure of an earlier start was forgotten when this one began.
        if is_up or job.failure is not None or found.phase not in _BEGUN:
            break
    if (failure := found.job.failure) is not None:
        error = as_error(OperationError(failure.code, failure.message))
        ended = found.phase is JobPhase.FAILED
        error.message = (
            f"job {operation.name!r} was started, and its program failed: {error.message}. "
            + ("The job has ended" if ended else "Its agent starts it again")
            + f"; `cutwater job logs {operation.name}` shows what it printed"
        )
        raise error
    return found


def raise_if_failed(operation: Operation) -> None:
    error = error_of(operation)
    if error is not None:
        step = operation.steps[operation.step] if operation.step < len(operation.steps) else OperationStep.END
        error.message = f"the {operation.kind} of job {operation.name!r} failed at its step {step}: {error.message}"
        raise error
    if operation.state is OperationState.SUPERSEDED:
        raise Refused(
            f"the {operation.kind} of job {operation.name!r} was ended by a later operation: `cutwater job describe "
            f"{operation.name}` shows it"
        )


def how_to_wait(log: ClusterTarget, operation: Operation) -> str:
    return f"wait for it with: cutwater job wait {operation.name}{_where(log)}"


def _where(log: ClusterTarget) -> str:
    option = log.as_option
    return f" {option}" if option and not Settings.is_json else ""
