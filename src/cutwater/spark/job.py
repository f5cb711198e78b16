"""Runs the program of a job: ``python -m cutwater.spark.job EVENTS FILE VARIABLE LOG``, started by its supervisor.

It loads the file, reports the name of its pipeline, and waits for the command to start it. Commands arrive on standard
input, and messages go to the file descriptor EVENTS. When the supervisor ends, standard input ends, and this process
ends with everything that it has started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.jobs.messages import (
    PROGRAM_ARGUMENTS,
    TELLS_LOG,
    Failed,
    FromProgram,
    Loaded,
    Start,
    Told,
    ToProgram,
    read_to_program,
)
from cutwater.jobs.program_file import load_pipeline
from cutwater.jobs.restarts import is_hopeless
from cutwater.jobs.spark_conf import check_conf
from cutwater.pipeline.stream import Pipeline
from cutwater.spark.job_program import ProgramRun, ours
from cutwater.spark.options import Where
from cutwater.spark.parent_pipe import ParentPipe, print_to

TOKEN, TOKEN_FILE = "CUTWATER_TOKEN", "CUTWATER_TOKEN_FILE"
TLS_FILES = ("CUTWATER_TLS_CA", "CUTWATER_TLS_CERTIFICATE", "CUTWATER_TLS_KEY")


class SupervisorConnection(ParentPipe[ToProgram]):
    """The connection to the supervisor."""

    def __init__(self, events: int) -> None:
        super().__init__(events, read_to_program)

    def tell(self, message: FromProgram) -> None:
        self.send(message)

    def fail(self, error: BaseException) -> None:
        self.send(Failed(Told.of(ours(error), is_hopeless=is_hopeless(error))))


def main(events: str, file: str, variable: str, log: str) -> None:
    supervisor = SupervisorConnection(int(events))
    try:
        pipeline = load_pipeline(file, variable, msgspec.json.decode(os.environ.pop(PROGRAM_ARGUMENTS, "{}")))
        if log:
            pipeline.log = log
        supervisor.tell(Loaded(pipeline.name, _log_key(pipeline) if os.environ.pop(TELLS_LOG, "") else ""))
        start = supervisor.commands.get()
        assert isinstance(start, Start), "the first command is how to start"
        print_to(start.output)
        check_conf(start.conf, start.master)
        where = where_of_job(pipeline, start.master)
        # Spark's processes read the file that the query names, and no other process needs the token.
        for name in (TOKEN, TOKEN_FILE):
            os.environ.pop(name, "")
        ProgramRun(supervisor, pipeline, start, where).run()
    except Exception as error:
        supervisor.fail(error)
        if not isinstance(error, CutwaterError):
            raise
        sys.exit(1)


def _log_key(pipeline: Pipeline) -> str:
    """Return the key of the log, by which its checkpoints are found."""
    from cutwater.spark.pipeline.runner import log_key  # noqa: PLC0415

    return log_key(where_of_job(pipeline))


def where_of_job(pipeline: Pipeline, master: str = "") -> Where:
    """Return the log, and files with the credentials for it, which are in the environment. ``master`` is where Spark
    runs, if not in this process."""
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


if __name__ == "__main__":
    main(*sys.argv[1:])
