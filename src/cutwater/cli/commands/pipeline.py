"""``cutwater pipeline``: runs and supervises pipelines; stops, saves and rescales them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cutwater.cli.framework.command import Bundle, command, noun, under
from cutwater.cli.framework.exit_codes import INTERRUPTED, Settings
from cutwater.cli.framework.security import NO_CREDENTIALS, Security
from cutwater.cli.framework.target import TimeoutOption
from cutwater.cli.framework.times import parse_position
from cutwater.cli.framework.values import parse_pairs
from cutwater.cli.io.output import show, table
from cutwater.cli.io.pipeline_output import Display, held_line, late_line, moment, progress_line
from cutwater.core.jobs.checkpoint_stores import LOCAL, check_checkpoint_store, scheme_of
from cutwater.core.jobs.job_spec import split_entry
from cutwater.core.text import counted
from cutwater.durations import milliseconds
from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument, Refused, Unavailable
from cutwater.jobs import detached
from cutwater.jobs.control import ask
from cutwater.jobs.job_file import LOG_FILE, Job, JobDirectory, JobState, has_begun, list_jobs
from cutwater.jobs.messages import Answer, Cancel, Describe, Progress, Rescale, Start, Stop, TakeSavepoint
from cutwater.jobs.places import all_jobs, find
from cutwater.jobs.restarts import DEFAULT, parse, written
from cutwater.jobs.spark_conf import check_conf, parse_conf, refuse_open_ui, with_ui
from cutwater.jobs.supervisor import JobOptions, Supervisor
from cutwater.pipeline.local.spark_import import no_spark, on_spark
from cutwater.runtime.permissions import open_file
from cutwater.wire.listen.listen_checks import check_metrics

app = noun("Pipelines: programs over the log that run on Spark.")

MARGIN_SECONDS = 5.0
"""Time for an answer that is given at the last moment to arrive here."""
LOOK_SECONDS = 2.0
_end, _savepoints, _spark, _metrics = map(under, ("Where it ends", "Savepoints", "Spark", "Metrics"))

JobsOption = Annotated[
    Path | None,
    typer.Option(
        "--jobs-dir",
        envvar="CUTWATER_JOBS_DIR",
        help="Where jobs and their checkpoints lie, if not in the place of this user and the log.",
    ),
]
SavepointDirOption = Annotated[
    str,
    typer.Option("--savepoint-dir", envvar="CUTWATER_SAVEPOINT_DIR", help="Where the savepoint gets a directory."),
]


@dataclass(frozen=True)
class OneJob(Bundle):
    """The job that a command is about."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline.")]
    jobs_dir: JobsOption = None
    timeout: TimeoutOption = 300.0

    @property
    def directory(self) -> JobDirectory:
        return find(self.name) if self.jobs_dir is None else JobDirectory(self.jobs_dir, self.name)

    def ask(self, request: Any) -> Any:
        return ask(self.directory.require(), request, self.timeout + MARGIN_SECONDS)

    def saved(self, request: TakeSavepoint | Stop | Rescale) -> str:
        """Ask for a savepoint, and return where it is. The result is what was done, not what was requested."""
        answer: Answer = self.ask(request)
        if answer.savepoint is None:
            raise Unavailable(
                f"pipeline {self.name!r} tells of no savepoint: `cutwater pipeline describe {self.name}` shows it"
            )
        return answer.savepoint


@dataclass(frozen=True)
class PipelineRunOptions(Bundle):
    """Options of a run; ``cutwater.spark.pipeline.runner`` explains them."""

    parallelism: Annotated[
        int | None, typer.Option(min=1, help="How many tasks work at once; by default one per core.")
    ] = None
    restart: Annotated[
        str, typer.Option(metavar="STRATEGY", help="When to start it again: none, fixed:…, exponential:… or rate:….")
    ] = written(DEFAULT)
    log: Annotated[
        str, typer.Option(envvar="CUTWATER_LOG", help="Which log, if not the one that FILE names: a path or servers.")
    ] = ""
    arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the pipeline. May be repeated.")
    ] = None
    start: Annotated[str, typer.Option(metavar="earliest|latest|GLSN", help="Where a new checkpoint begins.")] = (
        "earliest"
    )
    until: Annotated[str | None, _end(metavar="now|GLSN|@TIME", help="The last position.")] = None
    available_now: Annotated[bool, _end("--available-now", help="The same as --until now.")] = False
    drain: Annotated[bool, _end("--drain", help="Treat that position as the end of the input: all windows close.")] = (
        False
    )
    drain_firings: Annotated[
        int,
        _end(
            metavar="N", min=0, help="How many timers that are registered while it drains fire, per key and operator."
        ),
    ] = 10
    from_savepoint: Annotated[str | None, _savepoints(metavar="PATH", help="Begin with this state.")] = None
    replay_output: Annotated[
        bool, _savepoints("--replay-output", help="Publish again what is published under its name.")
    ] = False
    allow_non_restored_state: Annotated[
        bool, _savepoints("--allow-non-restored-state", help="Leave out state of operators that FILE does not have.")
    ] = False
    checkpoint: Annotated[str | None, _spark(metavar="DIR", help="Spark's checkpoint, if not the job's own.")] = None
    retain: Annotated[int | None, _spark(metavar="N", min=2, help="How many micro-batches to keep for going back.")] = (
        None
    )
    trigger: Annotated[str | None, _spark(metavar="'5 seconds'", help="How often a micro-batch begins.")] = None
    max_records_per_trigger: Annotated[
        int | None, _spark(metavar="N", min=1, help="How large a micro-batch may be.")
    ] = None
    master: Annotated[str, _spark(help="Where Spark runs; by default in processes of this machine.")] = ""
    conf: Annotated[
        list[str] | None, _spark("--conf", metavar="KEY=VALUE", help="A setting of Spark's own; may be repeated.")
    ] = None
    spark_ui: Annotated[
        int | None,
        _spark(
            "--spark-ui", metavar="PORT", min=0, max=65_535, help="Serve Spark's pages on this machine; 0: any port."
        ),
    ] = None
    metrics: Annotated[str | None, _metrics(metavar="HOST:PORT", help="Where Prometheus can read metrics.")] = None
    insecure: Annotated[bool, _metrics("--insecure", help="--metrics may be reached from other machines.")] = False

    def asked(self, file: str, root: Path | None, security: Security = NO_CREDENTIALS) -> JobOptions:
        path, variable = split_entry(file)
        # Wrong credentials are refused here, before a process is started that would log the error.
        security.access()
        token = security.token_or_file()
        authority, certificate, key = (
            "" if path is None else str(path.absolute())
            for path in (security.tls_ca, security.tls_certificate, security.tls_key)
        )
        if self.metrics is not None:
            check_metrics(self.metrics, insecure=self.insecure)
        start = self._start()
        if token:
            refuse_open_ui(start.conf)
        return JobOptions(
            str(Path(path).absolute()),
            variable,
            self.log,
            "" if root is None else str(root.absolute()),
            parse(self.restart),
            start,
            token if isinstance(token, str) else "",
            self.metrics or "",
            "" if isinstance(token, str) else str(token.absolute()),
            (authority, certificate, key),
            parse_pairs("--arg", self.arg or ()),
        )

    def _start(self) -> Start:
        if self.available_now and (self.until is not None or self.drain):
            raise InvalidArgument("--available-now is --until now without --drain: say one or the other")
        if self.drain and self.until is None:
            raise InvalidArgument("--drain ends the input at a position: say which, with --until, such as --until now")
        if self.from_savepoint is None and self.allow_non_restored_state:
            raise InvalidArgument("--allow-non-restored-state is about --from-savepoint: name one")
        if self.start not in ("earliest", "latest") and not (self.start.isdecimal() and int(self.start) >= 1):
            raise InvalidArgument(f"--start is 'earliest', 'latest' or a GLSN from 1 on, not {self.start!r}")
        # A checkpoint that has begun no longer needs its savepoint.
        if self.from_savepoint is not None and not (self.checkpoint and has_begun(self.checkpoint)):
            _require_savepoint(self.from_savepoint)
        if self.trigger is not None:
            milliseconds(self.trigger, "--trigger")
        if self.checkpoint is not None:
            check_checkpoint_store(self.checkpoint)
        conf = with_ui(parse_conf(self.conf or ()), self.spark_ui)
        check_conf(conf, self.master)
        return Start(
            checkpoint=_absolute(self.checkpoint) or "",
            master=self.master,
            parallelism=self.parallelism,
            until=_until("now" if self.available_now else self.until),
            drain=self.drain,
            drain_firings=self.drain_firings,
            trigger=self.trigger,
            start=self.start,
            max_records_per_trigger=self.max_records_per_trigger,
            from_savepoint=_absolute(self.from_savepoint),
            replay_output=self.replay_output,
            allow_non_restored_state=self.allow_non_restored_state,
            retain=self.retain,
            conf=conf,
        )


def _require_savepoint(path: str) -> None:
    """Check that the savepoint exists, if it is on this machine; elsewhere Spark checks it."""
    # Imported here, because other commands would load Arrow for nothing.
    from cutwater.savepoints.files import is_local  # noqa: PLC0415
    from cutwater.savepoints.savepoint import open_savepoint  # noqa: PLC0415

    if is_local(path):
        open_savepoint(path)


def _until(text: str | None) -> int | str | None:
    if text is None or text == "now":
        return text
    try:
        found = parse_position(text, datetime.now(UTC))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}; or 'now'") from None
    return found if isinstance(found, int) else found.isoformat()


def _absolute(path: str | None) -> str | None:
    """Return an absolute path, because other processes have other working directories. A path that names a file system
    stays as it is."""
    return str(Path(path).absolute()) if path is not None and _is_plain(path) else path


def _is_plain(path: str) -> bool:
    """Report whether a path is one of this machine, without the name of a file system."""
    return scheme_of(path) == LOCAL and not path.startswith(f"{LOCAL}:/")


@command(app)
def run(
    file: Annotated[
        str, typer.Argument(metavar="FILE[:NAME]", help="A Python file, and its pipeline if it has several.")
    ],
    detach: Annotated[bool, typer.Option("--detach", help="Return when it runs, and leave it running.")] = False,
    jobs_dir: JobsOption = None,
    timeout: TimeoutOption = 300.0,
    *,
    options: PipelineRunOptions,
    security: Security,
) -> None:
    """Run a pipeline, and start it again when it fails. Continues with its checkpoint, if there is one.

    On a terminal a line shows the progress; elsewhere there are lines of JSON. Ctrl-C or SIGTERM stop it.
    """
    asked = options.asked(file, jobs_dir, security)
    if find_spec("pyspark") is None:
        raise Refused(no_spark("pipelines run on Spark", "No module named 'pyspark'"))
    if detach:
        job = detached.start(asked, timeout)
        told = f"pipeline {job.pipeline!r} is {job.state}, process {job.pid}; checkpoint {job.checkpoint}\n"
        where = "" if jobs_dir is None else f" --jobs-dir {jobs_dir}"
        if job.metrics:
            told += f"metrics: http://{job.metrics}/metrics\n"
        if job.ui:
            told += f"Spark's pages: {job.ui}\n"
        show(job, f"{told}stop it with: cutwater pipeline stop {job.pipeline}{where}")
        return
    display = Display()
    supervisor = Supervisor(asked, display.show)
    try:
        supervisor.run()
    finally:
        display.close()
    if supervisor.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


@command(app, name="list")
def list_pipelines(jobs_dir: JobsOption = None) -> None:
    """Show all jobs of this user, or those under a directory, and their states."""
    found = list(all_jobs() if jobs_dir is None else list_jobs(jobs_dir))
    if Settings.is_json:
        show([_plain(job, None) for job in found], "")
        return
    columns = ["pipeline", "state", "since (UTC)", "pid", "parallelism", "restarts", "checkpoint", "file"]
    rows = []
    for job in found:
        pid, checkpoint = job.pid if job.is_alive else None, Path(job.checkpoint).name
        state = (job.pipeline, job.state_now, moment(job.since), pid)
        rows.append((*state, job.parallelism, job.restarts, checkpoint, job.file or None))
    show(None, table(columns, rows))


@command(app)
def describe(job: OneJob) -> None:
    """Show a pipeline: state, progress, checkpoint, savepoint, last error."""
    found = job.directory.require()
    answer = _answer(found)
    progress = None if answer is None else answer.progress
    if Settings.is_json:
        show(_plain(found, progress), "")
        return
    lines = [
        f"pipeline {found.pipeline!r}: {found.state_now} since {moment(found.since)} UTC",
        f"  file:       {found.file or 'a program that runs by itself'}, run in {found.directory}",
        f"  processes:  {_processes(found)}",
        f"  restarts:   {found.restarts}, strategy {found.arguments.get('restart', 'none of ours')}",
        f"  checkpoint: {found.checkpoint}",
    ]
    if found.parallelism is not None:
        lines.append(f"  parallelism: {found.parallelism}")
    if found.from_savepoint:
        lines.append(f"  began with: {found.from_savepoint}")
    if found.restored is not None:
        lines.append(f"  went on from: {found.restored}")
    if found.savepoint:
        lines.append(f"  savepoint:  {found.savepoint}")
    if found.metrics and found.is_alive:
        lines.append(f"  metrics:    http://{found.metrics}/metrics")
    if found.ui and found.is_alive:
        lines.append(f"  Spark's pages: {found.ui}")
    if found.last_error is not None:
        lines.append(f"  last error: {moment(found.last_error.at)} UTC, {found.last_error.message}")
    if progress is not None:
        lines.append(f"  progress:   {progress_line(progress)}; GLSN {progress.glsn} of {progress.tail}")
        lines.append(f"  held by:    {held_line(progress)}")
        lines.append(f"  late:       {late_line(progress)}")
        left = [f"{counted(timers, 'timer')} of {uid!r}" for uid, timers in progress.left_timers.items()]
        if left:
            lines.append(f"  left:       {', '.join(left)} did not fire when the input ended (--drain-firings)")
    elif answer is not None and found.state is JobState.RUNNING:
        lines.append("  progress:   no micro-batch yet since it was started")
    show(None, "\n".join(lines))


def _plain(job: Job, progress: Progress | None) -> dict[str, Any]:
    hidden = {"control"}
    told = {name: value for name, value in msgspec.to_builtins(job).items() if name not in hidden}
    return told | {"state": job.state_now, "progress": msgspec.to_builtins(progress)}


def _answer(job: Job) -> Answer | None:
    """Return the answer of its supervisor; None if none answers."""
    try:
        return ask(job, Describe(), LOOK_SECONDS)
    except CutwaterError:
        return None


def _processes(job: Job) -> str:
    if not job.is_alive:
        return "none"
    found = {"supervisor" if job.control else "program": job.pid, "driver": job.driver, "JVM": job.jvm}
    return ", ".join(f"{what} {pid}" for what, pid in found.items() if pid)


@command(app)
def stop(
    savepoint_dir: SavepointDirOption = "savepoints",
    no_savepoint: Annotated[bool, typer.Option("--no-savepoint", help="Keep only its checkpoint.")] = False,
    *,
    job: OneJob,
) -> None:
    """Stop a pipeline when its state and its output agree, and take a savepoint. If that fails, it runs on."""
    taken, told = None, "; `cutwater pipeline run` goes on from its checkpoint"
    if no_savepoint:
        job.ask(Stop(None, job.timeout))
    else:
        taken = job.saved(Stop(_target(job.name, savepoint_dir), job.timeout))
        told = f" with savepoint {taken}"
    show({"pipeline": job.name, "state": JobState.STOPPED, "savepoint": taken}, f"stopped {job.name!r}{told}")


@command(app)
def cancel(job: OneJob) -> None:
    """End a pipeline now. Its checkpoint stays, and `cutwater pipeline run` goes on from there."""
    job.ask(Cancel())
    show({"pipeline": job.name, "state": JobState.CANCELLED}, f"cancelled {job.name!r}")


@command(app)
def savepoint(savepoint_dir: SavepointDirOption = "savepoints", *, job: OneJob) -> None:
    """Take a savepoint from the last micro-batch, while the pipeline runs on, or after it has ended."""
    target = _target(job.name, savepoint_dir)
    is_at_rest = not job.directory.require().is_alive
    taken = _saved_at_rest(job, target) if is_at_rest else job.saved(TakeSavepoint(target, job.timeout))
    show({"pipeline": job.name, "savepoint": taken}, f"savepoint of {job.name!r}: {taken}")


@command(app)
def rescale(
    parallelism: Annotated[int, typer.Option(min=1, help="How many tasks work at once.")],
    savepoint_dir: SavepointDirOption = "savepoints",
    *,
    job: OneJob,
) -> None:
    """Stop a pipeline with a savepoint, and go on from it with another number of tasks."""
    taken = job.saved(Rescale(parallelism, _target(job.name, savepoint_dir), job.timeout))
    told = f"{job.name!r} runs with parallelism {parallelism}, from savepoint {taken}"
    show({"pipeline": job.name, "parallelism": parallelism, "savepoint": taken}, told)


def _saved_at_rest(job: OneJob, target: str) -> str:
    """Take a savepoint of a job that does not run, with Spark in this process. A lock keeps the job from being started
    meanwhile."""
    directory = job.directory
    with directory.lock():
        found = directory.require()
        if found.is_alive:
            raise Refused(f"pipeline {job.name!r} has just been started by process {found.pid}: try again")
        if _is_plain(found.checkpoint) and not has_begun(found.checkpoint) and not found.from_savepoint:
            raise Refused(f"pipeline {job.name!r} has not done a micro-batch: there is nothing to save")
        with _printing_to(directory.path / LOG_FILE):
            take = on_spark("savepoint.savepoints", job.name).take_savepoint
            take(found.checkpoint, target, timeout=job.timeout, **_session(found))
        found.savepoint = target
        directory.save(found)
    return target


def _session(job: Job) -> dict[str, Any]:
    """Return the session to save a job with, if it reaches its file systems by settings of its own."""
    conf: dict[str, str] = job.arguments.get("conf") or {}
    stores = {name: value for name, value in conf.items() if name.startswith("spark.hadoop.")}
    if not stores:
        return {}
    return {"spark": on_spark("session.session", job.pipeline).session("cutwater savepoint", config=stores)}


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Redirect everything that any library or process prints meanwhile to a file: Spark prints much."""
    # First write what Python has buffered to its original destination.
    _flush()
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    try:
        with open(path, "ab", opener=open_file) as output:
            for fd in kept:
                os.dup2(output.fileno(), fd)
        try:
            yield
        finally:
            _flush()
    finally:
        for fd, old in kept.items():
            os.dup2(old, fd)
            os.close(old)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _target(pipeline: str, directory: str) -> str:
    """Return a directory of its own for each savepoint, named by pipeline and time."""
    name = f"{JobDirectory('.', pipeline).path.name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    place = f"{(_absolute(directory) or '').rstrip('/')}/{name}"
    if _is_plain(place) and Path(place).exists():
        raise AlreadyExists(f"{place} exists: try again in a second, or name another --savepoint-dir")
    return place
