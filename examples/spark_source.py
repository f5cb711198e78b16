"""Shows the Spark source, cell by cell. Run it as a script, or open it as a notebook."""

# %% Open a log inside this program, with a topic of typed rows and some payments in it.
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

import cutwater
import cutwater.spark

folder = Path(tempfile.mkdtemp())
log = cutwater.open(folder / "log")
schema = pa.schema({"user": pa.string(), "amount": pa.int64(), "at": pa.timestamp("us", "UTC")})
log.create_topic("payments", streams=3, schema=schema, event_time="at")
noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
for minute in range(30):
    log.append(
        "payments",
        [{"user": user, "amount": minute, "at": noon + timedelta(minutes=minute)} for user in ("ann", "bob", "eve")],
    )

# %% Start a session. It brings a Java if this machine has none.
spark = cutwater.spark.session()

# %% Read the topic as a table: nothing to parse, and every row has its position in the log.
payments = spark.read.format("cutwater").option("subscribe", "payments").load(str(folder / "log"))
payments.printSchema()
payments.groupBy("user").sum("amount").orderBy("user").show()

# %% Read a part of it: from a position on, and only two columns; the storage node sends no others.
late = (
    spark.read.format("cutwater")
    .option("subscribe", "payments")
    .option("startingOffsets", log.tail() - 5)
    .option("columns", "glsn,amount")
    .load(str(folder / "log"))
)
late.orderBy("glsn").show()

# %% Read the same as a stream, twenty records at a time, with a checkpoint.
query = (
    spark.readStream.format("cutwater")
    .option("subscribe", "payments")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 20)
    .load(str(folder / "log"))
    .writeStream.format("parquet")
    .option("path", str(folder / "copy"))
    .option("checkpointLocation", str(folder / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
for progress in query.recentProgress:
    print(progress["numInputRows"], "rows up to", progress["sources"][0]["endOffset"])

# %% Check that the copy is the log, in its order.
copied = spark.read.parquet(str(folder / "copy")).orderBy("glsn").select("glsn").collect()
assert [row.glsn for row in copied] == [record.glsn for record in log.subscribe("payments", follow=False)]

# %% Clean up.
spark.stop()
log.close()
