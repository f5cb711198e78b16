"""A pipeline as a file, for ``test_jobs_on_spark``: numbers the records of each key."""

from __future__ import annotations

import os
from typing import Any

from cutwater.pipeline import Pipeline, ProcessFunction, ValueState

ROWS = "k string, n bigint"


class Number(ProcessFunction):
    seen = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        return {"k": ctx.key, "n": record.n, "seen": self.seen.get()}


p = Pipeline("numbered", log=os.environ.get("JOBS_LOG", ""))
numbered = p.source("in", schema=ROWS).process(key="k", function=Number(), uid="number", schema=f"{ROWS}, seen bigint")
numbered.sink("out", uid="out")
