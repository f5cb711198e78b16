"""Spark and pipelines with a cluster that has TLS and access control: least rights, tokens that nobody sees, and rights
that are checked when rows are staged and again when they are published."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

import cutwater
import cutwater.spark
from cutwater.errors import InvalidArgument, PermissionDenied
from cutwater.pipeline import Pipeline
from cutwater.spark.pipeline import runner
from cutwater.spark.pipeline.sink import PipelineSink, PipelineWriter
from cutwater.spark.session.session import provide_format
from cutwater.spark.sink.sink import BatchWriter, StreamWriter
from cutwater.spark.source.source import source_class
from tests.spark.secured_kit import SecuredCluster, secret_in, secured_cluster

ROOT = Path(__file__).parents[2]
ROWS = 300
LOOK_SECONDS = 0.05
ARGUMENTS_SECONDS = 0.2
WAIT_SECONDS = 200


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    """With these principals, which have the rights that ``docs/spark.md`` names, and no others."""
    with secured_cluster(tmp_path_factory.mktemp("secured") / "cluster") as cluster:
        with cluster.owner() as log:
            for topic in ("orders", "secret-orders", "copies", "published", "published-too"):
                log.create_topic(topic)
            log.append("orders", [b"%d" % number for number in range(ROWS)])
        cluster.allow("reader", ("read", "topic:orders"))
        cluster.allow("writer", ("append", "topic:copies"))
        cluster.allow(
            "piper", ("read", "topic:orders"), ("append,create", "topic:counted"), ("publish", "run:counting")
        )
        for principal in ("reader", "writer", "piper"):
            cluster.token(principal)
        yield cluster


def token_of(cluster: SecuredCluster, principal: str) -> Path:
    return cluster.directory.with_name(f"{principal}.token")


class Arguments(threading.Thread):
    """Looks all the time at the arguments with which processes of this machine were started."""

    def __init__(self, words: list[str]) -> None:
        super().__init__(daemon=True)
        self._words, self._over, self._seen = words, threading.Event(), set[str]()
        self.found: dict[str, str] = {}

    def run(self) -> None:
        while not self._over.wait(ARGUMENTS_SECONDS):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    text = path.read_bytes().decode(errors="replace")
                    self.found |= {word: text for word in self._words if word in text}

    def end(self) -> dict[str, str]:
        self._over.set()
        self.join()
        return self.found


def files_with(directory: Path, word: str) -> set[str]:
    found = set()
    for path in directory.rglob("*"):
        with suppress(OSError):
            if path.is_file() and word.encode() in path.read_bytes():
                found.add(str(path.relative_to(directory)))
    return found


@contextmanager
def started(command: list[str], directory: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """What the process prints goes into the directory. Nothing that it has started is left."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("CUTWATER_", "SPARK_HOME"))}
    given |= {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), **environment}
    with (directory / "stdout").open("w") as out, (directory / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, env=given, stdin=subprocess.PIPE, stdout=out, stderr=errors, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(holds: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.returncode
        time.sleep(LOOK_SECONDS)


def test_least_rights_and_no_secret_is_shown_anywhere(secured: SecuredCluster, tmp_path: Path) -> None:
    """A program reads, writes and runs a pipeline on executors of their own. Spark hides nothing by its name there, and
    what options contain is seen in all places that are searched for the tokens."""
    out, conf = tmp_path / "out", tmp_path / "conf"
    out.mkdir()
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(
        "spark.authenticate true\nspark.network.crypto.enabled true\nspark.io.encryption.enabled true\n"
        f"spark.authenticate.secret {secrets.token_hex(16)}\n"
    )
    names = ("reader", "writer", "piper")
    planted = {name: secret_in(token_of(secured, name)) for name in names}
    place = secured.directory.parent
    command = [sys.executable, str(Path(__file__).with_name("secured_program.py"))]
    command += [secured.servers, str(secured.ca), str(place), str(out)]
    arguments = Arguments([*planted.values(), secured.servers])
    arguments.start()
    # Executors have their logs in Spark's home, which is made there.
    more = {"SPARK_CONF_DIR": str(conf), "XDG_CACHE_HOME": str(out / "cache"), "SPARK_LOCAL_IP": "127.0.0.1"}
    with started(command, out, **more) as process:
        stdout = out / "stdout"
        wait(lambda: stdout.read_text().endswith("}\n"), process)
        found = {name: files_with(tmp_path, secret) for name, secret in planted.items()}
        in_options = files_with(tmp_path, "reader.token")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(WAIT_SECONDS) == 0
    told = json.loads(stdout.read_text().splitlines()[-1])
    assert (told["batch"], told["viewed"], told["streamed"], told["hidden"]) == (ROWS, ROWS, ROWS, True)
    assert told["denied"].startswith("piper lacks the right publish on run:other")
    with secured.owner() as log:
        assert sorted(log.table("copies")["value"].to_pylist()) == sorted([b"%d" % n for n in range(ROWS)] * 2)
        assert sorted(log.table("counted")["n"].to_pylist()) == list(range(ROWS))
    assert found == {name: set() for name in names}
    assert {name: files_with(tmp_path, secret) for name, secret in planted.items()} == found
    in_options |= files_with(tmp_path, "reader.token")
    # The search sees options: in the pages, in explained plans, in Spark's own log and in its event log.
    assert {"out/pages.html", "out/shown.txt", "out/stderr"} <= in_options
    assert any(path.startswith("out/events/") for path in in_options)
    assert any(path.startswith("out/cache/") and path.endswith("/stderr") for path in files_with(tmp_path, "executor"))
    assert set(arguments.end()) == {secured.servers}


PIPELINE = """
from tests.spark.secured_program import counting

p = counting({servers!r})
"""


def test_a_supervised_pipeline_with_a_token_from_the_environment(
    secured: SecuredCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also with ``--debug``. Neither the job's files nor the arguments of its processes have the token."""
    file, token = tmp_path / "p.py", token_of(secured, "piper")
    file.write_text(PIPELINE.format(servers=secured.servers))
    command = [sys.executable, "-m", "cutwater.cli", "pipeline", "run", str(file), "--debug", "--until", "now"]
    command += ["--tls-ca", str(secured.ca), "--jobs-dir", str(tmp_path / "jobs"), "--restart", "none"]
    command += ["--parallelism", "1", "--replay-output"]
    arguments = Arguments([secret_in(token), str(file)])
    arguments.start()
    with secured.owner() as log:
        before = log.table("counted").num_rows if "counted" in [topic.name for topic in log.topics()] else 0
    # The path of a Unix socket in it has to be short.
    scratch = Path(mkdtemp(prefix="cw-"))
    request.addfinalizer(lambda: rmtree(scratch))
    with started(command, tmp_path, CUTWATER_TOKEN=token.read_text().strip(), TMPDIR=str(scratch)) as process:
        assert process.wait(WAIT_SECONDS) == 0, (tmp_path / "stderr").read_text()
    with secured.owner() as log:
        assert log.table("counted").num_rows == before + ROWS
    assert files_with(tmp_path, secret_in(token)) == set()
    assert list(scratch.iterdir()) == []
    file.write_text("def built():\n    return 1 / 0\n\np = built()\n")
    with started(command, tmp_path, CUTWATER_TOKEN=token.read_text().strip(), TMPDIR=str(scratch)) as process:
        assert process.wait(WAIT_SECONDS) != 0
    assert "ZeroDivisionError" in (tmp_path / "stderr").read_text()
    assert files_with(tmp_path, secret_in(token)) == files_with(scratch, secret_in(token)) == set()
    assert set(arguments.end()) == {str(file)}


def paused(directory: Path) -> type[DataSource]:
    """The format, but a commit waits until it is let on. By then all tasks have staged their rows."""

    def pause() -> None:
        (directory / "staged").touch()
        deadline = time.monotonic() + WAIT_SECONDS
        while not (directory / "go").exists() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    class PausedBatch(BatchWriter):
        def commit(self, messages: Any) -> None:
            pause()
            super().commit(messages)

    class PausedStream(StreamWriter):
        def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
            pause()
            super().commit(messages, batchId)

    class Paused(source_class(os.getpid())):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "cutwater-paused"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            made = super().writer(schema, overwrite)
            made.__class__ = PausedBatch
            return made

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            made = super().streamWriter(schema, overwrite)
            made.__class__ = PausedStream
            return made

    return Paused


def paused_sink(directory: Path) -> type[PipelineSink]:
    """The same for the sink of a pipeline."""

    class PausedPipeline(PipelineWriter):
        def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
            (directory / "staged").touch()
            deadline = time.monotonic() + WAIT_SECONDS
            while not (directory / "go").exists() and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            super().commit(messages, batchId)

    class PausedSink(PipelineSink):
        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            made = super().streamWriter(schema, overwrite)
            made.__class__ = PausedPipeline
            return made

    return PausedSink


class Checked:
    """Runs a write, takes a right away when all of it is staged, and lets it be published."""

    def __init__(self, cluster: SecuredCluster, directory: Path, principal: str) -> None:
        self._cluster, self._directory, self._principal = cluster, directory, principal

    def denied_at_publishing(self, write: Callable[[], object], right: str, resource: str) -> str:
        """Return the error. The right is still missing after that."""
        for name in ("staged", "go"):
            (self._directory / name).unlink(missing_ok=True)
        thread = threading.Thread(target=self._take_away, args=(right, resource))
        thread.start()
        try:
            with pytest.raises((PySparkException, PermissionDenied)) as raised:
                write()
        finally:
            thread.join()
        assert (self._directory / "staged").exists(), str(raised.value)
        return str(raised.value)

    def _take_away(self, right: str, resource: str) -> None:
        try:
            wait((self._directory / "staged").exists)
            self._cluster.remove(self._principal, right, resource)
        finally:
            (self._directory / "go").touch()

    def denied(self, right: str, resource: str) -> str:
        return f"{self._principal} lacks the right {right} on {resource}"


def test_rights_are_checked_at_staging_and_again_at_publishing(
    secured: SecuredCluster, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a batch, a stream and a pipeline: nothing appears without the right, and everything once when it is back."""
    grants = [("append", "topic:published"), ("append", "topic:published-too"), ("read", "topic:orders")]
    secured.allow("publisher", *grants, ("publish", "run:publishing"))
    token = secured.token("publisher")
    options = secured.options(token)
    provide_format(spark, paused(tmp_path))
    checked = Checked(secured, tmp_path, "publisher")
    missing = ("append", "topic:published-too")
    rows = "explode(array('published', 'published-too')) as topic"

    def counts() -> tuple[int, int]:
        with secured.owner() as log:
            first, second = (log.table(topic)["value"].to_pylist() for topic in ("published", "published-too"))
            assert sorted(first) == sorted(second)
            return len(first), len(set(first))

    def batch() -> None:
        frame = spark.range(7).selectExpr("concat('b', id) as value").selectExpr("value", rows)
        frame.write.format("cutwater-paused").mode("append").options(**options).save()

    # A principal without any right on a topic may not know that it exists. What it wrote itself is named all the same.
    assert checked.denied(*missing) in checked.denied_at_publishing(batch, *missing)
    with pytest.raises(PySparkException, match="there is no topic 'published-too'; topics: orders, published"):
        batch()
    assert counts() == (0, 0)
    secured.allow("publisher", missing, ("describe", "topic:published-too"))
    batch()
    assert counts() == (7, 7)

    def stream() -> None:
        frame = spark.readStream.format("cutwater").options(**options, subscribe="orders", startingOffsets="earliest")
        writer = frame.load().selectExpr("concat('s', string(value)) as value", rows).writeStream
        writer = writer.format("cutwater-paused").options(**options, checkpointLocation=str(tmp_path / "checkpoint"))
        cutwater.spark.start(writer.trigger(availableNow=True)).awaitTermination()

    assert checked.denied(*missing) in checked.denied_at_publishing(stream, *missing)
    with pytest.raises(StreamingQueryException, match=checked.denied(*missing)):
        stream()
    assert counts() == (7, 7)
    secured.allow("publisher", missing)
    stream()
    assert counts() == (7 + ROWS, 7 + ROWS)

    monkeypatch.setattr(runner, "PipelineSink", paused_sink(tmp_path))
    p = Pipeline("publishing", log=secured.servers)
    values = p.source("orders").map(lambda row: {"value": b"p" + row.value}, "value binary")
    for topic in ("published", "published-too"):
        values.sink(topic, uid=topic)

    def pipeline() -> None:
        p.run(
            spark=spark,
            until="now",
            parallelism=2,
            slices=2,
            token=token,
            tls_ca=secured.ca,
            checkpoint=str(tmp_path / "pipeline"),
        )

    name = ("publish", "run:publishing")
    assert checked.denied(*name) in checked.denied_at_publishing(pipeline, *name)
    assert counts() == (7 + ROWS, 7 + ROWS)
    secured.allow("publisher", name)
    pipeline()
    assert counts() == (7 + 2 * ROWS, 7 + 2 * ROWS)


def test_a_token_is_refused_where_spark_is_not_protected(spark: SparkSession, secured: SecuredCluster) -> None:
    made = source_class(os.getpid(), "spark.authenticate=true is missing")
    unprotected = type("Unprotected", (made,), {"name": classmethod(lambda cls: "cutwater-unprotected")})
    provide_format(spark, unprotected)
    spark.conf.set("spark.mine", f"--token {token_of(secured, 'reader').read_text()}")
    with pytest.raises(InvalidArgument, match=r"the setting 'spark\.mine' of Spark contains a token"):
        cutwater.spark.register(spark)
    spark.conf.unset("spark.mine")
    cutwater.spark.register(spark)
    common = {"servers": secured.servers, "tls.ca": str(secured.ca), "subscribe": "orders"}
    for more, told in (
        ({"token.file": str(token_of(secured, "reader"))}, r"Refused: spark\.authenticate=true is missing"),
        ({}, r"Unauthenticated: "),
    ):
        with pytest.raises(PySparkException, match=told):
            spark.read.format("cutwater-unprotected").options(**common, **more).load()
