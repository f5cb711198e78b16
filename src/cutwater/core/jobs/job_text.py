"""Describes decisions about jobs and agents for operators, as events and audit records show them, and what they lead
to."""

from __future__ import annotations

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.job_records import BeforeSwitch
from cutwater.core.jobs.operations import Operation
from cutwater.core.text import counted

QUIET = j.BeginAttempt | j.EndAttempt | j.NoteCheckpoint | j.NoteFirstBatch | j.FinishStep
"""Decisions that come often and are no events: a description of the job has the last ones."""


def tell_job(decision: j.JobDecision) -> tuple[str, str]:
    """Return what a decision says and its reason, if it has one."""
    match decision:
        case j.RegisterAgent():
            offers = decision.agent
            where = f" on {offers.host}" if offers.host else ""
            return f"agent {offers.name!r} registered{where}, with {counted(offers.slots, 'slot')}", ""
        case j.ExpireAgent():
            return f"agent {decision.agent!r} is gone, and its jobs go to others", decision.reason
        case j.DrainAgent():
            does = "gets no further jobs, and its jobs move" if decision.is_draining else "gets jobs again"
            return f"agent {decision.agent!r} {does}", ""
        case j.RemoveAgent():
            return f"agent {decision.agent!r} removed", ""
        case j.BeginOperation():
            begun = decision.operation
            version = f" version {begun.version}" if begun.version else ""
            return f"operation {begun.id} on job {begun.name!r} begun: {begun.kind}{version}", ""
        case j.AssignJob():
            return f"job number {decision.job} assigned to agent {decision.agent!r} with epoch {decision.epoch}", ""
        case j.ReleaseJob():
            return f"job number {decision.job} is to be given back, epoch {decision.epoch}", decision.reason
        case j.EndAssignment():
            why = f"{decision.failure.code}: {decision.failure.message}" if decision.failure is not None else ""
            return f"job number {decision.job} ended with epoch {decision.epoch}: {decision.end}", why
        case j.NoteSavepoint():
            taken = decision.savepoint
            return f"savepoint {taken.id} of job number {decision.job} taken at GLSN {taken.glsn}", ""
        case j.FailOperation():
            return f"operation {decision.operation} failed", f"{decision.error.code}: {decision.error.message}"
        case j.ForgetSavepoint():
            return f"savepoint {decision.savepoint} of job number {decision.job} is not known any more", ""
        case j.BeginAttempt() | j.EndAttempt() | j.NoteCheckpoint() | j.NoteFirstBatch() | j.FinishStep():
            return "", ""


def what_goes_on(operation: Operation, before: BeforeSwitch) -> str:
    """Say what a job does after an operation whose version did not come up."""
    version = operation.version_before
    if not operation.was_running:
        return f"the job is {before.end or 'ended'} with version {version} again"
    if before.start.checkpoint is not None:
        return f"version {version} goes on from its checkpoint"
    if before.start.savepoint:
        return f"version {version} goes on from savepoint {before.start.savepoint}"
    return f"version {version} begins anew, as nothing was published"
