"""Sends the program of a job to the machines of Spark's workers.

Workers on this machine find the modules of a program where the driver does, by ``PYTHONPATH``. Those of another master
run elsewhere, or start from another environment, so Spark sends them the archive.
"""

from __future__ import annotations

import os

from pyspark.sql import SparkSession

from cutwater.errors import InvalidArgument
from cutwater.jobs.messages import PROGRAM_ARCHIVE


def send_program(spark: SparkSession, master: str) -> None:
    """Let all workers of a session import the modules of the program, if this process runs one with an archive."""
    archive = os.environ.get(PROGRAM_ARCHIVE, "")
    if not archive or is_in_driver(master):
        return
    if not os.path.isfile(archive):
        raise InvalidArgument(f"there is no archive {archive} of the program: the agent names it in {PROGRAM_ARCHIVE}")
    spark.sparkContext.addPyFile(archive)


def is_in_driver(master: str) -> bool:
    """Return whether tasks run in processes that the driver itself starts."""
    return master in ("", "local") or master.startswith("local[")
