"""A Spark session with the settings that Cutwater was measured with, and the format ``cutwater`` registered."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from pyspark.core.context import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from cutwater.errors import InvalidArgument, Unavailable
from cutwater.jobs.child import how_it_ended
from cutwater.spark.session.java import provide_java
from cutwater.spark.session.spark_home import provide_home
from cutwater.spark.source.source import source_class

_STREAMING = "org.apache.spark.sql.execution.streaming"

SETTINGS: Mapping[str, str] = {
    # A worker that starts on a busy machine needs longer than the default to say that it is there.
    "spark.python.authenticate.socketTimeout": "180s",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": f"{_STREAMING}.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # A file of a checkpoint is written with a rename, and no processes are started on the way.
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""See ADR 0017."""

LOOPBACK = "127.0.0.1"
ON_THIS_MACHINE: Mapping[str, str] = {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
"""Nobody else can connect."""


HARMLESS = ("org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkStateServer",)
"""Loggers whose warnings are none: this one tells of every value that is looked for and not there."""
STARTS_MAX = 5
STARTING = "Initializing sources"
LATE_WORKER = "failed to connect back"
LOOK_SECONDS = 0.02
END_SECONDS = 2.0
"""What a JVM gets to end when calls into it have failed."""
ALREADY_THERE = "DATA_SOURCE_ALREADY_EXISTS"


def session(
    name: str = "cutwater", *, master: str = "local[*]", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A session that reads and writes the format ``cutwater``; the one that is running, if one is.

    ``master`` is Spark's: ``local[*]``, ``local-cluster[2,1,1024]``, ``spark://host:port`` and others. ``config`` comes
    on top of ``SETTINGS``. Python workers run the interpreter that calls this.

    >>> spark = cutwater.spark.session()                                                           # doctest: +SKIP
    >>> spark.read.format("cutwater").option("subscribe", "orders").load("./data").show()          # doctest: +SKIP
    """
    gone = jvm_end(0)
    if gone is not None:
        raise Unavailable(f"{gone}: start the program again, in a new process")
    provide_java()
    provide_home()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = dict(SETTINGS)
    if master.startswith("local"):
        settings |= ON_THIS_MACHINE
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # The default, 200, is for clusters; a streaming query pays for each of them in every micro-batch.
        settings["spark.sql.shuffle.partitions"] = str(min(os.cpu_count() or 1, 8))
    settings |= config or {}
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    _leave_out_checksum_files(spark)
    _quieten(spark)
    register(spark)
    return spark


def _leave_out_checksum_files(spark: SparkSession) -> None:
    """On local files, so that one rename, which is atomic, puts a file of a checkpoint into its place. A file system
    that never writes them would do as well, but the state store insists on this one.
    """
    context: Any = spark.sparkContext
    files = context._jvm.org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration())
    files.setWriteChecksum(False)


def _quieten(spark: SparkSession) -> None:
    """What says nothing to anyone is not logged."""
    context: Any = spark.sparkContext
    log4j = context._jvm.org.apache.logging.log4j
    for name in HARMLESS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


def register(spark: SparkSession) -> None:
    """Let a session that was made otherwise know the format ``cutwater``."""
    provide_format(spark, source_class(os.getpid()))


def provide_format(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a format. A session that ``newSession`` made refuses to have one of the first session again, and does
    not find it either.
    """
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        if ALREADY_THERE not in str(error):
            raise
        raise InvalidArgument(
            f"the session was made by newSession(), and there Spark neither finds the format {source.name()!r} of the "
            "first session nor takes it again: use the first session (SparkSession.builder.getOrCreate()), or leave "
            "spark=… out"
        ) from None


def jvm_end(seconds: float = END_SECONDS) -> str | None:
    """How the JVM of this process ended, in words; None if it runs, or was never started. It gets some time to end."""
    context: Any = SparkContext
    jvm = getattr(context._gateway, "proc", None)
    if jvm is None:
        return None
    try:
        code = jvm.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    return f"the JVM of Spark, process {jvm.pid}, {how_it_ended(code)}"


def start(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query, and again if Spark gave up on it because a Python process took too long to come up: for those on
    the driver that limit is ten seconds, and cannot be set. Returns when the query has begun, or has failed otherwise.
    """
    for _ in range(STARTS_MAX - 1):
        query = writer.start()
        while query.isActive and query.status["message"] == STARTING:
            time.sleep(LOOK_SECONDS)
        if LATE_WORKER not in str(query.exception()):
            return query
    return writer.start()
