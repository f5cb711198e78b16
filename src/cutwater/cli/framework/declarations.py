"""Options for declarations of event time, which several commands share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import typer

from cutwater.cli.framework.times import parse_time

WatermarkOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Declare that no record with an earlier event time follows; as 2026-01-31T12:00Z."
    ),
]
IdleOption = Annotated[bool, typer.Option("--idle", help="Declare that nothing is expected until the next record.")]


class DeclaredOptions(NamedTuple):
    watermark: datetime | None
    idle: bool


def parse_declared(watermark: str | None, idle: bool) -> DeclaredOptions | None:
    """Return the declaration; None if nothing is declared."""
    if watermark is None and not idle:
        return None
    return DeclaredOptions(None if watermark is None else parse_time(watermark, datetime.now(UTC)), idle)
