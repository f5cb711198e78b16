"""Events written short: ``a7`` is a record of key a with event time 7."""

from __future__ import annotations

from typing import Any

from cutwater.pipeline import Pipeline, Stream, Watermark
from cutwater.pipeline.local.local_runner import TestResult


def events(text: str) -> list[dict[str, Any]]:
    return [{"k": word[0], "t": int(word[1:])} for word in text.split()]


def source(bound: int = 0) -> tuple[Pipeline, Stream]:
    p = Pipeline("test")
    return p, p.source("in", schema="k string, t bigint", event_time="t", watermark=Watermark.bounded(bound))


def run(p: Pipeline, text: str, **options: Any) -> TestResult:
    return p.test({"in": events(text)}, **options)
