"""The process of a job: ``python -P -m cutwater.agent.job.job_process EVENTS``, see ``job_setup``.

It runs one attempt, in which it is itself the driver of Spark. Whether there is another attempt, the agent decides.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from cutwater.agent.job.checkpoint_start import begin_checkpoint
from cutwater.agent.job.job_messages import (
    FromJob,
    JobAnswers,
    JobEnds,
    JobMoves,
    JobRuns,
    SaveJob,
    read_to_job,
)
from cutwater.agent.job.job_setup import ClusterSetup, JobSetup, read_job_setup
from cutwater.agent.job.program_entry import load_job
from cutwater.agent.job.spark_limits import conf_within, tasks_within
from cutwater.client.client import Client
from cutwater.core.jobs.job_records import RunEnd
from cutwater.errors import Malformed, PipelineFailed
from cutwater.jobs import messages
from cutwater.jobs.messages import FromProgram, Start, Stop, TakeSavepoint, Told, ToProgram
from cutwater.jobs.restarts import is_hopeless
from cutwater.jobs.spark_conf import check_conf
from cutwater.spark.job_program import ProgramRun, ours
from cutwater.spark.options import TOKEN_FILE, Where, where_of
from cutwater.spark.parent_pipe import ParentPipe, end_all, print_to
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.types import JobEpoch

_OF_AGENT = ("CUTWATER_TOKEN", "CUTWATER_TLS_")
"""Beginnings of variables that say what an agent, or its user, may do. The setup says what the job may do."""


class AgentConnection:
    """Translates between what an agent says and what runs a pipeline."""

    def __init__(self, events: int) -> None:
        self._setup: JobSetup | None = None
        self._asks: dict[str, int] = {}
        """The savepoints that the agent has asked for, by their paths."""
        self._stop = 0
        """The number of the message that told the job to stop."""
        self._is_over = False
        # Begins to read.
        self._pipe: ParentPipe[Any] = ParentPipe(events, self._read)

    @property
    def commands(self) -> queue.Queue[ToProgram]:
        return self._pipe.commands

    def setup(self) -> JobSetup:
        """Wait for the first line."""
        found = self._pipe.commands.get()
        assert isinstance(found, JobSetup), "the first line is the setup"
        return found

    def _read(self, data: bytes) -> JobSetup | ToProgram:
        if self._setup is None:
            self._setup = read_job_setup(data)
            return self._setup
        message = read_to_job(data)
        if message.path:
            self._asks[self._place(message.path)] = message.ask
        if isinstance(message, SaveJob):
            return TakeSavepoint(self._place(message.path), message.seconds)
        self._stop = message.ask
        return Stop(self._place(message.path) if message.path else None, message.seconds, goes_on=True)

    def _place(self, path: str) -> str:
        assert self._setup is not None
        return f"{self._setup.savepoint_root.rstrip('/')}/{path}"

    def tell(self, message: FromProgram) -> None:
        match message:
            case messages.Running():
                self._send(JobRuns(message.parallelism, str(message.restored or "")))
            case messages.Moved(progress):
                # Spark names the micro-batch that is next while there is no input.
                self._send(
                    JobMoves(
                        progress.done,
                        progress.glsn,
                        progress.records_per_second,
                        -1 if progress.lag_records is None else progress.lag_records,
                        progress.watermark_ms or 0,
                        progress.state_bytes,
                    )
                )
            case messages.Taken(target, error, saved):
                self._answer(self._asks.pop(target, 0), saved, error)
            case messages.Ended(is_finished, savepoint, saved):
                if not is_finished:
                    self._answer(self._asks.pop(savepoint or "", self._stop), saved)
                self._end(JobEnds(RunEnd.FINISHED if is_finished else RunEnd.STOPPED))
            case messages.Failed(error):
                self._end(JobEnds(RunEnd.FAILED, error, error.is_hopeless))

    def fail(self, error: BaseException) -> None:
        told = Told.of(ours(error), is_hopeless=is_hopeless(error))
        self._end(JobEnds(RunEnd.FAILED, told, told.is_hopeless, failed_at(error)))

    def _answer(self, ask: int, saved: messages.SavedPoint | None, error: Told | None = None) -> None:
        if saved is not None:
            self._send(JobAnswers(ask, saved.glsn, saved.batch, saved.bytes))
        else:
            self._send(JobAnswers(ask, error=error))

    def _end(self, message: JobEnds) -> None:
        # The JVM may die of the end of the pipeline: the first word counts.
        if not self._is_over:
            self._is_over = True
            self._send(message)

    def _send(self, message: FromJob) -> None:
        self._pipe.send(message)


def main(events: str) -> NoReturn:
    agent = AgentConnection(int(events))
    try:
        _run(agent, agent.setup())
    except BaseException as error:
        # Also if the program calls sys.exit: no thread of it keeps the process alive.
        agent.fail(error)
        sys.excepthook(*sys.exc_info())
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_all(0)


def _run(agent: AgentConnection, setup: JobSetup) -> None:
    if setup.log_file:
        print_to(setup.log_file)
    settle(setup.scratch)
    master = master_of(setup.master)
    check_conf(setup.conf, master)
    pipeline = load_job(setup.name, setup.program)
    where = where_of_cluster(setup.cluster)
    pipeline.log = where.servers
    start = Start(
        checkpoint=setup.checkpoint,
        master=master,
        parallelism=setup.parallelism,
        from_savepoint=setup.savepoint or None,
        goes_on=True,
        replay_output=setup.replay_output,
        allow_non_restored_state=setup.allow_non_restored_state,
        conf=conf_within(setup.conf, setup.limits),
        job_epoch=setup.epoch,
        threads_max=tasks_within(setup.limits),
    )

    def succeed(client: Client, checkpoint: Checkpoint) -> None:
        begin_checkpoint(client, setup.name, checkpoint, JobEpoch(setup.epoch), setup.predecessor)

    ProgramRun(agent, pipeline, start, where, succeed).run()


def failed_at(error: BaseException) -> int:
    """Return the position of the record at which a pipeline failed, or 0 if it is not about a record."""
    match error:
        case PipelineFailed():
            return int(error.glsn)
        case Malformed():
            return int(error.first_glsn)
    return 0


def settle(scratch: str) -> None:
    """Let this process, and all that it starts, have its files in the scratch directory, and no rights of others."""
    os.chdir(scratch)
    os.environ |= {"TMPDIR": scratch, "SPARK_LOCAL_DIRS": scratch}
    tempfile.tempdir = None
    for name in [name for name in os.environ if name.startswith(_OF_AGENT)]:
        del os.environ[name]


def master_of(master: str) -> str:
    """Return where Spark runs; empty for this machine, with as many threads as the pipeline has tasks."""
    return "" if master == "local" else master


def where_of_cluster(cluster: ClusterSetup) -> Where:
    """Return how to reach the cluster, for this process and for tasks."""
    files = {
        TOKEN_FILE: cluster.token_file,
        "tls.ca": cluster.tls_ca,
        "tls.certificate": cluster.tls_certificate,
        "tls.key": cluster.tls_key,
    }
    return where_of({"servers": cluster.servers} | {k: str(Path(v).absolute()) for k, v in files.items() if v})


if __name__ == "__main__":
    main(*sys.argv[1:])
