"""PySpark code inside pipelines: what is refused, and what comes out where it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import cutwater
from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from tests.spark.pipeline_kit import program_of, written
from tests.spark.random_pipelines import expected
from tests.times import at_us

SCHEMA = pa.schema({"k": pa.string(), "n": pa.int64(), "tags": pa.list_(pa.string()), "at": pa.timestamp("ms", "UTC")})
ROWS = "k string, n bigint, tags array<string>, at timestamp"
SHORT = "k string, n bigint"


class Count(ProcessFunction):
    n = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        return {"k": ctx.key, "n": self.n.get()}


def shown(row: Any) -> Any:
    return row


def short(frame: DataFrame) -> DataFrame:
    return frame.select("k", "n", "_cw")


def test_code_that_is_not_stateless_is_refused_and_the_alternative_named(
    log: cutwater.Client, spark: SparkSession
) -> None:
    log.create_topic("refused-in", schema=SCHEMA, event_time="at")
    static = spark.createDataFrame([("a", 1)], "k string, w int")

    def refused(code: Any, match: str, error: type[Exception] = Refused, schema: str = SHORT) -> None:
        p = Pipeline("refused", log=log.servers)
        p.source("refused-in").transform(code, schema=schema).sink("never-made", uid="x")
        with pytest.raises(error, match=f"pipeline 'refused', transform-1: .*{match}"):
            program_of(p, log, 1, 4, spark)

    refused(lambda df: df.groupBy("k", "_cw").agg(F.sum("n").alias("n")), r"Aggregate .* use window\(…\) or process")
    refused(lambda df: df.dropDuplicates(["k"]), r"Deduplicate .* use process\(…\) with a ValueState")
    refused(lambda df: df.limit(5), "Limit .* ValueState that counts")
    refused(lambda df: df.orderBy("n"), "Sort .* order of the log")
    refused(lambda df: df.union(df), "Union .* use Stream.union")
    refused(lambda df: df.repartition(3), "Repartition .* leave it out")
    refused(lambda df: df.withWatermark("at", "1 second"), "EventTimeWatermark .* watermark= of the source")
    refused(lambda df: df.withColumn("n", F.lag("n").over(cutwater_window())), r"Window .* use window\(…\)")
    refused(lambda df: df.withColumn("n", (F.rand() * 10).cast("bigint")), "another value each time")
    refused(lambda df: df.withColumn("n", F.unix_timestamp(F.current_timestamp())), "another value each time")
    refused(lambda df: df.join(df.select("k"), "k"), r"static data only: use connect\(…\)")
    refused(lambda df: df.join(static, "k", "full"), "a FullOuter join gives rows that belong to no record")
    refused(lambda df: df.mapInArrow(shown, df.schema), r"transform\(arrow=…\)")
    wrong = InvalidArgument
    refused(lambda df: df.select("k", "n"), "the reserved column _cw", wrong)
    refused(lambda df: df.withColumn("_cw", F.col("_cw")), "the reserved column _cw", wrong)
    refused(lambda df: df.select("k", "_cw"), "no column 'n'", wrong)
    refused(lambda df: df.withColumn("n", F.lit("1")), "'n' that comes out is string, but .* bigint", wrong)
    failed = (
        r"failed on a data frame with the columns k, n, tags, at, _cw: .* \(test_transforms.py, line \d+, in <lambda>\)"
    )
    refused(lambda df: df.select("nothing"), failed, wrong)
    refused(lambda df: static, "not made from the one that was given", wrong)
    refused(lambda df: None, "returned None: return a data frame", wrong)
    assert "never-made" not in {topic.name for topic in log.topics()}


def cutwater_window() -> Any:
    from pyspark.sql.window import Window

    return Window.partitionBy("k").orderBy("n")


def test_behind_an_operator_it_must_be_all_that_follows(log: cutwater.Client) -> None:
    log.create_topic("behind-in", schema=SCHEMA, event_time="at")
    p = Pipeline("behind", log=log.servers)
    counted = p.source("behind-in").process(key="k", function=Count(), uid="c", schema=SHORT)
    counted.transform(short, schema=SHORT).sink("x", uid="x")
    counted.sink("y", uid="y")
    with pytest.raises(Refused, match=r"behind an operator .* all that follows.*Give the same as transform\(arrow=…\)"):
        program_of(p, log, 1, 4)


def filled(log: cutwater.Client, topic: str) -> None:
    log.create_topic(topic, streams=2, schema=SCHEMA, event_time="at")
    for i in range(30):
        row = {"k": "abcd"[i % 4], "n": i, "tags": ["x", "y", "z"][: i % 4], "at": at_us(1_000_000 * i)}
        log.append(topic, [row], stream=log.topic(topic).streams[i % 2])


@pytest.mark.timeout(600)
def test_projection_filter_explode_and_join_give_what_a_test_gives(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    """Before operators, side by side with what goes another way; and the source is read once."""
    filled(log, "transformed-in")
    static = spark.createDataFrame([("x", 1), ("y", 2), ("y", 1), ("z", 3)], "tag string, weight bigint")
    calls = tmp_path / "calls"

    def counted(row: Any) -> Any:
        with calls.open("a") as lines:
            lines.write(f"{row.n}\n")
        return row

    def exploded(df: DataFrame) -> DataFrame:
        return df.where("n > 3").select("_cw", "k", "n", F.explode("tags").alias("tag"))

    def weighed(df: DataFrame) -> DataFrame:
        return df.join(static, "tag").withColumn("n", F.col("weight") * 100)

    p = Pipeline("transforms", log=log.servers)
    source = p.source("transformed-in", schema=ROWS, event_time="at", watermark=Watermark.ascending()).map(
        counted, ROWS
    )
    tags = source.transform(exploded, schema="k string, n bigint, tag string")
    tags.process(key="tag", function=Count(), uid="count", schema=SHORT).sink("tag-counts", uid="counts")
    tags.sink("tags", uid="tags")
    tags.transform(weighed, schema="n bigint, tag string").sink("weighed", uid="weighed")
    per = source.window(key="k", window=Tumbling("10s"), aggregate={"n": "count(*)"}, uid="w")
    per.sink("per-key", uid="per-key")
    wanted = expected(log, p)
    assert [len(wanted[name]) for name in ("tags", "weighed", "per-key")] == [37, 49, 12]
    calls.unlink()
    p.run(spark=spark, until="now", drain=True, parallelism=2, slices=4, checkpoint=tmp_path / "checkpoint")
    assert {topic: written(log, topic) for topic in wanted} == wanted
    assert sorted(map(int, calls.read_text().split())) == list(range(30))


@pytest.mark.timeout(600)
def test_the_last_step_may_be_code_on_data_frames(log: cutwater.Client, spark: SparkSession, tmp_path: Path) -> None:
    filled(log, "last-in")
    p = Pipeline("last", log=log.servers)
    per = p.source("last-in", schema=ROWS, event_time="at", watermark=Watermark.ascending()).window(
        key="k", window=Tumbling("10s"), aggregate={"n": "sum(n)"}, uid="w"
    )
    named = "k string, from timestamp, n bigint"
    per.transform(lambda df: df.withColumnRenamed("window_start", "from").where("n > 20"), schema=named).sink(
        "last-out", uid="out"
    )
    wanted = expected(log, p)
    p.run(spark=spark, until="now", drain=True, parallelism=1, slices=2, checkpoint=tmp_path / "checkpoint")
    assert wanted["last-out"]
    assert written(log, "last-out") == wanted["last-out"]


@pytest.mark.timeout(600)
def test_an_unchained_row_function_runs_in_a_worker_of_its_own(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    filled(log, "unchained-in")

    def first(row: Any) -> Any:
        return {"n": row.n, "first": os.getpid()}

    def next_one(row: Any) -> Any:
        return {"n": row.n, "first": row.first, "second": os.getpid()}

    def last(row: Any) -> Any:
        return {"n": row.n, "first": row.first, "second": row.second, "third": os.getpid()}

    p = Pipeline("unchained", log=log.servers)
    firsts = p.source("unchained-in", schema=ROWS).map(first, "n bigint, first bigint")
    seconds = firsts.map(next_one, "n bigint, first bigint, second bigint").unchained()
    seconds.map(last, "n bigint, first bigint, second bigint, third bigint").sink("unchained-out", uid="out")
    p.run(spark=spark, until="now", parallelism=1, slices=2, checkpoint=tmp_path / "checkpoint")
    rows = written(log, "unchained-out")
    assert [row["n"] for row in rows] == list(range(30))
    assert all(row["first"] == row["second"] != row["third"] for row in rows)


def test_a_session_that_newsession_made_is_told_of(log: cutwater.Client, spark: SparkSession, tmp_path: Path) -> None:
    log.create_topic("sessions-in", schema=SCHEMA)
    for name in ("sessions", "sessions again"):
        p = Pipeline(name, log=log.servers)
        p.source("sessions-in").sink("sessions-out", uid="out")
        if name == "sessions":
            p.run(spark=spark, until="now", parallelism=1, slices=2, checkpoint=tmp_path / "first")
            log.delete_topic("sessions-out")
            continue
        with pytest.raises(InvalidArgument, match=r"was made by newSession\(\).*use the first session"):
            p.run(spark=spark.newSession(), until="now", parallelism=1, slices=2, checkpoint=tmp_path / "second")
    assert "sessions-out" not in {topic.name for topic in log.topics()}
