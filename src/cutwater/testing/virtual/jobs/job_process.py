"""The program of a simulated job: it reads the log up to its tail, batch after batch, and publishes a row for every few
positions, as one driver of Spark with one task would.

It begins its checkpoint from that of the assignment before, as ``spark.savepoint.succession`` does: it opens the run
under its own epoch first, and then copies what belongs to batches that are decided. The rows are numbered, so output
that is lost, doubled, or made from another state, shows in the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import TYPE_CHECKING

from cutwater.agent.job.job_messages import FromJob, JobAnswers, JobEnds, JobMoves, JobRuns, SaveJob, StopJob, ToJob
from cutwater.client.async_client import AsyncClient
from cutwater.client.publish.runs import Run, RunStart
from cutwater.core.jobs.job_records import CheckpointPointer, RunEnd
from cutwater.core.jobs.job_requests import AssignedJob
from cutwater.core.requests import PublishedGroup
from cutwater.errors import BatchDiffers, CutwaterError, OutputExists, RunFenced, StagedExpired
from cutwater.jobs.messages import Told
from cutwater.testing.checkers.jobs import PublishedRows
from cutwater.testing.checkers.record import PublishOp, SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.jobs.job_files import ProgramState, SimCheckpoint, SimSavepoint
from cutwater.testing.virtual.workload import PLAIN
from cutwater.types import GLSN, BatchNumber, InputRange, JobEpoch, Part

if TYPE_CHECKING:
    from cutwater.testing.virtual.jobs.agent_machine import SimJob
    from cutwater.testing.virtual.simulation import ShippedSimulation

POSITIONS_PER_ROW = 4
POSITIONS_MAX = 40
"""A batch reads at most so many positions."""
PAUSE_SECONDS = 0.05
STEP_SECONDS_MAX = 0.02
"""Between two steps of a batch; a kill may come there."""
ATTEMPT_SECONDS = 1.5
"""A publication that takes longer is asked for again."""
OPENS_AGAIN = 0.3
"""Share of batches before which the run is opened again, as every task of Spark does."""
FAILS = 0.01
"""Share of batches at which the program fails."""
AT_START, BEFORE_A_BATCH = "at-start", "before-a-batch"
"""How a broken version of a program fails."""


class AttemptFailed(Exception):
    """The attempt ends with an error. ``is_hopeless``: another one would, too."""

    def __init__(self, code: str, message: str, *, is_hopeless: bool = False) -> None:
        super().__init__(message)
        self.code, self.is_hopeless = code, is_hopeless


class JobProgram:
    """See the module."""

    def __init__(
        self,
        world: ShippedSimulation,
        job: SimJob,
        assigned: AssignedJob,
        pointer: CheckpointPointer,
        random: Random,
    ) -> None:
        assert world.jobs is not None
        self._world, self._jobs, self._job = world, world.jobs, job
        self._assigned, self._pointer = assigned, pointer
        self._random = random
        self.epoch = JobEpoch(assigned.epoch)
        self.inbox: deque[ToJob] = deque()
        arguments = assigned.version.spec.arguments
        self._breaks = arguments.get("breaks", "")
        self._batches_max = int(arguments.get("batches", "0"))
        """After so many batches the input ends; 0 means never."""

    def _tell(self, message: FromJob) -> None:
        self._job.tell(message)

    async def run(self) -> None:
        """Run to the end, and tell the agent what it was."""
        try:
            end = await self._run()
        except AttemptFailed as failed:
            end = JobEnds(RunEnd.FAILED, Told(failed.code, str(failed)), failed.is_hopeless)
        except RunFenced as error:
            self._check_may_be_fenced(error)
            end = JobEnds(RunEnd.FAILED, Told(error.code, error.message))
        except OutputExists as error:
            self._check_may_exist(error)
            end = JobEnds(RunEnd.FAILED, Told(error.code, error.message), is_hopeless=True)
        except BatchDiffers as error:
            self._say_violation("job output", f"{self._name} was told: {error.message}")
            return
        except CutwaterError as error:
            end = JobEnds(RunEnd.FAILED, Told(error.code, error.message))
        self._tell(end)

    @property
    def _name(self) -> str:
        return f"job {self._assigned.name!r} with epoch {self.epoch}"

    def _say_violation(self, guarantee: str, what: str) -> None:
        self._world.violations.append(Violation(guarantee, what))

    def _check_may_be_fenced(self, error: RunFenced) -> None:
        """Only a later assignment, or the end of this one, fences a driver."""
        if self._jobs.is_present(self.epoch):
            self._say_violation("job epoch", f"{self._name} has the job, and was told: {error.message}")

    def _check_may_exist(self, error: OutputExists) -> None:
        """A start that nobody chose never finds output that is not its own."""
        notes, start = self._jobs.notes, self._assigned.start
        # The name may be that of an earlier job, which was deleted.
        is_new = not start.savepoint and self._assigned.job not in notes.publishing
        if is_new or start.savepoint in notes.named_savepoints or not self._jobs.is_present(self.epoch):
            return
        self._say_violation("job output", f"{self._name} goes on from where it was, and was told: {error.message}")

    async def _run(self) -> JobEnds:
        await self._step()
        if self._breaks == AT_START:
            raise AttemptFailed("broken", "this version of the program does not start", is_hopeless=True)
        log = await self._world.cluster.connect(self._world.options.timeout)
        checkpoint, run = await self._begin(log)
        self._tell(JobRuns(self._assigned.version.spec.parallelism))
        while True:
            ended = self._obey(checkpoint)
            if ended is not None:
                return ended
            if self._batches_max and checkpoint.last_done + 1 >= self._batches_max:
                return JobEnds(RunEnd.FINISHED)
            if self._jobs.is_frozen:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if self._breaks == BEFORE_A_BATCH:
                raise AttemptFailed("broken", "this version of the program fails at its first record", is_hopeless=True)
            if not self._jobs.is_healed and self._random.random() < FAILS:
                raise AttemptFailed("program", "the program fails now and then")
            try:
                await self._next_batch(log, checkpoint, run)
                is_expired = False
            except StagedExpired:
                is_expired = True
            if is_expired or self._random.random() < OPENS_AGAIN:
                run = await self._open(log, checkpoint)
            await asyncio.sleep(self._random.expovariate(1 / PAUSE_SECONDS))

    async def _step(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0, STEP_SECONDS_MAX))

    # The beginning.

    async def _begin(self, log: AsyncClient) -> tuple[SimCheckpoint, Run]:
        pointer, machine = self._pointer, self._job.machine.name
        own = self._jobs.files.checkpoint(pointer.root, machine, pointer.path, self.epoch)
        if not own.is_begun:
            found = self._jobs.files.predecessor(pointer.root, machine, pointer.path, self.epoch)
            if found is not None:
                await self._succeed(log, own, found)
            else:
                self._begin_anew(own)
            await self._step()
            own.is_begun = True
        run = await self._open(log, own)
        if run.last_batch > max(own.planned, default=-1):
            # The driver before has published its first batch after it was looked at.
            own.is_begun = False
            raise AttemptFailed("unavailable", f"batch {run.last_batch} was decided while the checkpoint was begun")
        return own, run

    def _begin_anew(self, own: SimCheckpoint) -> None:
        """Begin from the savepoint of the assignment, or from nothing."""
        start, savepoint = self._assigned.start, self._assigned.savepoint
        if savepoint is None:
            if start.checkpoint is not None and self._jobs.files.has(start.checkpoint, self._job.machine.name):
                self._say_violation("job checkpoint", f"{self._name} does not go on from {start.checkpoint}")
            own.origin, own.start_key = ProgramState(), ""
        else:
            saved = self._jobs.files.saved(savepoint, self._job.machine.name)
            own.origin, own.start_key, own.start_batch = saved.state, saved.key, saved.batch
            own.replays = start.replay_output
        own.key = f"{self._assigned.name} {self.epoch} {self._random.getrandbits(32)}"
        own.planned, own.done = {}, {}

    async def _succeed(self, log: AsyncClient, own: SimCheckpoint, found: SimCheckpoint) -> None:
        """Copy what belongs to decided batches. The run is opened first, so that no earlier driver decides more."""
        last = -1
        if any(run.key == found.key for run in await log.find_runs(self._assigned.name)):
            last = (await log.open_run(self._assigned.name, found.key, job_epoch=self.epoch)).last_batch
        await self._step()
        if last >= 0 and last not in found.planned:
            self._say_violation("job checkpoint", f"batch {last} is decided, and not planned in {found}")
        own.key, own.origin, own.replays = found.key, found.origin, found.replays
        own.start_key, own.start_batch = found.start_key, found.start_batch
        own.planned = {batch: its for batch, its in found.planned.items() if batch <= last}
        own.done = {batch: state for batch, state in found.done.items() if batch <= last}
        if own.last_done < last - 1:
            self._say_violation("job checkpoint", f"batch {last} is decided, and {own.last_done} is the last one done")

    async def _open(self, log: AsyncClient, own: SimCheckpoint) -> Run:
        start = RunStart(
            GLSN(own.origin.position), own.start_key, BatchNumber(own.start_batch), own.replays, "a simulated savepoint"
        )
        self._jobs.notes.begin_run(own.key, self._assigned.name, own.origin.rows, replays=own.replays)
        if own.replays or own.start_key:
            self._world.history.replays.add(own.key)
        return await log.open_run(self._assigned.name, own.key, start=start, job_epoch=self.epoch)

    # Batches.

    async def _next_batch(self, log: AsyncClient, own: SimCheckpoint, run: Run) -> None:
        batch = own.last_done + 1
        state = own.state_before(batch)
        if batch not in own.planned:
            tail = int(await log.tail())
            if tail <= state.position:
                return
            through = min(tail, state.position + self._random.randint(1, POSITIONS_MAX))
            await self._step()
            own.planned[batch] = InputRange(GLSN(state.position), GLSN(through))
        given = own.planned[batch]
        await self._step()
        count = given.through // POSITIONS_PER_ROW - given.after // POSITIONS_PER_ROW
        parts = await self._stage(log, run, batch, state.rows, count)
        await self._step()
        if parts:
            self._jobs.notes.publishing.add(self._assigned.job)
        self._world.history.offered.append((run.run, batch, tuple(part.part for part in parts)))
        published = await log.publish(
            run, batch, parts, position=given.through, read=given, timeout=max(ATTEMPT_SECONDS, 0.1)
        )
        groups = [
            PublishedGroup(self._world.cluster.topic(group.topic), group.stream, group.glsn, group.count)
            for group in published
        ]
        self._world.history.published.append(PublishOp(run.run, BatchNumber(batch), tuple(groups)))
        self._jobs.notes.counts["batch of a job"] += 1
        self._world.note(f"{self._name} has published batch {batch} of run {run.run}, {given}")
        await self._step()
        own.done[batch] = ProgramState(int(given.through), state.rows + count)
        self._jobs.note_batch(self.epoch)
        self._tell(JobMoves(batch, int(given.through)))

    async def _stage(self, log: AsyncClient, run: Run, batch: int, rows: int, count: int) -> list[Part]:
        history = self._world.history
        parts: list[Part] = []
        while count:
            size = self._random.randint(1, count)
            count -= size
            op = history.begin(self._world.loop.callbacks, PLAIN, size, self._world.event_time())
            op.outcome, op.part = SimOutcome.UNKNOWN, "not staged"
            self._jobs.notes.rows[op.payload] = PublishedRows(self._assigned.name, self.epoch, rows + 1, size)
            rows += size
            content = [
                {"value": value, "timestamp": time}
                for value, time in zip(h.values_of(op, b""), h.times_of(op), strict=True)
            ]
            part = await log.stage(run, batch, PLAIN, content)
            assert part is not None
            history.stage(part, [op])
            parts.append(part)
        return parts

    # What the agent wants.

    def _obey(self, own: SimCheckpoint) -> JobEnds | None:
        """Do what the agent has asked for; return how the program ends, if it does."""
        while self.inbox:
            message = self.inbox[0]
            if message.path if isinstance(message, StopJob) else True:
                if own.last_done < 0:
                    # A savepoint is that of a batch. The first one comes soon, or the time of the step is up.
                    return None
                self._save(own, message)
            self.inbox.popleft()
            if isinstance(message, StopJob):
                if not message.path:
                    self._tell(JobAnswers(message.ask))
                return JobEnds(RunEnd.STOPPED)
        return None

    def _save(self, own: SimCheckpoint, message: SaveJob | StopJob) -> None:
        batch = own.last_done
        state = own.done[batch]
        saved = SimSavepoint(state, own.key, batch)
        root = self._assigned.version.spec.savepoint_root
        self._jobs.files.save(root, self._job.machine.name, message.path, saved)
        self._world.note(f"{self._name} has saved batch {batch} at GLSN {state.position}")
        self._tell(JobAnswers(message.ask, state.position, batch, 100))
