"""Checkpoints and savepoints on file systems other than the local one: on a real HDFS, whose drivers are killed, fenced
and succeeded; and refused where files are not renamed atomically.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.errors import InvalidArgument, RunFenced
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.spark.savepoint.files import HadoopFiles, require_store
from cutwater.spark.savepoints import open_savepoint
from cutwater.spark.session.session import MANAGER, REMOTE_MANAGER, SETTINGS
from tests.spark.hdfs_kit import mini_hdfs
from tests.spark.pipeline_kit import written
from tests.spark.random_pipelines import expected, filled, random_pipeline

ROOT = Path(__file__).resolve().parents[2]
SEED = 9
"""Of a pipeline that keeps state."""
KILL_SECONDS = 300.0
SIZES = {"parallelism": 2, "slices": 4}


@pytest.fixture(scope="module")
def hdfs(swift_start: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mini_hdfs(tmp_path_factory.mktemp("hdfs")) as address:
        yield address


@contextmanager
def hadoop_settings(spark: SparkSession, **given: str) -> Iterator[None]:
    """Settings of Hadoop for a while. ``_`` in a name stands for a dot."""
    context: Any = spark.sparkContext
    conf = context._jsc.hadoopConfiguration()
    before = {name: conf.get(name) for name in given}
    for name, value in given.items():
        conf.set(name.replace("_", "."), value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                conf.unset(name.replace("_", "."))
            else:
                conf.set(name.replace("_", "."), old)


def killed_driver(files: HadoopFiles, output: Path, arguments: list[str], checkpoint: str) -> None:
    """Run the pipeline in a process of its own, with its JVM, and kill both when a micro-batch is done."""
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.run_random_pipeline", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(cutwater.__file__).parents[1]), str(ROOT)))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + KILL_SECONDS
        while "0" not in files.list(f"{checkpoint}/commits"):
            assert process.poll() is None, output.read_text()[-5_000:]
            assert time.monotonic() < deadline, "no micro-batch was done in time"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_pipeline_with_all_that_it_keeps_on_hdfs(
    log: cutwater.Client, spark: SparkSession, hdfs: str, tmp_path: Path
) -> None:
    """Its driver is killed and started again, another assignment succeeds it, and a savepoint is taken and started
    from: the output is that of one thread, and the earlier assignment publishes nothing any more."""
    name, third, fourth, kept = "on-hdfs", f"{hdfs}/jobs/epoch-3", f"{hdfs}/jobs/epoch-4", f"{hdfs}/saved/one"
    pipeline, choice = random_pipeline(SEED, name, log.servers)
    filled(log, pipeline, choice, 60)
    until = int(log.tail())
    wanted, files = expected(log, pipeline, until), HadoopFiles(spark)
    killed_driver(files, tmp_path / "output", [str(SEED), name, log.servers, third, str(until), "3"], third)
    kept_there = Checkpoint(third, files)
    # Past what the first driver has planned, and not to the end.
    begun = kept_there.offset(kept_there.planned()[-1]).glsn
    middle, more = begun + (until - begun) * 2 // 3, {"spark": spark, **SIZES}
    assert begun + 10 < middle < until - 5, f"the driver was killed too late, at {begun} of {until}"
    pipeline.run(until=(begun + middle) // 2, job_epoch=3, checkpoint=third, **more)
    assert kept_there.point().offset.glsn == (begun + middle) // 2
    assert files.list(f"{third}/state"), "the pipeline keeps no state"
    run = pipeline.run(until=middle, job_epoch=4, checkpoint=fourth, succeeds=third, **more)
    assert Checkpoint(fourth, files).moved_from() is None
    with pytest.raises(RunFenced):
        log.open_run(name, str(kept_there.key), job_epoch=3)
    run.stop(savepoint=kept)
    assert open_savepoint(spark, kept).manifest.glsn == middle
    # With HDFS as Hadoop's default file system, a plain path is still one of this machine.
    with hadoop_settings(spark, fs_defaultFS=hdfs):
        here = tmp_path / "epoch-5"
        run = pipeline.run(until=until, drain=True, job_epoch=5, checkpoint=here, from_savepoint=kept, **more)
        run.stop(savepoint=tmp_path / "last")
    assert (here / "commits").is_dir()
    assert (tmp_path / "last" / "manifest.json").exists()
    assert not files.exists(f"{hdfs}{here}")
    for topic, rows in wanted.items():
        assert written(log, topic) == rows, topic


@pytest.mark.parametrize(
    ("manager", "left"), [(REMOTE_MANAGER, b"second"), (SETTINGS[MANAGER], b"first")], ids=["remote", "local"]
)
def test_why_checkpoints_on_hdfs_have_another_manager(
    spark: SparkSession, hdfs: str, manager: str, left: bytes
) -> None:
    """A micro-batch that is run again writes its files of state again. Only one manager puts them into their place."""
    context: Any = spark.sparkContext
    conf, jvm = context._jsc.hadoopConfiguration(), context._jvm
    place = jvm.org.apache.hadoop.fs.Path(f"{hdfs}/managers/{manager.rpartition('.')[2]}/1.changelog")
    made = jvm.java.lang.Class.forName(manager)
    kinds = context._gateway.new_array(jvm.java.lang.Class, 2)
    kinds[0], kinds[1] = place.getClass(), conf.getClass()
    given = context._gateway.new_array(jvm.java.lang.Object, 2)
    given[0], given[1] = place.getParent(), conf
    files = made.getConstructor(kinds).newInstance(given)
    files.createCheckpointDirectory()
    for data in (b"first", b"second"):
        stream = files.createAtomic(place, True)
        stream.write(bytearray(data))
        stream.close()
    assert HadoopFiles(spark).read(str(place.toString())) == left


def test_a_store_that_does_not_rename_atomically_is_refused(
    log: cutwater.Client, spark: SparkSession, hdfs: str, tmp_path: Path
) -> None:
    """By name before anything is started; by what the session has for the name, and by what is mounted, before
    anything is written."""
    pipeline, _ = random_pipeline(SEED, "refused", log.servers)
    mounts = "fs.viewfs.mounttable.views.link."
    http = "org.apache.hadoop.fs.http.HttpFileSystem"
    views = {f"{mounts}/{name}": place for name, place in
             {"here": f"file://{tmp_path}", "there": f"{hdfs}/", "web": "http://127.0.0.1:9/"}.items()}  # fmt: skip
    with hadoop_settings(spark, **views):
        for good in (
            f"{tmp_path}/c",
            f"file://{tmp_path}/c",
            f"{hdfs}/a/c",
            "viewfs://views/here/a/c",
            "viewfs://views/there/c",
        ):
            require_store(spark, good)
        with pytest.raises(InvalidArgument, match=r"is on http://127\.0\.0\.1:9/c by a mount, and that cannot hold"):
            pipeline.run(spark=spark, checkpoint="viewfs://views/web/c")
    with (
        hadoop_settings(spark, **{"fs.hdfs.impl": http, "fs.hdfs.impl.disable.cache": "true"}),
        pytest.raises(InvalidArgument, match=rf"is on hdfs:// \({http}\), and that cannot hold checkpoints"),
    ):
        pipeline.run(spark=spark, checkpoint=f"{hdfs}/c")
    with pytest.raises(InvalidArgument, match=r"s3a://bucket/c is on s3a://, .*a rename there copies the file"):
        pipeline.run(spark=spark, checkpoint="s3a://bucket/c")
