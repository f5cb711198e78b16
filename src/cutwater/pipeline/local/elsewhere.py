"""Modules of other packages that a test of a pipeline needs, and that this package never imports: they are above it."""

from __future__ import annotations

from typing import Any


def elsewhere(module: str) -> Any:
    """A module of Cutwater, by its name without ``cutwater.``."""
    return __import__(f"cutwater.{module}", fromlist=[module.rpartition(".")[2]])
