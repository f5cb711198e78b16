"""Runs a pipeline whose JVM is killed: ``python jvm_killed_program.py SERVERS DIRECTORY``. Prints what it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import cutwater.spark
from cutwater.errors import CutwaterError
from cutwater.pipeline import Pipeline


def told(call: Any) -> None:
    try:
        call()
    except CutwaterError as error:
        print(f"{error.code}: {error.message}", flush=True)


def main(servers: str, directory: str) -> None:
    spark = cutwater.spark.session("killed", master="local[1]")
    p = Pipeline("killed", log=servers)
    p.source("killed-in").sink("killed-out", uid="out")
    run = p.run(spark=spark, parallelism=1, slices=1, checkpoint=directory, wait=False)
    while run.progress is None:
        time.sleep(0.1)
    gateway: Any = spark.sparkContext._gateway
    os.kill(gateway.proc.pid, signal.SIGKILL)
    told(run.wait)
    told(lambda: p.run(parallelism=1, slices=1, checkpoint=directory))
    # The gateway's own threads complain at the end of the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
