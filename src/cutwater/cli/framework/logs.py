"""Configures logs of servers: on standard error, for people or for programs."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import structlog

from cutwater.cli.framework.command import Bundle
from cutwater.cli.framework.options import LogFormat, LogFormatOption, LogLevel, LogLevelOption


@dataclass(frozen=True)
class LogOptions(Bundle):
    log_format: LogFormatOption = LogFormat.TEXT
    log_level: LogLevelOption = LogLevel.INFO

    def configure(self) -> None:
        configure(self.log_format, self.log_level)


def configure(log_format: LogFormat, level: LogLevel) -> None:
    """Make logs structured; the servers use the standard library's logging."""
    common: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    if log_format is LogFormat.JSON:
        common.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=common,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
