"""Jobs, as named checks over the decisions and what agents and users of one run noted.

- ``job epoch``: epochs only rise, a job has one assignment at a time, and only the newest assignment opens its runs and
  publishes.
- ``job output``: the rows of a job are in the log once and in order, over all assignments, upgrades and rollbacks.
- ``job steps``: a step of an operation is done once and in its turn, and a job has one operation in progress.
- ``job keys``: an idempotency key stands for one operation.
- ``job room``: jobs are on agents that live, do not drain, and have their slots, labels and roots.
- ``job memory``: the state that a leader has folded, perhaps from a snapshot, is that of all decisions.

The fold here is independent of that of the metadata repository.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import UNSET, Struct

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.agents import AgentDescription, JobIsolation
from cutwater.core.jobs.job_records import VERSIONS_MAX, JobVersion, RunEnd
from cutwater.core.jobs.job_registry import OPERATIONS_KEPT, JobRegistry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import Operation, OperationKind, OperationState
from cutwater.core.order import decisions as d
from cutwater.testing.checkers.violation import Violation
from cutwater.types import JobEpoch, JobNumber, RunId

EPOCH, OUTPUT, STEPS, KEYS, ROOM, MEMORY = (
    "job epoch",
    "job output",
    "job steps",
    "job keys",
    "job room",
    "job memory",
)


class PublishedRows(Struct, frozen=True):
    """Rows that a process of a job staged, as one append: ``count`` of them from number ``first`` on."""

    job: str
    epoch: JobEpoch
    first: int
    count: int


class RunBegin(Struct, frozen=True):
    """Where a run of a job begins: after so many rows. ``replays``: these rows are wanted again."""

    job: str
    rows: int
    replays: bool


class JobNotes(Struct):
    """What was noted while a cluster ran."""

    rows: dict[int, PublishedRows] = {}
    """By the payload of the append."""
    runs: dict[str, RunBegin] = {}
    """By the key of the run."""
    versions: dict[JobEpoch, JobVersion] = {}
    """The version that each assignment runs, as its agent was told."""
    publishing: set[JobNumber] = set()
    """Jobs that have asked to publish rows."""
    named_savepoints: set[str] = set()
    """Savepoints from which users asked to start."""
    keys: dict[tuple[str, str], str] = {}
    """The operation that users were told for each key and request."""
    seen: dict[str, Operation] = {}
    """Each operation as users saw it last."""
    counts: Counter[str] = Counter()
    """How often users and jobs did something."""
    struck: Counter[str] = Counter()
    """How often each fault struck agents and jobs."""

    def begin_run(self, key: str, job: str, rows: int, *, replays: bool) -> None:
        self.runs.setdefault(key, RunBegin(job, rows, replays))

    def answered(self, key: str, body: str, operation: str) -> None:
        """Note which operation a user was told for a key."""
        known = self.keys.setdefault((key, body), operation)
        if known != operation:
            raise Violation(KEYS, f"the key {key} with the same request was operation {known}, and is {operation}")

    def saw(self, operation: Operation) -> None:
        """Note an operation as a user sees it. It only goes on."""
        known = self.seen.get(operation.id)
        if known is not None:
            is_over = known.state is not OperationState.RUNNING
            if operation.step < known.step or (is_over and operation != known):
                raise Violation(STEPS, f"an operation was {known}, and is {operation}")
        self.seen[operation.id] = operation

    def check_seen(self, known: Mapping[str, Operation]) -> None:
        """What users were told of operations that are over is what is stored."""
        for identifier, told in self.seen.items():
            stored = known.get(identifier)
            if told.state is not OperationState.RUNNING and told != stored:
                raise Violation(STEPS, f"users were told {told}, and {stored} is stored")
        for operation in self.keys.values():
            if operation not in known:
                raise Violation(STEPS, f"users were told of operation {operation}, which is not stored")


class _Job(Struct):
    number: JobNumber
    name: str
    owner: str
    versions: dict[int, JobSpec]
    epoch: JobEpoch = JobEpoch(0)
    """Of the present assignment; 0 if it has none."""
    agent: str = ""
    attempt: int = 0
    is_deleted: bool = False
    """Whether it goes as soon as it has no assignment."""


class _Agent(Struct):
    description: AgentDescription
    session: int
    is_alive: bool = True
    is_draining: bool = False


class _Run(Struct):
    name: str
    epoch: JobEpoch
    key: str


class JobFold:
    """All decisions about jobs, one after the other. ``apply`` raises a violation when one contradicts the others."""

    def __init__(self, notes: JobNotes, staged: Mapping[str, list[int]]) -> None:
        """``staged`` has the payloads of each part."""
        self._notes, self._staged = notes, staged
        self.jobs: dict[JobNumber, _Job] = {}
        self.agents: dict[str, _Agent] = {}
        self.last_epoch = JobEpoch(0)
        self.operations: dict[str, Operation] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self._done: set[tuple[str, int]] = set()
        self._runs: dict[RunId, _Run] = {}
        self._opened: dict[str, JobEpoch] = {}
        """The highest epoch that has opened a run of each name."""
        self._epochs: dict[JobEpoch, str] = {}
        """The names of the jobs of all epochs."""

    def is_present(self, epoch: JobEpoch) -> bool:
        return any(job.epoch == epoch for job in self.jobs.values())

    def apply(self, decision: d.Decision) -> None:
        match decision:
            case j.RegisterAgent():
                known = self.agents.get(decision.agent.name)
                if known is None or not known.is_alive or known.session != decision.session:
                    self._lose(decision.agent.name)
                is_draining = known is not None and known.is_draining
                self.agents[decision.agent.name] = _Agent(decision.agent, decision.session, True, is_draining)
            case j.ExpireAgent():
                agent = self.agents[decision.agent]
                if not agent.is_alive or agent.session != decision.session:
                    raise Violation(EPOCH, f"{decision}: the agent is {agent}")
                agent.is_alive = False
                self._lose(decision.agent)
            case j.DrainAgent():
                self.agents[decision.agent].is_draining = decision.is_draining
            case j.RemoveAgent():
                if self.agents.pop(decision.agent).is_alive:
                    raise Violation(EPOCH, f"{decision}: it is alive")
            case j.BeginOperation():
                self._begin(decision)
            case j.AssignJob():
                self._assign(decision)
            case j.BeginAttempt():
                job = self._has(decision.job, decision.epoch, decision)
                if decision.attempt != job.attempt + 1:
                    raise Violation(STEPS, f"{decision} comes after attempt {job.attempt}")
                job.attempt = decision.attempt
            case j.EndAttempt() | j.ReleaseJob() | j.NoteCheckpoint() | j.NoteFirstBatch():
                self._has(decision.job, decision.epoch, decision)
            case j.EndAssignment():
                self._end(self._has(decision.job, decision.epoch, decision))
                if decision.end is RunEnd.LOST:
                    raise Violation(EPOCH, f"{decision}: only the end of a lease loses a job")
            case j.NoteSavepoint():
                self._has(decision.job, decision.epoch, decision)
                self._do_step(decision.operation, decision.step)
            case j.FinishStep() | j.FailOperation():
                self._do_step(decision.operation, decision.step)
            case d.OpenRun() | d.RaiseRunEpoch() | d.DecideBatch():
                self._publish(decision)

    def _lose(self, agent: str) -> None:
        for job in tuple(self.jobs.values()):
            if job.epoch and job.agent == agent:
                self._end(job)

    def _end(self, job: _Job) -> None:
        job.epoch, job.agent, job.attempt = JobEpoch(0), "", 0
        if job.is_deleted:
            del self.jobs[job.number]

    def _has(self, number: JobNumber, epoch: JobEpoch, decision: object) -> _Job:
        job = self.jobs.get(number)
        if job is None or not epoch or job.epoch != epoch:
            raise Violation(EPOCH, f"{decision} is about an assignment that is over: {job}")
        return job

    # Operations.

    def _begin(self, decision: j.BeginOperation) -> None:
        operation = decision.operation
        by = decision.by.principal if decision.by else ""
        if operation.id in self.operations:
            raise Violation(STEPS, f"operation {operation.id} begins twice")
        self.operations[operation.id] = operation
        if decision.key is not None:
            known = self.keys.setdefault((by, decision.key.key), operation.id)
            if known != operation.id:
                raise Violation(KEYS, f"the key {decision.key.key} began operations {known} and {operation.id}")
        if operation.kind is OperationKind.SUBMIT:
            assert decision.spec is not None
            if operation.job in self.jobs or any(job.name == operation.name for job in self.jobs.values()):
                raise Violation(STEPS, f"{operation}: there is such a job")
            self.jobs[operation.job] = _Job(operation.job, operation.name, by, {1: decision.spec})
            return
        job = self.jobs[operation.job]
        if decision.spec is not None:
            if operation.version in job.versions:
                raise Violation(STEPS, f"{operation}: there is such a version")
            job.versions[operation.version] = decision.spec
        if operation.kind is OperationKind.DELETE:
            job.is_deleted = True
            if not job.epoch:
                del self.jobs[job.number]

    def _do_step(self, operation: str, step: int) -> None:
        if operation not in self.operations or (operation, step) in self._done:
            raise Violation(STEPS, f"step {step} of operation {operation} is done again")
        self._done.add((operation, step))

    # Assignments.

    def _assign(self, decision: j.AssignJob) -> None:
        job, agent = self.jobs.get(decision.job), self.agents.get(decision.agent)
        if decision.epoch <= self.last_epoch:
            raise Violation(EPOCH, f"{decision} has an epoch that was given out before: {self.last_epoch} was")
        if job is None or job.epoch:
            raise Violation(EPOCH, f"{decision}: the job is {job}")
        if agent is None or not agent.is_alive or agent.session != decision.session or agent.is_draining:
            raise Violation(ROOM, f"{decision}: the agent is {agent}")
        self.last_epoch = decision.epoch
        self._epochs[decision.epoch] = job.name
        job.epoch, job.agent, job.attempt = decision.epoch, decision.agent, 0

    def check_room(self) -> None:
        """Check what each agent has now, as far as it is known which versions run there."""
        for name, agent in self.agents.items():
            its = [job for job in self.jobs.values() if job.epoch and job.agent == name]
            specs = [(job, self._notes.versions[job.epoch].spec) for job in its if job.epoch in self._notes.versions]
            for job, spec in specs:
                if (why := why_not_offered(agent.description, spec)) and agent.is_alive:
                    raise Violation(ROOM, f"job {job.name!r} is on agent {name!r}, which {why}")
            used = sum(spec.slots for _, spec in specs)
            if used > agent.description.slots and agent.is_alive:
                raise Violation(ROOM, f"jobs take {used} slots of agent {name!r}: {agent.description}")
            owners = {job.owner for job in its}
            if len(owners) > 1 and agent.description.isolation is JobIsolation.ONE_OWNER:
                raise Violation(ROOM, f"agent {name!r} has jobs of {sorted(owners)}")

    # Publishing.

    def _publish(self, decision: d.OpenRun | d.RaiseRunEpoch | d.DecideBatch) -> None:
        if isinstance(decision, d.OpenRun):
            epoch = decision.job_epoch
            if epoch is UNSET:
                if any(job.name == decision.name for job in self.jobs.values()):
                    raise Violation(EPOCH, f"{decision}: only the job itself publishes under its name")
                return
            self._runs[decision.run] = _Run(decision.name, epoch, decision.key)
            self._check_opens(decision.name, epoch, decision)
            return
        run = self._runs.get(decision.run)
        if run is None:
            return
        if isinstance(decision, d.RaiseRunEpoch):
            run.epoch = decision.job_epoch
            self._check_opens(run.name, run.epoch, decision)
            return
        job = next((job for job in self.jobs.values() if job.name == run.name), None)
        if job is not None and job.epoch != run.epoch:
            raise Violation(EPOCH, f"{decision} is of epoch {run.epoch} of job {run.name!r}, which has {job.epoch}")
        parts = [part.part for group in decision.groups for part in group.parts]
        for rows in (self._notes.rows[payload] for part in parts for payload in self._staged[part]):
            if rows.epoch != run.epoch:
                raise Violation(EPOCH, f"{decision} is of epoch {run.epoch}, and has {rows}")
        if run.epoch < self._opened.get(run.name, 0):
            raise Violation(EPOCH, f"{decision} is of epoch {run.epoch}, and {self._opened[run.name]} was opened")

    def _check_opens(self, name: str, epoch: JobEpoch, decision: object) -> None:
        if self._epochs.get(epoch) != name or epoch < self._opened.get(name, 0):
            raise Violation(EPOCH, f"{decision}: the newest epoch of {name!r} that has opened a run is another one")
        self._opened[name] = epoch
        job = next((job for job in self.jobs.values() if job.name == name), None)
        if job is None or job.epoch != epoch:
            raise Violation(EPOCH, f"{decision}: the job is {job}")

    # The end.

    def check_memory(self, known: JobRegistry) -> None:
        """Compare the state of a leader with all decisions."""
        if known.jobs.keys() != self.jobs.keys():
            what = f"jobs {sorted(known.jobs)} are in memory, and {sorted(self.jobs)} were decided"
            raise Violation(MEMORY, what)
        for number, own in self.jobs.items():
            job = known.jobs[number]
            epoch = job.assignment.epoch if job.assignment is not None else JobEpoch(0)
            if (epoch, job.name) != (own.epoch, own.name):
                raise Violation(MEMORY, f"job {own.name!r} has epoch {epoch} in memory, and {own.epoch} was decided")
            if len(job.versions) > VERSIONS_MAX:
                raise Violation(MEMORY, f"job {own.name!r} has {len(job.versions)} versions")
        if known.last_epoch != self.last_epoch or sorted(known.agents) != sorted(self.agents):
            what = f"epoch {known.last_epoch}, agents {sorted(known.agents)}"
            raise Violation(MEMORY, f"{what} are in memory, {self.last_epoch}, {sorted(self.agents)} were decided")
        kept = {place: key.operation for place, key in known.keys.items()}
        if kept != self.keys:
            raise Violation(KEYS, f"of the keys {sorted(self.keys)}, a leader remembers {sorted(kept)}")
        if len(known.operations) > OPERATIONS_KEPT or known.operations.keys() != self.operations.keys():
            gone = sorted(self.operations.keys() ^ known.operations.keys())
            raise Violation(MEMORY, f"operations {gone[:5]} are in memory or were decided, and not both")


def why_not_offered(agent: AgentDescription, spec: JobSpec) -> str:
    """Return what a specification asks for and an agent does not offer."""
    if any(agent.labels.get(label) != value for label, value in spec.labels.items()):
        return f"lacks a label of {spec.labels}"
    if spec.master and spec.master not in agent.masters:
        return f"lacks the master {spec.master}"
    if spec.checkpoint_root not in {root.name for root in agent.checkpoint_roots}:
        return f"lacks the checkpoint root {spec.checkpoint_root}"
    if spec.savepoint_root not in {root.name for root in agent.savepoint_roots}:
        return f"lacks the savepoint root {spec.savepoint_root}"
    return f"has {agent.slots} slots, not {spec.slots}" if agent.slots < spec.slots else ""


def check_output(decisions: Sequence[d.Decision], notes: JobNotes, staged: dict[str, list[int]]) -> None:
    """The batches of each job have all of its rows, once and in order. ``staged`` has the payloads of each part."""
    keys: dict[RunId, str] = {}
    last: dict[str, int] = {}
    begun: set[str] = set()
    for decision in decisions:
        if isinstance(decision, d.OpenRun) and decision.key in notes.runs:
            keys[decision.run] = decision.key
        if not isinstance(decision, d.DecideBatch) or decision.run not in keys:
            continue
        key = keys[decision.run]
        begin = notes.runs[key]
        parts = [part.part for group in decision.groups for part in group.parts]
        rows = [notes.rows[payload] for part in parts for payload in staged[part]]
        if rows and key not in begun:
            begun.add(key)
            if begin.replays or begin.job not in last:
                last[begin.job] = begin.rows
            elif last[begin.job] != begin.rows:
                what = f"run {key!r} begins after {begin.rows} rows of job {begin.job!r}, which has {last[begin.job]}"
                raise Violation(OUTPUT, what)
        for row in rows:
            if row.job != begin.job or row.first != last[begin.job] + 1:
                what = f"batch {decision.batch} of run {key!r} has {row}, and row {last[begin.job]} is the last one"
                raise Violation(OUTPUT, what)
            last[begin.job] = row.first + row.count - 1
