"""Options that several commands share, and how options are made."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from cutwater.cli.framework.exit_codes import Settings


def under(heading: str) -> Callable[..., Any]:
    """Return ``typer.Option`` for options that help lists under this heading."""
    return partial(typer.Option, rich_help_panel=heading)


class OutputFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def _set_debug(value: bool) -> bool:
    Settings.is_debug = Settings.is_debug or value
    return value


def _set_output(value: OutputFormat) -> OutputFormat:
    Settings.is_json = value is OutputFormat.JSON
    return value


DebugOption = Annotated[
    bool,
    typer.Option("--debug", envvar="CUTWATER_DEBUG", callback=_set_debug, help="Show where an error comes from."),
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        "--output", "-o", envvar="CUTWATER_OUTPUT", callback=_set_output, is_eager=True, help="For people or programs."
    ),
]
