"""Runs the pipeline of a job in this process, as another process commands: the supervisor of ``cutwater pipeline run``,
or an agent.

Commands come in a queue, and what happens is told at once. A savepoint that fails does not end the pipeline. When the
JVM dies, this process reports it and ends.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from cutwater.client.client import Client
from cutwater.core.jobs.checkpoint_stores import check_checkpoint_store
from cutwater.errors import CutwaterError, Refused, Unavailable
from cutwater.jobs.child import how_it_ended
from cutwater.jobs.job_file import Restored, require_parallelism
from cutwater.jobs.locks import lock_checkpoint
from cutwater.jobs.messages import (
    Ended,
    FromProgram,
    Moved,
    Running,
    SavedPoint,
    Start,
    Stop,
    Taken,
    TakeSavepoint,
    Told,
    ToProgram,
)
from cutwater.jobs.spark_conf import refuse_open_ui
from cutwater.pipeline.keyed_state.keys import SLICES_DEFAULT
from cutwater.pipeline.stream import Pipeline
from cutwater.savepoints.evolution import restoration
from cutwater.savepoints.files import LocalFiles, is_local
from cutwater.savepoints.program import described
from cutwater.savepoints.savepoint import Savepoint, open_savepoint, place_of
from cutwater.spark.options import Where
from cutwater.spark.savepoint.checkpoints import Checkpoint, FinishedBatch, Note, Origin

WAIT_SECONDS = 1.0
"""How often it looks for commands and reports progress."""
LEAST_SECONDS = 0.001
JVM_LOOK_SECONDS = 0.1
JVM_END_SECONDS = 8.0

Succeed = Callable[[Client, Checkpoint], None]
"""Begins the checkpoint from that of an earlier assignment, if there is one. Called before every start."""


class Commander(Protocol):
    """The process that commands this one."""

    @property
    def commands(self) -> queue.Queue[ToProgram]: ...

    def tell(self, message: FromProgram) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Tell that the program has failed."""


def ours(error: BaseException) -> CutwaterError:
    """Return an error as one of ours, which can be told."""
    if isinstance(error, CutwaterError):
        return error
    return CutwaterError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def sizes(start: Start, note: Note | None) -> tuple[int, int]:
    """Return parallelism and slices: those that a checkpoint was made with, or else the requested ones."""
    if note is None:
        slices = max(SLICES_DEFAULT, start.parallelism or 1)
        return start.parallelism or min(os.cpu_count() or 1, slices), slices
    require_parallelism(start.checkpoint, note.parallelism, start.parallelism)
    return note.parallelism, note.slices


def restored(checkpoint: Checkpoint, done: FinishedBatch | None, origin: Origin | None) -> Restored | None:
    """Return what a start goes on from. ``done`` is the last micro-batch before it; ``origin`` is the savepoint that
    the checkpoint began with."""
    if done is not None:
        return Restored(checkpoint.path, done.offset.glsn, done.batch)
    return None if origin is None else Restored(origin.savepoint, origin.glsn)


def _own_conf() -> dict[str, str]:
    """Let the JVM have its temporary files in the directory of the job. It puts native libraries there, and leaves them
    if it is killed."""
    return {"spark.driver.defaultJavaOptions": f'"-Djava.io.tmpdir={tempfile.gettempdir()}"'}


def _tls_of(where: Any) -> dict[str, Any]:
    tls = where.tls
    if tls is None:
        return {}
    return {"tls_ca": tls.authority, "tls_certificate": tls.certificate, "tls_key": tls.key}


class SavepointWish:
    """A requested savepoint of a running pipeline. It can be taken as soon as a micro-batch is done."""

    def __init__(self, wanted: TakeSavepoint, checkpoint: Checkpoint) -> None:
        self._target, self._deadline = wanted.target, time.monotonic() + wanted.seconds
        self._checkpoint = checkpoint

    def taken(self, run: Any) -> Taken | None:
        """Take the savepoint. Returns None if it is too early. A failure never ends the pipeline."""
        left = self._deadline - time.monotonic()
        has_begun = bool(self._checkpoint.committed())
        try:
            savepoint = run.savepoint(self._target, timeout=max(left, LEAST_SECONDS))
        except Refused as error:
            return None if left > 0 and not has_begun else Taken(self._target, Told.of(error))
        except Exception as error:
            return Taken(self._target, Told.of(ours(error)))
        return Taken(self._target, saved=saved_point(savepoint))


def saved_point(savepoint: Savepoint) -> SavedPoint:
    made = savepoint.manifest
    return SavedPoint(made.glsn, made.run.batch, made.bytes)


class ProgramRun:
    """See the module. ``succeed`` is for pipelines that run for an assignment of a job."""

    def __init__(
        self, commander: Commander, pipeline: Pipeline, start: Start, where: Where, succeed: Succeed | None = None
    ) -> None:
        self._commander, self._pipeline, self._start = commander, pipeline, start
        self._where, self._succeed = where, succeed

    def run(self) -> None:
        # Spark is loaded only when there is something to run.
        from cutwater.spark.savepoint.files import files_at, require_store  # noqa: PLC0415
        from cutwater.spark.session.program_files import send_program  # noqa: PLC0415
        from cutwater.spark.session.session import session  # noqa: PLC0415

        start, where = self._start, self._where
        if where.token():
            refuse_open_ui(start.conf)
        check_checkpoint_store(start.checkpoint)
        if is_local(start.checkpoint):
            self._go_on_from_another(Checkpoint(start.checkpoint, LocalFiles()))
        # A remote checkpoint is read through Spark, which then has the requested number of threads.
        note = Checkpoint(start.checkpoint, LocalFiles()).note() if is_local(start.checkpoint) else None
        threads, slices = sizes(start, note)
        until = self._checked(threads, slices)
        master = start.master or f"local[{threads if start.threads_max is None else min(threads, start.threads_max)}]"
        spark = session(f"cutwater {self._pipeline.name}", master=master, config={**_own_conf(), **start.conf})
        send_program(spark, start.master)
        gateway: Any = spark.sparkContext._gateway
        jvm = gateway.proc
        threading.Thread(target=self._watch_jvm, args=(jvm,), name="jvm", daemon=True).start()
        checkpoint = Checkpoint(start.checkpoint, files_at(spark, start.checkpoint))
        if not is_local(start.checkpoint):
            require_store(spark, start.checkpoint)
            self._go_on_from_another(checkpoint)
        last = None
        while last is None:
            # Again if it was to stop with a savepoint and could not take that.
            last = self._run_until_stop(spark, checkpoint, until)
        self._end_jvm(spark, jvm)
        self._commander.tell(last)

    def _run_until_stop(self, spark: Any, checkpoint: Checkpoint, until: int | None) -> FromProgram | None:
        from cutwater.spark.job_progress import Watcher  # noqa: PLC0415
        from cutwater.spark.pipeline.runner import run_pipeline  # noqa: PLC0415

        start, where = self._start, self._where
        parallelism, slices = sizes(start, checkpoint.note())
        done = checkpoint.point() if checkpoint.committed() else None
        run = run_pipeline(
            self._pipeline,
            until=until,
            drain=start.drain,
            drain_firings=start.drain_firings,
            parallelism=parallelism,
            slices=slices,
            checkpoint=start.checkpoint,
            trigger=start.trigger,
            start=start.start,
            max_records_per_trigger=start.max_records_per_trigger,
            spark=spark,
            token=Path(where.token_file) if where.token_file else "",
            **_tls_of(where),
            retain=start.retain,
            job_epoch=start.job_epoch,
            wait=False,
            **self._beginning(checkpoint),
        )
        note = checkpoint.note()
        origin = None if note is None else note.origin
        savepoint = None if origin is None else origin.savepoint
        ui = str(spark.sparkContext.uiWebUrl or "")
        goes_on = restored(checkpoint, done, origin)
        pid = spark.sparkContext._gateway.proc.pid
        self._commander.tell(Running(pid, parallelism, until, savepoint, goes_on, ui))
        return self._until_over(run, checkpoint, Watcher(self._pipeline, where))

    def _go_on_from_another(self, checkpoint: Checkpoint) -> None:
        """Begin the checkpoint from that of an earlier assignment, unless that is done."""
        from cutwater.spark.pipeline.runner import connected  # noqa: PLC0415

        if self._succeed is None:
            return
        lock = lock_checkpoint(checkpoint.path)
        try:
            with connected(self._where) as client:
                self._succeed(client, checkpoint)
        finally:
            if lock is not None:
                lock.release()

    def _beginning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return how the run begins. A checkpoint that began with this savepoint stores what was allowed for it. More
        may be allowed until a micro-batch is done; after that the checkpoint no longer needs the savepoint. A
        checkpoint that began otherwise is refused."""
        start = self._start
        replays = {"replay_output": True} if start.replay_output else {}
        if start.from_savepoint is None:
            return replays
        here = is_local(start.from_savepoint)
        place = place_of(start.from_savepoint, None)[0] if here else start.from_savepoint.rstrip("/")
        note = checkpoint.note()
        if note is not None and start.goes_on:
            return replays
        is_noted = note is not None and note.origin is not None and note.origin.savepoint == place
        allows_more = start.replay_output or start.allow_non_restored_state
        if is_noted and (checkpoint.committed() or not allows_more):
            return {}
        names = ("from_savepoint", "replay_output", "allow_non_restored_state")
        return {name: getattr(start, name) for name in names}

    def _checked(self, parallelism: int, slices: int) -> int | None:
        """Refuse known errors before Spark starts. Returns the end of the run as a position, which every restart uses
        again: "now" means when the job was started, not when its program was last started."""
        from cutwater.pipeline.local.run_checks import check_writes  # noqa: PLC0415
        from cutwater.spark.pipeline.runner import checked, connected, until_position  # noqa: PLC0415

        check_writes(self._pipeline.name, self._pipeline.graph)
        end: Any = self._start.until
        if isinstance(end, str) and end != "now":
            end = datetime.fromisoformat(end)
        with connected(self._where) as client:
            self._check_savepoint(checked(self._pipeline, client, parallelism, slices))
            return until_position(client, end)

    def _check_savepoint(self, program: Any) -> None:
        """Refuse a program that cannot restore the savepoint, if both checkpoint and savepoint are on this machine."""
        start = self._start
        if start.from_savepoint is None or not (is_local(start.checkpoint) and is_local(start.from_savepoint)):
            return
        if Checkpoint(start.checkpoint, LocalFiles()).note() is None:
            manifest = open_savepoint(start.from_savepoint).manifest
            allowed = start.allow_non_restored_state
            restoration(manifest, described(program.plan), allow_non_restored_state=allowed)

    def _until_over(self, run: Any, checkpoint: Checkpoint, watcher: Any) -> FromProgram | None:
        """Return the last message, or None if the pipeline has to be run again."""
        wish: SavepointWish | None = None
        while not run.wait(WAIT_SECONDS):
            with suppress(queue.Empty):
                match self._commander.commands.get_nowait():
                    case Stop() as stop:
                        return self._stop(run, stop)
                    case TakeSavepoint() as wanted:
                        wish = SavepointWish(wanted, checkpoint)
            taken = None if wish is None else wish.taken(run)
            if taken is not None:
                self._commander.tell(taken)
                wish = None
            self._tell_progress(run, watcher)
        # The last micro-batch, which may be the only one, may have finished after the last report.
        self._tell_progress(run, watcher)
        return Ended(is_finished=True)

    def _tell_progress(self, run: Any, watcher: Any) -> None:
        progress = watcher.look(run.progress)
        if progress is not None:
            self._commander.tell(Moved(progress))

    def _stop(self, run: Any, stop: Stop) -> FromProgram | None:
        if stop.savepoint is None:
            run.stop()
            return Ended(is_finished=False)
        try:
            savepoint = run.stop(savepoint=stop.savepoint, timeout=stop.seconds)
        except CutwaterError as error:
            if not stop.goes_on:
                raise
            self._commander.tell(Taken(stop.savepoint, Told.of(error)))
            return None
        return Ended(is_finished=False, savepoint=stop.savepoint, saved=saved_point(savepoint))

    def _watch_jvm(self, jvm: Any) -> None:
        """Report the death of the JVM. Calls into a dead JVM fail in many ways or hang, and do not say what
        happened."""
        while jvm.poll() is None:
            time.sleep(JVM_LOOK_SECONDS)
        if not self._is_ending:
            self._commander.fail(Unavailable(f"the JVM of Spark, process {jvm.pid}, {how_it_ended(jvm.returncode)}"))
            os._exit(1)

    _is_ending = False

    def _end_jvm(self, spark: Any, jvm: Any) -> None:
        """End the JVM and wait for it, because it removes its files when it ends by itself."""
        self._is_ending = True
        with suppress(Exception):
            spark.stop()
            jvm.stdin.close()
            jvm.wait(JVM_END_SECONDS)
