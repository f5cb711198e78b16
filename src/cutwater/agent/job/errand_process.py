"""The process of an errand: ``python -P -m cutwater.agent.job.errand_process EVENTS``, see ``job_setup``.

It answers one question about a program or a savepoint and ends. The JVM is started only for savepoints that only Hadoop
reaches. A failure is the answer, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from msgspec import Raw

from cutwater.agent.job.errand_answers import answer_of
from cutwater.agent.job.job_process import master_of, settle
from cutwater.agent.job.job_setup import ErrandEnds, ErrandSetup, read_errand_setup
from cutwater.agent.job.spark_limits import conf_within
from cutwater.core.jobs.errands import ERRAND_ANSWER_BYTES_MAX
from cutwater.errors import DeadlineExceeded, InvalidArgument
from cutwater.jobs.messages import Told
from cutwater.jobs.spark_conf import check_conf
from cutwater.savepoints.files import Files, LocalFiles, is_local
from cutwater.spark.job_program import ours
from cutwater.spark.parent_pipe import ParentPipe, end_all


def main(events: str) -> NoReturn:
    pipe: ParentPipe[ErrandSetup] = ParentPipe(int(events), read_errand_setup)
    setup = pipe.commands.get()
    if setup.seconds:
        threading.Timer(setup.seconds, _out_of_time, (pipe, setup)).start()
    try:
        ended = _done(setup)
    except BaseException as error:
        # Also if the program calls sys.exit.
        ended = ErrandEnds(error=Told.of(ours(error)))
        sys.excepthook(*sys.exc_info())
    _end(pipe, ended)


def _done(setup: ErrandSetup) -> ErrandEnds:
    settle(setup.scratch)
    body = answer_of(setup, lambda: _files(setup))
    if len(body) > ERRAND_ANSWER_BYTES_MAX:
        raise InvalidArgument(
            f"the answer has {len(body)} bytes, and {ERRAND_ANSWER_BYTES_MAX} is the most: ask for less, such as one "
            "operator, one key or fewer keys"
        )
    return ErrandEnds(Raw(body))


@contextmanager
def _files(setup: ErrandSetup) -> Iterator[Files]:
    if all(is_local(path) for path in (setup.savepoint, setup.other_savepoint) if path):
        yield LocalFiles()
        return
    from cutwater.spark.savepoint.files import HadoopFiles  # noqa: PLC0415
    from cutwater.spark.session.session import session  # noqa: PLC0415

    check_conf(setup.conf, master_of(setup.master))
    # Only this process reads: workers elsewhere would be of no use.
    spark = session(f"cutwater {setup.kind}", master="local[1]", config=conf_within(setup.conf, setup.limits))
    try:
        yield HadoopFiles(spark)
    finally:
        spark.stop()


def _out_of_time(pipe: ParentPipe[ErrandSetup], setup: ErrandSetup) -> None:
    error = DeadlineExceeded(f"{setup.kind} for job {setup.name!r} was not done within {setup.seconds:g} s")
    _end(pipe, ErrandEnds(error=Told.of(error)))


_ending = threading.Lock()


def _end(pipe: ParentPipe[ErrandSetup], ended: ErrandEnds) -> NoReturn:
    _ending.acquire()
    pipe.send(ended)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.chdir("/")
    end_all(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
