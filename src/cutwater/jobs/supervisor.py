"""Supervises one job: starts its program, watches it, restarts it as the strategy says, and handles requests.

One thread waits for the next event: a message from the program, its death, a request from a command, a signal, or the
time to restart. The program loads the user's file and reports the name of its pipeline. Only then the supervisor knows
which job this is and where its checkpoint is. A second thread serves metrics, if requested. No process of the job
outlives the supervisor, however that ends.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, Refused, Unavailable
from cutwater.jobs import messages
from cutwater.jobs.child import Child, environment, how_it_ended
from cutwater.jobs.control import Control, Conversation
from cutwater.jobs.job_file import (
    LOG_FILE,
    OVER,
    Job,
    JobDirectory,
    JobState,
    ProgramFailure,
    has_begun,
    here,
    require_parallelism,
)
from cutwater.jobs.locks import FileLock
from cutwater.jobs.messages import Answer, Progress, Rescale, Start, Stop, TakeSavepoint, Told
from cutwater.jobs.places import root_of
from cutwater.jobs.restarts import Restarts, Strategy, written
from cutwater.runtime import processes
from cutwater.wire.addresses import parse_address

if TYPE_CHECKING:
    from cutwater.wire.listen.metrics_http import MetricsExporter

START_SECONDS: Final = 600.0
"""How long a start may take, including the JVM and the loading of a savepoint."""
STOP_SECONDS: Final = 60.0
END_SECONDS: Final = 10.0
"""How long processes may take to end by themselves when their driver is gone: the JVM removes its files then."""
LOG_BYTES_MAX: Final = 16 << 20
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobOptions(Struct, frozen=True):
    """The options with which a user started the job."""

    file: str
    variable: str
    log: str
    """The log, if it is not the one that the program names."""
    root: str
    """The directory of jobs; empty for the default place of the user and the log."""
    strategy: Strategy
    start: Start
    """``checkpoint`` is empty unless one is named."""
    token: str = ""
    metrics: str = ""
    """The address where Prometheus can read metrics; empty for none."""
    token_file: str = ""
    """A file with the token, in place of the token itself."""
    tls: tuple[str, str, str] = ("", "", "")
    """Files: the authority of the servers, the certificate of this client, and its key."""
    arguments: dict[str, str] = {}
    """Arguments of the function that returns the pipeline."""

    def __repr__(self) -> str:
        """Leave out the token: this text gets into messages and logs."""
        return f"JobOptions(file={self.file!r}, variable={self.variable!r}, log={self.log!r})"

    def credentials(self) -> dict[str, str]:
        """Return the environment by which the program gets the credentials. That of this process does not count: the
        command may have been given others."""
        names = ("CUTWATER_TLS_CA", "CUTWATER_TLS_CERTIFICATE", "CUTWATER_TLS_KEY")
        found = dict(zip(names, self.tls, strict=True))
        return found | {"CUTWATER_TOKEN": self.token, "CUTWATER_TOKEN_FILE": self.token_file}


class _Pending(Struct):
    conversation: Conversation
    request: TakeSavepoint | Stop | Rescale
    deadline: float
    is_switched: bool = False
    """For a rescale: the savepoint has been taken, and the job goes on from it."""


Watch = Callable[[Job, Progress | None], None]


class Supervisor:
    def __init__(self, asked: JobOptions, watch: Watch) -> None:
        """``watch`` is called with every change of the job's state and of its progress."""
        self._asked, self._watch, self._start = asked, watch, asked.start
        self._restarts = Restarts(asked.strategy)
        self._selector = DefaultSelector()
        self._scratch = Path(tempfile.mkdtemp(prefix="cutwater-job-"))
        self._directory: JobDirectory | None = None
        self._lock: FileLock | None = None
        self._job: Job | None = None
        self._before: Job | None = None
        """The previous job, until the program has run."""
        self._start_before: Start | None = None
        """The start before a rescale, until the program has run."""
        self._child: Child | None = None
        self._progress: Progress | None = None
        self._pending: _Pending | None = None
        self._last_word: messages.Ended | messages.Failed | None = None
        self._deadline: float | None = None
        """When the program must have started, must have stopped, or must be gone after its last message."""
        self._restart_at: float | None = None
        self._signal = 0
        self._is_cancelled = False
        self._failure: CutwaterError | None = None
        self._metrics = ""
        """The address of the metrics, if they are served."""

    def run(self) -> Job:
        """Run until the job is over. Raises the error that ended it, if any."""
        with ExitStack() as at_end:
            at_end.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            at_end.callback(self._release)
            if self._asked.metrics:
                at_end.callback(self._serve_metrics().close)
            at_end.callback(self._selector.close)
            control = Control(self._scratch / "control", self._selector, self._asked_for)
            at_end.callback(control.close)
            at_end.callback(self._end_child)
            at_end.enter_context(self._signals())
            self._spawn()
            while self._failure is None and (self._job is None or self._job.state not in OVER):
                self._turn()
        if self._failure is not None:
            raise self._failure
        assert self._job is not None
        return self._job

    def _serve_metrics(self) -> MetricsExporter:
        # Only jobs with metrics need the library.
        from cutwater.jobs.metrics import JobCollector  # noqa: PLC0415
        from cutwater.wire.listen.metrics_http import MetricsExporter  # noqa: PLC0415

        collector, watch = JobCollector(), self._watch
        exporter = MetricsExporter(collector, *parse_address(self._asked.metrics))

        def watched(job: Job, progress: Progress | None) -> None:
            collector.take(job, progress)
            watch(job, progress)

        self._watch, self._metrics = watched, exporter.address
        return exporter

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.end(END_SECONDS)

    @property
    def signal(self) -> int:
        """The signal that stopped the job; 0 if none did."""
        return self._signal

    def _turn(self) -> None:
        # A program that has sent its last message has done what was requested or never will: wait only for its end.
        pending = self._pending if self._last_word is None else None
        times = [at for at in (self._deadline, self._restart_at, pending and pending.deadline) if at]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(wait):
            key.data()
        now = time.monotonic()
        if self._last_word is None and self._pending is not None and now >= self._pending.deadline:
            self._out_of_time(self._pending)
        if self._deadline is not None and now >= self._deadline and self._child is not None:
            self._deadline = None
            if self._last_word is None:
                self._last_word = messages.Failed(
                    Told("deadline_exceeded", "the program took too long to start or to stop", True)
                )
            self._child.kill()
        if self._restart_at is not None and now >= self._restart_at:
            self._spawn()

    # ---------------------------------------------------------------------------------------------------- the program

    def _spawn(self) -> None:
        self._restart_at, self._last_word, self._progress = None, None, None
        asked = self._asked
        more = asked.credentials()
        if asked.arguments:
            more[messages.PROGRAM_ARGUMENTS] = msgspec.json.encode(asked.arguments).decode()
        if not asked.root:
            more[messages.TELLS_LOG] = "yes"
        arguments = [asked.file, asked.variable, asked.log]
        # The program writes to a separate log until it is known which job it is.
        loading = self._scratch / LOG_FILE
        self._child = child = Child(arguments, loading, environment(self._scratch, Path(asked.file), more))
        self._selector.register(child.events, EVENT_READ, self._heard)
        self._deadline = time.monotonic() + START_SECONDS
        if self._job is not None:
            self._job.driver, self._job.jvm, self._job.ui = child.pid, 0, ""
            self._change(JobState.STARTING)

    def _heard(self) -> None:
        assert self._child is not None
        messages = self._child.read()
        if messages is None:
            self._child_ended()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: messages.FromProgram) -> None:
        match message:
            case messages.Loaded(pipeline, log):
                self._loaded(pipeline, log)
            case messages.Running():
                self._runs(message)
            case messages.Moved(progress):
                self._progress = progress
                assert self._job is not None
                self._watch(self._job, progress)
            case messages.Taken(target, error):
                if error is None:
                    self._note_savepoint(target)
                # An earlier request may have been given up because it took too long.
                asked = self._pending and self._pending.request
                if isinstance(asked, TakeSavepoint) and asked.target == target:
                    self._answer(Answer(savepoint=target, error=error))
            case messages.Ended() | messages.Failed():
                # A thread of the user's program may keep the process alive forever.
                self._last_word, self._deadline = message, time.monotonic() + END_SECONDS

    def _runs(self, message: messages.Running) -> None:
        """Record with what values the program runs: a restart uses the same."""
        assert self._job is not None
        self._before = self._start_before = self._deadline = None
        self._job.jvm = message.jvm
        self._job.parallelism, self._job.from_savepoint = message.parallelism, message.from_savepoint
        self._job.restored, self._job.ui = message.restored, message.ui
        until = self._start.until if message.until is None else message.until
        self._start = msgspec.structs.replace(self._start, until=until, parallelism=message.parallelism)
        self._change(JobState.RUNNING)
        if self._pending is not None and self._pending.is_switched:
            self._answer(Answer(savepoint=self._start.from_savepoint))

    def _loaded(self, pipeline: str, log_key: str) -> None:
        assert self._child is not None
        try:
            if self._job is None:
                self._adopt(pipeline, log_key)
            elif self._job.pipeline != pipeline:
                raise InvalidArgument(
                    f"{self._asked.file} made the pipeline {self._job.pipeline!r} before, {pipeline!r} now: give "
                    "it its name back, or stop this job and run the file anew"
                )
        except CutwaterError as error:
            # The program has nothing to do yet, so it can be killed.
            self._last_word = messages.Failed(Told.of(error, is_hopeless=True))
            self._child.kill()
            return
        assert self._directory is not None
        log = self._directory.path / LOG_FILE
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
        self._child.send(msgspec.structs.replace(self._start, output=str(log)))

    def _adopt(self, pipeline: str, log_key: str) -> None:
        """Find the job, its directory and its checkpoint, now that the name and the log are known."""
        assert self._child is not None
        asked, start = self._asked, self._start
        directory = JobDirectory(asked.root or root_of(log_key, pipeline), pipeline)
        self._lock = directory.lock(
            "`cutwater pipeline list` shows it, unless it is just starting or ending, or a savepoint of it is being "
            "taken; stop it, wait, or run this one with another --jobs-dir"
        )
        self._before = before = directory.load()
        if before is not None and before.is_alive:
            raise Refused(f"pipeline {pipeline!r} is run by process {before.pid}: stop that one first")
        job = Job(pipeline, "", file=asked.file, control=str(self._scratch / "control"), **here())
        job.driver, job.since, job.metrics = self._child.pid, time.time(), self._metrics
        job.arguments = {"variable": asked.variable, "log": asked.log, "restart": written(asked.strategy)}
        if asked.arguments:
            job.arguments["arguments"] = asked.arguments
        job.arguments |= {k: v for k, v in msgspec.to_builtins(start).items() if k not in ("type", "checkpoint")}
        if start.from_savepoint is not None:
            job.checkpoint, job.from_savepoint = start.checkpoint or directory.next_checkpoint(), start.from_savepoint
        else:
            job.checkpoint = start.checkpoint or directory.current() or directory.next_checkpoint()
        if before is not None:
            if job.checkpoint == before.checkpoint and has_begun(job.checkpoint):
                # It need not be started to be refused.
                require_parallelism(job.checkpoint, before.parallelism, start.parallelism)
            job.savepoint = before.savepoint
            _remove_scratch(before)
            if job.checkpoint == before.checkpoint:
                job.parallelism = before.parallelism
                job.from_savepoint = job.from_savepoint or before.from_savepoint
        # Requested values become the job's when the program runs with them: the checkpoint may have others.
        parallelism = start.parallelism or job.parallelism
        self._start = msgspec.structs.replace(
            start,
            checkpoint=job.checkpoint,
            from_savepoint=job.from_savepoint,
            goes_on=start.from_savepoint is None,
            parallelism=parallelism,
        )
        self._directory, self._job = directory, job
        directory.save(job)
        self._watch(job, None)

    def _child_ended(self) -> None:
        child, word = self._child, self._last_word
        assert child is not None
        self._selector.unregister(child.events)
        code = child.end(END_SECONDS)
        self._child, self._deadline = None, None
        if self._job is not None:
            self._job.driver = self._job.jvm = 0
        if self._is_cancelled:
            self._over(JobState.CANCELLED)
        elif isinstance(word, messages.Ended):
            self._ended(word)
        elif isinstance(word, messages.Failed):
            self._failed(word.error)
        else:
            what = f"the program, process {child.pid}, {how_it_ended(code)}"
            self._failed(Told("unavailable", f"{what}; {self._printed()}", retriable=True))

    def _printed(self) -> str:
        if self._directory is not None:
            return f"what it printed is in {self._directory.path / LOG_FILE}"
        return f"it printed: {processes.tail(self._scratch / LOG_FILE) or 'nothing'}"

    def _ended(self, word: messages.Ended) -> None:
        pending = self._pending
        if word.savepoint is not None:
            self._note_savepoint(word.savepoint)
            if pending is not None and isinstance(pending.request, Rescale) and not self._signal:
                self._switch(pending, pending.request, word.savepoint)
                return
        self._over(JobState.FINISHED if word.is_finished else JobState.STOPPED, word.savepoint)

    def _switch(self, pending: _Pending, request: Rescale, savepoint: str) -> None:
        assert self._directory is not None
        assert self._job is not None
        pending.is_switched = True
        job = self._job
        self._before, self._start_before = copy(job), self._start
        job.checkpoint, job.from_savepoint = self._directory.next_checkpoint(), savepoint
        job.parallelism = request.parallelism
        # Permissions for the earlier savepoint do not apply to this one.
        self._start = msgspec.structs.replace(
            self._start,
            checkpoint=job.checkpoint,
            from_savepoint=savepoint,
            parallelism=job.parallelism,
            replay_output=False,
            allow_non_restored_state=False,
        )
        self._spawn()

    def _go_back(self, error: Told, start: Start) -> None:
        assert self._job is not None
        assert self._before is not None
        taken = self._start.from_savepoint
        self._job.go_back_to(self._before)
        self._start, self._start_before, self._before = start, None, None
        told = f"the pipeline goes on as it was, with parallelism {start.parallelism}; the savepoint {taken} is there"
        self._answer(Answer(error=msgspec.structs.replace(error, message=f"{error.message}\n  {told}")))
        self._spawn()

    def _failed(self, error: Told) -> None:
        job, pending = self._job, self._pending
        if job is None:
            self._failed_early(error)
            return
        if self._signal or (
            pending is not None and isinstance(pending.request, Stop) and not pending.request.savepoint
        ):
            # The checkpoint is good, even if the program failed while it stopped.
            self._over(JobState.STOPPED)
            return
        job.last_error = ProgramFailure(error.code, error.message, time.time())
        if pending is not None and not isinstance(pending.request, TakeSavepoint) and not pending.is_switched:
            # The program ran well before it was asked to stop, so it goes on from its checkpoint.
            self._answer(Answer(error=error))
            self._spawn()
            return
        wait_ms = self._restart_delay(error)
        if wait_ms is None and self._start_before is not None and not has_begun(job.checkpoint):
            self._go_back(error, self._start_before)
            return
        self._answer(Answer(error=error))
        if wait_ms is None:
            self._failure = error.error()
            self._over(JobState.FAILED)
            return
        job.restarts = self._restarts.count
        self._restart_at = time.monotonic() + wait_ms / 1_000
        self._change(JobState.WAITING)

    def _failed_early(self, error: Told) -> None:
        """Handle a failure before it is known which job this is: the log may not be available yet."""
        wait_ms = None if self._asked.root else self._restart_delay(error)
        if wait_ms is None or self._signal:
            self._failure = error.error()
        else:
            self._restart_at = time.monotonic() + wait_ms / 1_000

    def _restart_delay(self, error: Told) -> int | None:
        if error.is_hopeless:
            return None
        return self._restarts.failed(round(time.monotonic() * 1_000), random.uniform(-1, 1))

    # ---------------------------------------------------------------------------------------------------- the questions

    def _asked_for(self, conversation: Conversation, request: messages.Request) -> None:
        job = self._job
        if isinstance(request, messages.Describe):
            conversation.answer(Answer(progress=self._progress))
        elif job is None:
            conversation.refuse(Refused("the program is still being loaded: try again"))
        elif self._pending is not None and not isinstance(request, messages.Cancel):
            what = str(self._pending.request.__struct_config__.tag).lower()
            conversation.refuse(Refused(f"a {what} of pipeline {job.pipeline!r} is under way: wait for its end"))
        elif isinstance(request, messages.Cancel):
            self._cancel(conversation)
        elif isinstance(request, Stop) and job.state is JobState.WAITING and not request.savepoint:
            self._restart_at = None
            self._over(JobState.STOPPED)
            conversation.answer(Answer())
        elif job.state is not JobState.RUNNING or self._child is None:
            error = f"; its last error: {job.last_error.message}" if job.last_error else ""
            way_out = "try again when it runs"
            if job.state is JobState.WAITING:
                way_out += (
                    f", or end it now with `cutwater pipeline stop {job.pipeline} --no-savepoint` or `cutwater "
                    f"pipeline cancel {job.pipeline}`: its checkpoint stays"
                )
            conversation.refuse(Refused(f"pipeline {job.pipeline!r} is {job.state}{error}: {way_out}"))
        else:
            self._pending = _Pending(conversation, request, time.monotonic() + request.seconds)
            if isinstance(request, TakeSavepoint):
                self._child.send(request)
            else:
                self._change(JobState.STOPPING)
                self._child.send(Stop(request.savepoint, request.seconds))

    def _cancel(self, conversation: Conversation) -> None:
        self._answer(Answer(error=Told.of(Refused("the job was cancelled"))))
        self._pending = _Pending(conversation, Stop(None, 0), time.monotonic() + STOP_SECONDS)
        self._is_cancelled = True
        if self._child is not None:
            self._child.kill()
        else:
            self._over(JobState.CANCELLED)
        # The answer is sent when all processes of the job are gone.

    def _out_of_time(self, pending: _Pending) -> None:
        request = pending.request
        what = f"not done within {request.seconds:g} s"
        if isinstance(request, TakeSavepoint):
            why = ", as no micro-batch was done," if self._progress is None else ""
            what = f"the savepoint was {what}{why} and is given up: allow for more with --timeout"
        elif pending.is_switched:
            what = f"the savepoint {self._start.from_savepoint} is taken, but the start from it was {what}; it goes on"
        else:
            what = f"the stop was {what}, and the pipeline runs on from its checkpoint: allow for more with --timeout"
            if self._child is not None:
                # Its end is noticed, and a start follows.
                self._last_word = messages.Failed(Told("deadline_exceeded", what, retriable=True))
                self._child.kill()
                return
        self._answer(Answer(error=Told.of(DeadlineExceeded(what))))

    def _answer(self, answer: Answer) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.conversation.answer(answer)

    # ------------------------------------------------------------------------------------------------------- the state

    def _change(self, state: JobState) -> None:
        assert self._directory is not None
        assert self._job is not None
        self._directory.change(self._job, state)
        self._watch(self._job, self._progress)

    def _over(self, state: JobState, savepoint: str | None = None) -> None:
        """End the job in this state, with this savepoint. Tell a waiting client whether its request was fulfilled."""
        assert self._job is not None
        self._job.control = self._job.metrics = self._job.ui = ""
        if self._before is not None and not has_begun(self._job.checkpoint):
            self._job.go_back_to(self._before)
        self._change(state)
        request = self._pending and self._pending.request
        if isinstance(request, Stop) and request.savepoint == savepoint and state is not JobState.FINISHED:
            self._answer(Answer(savepoint=savepoint))
            return
        why = "the pipeline came to its end" if state is JobState.FINISHED else "a signal stopped the job"
        there = ""
        if isinstance(request, Rescale) and request.savepoint == self._job.savepoint:
            there = f"; there is the savepoint {request.savepoint}"
        self._answer(Answer(error=Told.of(Refused(f"{why} before that was done{there}"))))

    def _note_savepoint(self, savepoint: str) -> None:
        assert self._directory is not None
        assert self._job is not None
        self._job.savepoint = savepoint
        self._directory.save(self._job)

    # ----------------------------------------------------------------------------------------------------- the signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let a signal wake the one thread, which handles it: the first stops the job, a second one kills it."""
        hears, tells = socket.socketpair()
        tells.setblocking(False)
        before_fd = signal.set_wakeup_fd(tells.fileno())
        before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._selector.register(hears, EVENT_READ, lambda: self._signalled(hears.recv(1)[0]))
        try:
            yield
        finally:
            self._selector.unregister(hears)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            hears.close()
            tells.close()

    def _signalled(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        is_second, self._signal = self._signal != 0, number
        child, job = self._child, self._job
        if job is None:
            self._failure = Unavailable("stopped by a signal before the pipeline ran")
        elif child is None:
            self._restart_at = None
            self._over(JobState.STOPPED)
        elif is_second or job.state is JobState.STARTING or self._last_word is not None:
            child.kill()
        else:
            self._deadline = time.monotonic() + STOP_SECONDS
            if job.state is JobState.RUNNING:
                self._change(JobState.STOPPING)
                child.send(Stop(None, STOP_SECONDS))


def _remove_scratch(before: Job) -> None:
    """Remove the files that a killed supervisor left behind."""
    place = Path(before.control).parent
    if before.control and place.name.startswith("cutwater-job-"):
        with suppress(OSError):
            if place.stat().st_uid == os.getuid():
                shutil.rmtree(place)
