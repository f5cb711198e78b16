"""Tokens that tests make have a mark in their secret. It must show in no log record, and in no log file, of a session.

This sees tokens of ``access_cluster.new_token`` and log files (``*.log``, and denials that wait) below the session's
temporary directory, as far as tests leave them there. ``tests/integration/test_planted_secrets.py`` looks closer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

MARK = bytes.fromhex("5ec2e70d5ec2e70d")
"""The first bytes of the secret."""
TEXT = MARK.hex()
FILE_BYTES_MAX = 50_000_000


class MarkWatch(logging.Handler):
    """Notes log records that have the mark."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if TEXT in record.getMessage() or (error is not None and TEXT in repr(error)):
            self.found.append(f"{record.name}:{record.lineno}")


def marked_files(directory: Path, patterns: Iterable[str] = ("*.log", "*.denials", "denials.spool")) -> list[Path]:
    """Return the log files below the directory that have the mark."""
    found = []
    for path in (path for pattern in patterns for path in directory.rglob(pattern)):
        try:
            is_wanted = path.is_file() and path.stat().st_size <= FILE_BYTES_MAX
            if is_wanted and TEXT.encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found
