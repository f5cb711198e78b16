"""Runs and their batches: the part of the state that decisions about runs change.

A *run* is one life of a query's checkpoint, identified by its key. Of the runs with one name, only the newest may go
on. If the run is that of a job, only the newest assignment of the job that has opened it may go on: each has an epoch,
and a higher one than those before. The batches of a run are decided one after the other. The first decision about a
batch is final, and the next batch is decided only when all groups of the previous one are published. So the state keeps
only the last batch of each run.

An *output* is everything that was published under one name, by all runs of that name. It is kept until an operator has
it forgotten, however many runs come and go: a new checkpoint under the name would publish the same rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import UNSET, Struct, UnsetType, structs

from cutwater.core.order import decisions as d
from cutwater.core.publish.finished_runs import FinishedRun, FinishedRuns
from cutwater.core.requests import PublishedGroup
from cutwater.types import (
    GLSN,
    BatchNumber,
    DecisionIndex,
    InputRange,
    JobEpoch,
    LogStreamId,
    Part,
    RunId,
    TopicId,
)

FINISHED_RUNS_MAX = 1_000
"""Number of runs for a single batch that are remembered after their batch is published. Also the number of earlier runs
that are remembered for each name, so that their keys are known to be over."""
UNDECIDED_RUNS_MAX = 10_000
"""Number of runs for a single batch that may be open without having published anything. The same limit applies to runs
without a name."""
OPENERS_MIN = 10
"""While access control is on, the runs of one principal take up at most this fraction of each limit."""
UNNAMED_RUNS_MAX = 10_000
"""Number of runs without a name that are remembered: those that published last. Such a run has no explicit end, so it
ends here: a query without a name begins anew if it is opened after this many others have published."""


class Group(Struct, frozen=True):
    """The rows of a decided batch for one topic. ``parts`` is empty once the group is published. ``publisher`` is the
    principal that asked for it, if access control was on."""

    topic: TopicId
    stream: LogStreamId
    parts: tuple[Part, ...]
    rows: int
    glsn: GLSN = GLSN(0)
    publisher: str | UnsetType = UNSET

    @property
    def is_published(self) -> bool:
        return self.glsn > 0


class RunState(Struct):
    """State of one run. ``batch`` is the last decided batch, ``decided`` the index of that decision, and ``groups`` are
    the groups of the batch."""

    run: RunId
    name: str
    key: str
    once: bool = False
    generation: int = 1
    batch: BatchNumber = BatchNumber(-1)
    decided: DecisionIndex = DecisionIndex(0)
    groups: tuple[Group, ...] = ()
    fenced_by: RunId = RunId(0)
    """The run that has taken over the name; the run's own number if it was dropped; 0 if the run may go on."""
    opener: str | UnsetType = UNSET
    """The principal that opened the run, if access control was on. A run without a name belongs to it."""
    job_epoch: JobEpoch | UnsetType = UNSET
    """The highest epoch under which a job has opened the run. Not set if none has."""
    after_epoch: JobEpoch | UnsetType = UNSET
    """Of a run that no job has opened: the highest epoch that its name had before. All these are over."""
    input: InputRange | UnsetType = UNSET
    """The range of the input of the last decided batch, if it is known."""

    @property
    def least_epoch(self) -> JobEpoch:
        """The least epoch under which the run may be opened."""
        if self.job_epoch is not UNSET:
            return self.job_epoch
        return JobEpoch(0 if self.after_epoch is UNSET else self.after_epoch + 1)

    @property
    def unpublished(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.is_published)

    @property
    def published(self) -> tuple[PublishedGroup, ...]:
        return tuple(PublishedGroup(g.topic, g.stream, g.glsn, g.rows) for g in self.groups if g.is_published)

    def group(self, topic: TopicId) -> Group | None:
        return next((group for group in self.groups if group.topic == topic), None)

    def replace(self, new: Group) -> None:
        self.groups = tuple(new if group.topic == new.topic else group for group in self.groups)


class Output(Struct):
    """Everything that runs have published under one name. Runs for a single batch do not count: they have no checkpoint
    that could be lost.

    ``run`` is the last run that decided on rows, and ``batch`` is its batch. ``glsn`` is the last position that was
    published, or 0 if there is none yet. ``rows`` is None if some rows were published before rows were counted. The
    output covers the input up to ``position``, which is None if one of the runs did not say. ``earlier`` is the same
    position for the runs before the last one, or 0 if there are none.
    """

    name: str
    run: RunId
    batch: BatchNumber
    glsn: GLSN = GLSN(0)
    rows: int | None = 0
    position: GLSN | None = None
    earlier: GLSN | None = GLSN(0)


class RunRegistry:
    """All runs that are known, by number, and the outputs of their names."""

    def __init__(
        self,
        last: RunId,
        runs: Iterable[RunState],
        outputs: Iterable[Output] | None = (),
        finished: Iterable[FinishedRun] = (),
    ) -> None:
        """Load stored runs and outputs. State from versions without outputs has ``outputs`` None; they are then derived
        from the runs."""
        self.last = last
        self.finished = FinishedRuns(finished)
        """Runs for a single batch that were published and forgotten."""
        self._runs = {run.run: structs.replace(run) for run in runs}
        self._by_key = {run.key: run.run for run in self._runs.values()}
        self._by_name = {run.name: run.run for run in self._runs.values() if run.name and not run.fenced_by}
        self.unfinished = {run.run for run in self._runs.values() if run.unpublished}
        """Runs that have unpublished groups."""
        self._epochs: dict[str, JobEpoch] = {}
        """The least epoch under which a run with this name may be opened, if jobs have opened any."""
        self._newest_epochs: dict[str, JobEpoch] = {}
        """The highest epoch under which a run with this name was opened."""
        for run in self._runs.values():
            self._note_epoch(run)
        known = map(structs.replace, outputs) if outputs is not None else _told_by(self._runs.values())
        self._outputs = {output.name: output for output in known}

    def output(self, name: str) -> Output | None:
        """Return the output that was published under a name, or None."""
        return self._outputs.get(name)

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(self._outputs.values())

    def outputs_snapshot(self) -> tuple[Output, ...]:
        return tuple(structs.replace(output) for output in self._outputs.values())

    def __iter__(self) -> Iterator[RunState]:
        return iter(self._runs.values())

    def snapshot(self) -> tuple[RunState, ...]:
        return tuple(structs.replace(run) for run in self._runs.values())

    def get(self, run: RunId) -> RunState | None:
        return self._runs.get(run)

    def with_key(self, key: str) -> RunState | None:
        return self._runs.get(self._by_key.get(key, RunId(0)))

    def of_name(self, name: str) -> RunState | None:
        """Return the run that holds a name: the newest one, unless it was dropped."""
        return self._runs.get(self._by_name.get(name, RunId(0))) if name else None

    def least_epoch(self, name: str) -> JobEpoch:
        """Return the least epoch under which a run with this name may be opened. 0 if no job has opened one."""
        return self._epochs.get(name, JobEpoch(0))

    def may_return(self, run: RunState, epoch: JobEpoch | UnsetType) -> bool:
        """Whether a later assignment of a job may go on with a run after others took over its name: they have decided
        nothing, because the version of the job to which they belong did not come up."""
        holder = self.of_name(run.name)
        if not run.fenced_by or run.fenced_by == run.run or holder is None:
            return False
        if epoch is UNSET or run.job_epoch is UNSET:
            return False
        later = [other for other in self if other.name == run.name and other.run > run.run]
        is_newer = epoch > self.least_epoch(run.name) and run.run < holder.run
        return is_newer and all(other.batch < 0 and other.job_epoch is not UNSET for other in later)

    def was_forgotten(self, run: RunId) -> bool:
        """Whether the run was forgotten. Only runs without unpublished groups are. Numbers are never given out
        twice."""
        return run <= self.last and run not in self._runs

    @property
    def publishing(self) -> list[RunState]:
        """The runs that have unpublished groups, in the order in which their batches were decided."""
        return sorted((self._runs[run] for run in self.unfinished), key=lambda run: run.decided)

    def oldest(self, topic: TopicId) -> DecisionIndex:
        """Return the first decision that still has an unpublished group for the topic."""
        for run in self.publishing:
            if any(group.topic == topic for group in run.unpublished):
                return run.decided
        raise AssertionError(f"nothing is to be published to topic {topic}")

    # Decisions.

    def problem(self, decision: d.RunDecision, topic_of: Callable[[LogStreamId], TopicId | None]) -> str:
        """Return why the decision is not valid, or an empty string. ``topic_of`` returns the topic of a stream that
        takes appends, and None for any other."""
        if isinstance(decision, d.OpenRun):
            if decision.run != self.last + 1:
                return "its number is out of turn"
            if decision.job_epoch is not UNSET and decision.job_epoch < self.least_epoch(decision.name):
                return "a later assignment of the job has opened a run"
            return "its key is known already" if decision.key in self._by_key else ""
        if isinstance(decision, d.ForgetOutput):
            return "" if decision.name in self._outputs else "nothing was published under the name"
        run = self._runs.get(decision.run)
        if run is None:
            return "the run is unknown"
        if isinstance(decision, d.ExpireStaged):
            return ""
        if isinstance(decision, d.RaiseRunEpoch):
            if run.fenced_by and not self.may_return(run, decision.job_epoch):
                return "the run is over"
            is_higher = decision.job_epoch >= run.least_epoch and decision.job_epoch != run.job_epoch
            return "" if is_higher else "the epoch is not higher than before"
        if isinstance(decision, d.DropRun):
            return "" if run.unpublished else "it holds nothing up"
        if isinstance(decision, d.DecideBatch):
            return self._problem_of_batch(run, decision, topic_of)
        group = run.group(decision.topic) if run.batch == decision.batch else None
        if group is None or group.is_published:
            return "no such group is to be published"
        if isinstance(decision, d.MoveGroup):
            if topic_of(group.stream) is not None:
                return "the log stream it leaves is open"
            return "" if topic_of(decision.stream) == group.topic else "it cannot go there"
        return "" if (decision.glsn > 0 and decision.count == group.rows) else "it has another number of records"

    def _problem_of_batch(
        self, run: RunState, batch: d.DecideBatch, topic_of: Callable[[LogStreamId], TopicId | None]
    ) -> str:
        if run.fenced_by:
            return "the run is over"
        if batch.batch <= run.batch:
            return "the batch was decided before"
        if run.unpublished:
            return "the batch before it is not published yet"
        if len({group.topic for group in batch.groups}) < len(batch.groups):
            return "a topic is in it twice"
        for group in batch.groups:
            if topic_of(group.stream) != group.topic or not group.rows:
                return "a group of it cannot go where it should"
            if any(part.generation != run.generation or part.topic != group.topic for part in group.parts):
                return "a part of it is of another topic or generation"
        return ""

    def apply(self, decision: d.RunDecision, index: DecisionIndex) -> None:
        """Apply a decision for which ``problem`` returned nothing. ``index`` is the index of the decision."""
        if isinstance(decision, d.OpenRun):
            self._open(decision)
            return
        if isinstance(decision, d.ForgetOutput):
            del self._outputs[decision.name]
            return
        run = self._runs[decision.run]
        match decision:
            case d.DecideBatch():
                run.batch, run.decided, run.input = decision.batch, index, decision.input
                publisher = decision.by.principal if decision.by else UNSET
                run.groups = tuple(
                    Group(group.topic, group.stream, group.parts, group.rows, publisher=publisher)
                    for group in decision.groups
                )
                self._count(run, decision.position)
            case d.GroupPublished():
                group = run.group(decision.topic)
                assert group is not None
                run.replace(structs.replace(group, parts=(), glsn=decision.glsn))
                output = self._outputs.get(run.name)
                if output is not None and not run.once:
                    output.glsn = max(output.glsn, GLSN(decision.glsn + decision.count - 1))
            case d.MoveGroup():
                group = run.group(decision.topic)
                assert group is not None
                run.replace(structs.replace(group, stream=decision.stream))
            case d.ExpireStaged():
                run.generation += 1
            case d.RaiseRunEpoch():
                self._return(run)
                # Parts of the drivers before can no longer be decided on.
                run.job_epoch, run.after_epoch = decision.job_epoch, UNSET
                run.generation += 1
                self._note_epoch(run)
            case d.DropRun():
                self._drop(run)
        self._note(run)

    def _open(self, decision: d.OpenRun) -> None:
        self.last = decision.run
        older = self.of_name(decision.name)
        if older is not None:
            older.fenced_by = decision.run
            self._forget([run for run in self if run.name == decision.name and run.fenced_by], FINISHED_RUNS_MAX)
        opener = (decision.by.principal if decision.by else "") or UNSET
        run = RunState(decision.run, decision.name, decision.key, decision.once, opener=opener)
        run.job_epoch = decision.job_epoch
        if run.job_epoch is UNSET:
            run.after_epoch = self._newest_epochs.get(run.name, UNSET)
        self._runs[decision.run] = run
        self._note_epoch(run)
        self._by_key[decision.key] = decision.run
        if decision.name:
            self._by_name[decision.name] = decision.run
        if decision.once:
            self._forget([run for run in self if run.once and run.batch >= 0], FINISHED_RUNS_MAX, opener)
            self._forget([run for run in self if run.once and run.batch < 0], UNDECIDED_RUNS_MAX, opener)
        elif not decision.name:
            unnamed = [run for run in self if not run.once and not run.name]
            decided = sorted((run for run in unnamed if run.batch >= 0), key=lambda run: run.decided)
            self._forget(decided, UNNAMED_RUNS_MAX, opener)
            self._forget([run for run in unnamed if run.batch < 0], UNDECIDED_RUNS_MAX, opener)

    def _return(self, run: RunState) -> None:
        """Give a run its name back, if others have it that decided nothing."""
        holder = self.of_name(run.name)
        if holder is not None and holder.run != run.run:
            holder.fenced_by, run.fenced_by = run.run, RunId(0)
            self._by_name[run.name] = run.run

    def _count(self, run: RunState, position: GLSN | None) -> None:
        """Add the batch that was just decided to the output of its name. A batch without rows does not count, since
        repeating it changes nothing."""
        rows = sum(group.rows for group in run.groups)
        if not run.name or run.once or not rows:
            return
        output = self._outputs.get(run.name)
        if output is None:
            self._outputs[run.name] = Output(run.name, run.run, run.batch, GLSN(0), rows, position)
            return
        if output.run != run.run:
            output.earlier = output.position
        # A run continues where it stopped, so its last batch stands for all. Of other runs, the furthest position
        # counts.
        earlier = output.earlier
        output.position = None if position is None or earlier is None else max(position, earlier)
        output.run, output.batch = run.run, run.batch
        output.rows = None if output.rows is None else output.rows + rows

    def _uncount(self, run: RunState, rows: int) -> None:
        """Subtract rows that were decided and will never be published."""
        output = self._outputs.get(run.name)
        if output is not None and output.rows is not None and not run.once:
            output.rows = max(0, output.rows - rows)

    def _drop(self, run: RunState) -> None:
        self._uncount(run, sum(group.rows for group in run.unpublished))
        run.groups = tuple(group for group in run.groups if group.is_published)
        if not run.fenced_by:
            run.fenced_by = run.run
            self._by_name.pop(run.name, None)

    def _forget(self, runs: list[RunState], keep: int, opener: str | UnsetType = UNSET) -> None:
        """Keep only the last ``keep`` runs, by stored numbers, so that every copy of the state forgets the same
        ones. Of the runs of ``opener`` at most a part is kept, so that it cannot make runs of others be forgotten."""
        own = [run for run in runs if run.opener == opener] if opener is not UNSET else []
        excess = own[: -(keep // OPENERS_MIN)]
        gone = {run.run for run in excess}
        for run in (*excess, *[run for run in runs if run.run not in gone][:-keep]):
            if not run.unpublished:
                del self._runs[run.run], self._by_key[run.key]
                if run.once and run.batch >= 0 and run.fenced_by != run.run:
                    self.finished.add(run.run, run.key, run.opener or "")

    def _note_epoch(self, run: RunState) -> None:
        if run.name and run.least_epoch:
            self._epochs[run.name] = max(self.least_epoch(run.name), run.least_epoch)
            own = run.after_epoch if run.job_epoch is UNSET else run.job_epoch
            assert own is not UNSET, "it has a least epoch"
            self._newest_epochs[run.name] = max(self._newest_epochs.get(run.name, own), own)

    def _note(self, run: RunState) -> None:
        if run.unpublished:
            self.unfinished.add(run.run)
        else:
            self.unfinished.discard(run.run)

    def delete_topic(self, topic: TopicId) -> None:
        """Remove the topic's groups from all runs. Groups that were decided and not yet published are given up."""
        for run in self:
            group = run.group(topic)
            if group is not None:
                if not group.is_published:
                    self._uncount(run, group.rows)
                run.groups = tuple(group for group in run.groups if group.topic != topic)
                self._note(run)


def _told_by(runs: Iterable[RunState]) -> list[Output]:
    """Derive outputs from runs that an older version stored without them. Rows and input positions are unknown."""
    found: dict[str, Output] = {}
    for run in sorted(runs, key=lambda run: run.run):
        if run.name and not run.once and run.batch >= 0:
            before = found.get(run.name)
            ends = (GLSN(group.glsn + group.rows - 1) for group in run.groups if group.is_published)
            glsn = max((*ends, GLSN(0) if before is None else before.glsn))
            earlier = GLSN(0) if before is None else None
            found[run.name] = Output(run.name, run.run, run.batch, glsn, None, None, earlier)
    return list(found.values())
