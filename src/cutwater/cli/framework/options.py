"""Options that several commands share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from cutwater.cli.framework.exit_codes import Settings


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


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
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", envvar="CUTWATER_LOG_FORMAT", help="How logs on standard error look.")
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", envvar="CUTWATER_LOG_LEVEL", help="The least important logs to show.")
]
