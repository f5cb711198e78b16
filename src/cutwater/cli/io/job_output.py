"""Shows jobs, operations and agents: tables, descriptions, and the progress of an operation while it is waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from cutwater.admin.jobs import is_over
from cutwater.admin.status_text import time_of
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.io.output import table
from cutwater.cli.io.pipeline_output import clock, size, time_of_ms
from cutwater.core.jobs.job_records import AttemptRecord, JobRecord, JobSavepoint, JobVersion
from cutwater.core.jobs.job_requests import AgentSummary, JobDescription, JobProgress, JobSummary
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import Operation, OperationStep
from cutwater.core.text import counted, seconds

_CLEAR = "\r\x1b[K"
ERROR_SHOWN = 80
"""Characters of an error in a list; a description has all of it."""

_IN_WORDS = {
    OperationStep.START: "start on an agent",
    OperationStep.COME_UP: "decide the first batch",
    OperationStep.SAVEPOINT: "take a savepoint",
    OperationStep.VALIDATE: "find out whether the program can restore the savepoint",
    OperationStep.STOP: "take a savepoint and end",
    OperationStep.END: "end",
}


class OperationDisplay:
    """Shows each step of an operation as it begins: a line on a terminal, which is renewed, or a line for each step.
    Programs that read JSON get the end only."""

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty() and not Settings.is_json
        self._shown = ""

    def show(self, operation: Operation, waits_for: str = "") -> None:
        if not is_over(operation):
            self.note(step_line(operation) + (f" ({waits_for})" if waits_for else ""))

    def note(self, line: str) -> None:
        if Settings.is_json or line == self._shown:
            return
        self._shown = line
        if self._is_live:
            print(f"{_CLEAR}{clock(time.time())} {line}", end="", flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._is_live and self._shown:
            print(_CLEAR, end="", flush=True)


def step_line(operation: Operation) -> str:
    """Say which step of an operation is next."""
    step = operation.next_step
    if step is None:
        return f"{operation.kind} of job {operation.name!r}: {operation.state}"
    place = f"step {operation.step + 1} of {len(operation.steps)}"
    return f"{operation.kind} of job {operation.name!r}, {place}: {_IN_WORDS[step]}"


def runs_line(operation: Operation, found: JobDescription) -> str:
    """Say what a job does after an operation that started it."""
    job = found.job
    where = f" on agent {job.assignment.agent}" if job.assignment is not None else ""
    failed = f", after {job.failure.code}: {job.failure.message}" if job.failure is not None else ""
    return f"job {operation.name!r} is {found.phase}{where}, version {job.version}{failed or _why(found)}"


# Jobs.


def jobs_table(jobs: tuple[JobSummary, ...]) -> Any:
    columns = ["job", "phase", "since (UTC)", "version", "parallelism", "agent", "operation", "owner", "error"]
    return table(columns, map(_job_row, jobs))


def _job_row(job: JobSummary) -> tuple[object, ...]:
    error = job.error if len(job.error) <= ERROR_SHOWN else f"{job.error[: ERROR_SHOWN - 1]}…"
    named = (job.name, job.phase, time_of(job.since), job.version, job.parallelism)
    # An operation in progress is told by its id, which only programs need.
    return (*named, job.agent or None, "in progress" if job.operation else None, job.owner or None, error or None)


def tell_job(found: JobDescription) -> Iterator[str]:
    """Describe a job, line by line."""
    job = found.job
    yield f"job {job.name!r}: {found.phase}{_why(found)}"
    yield f"  version:     {job.version}{_others(found)}, {_up(job)}"
    yield from (f"  {line}" for line in tell_spec(job.spec))
    if job.owner:
        yield f"  owner:       {job.owner}"
    if job.assignment is not None:
        since = f"since {time_of(job.assignment.since)} UTC, epoch {job.assignment.epoch}"
        yield f"  agent:       {job.assignment.agent}, {since}, attempt {job.assignment.attempt or 'to come'}"
    if job.pinned_to:
        yield f"  pinned to:   agent {job.pinned_to}, whose checkpoint root {job.spec.checkpoint_root!r} is not shared"
    yield from _start(job)
    if found.progress is not None:
        yield f"  progress:    {progress_line(found.progress)}"
    if job.failure is not None:
        yield f"  last error:  {_failure(job)}"
    yield from (f"  attempt:     {_attempt(attempt)}" for attempt in job.attempts)
    if job.savepoints:
        yield f"  savepoints:  {len(job.savepoints)}, the last {savepoint_line(job.savepoints[-1])}"
    yield from (f"  operation:   {operation_line(operation)}" for operation in found.operations)


def _why(found: JobDescription) -> str:
    return f", {found.waits_for}" if found.waits_for else ""


def _others(found: JobDescription) -> str:
    """Name the other versions, as ranges."""
    ranges: list[list[int]] = []
    for number in sorted(set(found.versions) - {found.job.version}):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f" (others: {', '.join(' to '.join(map(str, one)) for one in ranges)})" if ranges else ""


def _up(job: JobRecord) -> str:
    return "has decided its first batch" if job.has_come_up else "has not decided a batch yet"


def _start(job: JobRecord) -> Iterator[str]:
    start = job.start
    if start.checkpoint is not None:
        at = f", GLSN {start.checkpoint.glsn}" if start.checkpoint.glsn else ""
        yield f"  checkpoint:  {start.checkpoint.path} below root {start.checkpoint.root!r}{at}"
    if start.savepoint:
        yield f"  began with:  savepoint {start.savepoint}"


def tell_spec(spec: JobSpec) -> Iterator[str]:
    """Describe a specification, line by line."""
    yield f"program:     {spec.entry} in {spec.program[:12]}…"
    takes = f"{counted(spec.slots, 'slot')}"
    takes += f", {size(spec.memory_bytes)} of memory" if spec.memory_bytes else ""
    takes += f", {spec.cpus:g} processors" if spec.cpus else ""
    yield f"parallelism: {spec.parallelism}; takes {takes}"
    for name, values in (("arguments", spec.arguments), ("conf", spec.conf), ("labels", spec.labels)):
        if values:
            yield f"{name + ':':12} {', '.join(f'{key}={value}' for key, value in values.items())}"
    if spec.master:
        yield f"master:      {spec.master}"
    yield f"roots:       checkpoints {spec.checkpoint_root!r}, savepoints {spec.savepoint_root!r}"
    if spec.restart:
        yield f"restart:     {spec.restart}"
    if spec.requirements:
        yield f"requirements: {spec.requirements[:12]}…"


def progress_line(progress: JobProgress) -> str:
    lag = "?" if progress.lag_rows < 0 else f"{progress.lag_rows:,}"
    watermark = time_of_ms(progress.watermark or None)
    return (
        f"{progress.rows_per_s:,.0f} rows/s  lag {lag} rows  watermark {watermark}  "
        f"state {size(progress.state_bytes)}  batch {progress.batch}, GLSN {progress.glsn}"
    )


def _failure(job: JobRecord) -> str:
    assert job.failure is not None
    at = f" (GLSN {job.failure.glsn})" if job.failure.glsn else ""
    version = f"version {job.failed_version} failed: " if job.failed_version else ""
    return f"{version}{job.failure.code}: {job.failure.message}{at}"


def _attempt(attempt: AttemptRecord) -> str:
    ran = f"{attempt.number} of epoch {attempt.epoch} on {attempt.agent}, version {attempt.version}"
    ended = f", {attempt.end} {time_of(attempt.ended)}" if attempt.end is not None else ", runs"
    why = f": {attempt.failure.message}" if attempt.failure is not None else ""
    return f"{ran}, begun {time_of(attempt.begun)}{ended}{why}"


def operation_line(operation: Operation) -> str:
    if operation.next_step is not None:
        return f"{operation.kind}, {_IN_WORDS[operation.next_step]}: {operation.step + 1} of {len(operation.steps)}"
    why = f": {operation.error.message}" if operation.error is not None else ""
    by = f" by {operation.principal}" if operation.principal else ""
    return f"{operation.kind}{by}, {operation.state} {time_of(operation.finished)}{why}"


def versions_table(versions: tuple[JobVersion, ...], present: int) -> Any:
    columns = ["version", "state", "made (UTC)", "by", "program", "entry", "parallelism", "arguments"]
    return table(columns, (_version_row(version, present) for version in versions))


def _version_row(version: JobVersion, present: int) -> tuple[object, ...]:
    spec = version.spec
    state = "came up" if version.has_come_up else "never came up"
    if version.number == present:
        state = "present" if version.has_come_up else "present, not up yet"
    arguments = [f"{key}={value}" for key, value in spec.arguments.items()]
    made = (version.number, state, time_of(version.made), version.principal or None)
    return (*made, f"{spec.program[:12]}…", spec.entry, spec.parallelism, arguments)


def savepoint_line(savepoint: JobSavepoint) -> str:
    return f"{savepoint.id} of version {savepoint.version} at GLSN {savepoint.glsn}, {time_of(savepoint.taken)} UTC"


def savepoints_table(savepoints: tuple[JobSavepoint, ...]) -> Any:
    columns = ["savepoint", "taken (UTC)", "GLSN", "version", "size", "root", "path", "agent"]
    rows = (
        (s.id, time_of(s.taken), s.glsn, s.version, size(s.bytes) if s.bytes else None, s.root, s.path, s.agent)
        for s in savepoints
    )
    return table(columns, rows)


# Agents.


def agents_table(agents: tuple[AgentSummary, ...]) -> Any:
    columns = ["agent", "state", "slots", "jobs", "labels", "host", "version"]
    return table(columns, map(_agent_row, agents))


def _agent_row(found: AgentSummary) -> tuple[object, ...]:
    told = found.agent.description
    labels = [f"{key}={value}" for key, value in told.labels.items()]
    used = f"{found.used_slots} of {told.slots}"
    return found.agent.name, agent_state(found), used, found.jobs, labels, told.host or None, told.version or None


def agent_state(found: AgentSummary) -> str:
    agent = found.agent
    if not agent.is_alive:
        return f"lost since {time_of(agent.since)}"
    return "draining" if agent.is_draining else "alive"


def tell_agent(found: AgentSummary) -> Iterator[str]:
    """Describe an agent, line by line."""
    agent, told = found.agent, found.agent.description
    silent = f", last heard of {seconds(found.silent_us)} ago" if agent.is_alive else ""
    yield f"agent {agent.name!r}: {agent_state(found)}{silent}"
    yield f"  slots:      {found.used_slots} of {told.slots} taken"
    yield f"  jobs:       {', '.join(found.jobs) or 'none'}"
    yield f"  labels:     {', '.join(f'{key}={value}' for key, value in told.labels.items()) or 'none'}"
    yield f"  masters:    {', '.join(told.masters)}"
    for kind, roots in (("checkpoint", told.checkpoint_roots), ("savepoint", told.savepoint_roots)):
        for root in roots:
            where = f" at {root.place}" if root.place else ""
            yield f"  {kind + 's:':11} {root.name!r}{where}, {'shared' if root.is_shared else 'of this agent only'}"
    yield f"  isolation:  {told.isolation}"
    yield f"  limits:     {told.limits or '-'}"
    yield f"  host:       {told.host or '-'}, version {told.version or '-'}, since {time_of(agent.since)} UTC"
    if agent.principal:
        yield f"  principal:  {agent.principal}"


def tell_plain(value: Any, depth: int = 0) -> Iterator[str]:
    """Write JSON for people: a line for each value, indented."""
    indent = "  " * depth
    items = value.items() if isinstance(value, dict) else ((f"{place}", item) for place, item in enumerate(value))
    for name, item in items:
        if isinstance(item, dict | list) and item:
            yield f"{indent}{name}:"
            yield from tell_plain(item, depth + 1)
        else:
            yield f"{indent}{name}: {item if item not in ([], {}, None, '') else '-'}"
