"""Runs a random pipeline in a process of its own, to be killed: SEED NAME SERVERS CHECKPOINT UNTIL [EPOCH]."""

from __future__ import annotations

import sys

from tests.spark.random_pipelines import random_pipeline

if __name__ == "__main__":
    seed, name, servers, checkpoint, until, *epoch = sys.argv[1:]
    pipeline, _ = random_pipeline(int(seed), name, servers)
    pipeline.run(
        until=int(until),
        drain=True,
        parallelism=2,
        slices=4,
        checkpoint=checkpoint,
        max_records_per_trigger=10,
        job_epoch=int(epoch[0]) if epoch else 0,
    )
