"""Ends a command: its exit code, and its message on standard error.

The codes are stable. Each stands for a class of errors; an error has the code of its nearest base class that has one.
``docs/operating.md`` shows the same table.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from cutwater.errors import CutwaterError, InvalidArgument

INTERNAL_ERROR = 1
UNHEALTHY = 3
"""Exit code of commands that check a cluster or a machine, if something is wrong."""
INTERRUPTED = 130

EXIT_CODES: dict[str, int] = {
    "invalid_argument": 2,
    "volume_unusable": 10,
    "volume_conflict": 11,
    "node_exists": 12,
    "wrong_identity": 13,
    "wrong_cluster": 13,
    "volume_locked": 14,
    "newer_format": 15,
    "cannot_listen": 16,
    "read_only": 17,
    "storage_broken": 18,
    "stop_timed_out": 19,
    "damaged": 20,
    "malformed": 21,
    "not_found": 30,
    "already_exists": 31,
    "refused": 32,
    "unauthenticated": 32,
    "unproven": 32,
    "untrusted": 32,
    "fenced": 33,
    "unavailable": 34,
    "connection_lost": 34,
    "deadline_exceeded": 34,
    "append_unknown": 35,
    "trimmed": 36,
    "not_yet_committed": 37,
    "no_record_here": 38,
    "cutwater_error": 39,
    "permission_denied": 40,
    "quota_exceeded": 41,
}
"""The code of an error's class → the exit code of the process."""


class Settings:
    """Settings of the whole process, whichever command it runs."""

    is_debug = False
    is_json = False


def exit_code_of(error: CutwaterError) -> int:
    for cls in type(error).__mro__:
        code = EXIT_CODES.get(getattr(cls, "code", ""))
        if code is not None:
            return code
    return INTERNAL_ERROR


def show(error: CutwaterError) -> int:
    """Print an error on standard error; return the exit code. An error may repeat a secret that was given in the wrong
    place."""
    exit_code = exit_code_of(error)
    message = hidden(error.message)
    if Settings.is_debug:
        print(hidden("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if Settings.is_json:
        told = {"code": error.code, "message": message, "retriable": error.retriable, "exit_code": exit_code}
        print(json.dumps({"error": told}), file=sys.stderr)
    else:
        print(f"error: {message}\n  code {error.code}, exit code {exit_code}", file=sys.stderr)
    return exit_code


def hidden(text: str) -> str:
    """Hide secrets in a text that may repeat what a user wrote."""
    # Only errors need it, so help and completions do not load it.
    from cutwater.runtime.redaction import without_secrets  # noqa: PLC0415

    return without_secrets(text)


def leave_at_once(error: CutwaterError) -> NoReturn:
    """Exit from any thread, when nothing else helps."""
    exit_code = show(error)
    sys.stderr.flush()
    os._exit(exit_code)


def is_of_output(error: OSError) -> bool:
    """Return whether the error says that standard output takes no more. An error about a file would name it."""
    return error.filename is None and error.errno in _OUTPUT_ERRORS


_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def output_told() -> Iterator[None]:
    """Flush standard output, and report if it cannot be written, so that no output gets lost silently."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        if not is_of_output(error):
            raise
        _drop_output()
        sys.exit(show(InvalidArgument(f"standard output cannot be written: {error.strerror}")))


def _drop_output() -> None:
    """Discard output that is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ended_well(work: Callable[[], None]) -> None:
    """Run a command, and turn its errors into messages and exit codes, without a traceback unless ``--debug`` is
    set."""
    try:
        work()
    except CutwaterError as error:
        raise typer.Exit(show(error)) from None
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # The reader of the output, such as ``head``, has closed it.
        _drop_output()
    except Exception as error:
        if Settings.is_debug or (isinstance(error, OSError) and is_of_output(error)):
            raise
        print(
            f"internal error: {hidden(repr(error))}\n  this is a bug; say --debug to see where",
            file=sys.stderr,
        )
        raise typer.Exit(INTERNAL_ERROR) from None
