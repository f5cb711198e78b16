"""The pipeline of the fixture. It runs under the version that made the fixture, and under the present one."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from cutwater.pipeline import Pipeline, Tumbling, Watermark


def waits(row: Any) -> bool:
    """A micro-batch with the record ``stop`` is planned and never done, as long as the environment says so."""
    if row.value == b"stop" and os.environ.get("RULE_ONE_STOP"):
        time.sleep(600)
    return True


def made(log: str) -> Pipeline:
    p = Pipeline("rule-one", log=log)
    readings = p.source("readings", watermark=Watermark.ascending().idle_after("1s")).filter(waits)
    per = readings.window(key="key", window=Tumbling("60s"), aggregate={"n": "count(*)"}, uid="per")
    per.sink("out", uid="out")
    return p


if __name__ == "__main__":
    made(sys.argv[1]).run(checkpoint=sys.argv[2], available_now=True, parallelism=1, slices=1)
