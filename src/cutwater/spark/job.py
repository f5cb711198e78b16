"""Runs the program of a job: ``python -m cutwater.spark.job EVENTS FILE VARIABLE LOG``, started by its supervisor.

It loads the file, reports the name of its pipeline, and waits for the command to start it. Commands arrive on standard
input, and messages go to the file descriptor EVENTS. When the supervisor ends, standard input ends, and this process
ends with everything that it has started. When the JVM dies, this process reports it and ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from cutwater.errors import CutwaterError, InvalidArgument, Refused, Unavailable
from cutwater.jobs.child import how_it_ended, session_members
from cutwater.jobs.job_file import Restored, require_parallelism
from cutwater.jobs.locks import lock_checkpoint
from cutwater.jobs.messages import (
    TELLS_LOG,
    Ended,
    Failed,
    FromProgram,
    Lines,
    Loaded,
    Moved,
    Running,
    Start,
    Stop,
    Taken,
    TakeSavepoint,
    Told,
    ToProgram,
    line,
    read_to_program,
)
from cutwater.jobs.program_file import load_pipeline
from cutwater.jobs.restarts import is_hopeless
from cutwater.jobs.spark_conf import check_conf, refuse_open_ui
from cutwater.pipeline.keyed_state.keys import SLICES_DEFAULT
from cutwater.pipeline.stream import Pipeline
from cutwater.savepoints.files import LocalFiles, is_local
from cutwater.savepoints.savepoint import place_of
from cutwater.spark.savepoint.checkpoints import Checkpoint, FinishedBatch, Note, Origin

TOKEN, TOKEN_FILE = "CUTWATER_TOKEN", "CUTWATER_TOKEN_FILE"
TLS_FILES = ("CUTWATER_TLS_CA", "CUTWATER_TLS_CERTIFICATE", "CUTWATER_TLS_KEY")
WAIT_SECONDS = 1.0
"""How often it looks for commands and reports progress."""
LEAST_SECONDS = 0.001
JVM_LOOK_SECONDS = 0.1
JVM_END_SECONDS = 8.0
COMMANDS_MAX = 16
READ_BYTES = 1 << 16


class SupervisorConnection:
    """The connection to the process that started this one."""

    def __init__(self, events: int) -> None:
        os.set_inheritable(events, False)
        self._events, self._lock = events, threading.Lock()
        self.commands: queue.Queue[ToProgram] = queue.Queue(COMMANDS_MAX)
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def tell(self, message: FromProgram) -> None:
        with self._lock, suppress(BrokenPipeError):
            os.write(self._events, line(message))

    def fail(self, error: BaseException) -> None:
        self.tell(Failed(Told.of(_ours(error), is_hopeless=is_hopeless(error))))

    def _listen(self) -> None:
        lines = Lines()
        # This bypasses Python's own buffer: a thread that waits forever would hold its lock when the interpreter ends.
        while data := os.read(sys.stdin.fileno(), READ_BYTES):
            for one in lines.add(data):
                self.commands.put(read_to_program(one))
        end_all()


def _ours(error: BaseException) -> CutwaterError:
    if isinstance(error, CutwaterError):
        return error
    return CutwaterError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def end_all() -> NoReturn:
    """End this process with its JVM and Spark's workers, because its supervisor is gone."""
    for pid in session_members(os.getsid(0)) or []:
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(1)


def main(events: str, file: str, variable: str, log: str) -> None:
    supervisor = SupervisorConnection(int(events))
    try:
        pipeline = load_pipeline(file, variable)
        if log:
            pipeline.log = log
        supervisor.tell(Loaded(pipeline.name, _log_key(pipeline) if os.environ.pop(TELLS_LOG, "") else ""))
        start = supervisor.commands.get()
        assert isinstance(start, Start), "the first command is how to start"
        _print_to(start.output)
        _Program(supervisor, pipeline, start).run()
    except Exception as error:
        supervisor.fail(error)
        if not isinstance(error, CutwaterError):
            raise
        sys.exit(1)


def _log_key(pipeline: Pipeline) -> str:
    """Return the key of the log, by which its checkpoints are found."""
    from cutwater.spark.pipeline.runner import log_key  # noqa: PLC0415

    return log_key(_where(pipeline))


def _where(pipeline: Pipeline, master: str = "") -> Any:
    """Return the log, and files with the credentials for it. ``master`` is where Spark runs, if not in this process."""
    from cutwater.spark.pipeline.runner import where_of_run  # noqa: PLC0415
    from cutwater.spark.session.token_safety import file_of  # noqa: PLC0415

    if not pipeline.log:
        raise InvalidArgument(
            f"pipeline {pipeline.name!r} does not say which log it reads: name one with --log, or in the file"
        )
    file = os.environ.get(TOKEN_FILE)
    token = Path(file) if file else os.environ.get(TOKEN, "")
    files = tuple(os.environ.get(name) for name in TLS_FILES)
    # The log stays open as long as the supervisor lives, so a restart finds it open.
    where = where_of_run(pipeline, file_of(token, {"spark.master": master or "local"}), files, os.getppid())
    pipeline.log = where.servers
    return where


def _print_to(path: str) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


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
            run.savepoint(self._target, timeout=max(left, LEAST_SECONDS))
        except Refused as error:
            return None if left > 0 and not has_begun else Taken(self._target, Told.of(error))
        except Exception as error:
            return Taken(self._target, Told.of(_ours(error)))
        return Taken(self._target)


class _Program:
    def __init__(self, supervisor: SupervisorConnection, pipeline: Pipeline, start: Start) -> None:
        self._supervisor, self._pipeline, self._start = supervisor, pipeline, start

    def run(self) -> None:
        # Spark is loaded only when there is something to run.
        from cutwater.spark.job_progress import Watcher  # noqa: PLC0415
        from cutwater.spark.pipeline.runner import run_pipeline  # noqa: PLC0415
        from cutwater.spark.savepoint.files import files_at  # noqa: PLC0415
        from cutwater.spark.session.program_files import send_program  # noqa: PLC0415
        from cutwater.spark.session.session import session  # noqa: PLC0415

        start, pipeline = self._start, self._pipeline
        check_conf(start.conf, start.master)
        where = _where(pipeline, start.master)
        if where.token():
            refuse_open_ui(start.conf)
        # Spark's processes read the file that the query names, and no other process needs the token.
        for name in (TOKEN, TOKEN_FILE):
            os.environ.pop(name, "")
        if is_local(start.checkpoint):
            self._succeed(where, Checkpoint(start.checkpoint, LocalFiles()))
        # A remote checkpoint is read through Spark, which then has the requested number of threads.
        note = Checkpoint(start.checkpoint, LocalFiles()).note() if is_local(start.checkpoint) else None
        threads, slices = sizes(start, note)
        until = self._checked(where, threads, slices)
        spark = session(f"cutwater {pipeline.name}", master=start.master or f"local[{threads}]", config=start.conf)
        send_program(spark, start.master)
        gateway: Any = spark.sparkContext._gateway
        jvm = gateway.proc
        threading.Thread(target=self._watch_jvm, args=(jvm,), name="jvm", daemon=True).start()
        checkpoint = Checkpoint(start.checkpoint, files_at(spark, start.checkpoint))
        if not is_local(start.checkpoint):
            self._succeed(where, checkpoint)
        parallelism, slices = sizes(start, checkpoint.note())
        done = checkpoint.point() if checkpoint.committed() else None
        run = run_pipeline(
            pipeline,
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
        self._supervisor.tell(Running(jvm.pid, parallelism, until, savepoint, goes_on, ui))
        last = self._until_over(run, checkpoint, Watcher(pipeline, where))
        self._end_jvm(spark, jvm)
        self._supervisor.tell(last)

    def _succeed(self, where: Any, checkpoint: Checkpoint) -> None:
        """Begin the checkpoint from that of an earlier assignment, unless that is done."""
        from cutwater.spark.pipeline.runner import connected  # noqa: PLC0415
        from cutwater.spark.savepoint.savepoints import absolute  # noqa: PLC0415
        from cutwater.spark.savepoint.succession import begin_from  # noqa: PLC0415

        start = self._start
        if start.succeeds is None:
            return
        lock = lock_checkpoint(start.checkpoint)
        try:
            with connected(where) as client:
                begin_from(client, self._pipeline.name, checkpoint, absolute(start.succeeds), start.job_epoch)
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
        if note is not None and (start.goes_on or start.succeeds is not None):
            return replays
        is_noted = note is not None and note.origin is not None and note.origin.savepoint == place
        allows_more = start.replay_output or start.allow_non_restored_state
        if is_noted and (checkpoint.committed() or not allows_more):
            return {}
        names = ("from_savepoint", "replay_output", "allow_non_restored_state")
        return {name: getattr(start, name) for name in names}

    def _checked(self, where: Any, parallelism: int, slices: int) -> int | None:
        """Refuse known errors before Spark starts. Returns the end of the run as a position, which every restart uses
        again: "now" means when the job was started, not when its program was last started."""
        from cutwater.pipeline.local.run_checks import check_writes  # noqa: PLC0415
        from cutwater.spark.pipeline.runner import checked, connected, until_position  # noqa: PLC0415

        check_writes(self._pipeline.name, self._pipeline.graph)
        end: Any = self._start.until
        if isinstance(end, str) and end != "now":
            end = datetime.fromisoformat(end)
        with connected(where) as client:
            checked(self._pipeline, client, parallelism, slices)
            return until_position(client, end)

    def _until_over(self, run: Any, checkpoint: Checkpoint, watcher: Any) -> FromProgram:
        wish: SavepointWish | None = None
        while not run.wait(WAIT_SECONDS):
            with suppress(queue.Empty):
                match self._supervisor.commands.get_nowait():
                    case Stop() as stop:
                        return self._stop(run, stop)
                    case TakeSavepoint() as wanted:
                        wish = SavepointWish(wanted, checkpoint)
            taken = None if wish is None else wish.taken(run)
            if taken is not None:
                self._supervisor.tell(taken)
                wish = None
            self._tell_progress(run, watcher)
        # The last micro-batch, which may be the only one, may have finished after the last report.
        self._tell_progress(run, watcher)
        return Ended(is_finished=True)

    def _tell_progress(self, run: Any, watcher: Any) -> None:
        progress = watcher.look(run.progress)
        if progress is not None:
            self._supervisor.tell(Moved(progress))

    def _stop(self, run: Any, stop: Stop) -> FromProgram:
        if stop.savepoint is None:
            run.stop()
        else:
            run.stop(savepoint=stop.savepoint, timeout=stop.seconds)
        return Ended(is_finished=False, savepoint=stop.savepoint)

    def _watch_jvm(self, jvm: Any) -> None:
        """Report the death of the JVM. Calls into a dead JVM fail in many ways or hang, and do not say what
        happened."""
        while jvm.poll() is None:
            time.sleep(JVM_LOOK_SECONDS)
        if not self._is_ending:
            self._supervisor.fail(Unavailable(f"the JVM of Spark, process {jvm.pid}, {how_it_ended(jvm.returncode)}"))
            os._exit(1)

    _is_ending = False

    def _end_jvm(self, spark: Any, jvm: Any) -> None:
        """End the JVM and wait for it, because it removes its files when it ends by itself."""
        self._is_ending = True
        with suppress(Exception):
            spark.stop()
            jvm.stdin.close()
            jvm.wait(JVM_END_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
