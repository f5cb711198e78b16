"""Imports ``cutwater.spark`` and other packages above this one when they are needed. This package never imports them at
the top."""

from __future__ import annotations

from typing import Any

from cutwater.errors import Refused


def elsewhere(module: str) -> Any:
    """Import a module of Cutwater by its name without ``cutwater.``."""
    return __import__(f"cutwater.{module}", fromlist=[""])


def no_spark(what: str, error: object) -> str:
    """Return the error message for a missing PySpark."""
    return f"{what}, which is not there ({error}): install cutwater[spark], which also brings Java"


def on_spark(module: str, pipeline: str) -> Any:
    """Import a module of ``cutwater.spark``."""
    try:
        return elsewhere(f"spark.{module}")
    except ImportError as error:
        told = no_spark(f"pipeline {pipeline!r} runs on Spark", error.__cause__ or error)
        raise Refused(
            f"{told}; p.test({{topic: rows}}) needs neither, unless there is a transform without arrow="
        ) from error
