"""The way to ``cutwater.spark``, which this package never imports: it is looked up when someone cannot do without."""

from __future__ import annotations

from typing import Any

from cutwater.errors import Refused


def no_spark(what: str, error: object) -> str:
    """What is told where PySpark is not installed."""
    return f"{what}, which is not there ({error}): install cutwater[spark], which also brings Java"


def on_spark(module: str, pipeline: str) -> Any:
    """A module of ``cutwater.spark``."""
    try:
        return __import__(f"cutwater.spark.{module}", fromlist=[module])
    except ImportError as error:
        told = no_spark(f"pipeline {pipeline!r} runs on Spark", error.__cause__ or error)
        raise Refused(
            f"{told}; p.test({{topic: rows}}) needs neither, unless there is a transform without arrow="
        ) from error
