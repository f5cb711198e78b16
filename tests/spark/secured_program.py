"""A program with a Spark of its own that hides nothing, and a secured cluster; ``test_secured`` runs it.

``python secured_program.py SERVERS CA TOKENS OUT``: reads ``orders`` as a batch, as a stream and in a pipeline, writes
``copies`` and ``counted``, and puts into OUT whatever Spark shows to anybody. Executors are processes of their own. It
prints a line when that is done, and ends when it has read one.
"""

from __future__ import annotations

import io
import json
import sys
import urllib.request
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import cutwater.spark
from cutwater.errors import PermissionDenied
from cutwater.pipeline import Pipeline

MASTER = "local-cluster[1,1,1024]"
SHOWS_ALL = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    # Spark hides values by their names. Here it hides nothing, as with a careless setting.
    "spark.redaction.regex": "no-name-is-secret",
    "spark.sql.redaction.options.regex": "no-name-is-secret",
    "spark.sql.maxPlanStringLength": "1000000",
    "spark.python.authenticate.socketTimeout": "180s",
}


def counting(servers: str, name: str = "counting") -> Pipeline:
    p = Pipeline(name, log=servers)
    p.source("orders").map(lambda row: {"n": int(row.value)}, "n bigint").sink("counted", uid="counted")
    return p


def explained(frame: Any) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        frame.explain(True)
    return text.getvalue()


def pages(spark: Any) -> str:
    """Everything that Spark's web page and its API tell."""
    base, application = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
    api = f"/api/v1/applications/{application}"
    found = []
    queries = [f"/SQL/execution/?id={number}" for number in range(12)]
    for path in ("/environment/", "/SQL/", "/stages/", "/StreamingQuery/", f"{api}/environment", *queries):
        with suppress(OSError), urllib.request.urlopen(base + path, timeout=30) as answer:
            found.append(answer.read().decode())
    with urllib.request.urlopen(f"{base}{api}/sql?details=true&planDescription=true&length=100", timeout=30) as answer:
        found.append(answer.read().decode())
    return "\n".join(found)


def main(servers: str, ca: str, tokens: str, place: str) -> None:
    out = Path(place)
    (out / "events").mkdir()
    config = {"spark.eventLog.dir": f"file://{out}/events", "spark.local.dir": f"{out}/local"}
    spark = cutwater.spark.session("secured", master=MASTER, config=SHOWS_ALL | config)
    spark.sparkContext.setLogLevel("INFO")
    log4j: Any = spark.sparkContext._jvm.org.apache.logging.log4j
    # This logger writes every text of SQL.
    log4j.core.config.Configurator.setLevel("org.apache.spark.sql.execution.SparkSqlParser", log4j.Level.DEBUG)
    common = {"servers": servers, "tls.ca": ca}
    reads = common | {"token.file": f"{tokens}/reader.token", "subscribe": "orders"}
    writes = common | {"token.file": f"{tokens}/writer.token", "topic": "copies"}
    told: dict[str, Any] = {}

    orders = spark.read.format("cutwater").options(**reads).load()
    told["batch"] = orders.count()
    shown = [explained(orders)]
    given = ", ".join(f"`{name}` '{value}'" for name, value in reads.items())
    spark.sql(f"CREATE TEMPORARY VIEW viewed USING cutwater OPTIONS ({given})")
    (row,) = spark.sql("SELECT count(*) AS n, max(watermark) AS w FROM viewed").collect()
    told["viewed"] = row.n
    orders.select("value").write.format("cutwater").mode("append").options(**writes).save()

    stream = spark.readStream.format("cutwater").options(**reads, startingOffsets="earliest").load()
    shown.append(explained(stream))
    writer = stream.writeStream.format("cutwater").options(**writes, checkpointLocation=f"{out}/checkpoint")
    query = cutwater.spark.start(writer.queryName("copying").trigger(availableNow=True))
    query.awaitTermination()
    told["streamed"] = sum(progress["numInputRows"] for progress in query.recentProgress)
    shown += [explained(query), json.dumps(query.recentProgress, default=str)]
    try:
        spark.read.format("cutwater").options(**(reads | {"subscribe": "secret-orders"})).load().count()
    except Exception as error:
        shown.append(str(error))
        told["hidden"] = "there is no topic 'secret-orders'" in str(error)

    token = Path(f"{tokens}/piper.token").read_text().strip()
    options = {"tls_ca": ca, "spark": spark, "parallelism": 1, "slices": 2, "checkpoint": f"{out}/pipeline"}
    run = counting(servers).run(token=token, until="now", **options)
    shown.append(json.dumps(run.progress, default=str))
    try:
        # It may read and write these topics, but publish under no other name.
        counting(servers, "other").run(token=token, until="now", **options | {"checkpoint": f"{out}/other"})
    except PermissionDenied as error:
        told["denied"] = str(error)
    (out / "shown.txt").write_text("\n".join(shown))
    (out / "pages.html").write_text(pages(spark))
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
