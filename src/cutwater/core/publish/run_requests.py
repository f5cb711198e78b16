"""Turns requests about runs into decisions, by the rules of ``runs.py``."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from cutwater.core import requests as r
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.order import decisions as d
from cutwater.core.order.state import OrderState
from cutwater.core.publish.runs import Output, RunRegistry, RunState
from cutwater.core.text import counted
from cutwater.errors import (
    BatchDiffers,
    InvalidArgument,
    NotFound,
    OutputExists,
    Refused,
    RunFenced,
    StagedExpired,
    Unavailable,
)
from cutwater.types import GLSN, BatchNumber, InputRange, JobEpoch, LogStreamId, Part, RunId, TopicId

NAME_LENGTH_MAX = 255
PARTS_MAX = 8_192
"""Parts of one batch. The decision about this many parts fits into one write of any store and into one message."""
NAMES_SHOWN_MAX = 20
HOLDERS_MAX = 16
STAGED_BATCHES_MAX = 10_000

Outcome = tuple[tuple[d.Decision, ...], r.Answer | None]


def open_run(request: r.OpenRunRequest, state: OrderState) -> Outcome:
    if not 1 <= len(request.key) <= NAME_LENGTH_MAX or len(request.name) > NAME_LENGTH_MAX:
        raise InvalidArgument(
            f"the key of a run has 1 to {NAME_LENGTH_MAX} characters and its name at most as many, "
            f"not {len(request.key)} and {len(request.name)}"
        )
    _check_assignment(request)
    run = state.runs.with_key(request.key)
    if run is None or run.job_epoch is not UNSET or request.job_epoch is not UNSET:
        # A run from before the job goes on until the job opens its own, which needs the right to publish: the name of
        # a new job alone must not shut out a query.
        _check_job(request, state)
    if run is not None:
        if not state.runs.may_return(run, request.job_epoch):
            _check_fence(run)
        if run.name != request.name:
            raise InvalidArgument(f"run {run.run} has another name than {request.name!r}: keep a run's name")
        return _open_again(request, run)
    over = state.runs.finished.with_key(request.key)
    if over is not None:
        raise Refused(
            f"run {over} had this key, and its single batch is in the log: a second run would publish it again. Use a "
            "new key for another batch"
        )
    _check_epoch_of_name(request, state)
    if request.once:
        _require_no_query(request, state)
    else:
        _require_new_output(request, state)
    if request.is_question:
        return (), r.RunAnswer(RunId(0), 1, BatchNumber(-1), request.job_epoch)
    number = RunId(state.runs.last + 1)
    opened = d.OpenRun(number, request.name, request.key, request.once, request.job_epoch)
    return (opened,), r.RunAnswer(number, 1, BatchNumber(-1), request.job_epoch)


def _check_assignment(request: r.OpenRunRequest) -> None:
    if request.job_epoch is UNSET:
        return
    if request.job_epoch < 1 or not request.name or request.once:
        raise InvalidArgument(
            f"assignment {request.job_epoch} of a job cannot open the run {request.name!r}"
            f"{' for a single batch' if request.once else ''}: assignments are numbered from 1 on, and their runs have "
            "the name of the job and many batches"
        )


def _check_job(request: r.OpenRunRequest, state: OrderState) -> None:
    """If there is a job of this name, only its present assignment may open the run."""
    job = state.jobs.named(request.name)
    if job is None:
        _check_not_over(request.name, request.job_epoch, state)
        return
    if request.job_epoch is UNSET:
        raise Refused(
            f"{request.name!r} is the name of a job, and only the job itself publishes under it: submit the program as "
            f"another version (`cutwater job upgrade {request.name}`), run it under another name, or delete the job "
            f"(`cutwater job delete {request.name}`)"
        )
    if job.assignment is None or job.assignment.epoch != request.job_epoch:
        holder = state.runs.of_name(request.name)
        raise RunFenced.of_epoch(job.name, RunId(0) if holder is None else holder.run, request.job_epoch, job.epoch)


def _open_again(request: r.OpenRunRequest, run: RunState) -> Outcome:
    """Open a known run. A later assignment of its job ends those before."""
    epoch, generation = request.job_epoch, run.generation
    if epoch is UNSET:
        _check_epoch(run, epoch)
        return (), r.RunAnswer(run.run, generation, run.batch, UNSET, run.input)
    if epoch < run.least_epoch:
        raise RunFenced.of_epoch(run.name, run.run, epoch, _newest_epoch(run))
    raised: tuple[d.Decision, ...] = ()
    if epoch != run.job_epoch and not request.is_question:
        raised, generation = (d.RaiseRunEpoch(run.run, epoch),), generation + 1
    return raised, r.RunAnswer(run.run, generation, run.batch, epoch, run.input)


def _check_epoch_of_name(request: r.OpenRunRequest, state: OrderState) -> None:
    """Refuse a new run of an assignment that is over. Without an epoch, the request is not from a job. Then it takes
    the name over from a job as from any other run, and all epochs so far are over."""
    least = state.runs.least_epoch(request.name)
    if request.job_epoch is not UNSET and request.job_epoch < least:
        holder = state.runs.of_name(request.name)
        run, newest = (RunId(0), least) if holder is None else (holder.run, _newest_epoch(holder))
        raise RunFenced.of_epoch(request.name, run, request.job_epoch, newest)


def _check_epoch(run: RunState, epoch: JobEpoch | UnsetType) -> None:
    """Refuse a driver that does not belong to the assignment that has opened the run last."""
    if epoch == run.job_epoch:
        return
    if epoch is UNSET:
        raise Refused(
            f"run {run.run} belongs to the job {run.name!r}, so nothing else opens it or publishes for it: run the "
            "pipeline as that job; or, to run it without the job, delete the job, and start from a savepoint with a "
            "new checkpoint, or under another name"
        )
    if epoch < run.least_epoch:
        raise RunFenced.of_epoch(run.name, run.run, epoch, _newest_epoch(run))
    raise InvalidArgument(f"assignment {epoch} has not opened run {run.run} yet: open it first")


def _check_assigned(run: RunState, state: OrderState) -> None:
    """Refuse a driver whose assignment is over, even if no later one has opened the run: another version of the job may
    be about to go on from where nothing was published."""
    job = state.jobs.named(run.name)
    if job is None:
        _check_not_over(run.name, run.job_epoch, state)
        return
    if run.job_epoch is UNSET:
        return
    if job.assignment is None or job.assignment.epoch != run.job_epoch:
        raise RunFenced.of_epoch(job.name, run.run, run.job_epoch, job.epoch)


def _check_not_over(name: str, epoch: JobEpoch | UnsetType, state: OrderState) -> None:
    """Refuse a driver of a job that was deleted: its agent may have been paused, and gone on when its lease had
    ended."""
    if epoch is not UNSET and epoch <= state.jobs.last_epoch and epoch not in state.jobs.epochs:
        holder = state.runs.of_name(name)
        raise RunFenced.of_epoch(name, RunId(0) if holder is None else holder.run, epoch, epoch)


def _newest_epoch(run: RunState) -> JobEpoch:
    return run.least_epoch if run.job_epoch is UNSET else run.job_epoch


def _require_no_query(request: r.OpenRunRequest, state: OrderState) -> None:
    """Refuse a batch write under the name of a query: it would take over the name and end the query permanently."""
    holder = state.runs.of_name(request.name)
    if holder is not None and not holder.once:
        raise Refused(
            f"the name {request.name!r} is that of a query with a checkpoint, run {holder.run}, which a batch write "
            "under it would end: write under another name, or without one"
        )


def _require_new_output(request: r.OpenRunRequest, state: OrderState) -> None:
    """Refuse a new run that would publish again what is in the output of its name, before it fences any other run."""
    output, start = state.runs.output(request.name), request.start
    if output is None or output.rows == 0 or start.replay or _is_past(output, start, state.runs):
        return
    rows = -1 if output.rows is None else output.rows
    position = GLSN(-1) if output.position is None else output.position
    what = start.what[:NAME_LENGTH_MAX] or "a new checkpoint"
    raise OutputExists(request.name, rows, output.glsn, position, what)


def _is_past(output: Output, start: r.RunStart, runs: RunRegistry) -> bool:
    """Whether the whole output is from before the start.

    A savepoint holds the state at its position. If the input ended there, the output contains that state as well. So
    the savepoint may be at the position of the output only if nothing was published after its own batch. If the run of
    the savepoint has published nothing, the run may have begun before the output, in order to publish it again.
    """
    run = runs.with_key(start.key) if start.key else None
    if run is not None and run.run == output.run and output.batch <= start.batch:
        return True
    if start.position is None or output.position is None:
        return False
    return start.position > output.position if start.key else start.position >= output.position


def forget_output(request: r.ForgetOutputRequest, state: OrderState) -> Outcome:
    if state.runs.output(request.name) is None:
        if state.access.mode is not AccessMode.OFF:
            raise NotFound(f"nothing was published under the name {request.name!r}")
        names = sorted(output.name for output in state.runs.outputs)
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", …" if len(names) > NAMES_SHOWN_MAX else "")
        raise NotFound(f"nothing was published under the name {request.name!r}; names that have: {shown or 'none'}")
    return (d.ForgetOutput(request.name),), r.Done()


def publish(request: r.PublishRequest, state: OrderState) -> Outcome:
    """Decide on a batch, or answer about the one that is decided.

    The answer is None while the batch, or the batch before it, is not published yet. The leader then calls this again
    when that has changed.
    """
    if request.batch < 0:
        raise InvalidArgument(f"batches are numbered from 0 on, not {request.batch}")
    if request.position is not None and not 0 <= request.position <= state.high_watermark:
        raise InvalidArgument(
            f"the input was read up to GLSN {request.position}, but the log ends at {state.high_watermark}: give the "
            "last position of this log that was read, or none"
        )
    _check_input(request.input, state)
    run = state.runs.get(request.run)
    if run is None and state.runs.finished.has(request.run):
        # A late retry: its only batch is in the log.
        return (), r.PublishAnswer()
    if run is None:
        raise NotFound(f"there is no run {request.run}, or it was over long ago and is forgotten: open one")
    _check_fence(run)
    _check_epoch(run, request.job_epoch)
    _check_assigned(run, state)
    if request.batch <= run.batch:
        return (), _answer(request, run)
    if run.unpublished:
        return (), None
    _check_parts(request, run, state)
    groups = tuple(_plan(request.batch, parts, state) for parts in _by_topic(request.parts))
    decided = d.DecideBatch(request.run, request.batch, groups, request.position, request.input)
    return (decided,), None if groups else r.PublishAnswer()


def _check_input(given: InputRange | UnsetType, state: OrderState) -> None:
    if given is not UNSET and not 0 <= given.after <= given.through <= state.high_watermark:
        raise InvalidArgument(
            f"the input of a batch cannot be {given} of a log that ends at {state.high_watermark}: give the range of "
            "this log that was read, or none"
        )


def drop_run(request: r.DropRunRequest, state: OrderState) -> Outcome:
    run = state.runs.get(request.run)
    if run is None:
        raise NotFound(f"there is no run {request.run}, or it was over long ago and is forgotten")
    if not run.unpublished:
        raise Refused(f"run {run.run} holds nothing up: all that was decided for it is in the log")
    lost = "; ".join(
        f"{counted(group.rows, 'row')} for topic {state.topics[group.topic].name!r}" for group in run.unpublished
    )
    return (d.DropRun(run.run, f"an operator gave up batch {run.batch}: {lost}"),), r.Done()


def _answer(request: r.PublishRequest, run: RunState) -> r.PublishAnswer | None:
    """Answer about the decided batch. The first decision is final, even if the request now names other parts. But its
    input must be the same: otherwise the batches that follow would skip input, or repeat it."""
    if request.batch < run.batch:
        return r.PublishAnswer()
    known, given = run.input, request.input
    if known is not UNSET and given is not UNSET and given != known:
        raise BatchDiffers(run.run, run.batch, known.after, known.through, str(given))
    if run.unpublished:
        return None
    return r.PublishAnswer(run.published)


def _check_fence(run: RunState) -> None:
    if run.fenced_by:
        raise RunFenced(run.name, run.run, run.fenced_by)


def _check_parts(request: r.PublishRequest, run: RunState, state: OrderState) -> None:
    if len(request.parts) > PARTS_MAX:
        raise InvalidArgument(
            f"a batch has at most {PARTS_MAX} parts, this one {len(request.parts)}: write it with fewer tasks"
        )
    names = {part.part for part in request.parts}
    if len(names) < len(request.parts):
        raise InvalidArgument("the same part is in the batch twice")
    for part in request.parts:
        if part.topic not in state.topics:
            raise NotFound(f"topic number {part.topic} does not exist (any more): nothing of the batch was published")
        if part.run and (part.run, part.batch) != (run.run, request.batch):
            raise InvalidArgument(
                f"part {part.part} was staged for batch {part.batch} of run {part.run}, not for batch {request.batch} "
                f"of run {run.run}: publish what was staged for this batch"
            )
        if part.generation != run.generation:
            raise StagedExpired(run.run, part.generation, run.generation)
        if not part.part or len(part.part) > NAME_LENGTH_MAX or min(part.rows, part.entries, part.bytes) < 0:
            raise InvalidArgument(f"malformed part: {part}")
        if not 1 <= len(part.holders) <= HOLDERS_MAX:
            raise InvalidArgument(f"1 to {HOLDERS_MAX} storage nodes hold a part, not {len(part.holders)}")
        if not any(node in state.nodes for node in part.holders):
            # A decision about it would be final, and could never be carried out.
            holders = ", ".join(map(str, part.holders))
            raise StagedExpired(run.run, part.generation, run.generation).because(
                f"rows of run {run.run} were staged on storage nodes that were removed since ({holders}): stage the "
                "rows again"
            )


def _by_topic(parts: Iterable[Part]) -> list[list[Part]]:
    """Return the parts that have rows, grouped by topic, in the order of the request."""
    topics: dict[TopicId, list[Part]] = {}
    for part in parts:
        if part.rows:
            topics.setdefault(part.topic, []).append(part)
    return [topics[topic] for topic in sorted(topics)]


def _plan(batch: BatchNumber, parts: list[Part], state: OrderState) -> d.GroupPlan:
    """Choose the open stream for which most bytes were staged, since its nodes hold them already."""
    topic = parts[0].topic
    streams = open_streams(state, topic)
    if not streams:
        raise Unavailable(f"no log stream of topic {state.topics[topic].name!r} takes appends now")
    staged = dict.fromkeys(streams, 0)
    for part in parts:
        if part.hint in staged:
            staged[part.hint] += part.bytes
    most = max(staged.values())
    stream = next(stream for stream in streams if staged[stream] == most) if most else streams[batch % len(streams)]
    return d.GroupPlan(topic, stream, tuple(parts))


def open_streams(state: OrderState, topic: TopicId) -> list[LogStreamId]:
    return sorted(stream.stream for stream in state.streams_of(topic) if stream.is_open)


def staged(request: r.StagedRequest, state: OrderState, expire_after_us: int) -> Outcome:
    """Expire rows that were staged too long ago to be decided on: their run gets a new generation."""
    if len(request.batches) > STAGED_BATCHES_MAX:
        raise InvalidArgument(f"ask about at most {STAGED_BATCHES_MAX} batches at once, not {len(request.batches)}")
    expired: dict[RunId, d.ExpireStaged] = {}
    for batch in request.batches:
        run = state.runs.get(batch.run)
        if run is None or _is_over(batch, run) or batch.batch <= run.batch:
            continue
        if batch.age_us > expire_after_us and batch.run not in expired:
            reason = f"batch {batch.batch} was staged {batch.age_us // 1_000_000} s ago on storage node {request.node}"
            expired[batch.run] = d.ExpireStaged(batch.run, reason)
    drop = tuple(
        batch
        for batch in request.batches
        if _may_drop(batch, state, expired) or _is_unheard_of(batch, state, expire_after_us)
    )
    return tuple(expired.values()), r.StagedAnswer(drop, _epochs_of(request, state) or UNSET)


def _epochs_of(request: r.StagedRequest, state: OrderState) -> dict[RunId, JobEpoch]:
    runs = {batch.run: state.runs.get(batch.run) for batch in request.batches}
    return {number: run.job_epoch for number, run in runs.items() if run is not None and run.job_epoch is not UNSET}


def _may_drop(batch: r.StagedBatch, state: OrderState, expired: dict[RunId, d.ExpireStaged]) -> bool:
    run = state.runs.get(batch.run)
    if run is None:
        return state.runs.was_forgotten(batch.run)
    if batch.batch <= run.batch:
        return batch.batch < run.batch or not run.unpublished
    return _is_over(batch, run) or (batch.run in expired and batch.generation <= run.generation)


def _is_unheard_of(batch: r.StagedBatch, state: OrderState, expire_after_us: int) -> bool:
    """Whether rows were staged long ago for a run that was never opened. A run's number is stored before any client
    learns it, so these are rows of another cluster, or of an invented number."""
    return batch.run > state.runs.last and batch.age_us > expire_after_us


def _is_over(batch: r.StagedBatch, run: RunState) -> bool:
    """Whether the staged rows of an undecided batch can never be decided on."""
    return bool(run.fenced_by) or batch.generation < run.generation
