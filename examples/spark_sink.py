"""Copies a topic through Spark into other topics, cell by cell. Run it as a script, or open it as a notebook."""

# %% Open a log inside this program: payments come in, totals and sorted payments go out.
import tempfile
from pathlib import Path

import pyarrow as pa

import cutwater
import cutwater.spark

folder = Path(tempfile.mkdtemp())
log = cutwater.open(folder / "log")
payment = pa.schema({"user": pa.string(), "amount": pa.int64()})
log.create_topic("payments", streams=3, schema=payment)
log.create_topic("totals", schema={"user": pa.string(), "total": pa.int64()})
for topic in ("small", "large"):
    log.create_topic(topic, streams=2, schema=payment)
for i in range(30):
    log.append("payments", [{"user": user, "amount": i * i} for user in ("ann", "bob", "eve")])

# %% Start a session. It brings a Java if this machine has none.
spark = cutwater.spark.session()

# %% Write a batch: either all of it is written, or nothing.
payments = spark.read.format("cutwater").option("subscribe", "payments").load(str(folder / "log"))
totals = payments.groupBy("user").sum("amount").toDF("user", "total")
totals.write.format("cutwater").mode("append").option("topic", "totals").save(str(folder / "log"))
print(log.table("totals").select(["user", "total"]).sort_by("user").to_pylist())

# %% Write a stream into two topics, in the order of the log. Kill it at any time and start it again with the same
# checkpoint: every payment is in one of the topics, once.
sorted_payments = (
    spark.readStream.format("cutwater")
    .option("subscribe", "payments")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 40)
    .load(str(folder / "log"))
    .selectExpr("if(amount > 400, 'large', 'small') as topic", "user", "amount", "glsn")
    .writeStream.format("cutwater")
    .option("name", "sorting")
    .option("positionColumn", "glsn")
    .option("checkpointLocation", str(folder / "checkpoint"))
    .trigger(availableNow=True)
)
sorted_payments.start(str(folder / "log")).awaitTermination()
for topic in ("small", "large"):
    amounts = log.table(topic)["amount"].to_pylist()
    assert amounts == sorted(amounts), "in the order in which they came"
    print(topic, len(amounts), "payments, the last one of", amounts[-1])

# %% Repeat a batch, because Spark has lost its own note of it: the log recognises it, and nothing is doubled.
newest = max((folder / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
newest.unlink()
sorted_payments.start(str(folder / "log")).awaitTermination()
assert log.table("small").num_rows + log.table("large").num_rows == 90

# %% Clean up.
spark.stop()
log.close()
