"""Uses new certificates without a restart: contexts of TLS that follow the files they were made from.

A context cannot forget an authority, so a changed file means a new context. New connections get it; open ones stay as
they are. Files that cannot be used are reported, and the contexts from before stay in use.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from cutwater.errors import InvalidArgument

_log = logging.getLogger(__name__)

C = TypeVar("C")

Marks = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[C]):
    """What was made from some files, made again when they have changed. ``current`` is always usable.

    ``make`` raises InvalidArgument if the files cannot be used. It gets whether the files replace others in use.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[bool], C]) -> None:
        self._paths, self._make = tuple(paths), make
        # The marks come first: a file that changes while it is read is read again.
        self._marks = self._look_at_files()
        self.current: C = make(False)
        self.trouble = ""
        """Why the present files are not in use."""

    def look(self) -> C:
        """Return what the files hold now, or held when they were last usable."""
        marks = self._look_at_files()
        # Files in trouble are tried again: a certificate may begin to be valid, and its key may still be on its way.
        if marks == self._marks and not self.trouble:
            return self.current
        self._marks = marks
        try:
            self.current = self._make(True)
        except InvalidArgument as error:
            if error.message != self.trouble:
                _log.warning("new files for TLS are not used, and those from before stay in use: %s", error.message)
            self.trouble = error.message
        else:
            self.trouble = ""
            _log.info("new connections use the new files for TLS: %s", ", ".join(map(str, self._paths)))
        return self.current

    def _look_at_files(self) -> Marks:
        return tuple(map(_mark, self._paths))


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; for a symbolic link, the file that it leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FollowingContext(ssl.SSLContext):
    """A context of TLS that leaves each new connection to the context that ``pick`` returns then.

    Settings of this context hold for the others as well, so a program may change them. It holds no certificates itself.
    """

    _pick: Callable[[], ssl.SSLContext]

    def __new__(cls, pick: Callable[[], ssl.SSLContext]) -> FollowingContext:
        found = pick()
        self = super().__new__(cls, found.protocol)
        _copy_settings(found, self)
        self._pick = pick
        return self

    def _picked(self) -> ssl.SSLContext:
        found = self._pick()
        _copy_settings(self, found)
        return found

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._picked().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        return self._picked().wrap_socket(
            sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, server_hostname, session
        )


def _copy_settings(source: ssl.SSLContext, target: ssl.SSLContext) -> None:
    # A context that checks host names must verify, so one of the two comes first.
    if source.check_hostname:
        target.verify_mode = source.verify_mode
        target.check_hostname = True
    else:
        target.check_hostname = False
        target.verify_mode = source.verify_mode
    target.verify_flags = source.verify_flags
    target.options = source.options
    target.minimum_version = source.minimum_version
    target.maximum_version = source.maximum_version
