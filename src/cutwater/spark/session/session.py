"""Makes a Spark session that has the measured settings and the registered format ``cutwater``."""

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
from cutwater.jobs.spark_conf import check_conf
from cutwater.spark.session.java import provide_java
from cutwater.spark.session.spark_home import provide_home
from cutwater.spark.session.spark_ui import serve_on_loopback
from cutwater.spark.session.token_safety import refuse_tokens_in, settings_of, why_no_tokens
from cutwater.spark.source.source import source_class

_STREAMING = "org.apache.spark.sql.execution.streaming"

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
REMOTE_MANAGER = f"{_STREAMING}.checkpointing.FileContextBasedCheckpointFileManager"
"""The manager of checkpoint files on other file systems. Only this one replaces files there: HDFS refuses to rename a
file to a name that exists, and the other manager then leaves the old file in its place without a word."""

SETTINGS: Mapping[str, str] = {
    # A worker that starts on a busy machine needs longer than the default time to connect.
    "spark.python.authenticate.socketTimeout": "180s",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": f"{_STREAMING}.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # On local files, this manager writes a checkpoint file with one rename and starts no processes.
    MANAGER: f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of every session; ADR 0017 gives the reasons."""

LOOPBACK = "127.0.0.1"
ON_THIS_MACHINE: Mapping[str, str] = {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
"""Settings of a session on this machine: other machines cannot connect to it."""

HARMLESS = ("org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkStateServer",)
"""Loggers whose warnings mean nothing: this one warns about every value that is looked up and missing."""
STARTS_MAX = 5
STARTING = "Initializing sources"
LATE_WORKER = "failed to connect back"
LOOK_SECONDS = 0.02
END_SECONDS = 2.0
"""How long a JVM may take to end after calls into it have failed."""
ALREADY_THERE = "DATA_SOURCE_ALREADY_EXISTS"


def session(
    name: str = "cutwater", *, master: str = "local[*]", config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session that reads and writes the format ``cutwater``: the running one if there is one, else a new one.

    ``master`` is Spark's: ``local[*]``, ``local-cluster[2,1,1024]``, ``spark://host:port`` and others. ``config`` comes
    on top of ``SETTINGS``. Python workers run the interpreter that calls this. Spark's pages, if ``config`` switches
    them on, are served on loopback.

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
        # The default, 200, is meant for clusters. A streaming query pays for each partition in every micro-batch.
        settings["spark.sql.shuffle.partitions"] = str(min(os.cpu_count() or 1, 8))
    settings |= config or {}
    refuse_tokens_in(settings)
    settings |= serve_on_loopback(settings, master)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    _leave_out_checksum_files(spark)
    _quieten(spark)
    register(spark)
    return spark


def check_session_conf(conf: Mapping[str, str], spark: SparkSession | None) -> None:
    """Refuse settings for the session of a pipeline that are not allowed, or that would not take effect because a
    session runs already: Spark ignores most of them then."""
    check_conf(conf)
    if spark is not None and conf:
        raise InvalidArgument(
            "conf=… is for the session that run() makes, and spark=… gives one that runs already: give the settings to "
            "cutwater.spark.session(config=…)"
        )
    running = SparkSession.getActiveSession() if conf else None
    if running is None:
        return
    for name, value in conf.items():
        if running.conf.get(name, None) != value:
            raise InvalidArgument(
                f"conf=… has {name}={value!r}, and a session of Spark runs in this process already without it: stop it "
                "(spark.stop()), or give the settings to the cutwater.spark.session(config=…) that makes it"
            )


def _leave_out_checksum_files(spark: SparkSession) -> None:
    """Turn off checksum files on local file systems, so that one atomic rename puts a checkpoint file into place.

    A file system class that never writes them would also do, but the state store requires this one.
    """
    context: Any = spark.sparkContext
    files = context._jvm.org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration())
    files.setWriteChecksum(False)


def _quieten(spark: SparkSession) -> None:
    """Turn off log messages that mean nothing."""
    context: Any = spark.sparkContext
    log4j = context._jvm.org.apache.logging.log4j
    for name in HARMLESS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


def register(spark: SparkSession) -> None:
    """Register the format ``cutwater`` in a session that was made without ``session``."""
    refuse_tokens_in(spark.conf.getAll)
    provide_format(spark, source_class(os.getpid(), why_no_tokens(settings_of(spark))))


def provide_format(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a format. A session made by ``newSession`` refuses a format that the first session has, and does not
    find that format either."""
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
    """Describe how the JVM of this process ended. Returns None if it runs or was never started. Waits up to ``seconds``
    for it to end."""
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
    """Start a query. Start it again if Spark gave up because a Python process started too slowly: for processes on the
    driver that limit is ten seconds and cannot be set. Returns when the query has begun or has failed for another
    reason."""
    for _ in range(STARTS_MAX - 1):
        query = writer.start()
        while query.isActive and query.status["message"] == STARTING:
            time.sleep(LOOK_SECONDS)
        if LATE_WORKER not in str(query.exception()):
            return query
    return writer.start()
