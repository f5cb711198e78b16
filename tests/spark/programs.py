"""Programs that start a Spark of their own; ``test_clusters`` runs them, because a process has one Spark only.

``python programs.py MASTER PATH-OR-SERVERS TOPIC``: prints, as JSON, how many rows a batch and a stream read. Both are
copied into the topic whose name ends with ``-copy``.
"""

from __future__ import annotations

import json
import sys
import tempfile

import cutwater.spark


def main(master: str, where: str, topic: str) -> None:
    spark = cutwater.spark.session("program", master=master)
    spark.sparkContext.setLogLevel("ERROR")
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
    streamed = sum(progress["numInputRows"] for progress in query.recentProgress)
    java = spark.sparkContext._jvm.System.getProperty("java.home")
    told = {"batch": batch.n, "positions": batch.g, "bytes": batch.bytes, "streamed": streamed, "java": java}
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
