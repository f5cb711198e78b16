"""Sets a deadline for work that takes several Spark jobs, which have no deadlines themselves."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from uuid import uuid4

from pyspark.sql import SparkSession

from cutwater.errors import DeadlineExceeded

REPEAT_SECONDS = 0.5
"""Cancelling is repeated at this interval, because between two jobs there is nothing to cancel."""


class TimeLimit:
    """Cancels the jobs that this thread starts within the context when the time is up. Jobs of other threads keep
    running."""

    def __init__(self, spark: SparkSession, seconds: float, what: str) -> None:
        """``what`` is the beginning of the error message, such as "the savepoint"."""
        self._context, self._seconds, self._what = spark.sparkContext, seconds, what
        self._tag = f"cutwater-{uuid4().hex}"
        self._is_late, self._has_ended = threading.Event(), threading.Event()
        self._watch = threading.Thread(target=self._cancel_when_late, name="time limit", daemon=True)

    def __enter__(self) -> TimeLimit:
        self._context.addJobTag(self._tag)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._watch.join()
        self._context.removeJobTag(self._tag)

    def check(self) -> None:
        """Raise if the time is up. Call this first after catching an error of Spark's: it may be a cancelled job."""
        if self._is_late.is_set():
            raise DeadlineExceeded(
                f"{self._what} was not done within {self._seconds:g} s, and was given up: allow for more with timeout= "
                "(--timeout)"
            )

    def _cancel_when_late(self) -> None:
        if self._has_ended.wait(self._seconds):
            return
        self._is_late.set()
        while True:
            # If the JVM is gone, its jobs are gone too.
            with suppress(Exception):
                self._context.cancelJobsWithTag(self._tag)
            if self._has_ended.wait(REPEAT_SECONDS):
                return
