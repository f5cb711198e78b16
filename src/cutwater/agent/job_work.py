"""One assignment of a job at an agent: from its first order to the report that none of its processes is left.

::

    FETCHING ──▶ BEGINNING ──▶ STARTING ──▶ RUNNING        the program of an attempt
                     ▲             │           │
                     └── PAUSED ◀──┴───────────┘           its restart strategy lets it begin another attempt
                                   │           │
                               ENDING ◀────────┘           its processes are told to end, or are being killed
                                   │
                               REPORTING                   the end is being reported

1. The program of an attempt starts only after the decision that the attempt begins is stored.
2. The end of the assignment is reported only after no process of it is left.
3. Reports are sent one after the other, each until it is answered or refused.
4. A step of an operation is begun once. What came of it is reported once.
"""

from __future__ import annotations

import enum
from collections import deque
from random import Random

from msgspec import Struct

from cutwater.agent.agent_events import (
    AgentEffect,
    AgentRequest,
    Ask,
    JobKey,
    KillJob,
    StartJob,
    TellJob,
    ValidateJob,
)
from cutwater.agent.checkpoint_lines import next_checkpoint
from cutwater.agent.job.job_messages import FromJob, JobAnswers, JobEnds, JobMoves, JobRuns, SaveJob, StopJob
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.job_records import CheckpointPointer, JobSavepoint, RunEnd, RunFailure
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError
from cutwater.jobs.restarts import DEFAULT, Restarts, parse
from cutwater.types import GLSN, BatchNumber

REPORT_MS = 10_000
"""How long one try of a report may take."""
STEP_MS = 300_000
"""How long a step of an operation may take if nothing else is said."""
ANSWER_MS = 30_000
"""How much longer a job may take to say that a step has failed."""
RELEASE_MS = 30_000
"""How long a job may take to stop when the agent gives it back."""
NOTE_MS = 60_000
"""How often the batch of the checkpoint is noted."""
ERROR_CHARS_MAX = 4_096


class WorkStage(enum.Enum):
    FETCHING = "fetching"
    BEGINNING = "beginning"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    ENDING = "ending"
    REPORTING = "reporting"
    OVER = "over"
    """Nothing is left to do. The agent forgets it."""


WITH_PROCESS = frozenset({WorkStage.STARTING, WorkStage.RUNNING, WorkStage.ENDING})


class _Step(Struct):
    """A step of an operation that the order names."""

    operation: str
    step: int
    action: r.OrderedAction
    deadline_ms: int
    ask: int = 0
    """The number of the message to the job; 0 if it was not told yet."""
    is_done: bool = False
    """Whether its outcome is known, and is being or was reported."""
    saved: JobSavepoint | None = None
    """The savepoint with which the job stops."""


class JobWork:
    """See the module. Every method returns effects."""

    def __init__(self, agent: str, session: int, order: r.JobOrder, random: Random) -> None:
        self._agent, self._session, self._random = agent, session, random
        self.order = order
        self.key: JobKey = (order.job, order.epoch)
        self.stage = WorkStage.FETCHING
        self.assigned: r.AssignedJob | None = None
        self.progress: r.JobProgress | None = None
        self.reports: deque[AgentRequest] = deque()
        self._is_asking = False
        """Whether the oldest report is under way."""
        self.is_lost = False
        """Whether only processes are left to end, and nothing is reported."""
        self._attempt = 0
        self._restarts = Restarts(DEFAULT)
        self._checkpoint = CheckpointPointer("", "")
        self._step: _Step | None = None
        self._asks = 0
        self._ended: JobEnds | None = None
        self._has_batch = False
        self._noted_at = 0
        self._noted_batch = -1
        self._wake_ms: int | None = None
        """When a paused job begins another attempt, or an ending one is killed."""

    # What the agent asks.

    @property
    def has_process(self) -> bool:
        return self.stage in WITH_PROCESS

    @property
    def next_ms(self) -> int | None:
        """When ``tick`` has something to do."""
        times = [self._wake_ms]
        if self._step is not None and not self._step.is_done:
            times.append(self._step.deadline_ms + (ANSWER_MS if self._step.ask else 0))
        return min((at for at in times if at is not None), default=None)

    def begin(self) -> list[AgentEffect]:
        return self._report(r.FetchAssignedRequest(self._agent, self._session, *self.key))

    def follow(self, order: r.JobOrder, now: int) -> list[AgentEffect]:
        """Take the order as it is now."""
        self.order = order
        if self.is_lost or self.stage in (WorkStage.REPORTING, WorkStage.OVER):
            return []
        if order.action is r.OrderedAction.END:
            self._step = None
            return self._end(now, is_gentle=order.is_releasing)
        if order.action is r.OrderedAction.RUN:
            self._step = None
            return []
        known = self._step
        if known is None or (known.operation, known.step) != (order.operation, order.step):
            deadline = now + (order.timeout_ms or STEP_MS)
            self._step = _Step(order.operation, order.step, order.action, deadline)
        return self._go_on_with_step(now)

    def release(self, now: int) -> list[AgentEffect]:
        """Let the job stop, since the agent ends. Nothing is reported: the agent says that it leaves."""
        if self.is_lost or self.stage is WorkStage.OVER:
            return []
        self.is_lost, self._step, self._wake_ms = True, None, None
        self.reports.clear()
        if self.stage is WorkStage.RUNNING:
            self._asks, self._wake_ms = self._asks + 1, now + RELEASE_MS
            self.stage = WorkStage.ENDING
            return [TellJob(self.key, StopJob(self._asks, RELEASE_MS / 1_000))]
        self.stage = WorkStage.ENDING if self.has_process else WorkStage.OVER
        return [KillJob(self.key)] if self.has_process else []

    def abandon(self) -> list[AgentEffect]:
        """Kill everything, and report nothing: the assignment is over."""
        if self.is_lost and self._wake_ms is None:
            return []
        self.is_lost, self._step, self._wake_ms = True, None, None
        self.reports.clear()
        self._is_asking = False
        if self.has_process:
            self.stage = WorkStage.ENDING
            return [KillJob(self.key)]
        self.stage = WorkStage.OVER
        return []

    def fail(self, error: OperationError) -> list[AgentEffect]:
        """End the assignment before anything was started."""
        self.reports.clear()
        self._is_asking = False
        return self._finish(RunEnd.FAILED, _failure(error.code, error.message))

    def tick(self, now: int) -> list[AgentEffect]:
        effects: list[AgentEffect] = []
        if self._wake_ms is not None and now >= self._wake_ms:
            self._wake_ms = None
            if self.stage is WorkStage.PAUSED:
                effects += self._begin_attempt()
            elif self.stage is WorkStage.ENDING:
                effects.append(KillJob(self.key))
        step = self._step
        if step is not None and not step.is_done and now >= step.deadline_ms:
            if not step.ask:
                why = "the job did not run" if step.action is not r.OrderedAction.VALIDATE else "it was not done"
                effects += self._fail_step(step, "deadline_exceeded", f"{why} before the time of this step was up")
            elif now >= step.deadline_ms + ANSWER_MS:
                effects += self._fail_step(step, "deadline_exceeded", "the job did not say what came of it in time")
        return effects

    # Answers of the cluster.

    def answered(self, request: AgentRequest, answer: object, now: int) -> list[AgentEffect]:
        if not self.reports or self.reports[0] != request:
            return []
        self.reports.popleft()
        self._is_asking = False
        effects: list[AgentEffect] = []
        if isinstance(request, r.FetchAssignedRequest):
            assert isinstance(answer, r.AssignedJob)
            effects += self._fetched(answer, now)
        elif isinstance(request, r.BeginAttemptRequest) and self.stage is WorkStage.BEGINNING:
            assert self.assigned is not None
            self.stage, self._ended = WorkStage.STARTING, None
            effects.append(StartJob(self.key, self.assigned, self._attempt, self._checkpoint))
        elif isinstance(request, r.EndAssignmentRequest) or _is_last(request):
            self.stage = WorkStage.OVER
        return effects + self._next_report()

    def refused(self, request: AgentRequest, error: OperationError, now: int) -> list[AgentEffect]:
        """A report was refused. That of a step may come too late for its operation; any other refusal means that the
        assignment is over."""
        if not self.reports or self.reports[0] != request:
            return []
        self.reports.popleft()
        self._is_asking = False
        if not isinstance(request, r.FinishStepRequest | r.NoteSavepointRequest):
            return self.abandon()
        effects = self._next_report()
        step = self._step
        if step is not None and (step.operation, step.step) == (request.operation, request.step):
            if isinstance(request, r.NoteSavepointRequest):
                # If the step is wanted still, this makes it fail. If it is not, this is refused, too.
                step.saved = None
                effects += self._fail_step(step, error.code, error.message)
            else:
                # If the step is wanted still, the next orders begin it anew.
                self._step = None
        if _is_last(request):
            # The job has stopped, and the cluster wants something else meanwhile. The next orders say what.
            effects += self._pause(now, now + 1_000)
        return effects

    def unanswered(self, request: AgentRequest) -> list[AgentEffect]:
        if not self.reports or self.reports[0] != request:
            return []
        self._is_asking = False
        return self._next_report()

    def _fetched(self, assigned: r.AssignedJob, now: int) -> list[AgentEffect]:
        self.assigned, self._attempt = assigned, assigned.attempt
        try:
            self._restarts = Restarts(
                parse(assigned.version.spec.restart) if assigned.version.spec.restart else DEFAULT
            )
        except CutwaterError as error:
            return self._finish(RunEnd.FAILED, _failure(error.code, error.message))
        self._checkpoint = next_checkpoint(assigned)
        effects: list[AgentEffect] = []
        if assigned.attempt:
            # This session had begun it, and gave the assignment up when a report was refused. The cluster may not know.
            lost = (self._attempt, RunEnd.LOST)
            effects += self._report(r.EndAttemptRequest(self._agent, self._session, *self.key, *lost))
        if self._ends_now():
            return effects + self._end(now, is_gentle=False)
        return effects + self._begin_attempt()

    def _begin_attempt(self) -> list[AgentEffect]:
        self.stage, self._attempt = WorkStage.BEGINNING, self._attempt + 1
        return self._report(
            r.BeginAttemptRequest(self._agent, self._session, *self.key, self._attempt, self._checkpoint)
        )

    # Messages of the job.

    def spoke(self, message: FromJob, now: int) -> list[AgentEffect]:
        if self.stage not in WITH_PROCESS or self.is_lost:
            return []
        match message:
            case JobRuns():
                if self.stage is WorkStage.STARTING:
                    self.stage = WorkStage.RUNNING
                return self._go_on_with_step(now)
            case JobMoves():
                return self._moved(message, now)
            case JobAnswers():
                return self._step_answered(message)
            case JobEnds():
                self._ended = message
        return []

    def _moved(self, message: JobMoves, now: int) -> list[AgentEffect]:
        batch, glsn = BatchNumber(message.batch), GLSN(message.glsn)
        self.progress = r.JobProgress(
            *self.key,
            batch,
            glsn,
            message.rows_per_s,
            message.lag_rows,
            message.watermark,
            message.state_bytes,
        )
        effects: list[AgentEffect] = []
        if not self._has_batch and batch >= 0:
            self._has_batch, self._noted_at = True, now
            effects += self._report(r.NoteBatchRequest(self._agent, self._session, *self.key, batch, glsn))
        if batch > self._noted_batch and now >= self._noted_at + NOTE_MS:
            self._noted_at, self._noted_batch = now, batch
            pointer = CheckpointPointer(self._checkpoint.root, self._checkpoint.path, batch, glsn)
            effects += self._report(r.NoteCheckpointRequest(self._agent, self._session, *self.key, pointer))
        return effects

    def gone(self, reason: str, error: OperationError | None, is_hopeless: bool, now: int) -> list[AgentEffect]:
        """No process is left."""
        self._wake_ms, ended, self._ended = None, self._ended, None
        if self.is_lost:
            self.stage = WorkStage.OVER
            return []
        step = self._step
        if self._ends_now():
            return self._end_reported(ended)
        if error is not None:
            return self._failed(_failure(error.code, error.message), now, is_hopeless=is_hopeless)
        if ended is None:
            return self._failed(_failure("unavailable", reason), now, is_hopeless=False)
        if ended.end is RunEnd.FINISHED:
            return self._finish(RunEnd.FINISHED)
        if ended.end is RunEnd.FAILED:
            told = ended.error
            failure = _failure("unavailable", reason) if told is None else _failure(told.code, told.message, ended.glsn)
            return self._failed(failure, now, is_hopeless=ended.is_hopeless)
        if step is not None and step.saved is not None:
            self.stage = WorkStage.REPORTING
            return self._note_savepoint(step, step.saved, has_ended=True)
        # Something else stopped the program.
        return self._failed(_failure("unavailable", f"the program was stopped from outside: {reason}"), now)

    def _failed(self, failure: RunFailure, now: int, *, is_hopeless: bool = False) -> list[AgentEffect]:
        wait_ms = None if is_hopeless else self._restarts.failed(now, self._random.uniform(-1, 1))
        if wait_ms is None:
            return self._finish(RunEnd.FAILED, failure)
        effects = self._pause(now, now + wait_ms)
        request = r.EndAttemptRequest(self._agent, self._session, *self.key, self._attempt, RunEnd.FAILED, failure)
        return effects + self._report(request)

    def _pause(self, now: int, until_ms: int) -> list[AgentEffect]:
        self.stage, self._wake_ms = WorkStage.PAUSED, until_ms
        step = self._step
        if step is not None and step.ask and (step.saved is not None or not step.is_done):
            # The program died before it said what came of the step, or before it had stopped. The next attempt is told
            # again.
            step.ask, step.is_done, step.saved = 0, False, None
        return self._end(now, is_gentle=False) if self._ends_now() else []

    # The end.

    def _ends_now(self) -> bool:
        return self.order.action is r.OrderedAction.END

    def _end(self, now: int, *, is_gentle: bool) -> list[AgentEffect]:
        match self.stage:
            case WorkStage.STARTING | WorkStage.RUNNING:
                is_running = self.stage is WorkStage.RUNNING
                self.stage = WorkStage.ENDING
                if is_gentle and is_running:
                    self._wake_ms = now + RELEASE_MS
                    self._asks += 1
                    return [TellJob(self.key, StopJob(self._asks, RELEASE_MS / 1_000))]
                return [KillJob(self.key)]
            case WorkStage.ENDING if not is_gentle and self._wake_ms is not None:
                self._wake_ms = None
                return [KillJob(self.key)]
            case WorkStage.BEGINNING | WorkStage.PAUSED:
                return self._end_reported(None)
            case WorkStage.FETCHING if self.assigned is not None or not self.reports:
                return self._end_reported(None)
        # The answer to the request that is under way comes first.
        return []

    def _end_reported(self, ended: JobEnds | None) -> list[AgentEffect]:
        if ended is not None and ended.end is RunEnd.FINISHED:
            return self._finish(RunEnd.FINISHED)
        return self._finish(RunEnd.RELEASED if self.order.is_releasing else RunEnd.CANCELLED)

    def _finish(self, end: RunEnd, failure: RunFailure | None = None) -> list[AgentEffect]:
        self.stage, self._wake_ms, self._step = WorkStage.REPORTING, None, None
        return self._report(r.EndAssignmentRequest(self._agent, self._session, *self.key, end, failure))

    # Steps of operations.

    def _go_on_with_step(self, now: int) -> list[AgentEffect]:
        step = self._step
        if step is None or step.is_done or step.ask:
            return []
        seconds = max(0.001, (step.deadline_ms - now) / 1_000)
        if step.action is r.OrderedAction.VALIDATE:
            assigned = self.assigned
            if assigned is None:
                return []
            self._asks += 1
            step.ask = self._asks
            return [
                ValidateJob(
                    self.key,
                    assigned.name,
                    assigned.owner,
                    step.operation,
                    step.step,
                    self.order.version_to,
                    self.order.savepoint,
                    seconds,
                )
            ]
        if self.stage is not WorkStage.RUNNING:
            return []
        self._asks += 1
        step.ask = self._asks
        path = self._path_of(self._new_savepoint())
        if step.action is r.OrderedAction.STOP:
            return [TellJob(self.key, StopJob(step.ask, seconds, path))]
        return [TellJob(self.key, SaveJob(step.ask, path, seconds))]

    def _new_savepoint(self) -> str:
        self._savepoint = f"{self._random.getrandbits(128):032x}"
        return self._savepoint

    _savepoint = ""
    """The id of the savepoint that is being taken."""

    def _path_of(self, savepoint: str) -> str:
        assert self.assigned is not None
        return f"{self.assigned.name}/{savepoint}"

    def _step_answered(self, message: JobAnswers) -> list[AgentEffect]:
        step = self._step
        if step is None or step.is_done or not step.ask or step.ask != message.ask:
            return []
        if message.error is not None:
            return self._fail_step(step, message.error.code, message.error.message)
        assert self.assigned is not None
        savepoint = JobSavepoint(
            self._savepoint,
            self.assigned.version.spec.savepoint_root,
            self._path_of(self._savepoint),
            GLSN(message.glsn),
            BatchNumber(message.batch),
            bytes=message.bytes,
        )
        step.is_done = True
        if step.action is r.OrderedAction.STOP:
            # Reported when no process is left.
            step.saved = savepoint
            return []
        return self._note_savepoint(step, savepoint, has_ended=False)

    def validated(self, operation: str, step: int, error: OperationError | None) -> list[AgentEffect]:
        known = self._step
        if known is None or known.is_done or (known.operation, known.step) != (operation, step):
            return []
        known.is_done = True
        return self._report(r.FinishStepRequest(self._agent, self._session, *self.key, operation, step, error))

    def _note_savepoint(self, step: _Step, savepoint: JobSavepoint, *, has_ended: bool) -> list[AgentEffect]:
        return self._report(
            r.NoteSavepointRequest(
                self._agent, self._session, *self.key, step.operation, step.step, savepoint, has_ended
            )
        )

    def _fail_step(self, step: _Step, code: str, message: str) -> list[AgentEffect]:
        step.is_done = True
        error = OperationError(code, message[:ERROR_CHARS_MAX])
        return self._report(
            r.FinishStepRequest(self._agent, self._session, *self.key, step.operation, step.step, error)
        )

    # Reports.

    def _report(self, request: AgentRequest) -> list[AgentEffect]:
        self.reports.append(request)
        return self._next_report()

    def _next_report(self) -> list[AgentEffect]:
        """Send the oldest report, unless it is under way."""
        if not self.reports or self._is_asking:
            return []
        self._is_asking = True
        return [Ask(self.reports[0], REPORT_MS)]


def _is_last(request: AgentRequest) -> bool:
    return isinstance(request, r.NoteSavepointRequest) and request.has_ended


def _failure(code: str, message: str, glsn: int = 0) -> RunFailure:
    if len(message) > ERROR_CHARS_MAX:
        message = f"{message[: ERROR_CHARS_MAX - 1]}…"
    return RunFailure(code, message, GLSN(glsn))
