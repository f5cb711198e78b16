"""Imports modules of other packages that a test of a pipeline needs. This package never imports them at the top: they
are above it."""

from __future__ import annotations

from typing import Any


def elsewhere(module: str) -> Any:
    """Import a module of Cutwater by its name without ``cutwater.``."""
    return __import__(f"cutwater.{module}", fromlist=[module.rpartition(".")[2]])
