"""Programs that start a Spark of their own; ``test_clusters`` runs them, because a process has one Spark only.

``python programs.py MASTER PATH-OR-SERVERS TOPIC [DIRECTORY [PIPELINE WORKER]]``: prints, as JSON, how many rows a
batch and a stream read. Both are copied into the topic whose name ends with ``-copy``. With a directory that is not
empty, one task of the batch is so slow that Spark starts a second attempt of it; attempts that have staged their rows
leave a file there. A pipeline of the name that is given runs as well; it loses a worker of the cluster, whose process
is ``WORKER``, and an executor, is started again, and goes on from a savepoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource

import cutwater.spark
from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from cutwater.spark.sink.sink import BatchWriter, Staged
from cutwater.spark.source.source import source_class

SLOW_SECONDS_MAX = 120
PIPELINE_SECONDS = 200.0
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.cores.max": "2",
}


class SlowWriter(BatchWriter):
    """The first attempt of the first task has staged its rows and does not end before Spark kills it."""

    directory: Path

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        staged = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0:
            (self.directory / f"attempt-{context.attemptNumber()}").write_text(str(len(staged.parts)))
            if context.attemptNumber() == 0:
                time.sleep(SLOW_SECONDS_MAX)
        return staged


def slow_source(directory: Path) -> type[DataSource]:
    class SlowSource(source_class(os.getpid())):  # type: ignore[misc]
        def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
            made = super().writer(schema, overwrite)
            made.__class__, made.directory = SlowWriter, directory
            return made  # type: ignore[no-any-return]

    return SlowSource


class Count(ProcessFunction):
    """Counts per key, and tells the count again when a timer fires."""

    n = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        ctx.timers.at(ctx.timestamp + 1)
        return {"k": ctx.key, "n": self.n.get()}

    def on_timer(self, time: int, ctx: Any) -> Any:
        return {"k": ctx.key, "n": -self.n.get()}


def pipeline(name: str, log: str, topic: str) -> Pipeline:
    """Two levels, with timers: what is counted is counted per window."""
    p = Pipeline(name, log=log)
    source = p.source(topic, watermark=Watermark.ascending().idle_after(None))
    numbers = source.map(lambda row: {"k": int(row.value) % 7, "n": int(row.value)}, "k bigint, n bigint")
    counted = numbers.process(key="k", function=Count(), uid="count", schema="k bigint, n bigint")
    counted.sink(f"{name}-counts", uid="counts")
    windows = counted.window(key="k", window=Tumbling("1s"), aggregate={"n": "sum(n)"}, uid="windows")
    windows.sink(f"{name}-windows", uid="sums")
    return p


def run_pipeline(built: Pipeline, spark: Any, directory: str, worker: int) -> None:
    """Run it in three parts: a worker is killed after the first micro-batch, and an executor in the middle of another
    one, after a restart from the checkpoint; the last part begins from a savepoint."""
    more = {"spark": spark, "parallelism": 2, "slices": 4}
    own = {**more, "checkpoint": f"{directory}/pipeline", "max_records_per_trigger": 300, "wait": False}
    run = built.run(**own)
    wait_for(run, f"{directory}/pipeline/commits/0")
    os.kill(worker, signal.SIGKILL)
    wait_for(run, f"{directory}/pipeline/commits/1")
    run.stop()
    before = len(list(Path(directory, "pipeline", "offsets").glob("[0-9]*")))
    run = built.run(**own)
    wait_for(run, f"{directory}/pipeline/offsets/{before}")
    assert not Path(directory, "pipeline", "commits", str(before)).exists(), "its micro-batch was over too soon"
    os.kill(executors(spark)[0], signal.SIGKILL)
    wait_for(run, f"{directory}/pipeline/commits/{before}")
    run.stop(savepoint=f"{directory}/saved")
    run = built.run(
        **more, checkpoint=f"{directory}/anew", from_savepoint=f"{directory}/saved", until="now", drain=True
    )
    assert run.restoration is not None


def wait_for(run: Any, path: str) -> None:
    deadline = time.monotonic() + PIPELINE_SECONDS
    while not Path(path).exists():
        assert run.is_active, f"it was over before {path} was there"
        assert time.monotonic() < deadline, f"{path} was not there in time"
        time.sleep(0.05)


def executors(spark: Any) -> list[int]:
    """The processes of the executors of this application."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if spark.sparkContext.applicationId.encode() in words and any(b"ExecutorBackend" in word for word in words):
                found.append(int(path.parent.name))
    return found


def main(master: str, where: str, topic: str, directory: str = "", name: str = "", worker: str = "") -> None:
    spark = cutwater.spark.session("program", master=master, config=SPECULATION if directory else {})
    spark.sparkContext.setLogLevel("ERROR")
    if directory:
        spark.dataSource.register(slow_source(Path(directory)))
    place = {"servers": where} if where.startswith("cutwater://") else {"path": where}
    options = {**place, "subscribe": topic, "maxPartitionBytes": "100k"}
    frame = spark.read.format("cutwater").options(**options).load()
    (batch,) = frame.selectExpr("count(*) as n", "count(distinct glsn) as g", "sum(length(value)) as bytes").collect()
    copy = {**place, "topic": f"{topic}-copy"}
    frame.select("value").write.format("cutwater").mode("append").options(**copy).save()
    stream = spark.readStream.format("cutwater").options(**options, startingOffsets="earliest").load()
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = stream.writeStream.format("cutwater").options(
            **copy, positionColumn="glsn", checkpointLocation=checkpoint
        )
        query = cutwater.spark.start(writer.trigger(availableNow=True))
        query.awaitTermination()
        if name:
            run_pipeline(pipeline(name, where, topic), spark, checkpoint, int(worker))
    streamed = sum(progress["numInputRows"] for progress in query.recentProgress)
    java = spark.sparkContext._jvm.System.getProperty("java.home")
    told = {"batch": batch.n, "positions": batch.g, "bytes": batch.bytes, "streamed": streamed, "java": java}
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
