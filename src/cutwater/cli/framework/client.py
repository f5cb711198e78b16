"""Opens a client for commands that write or read records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cutwater.cli.framework.target import LogTarget, check_log
from cutwater.client.cluster.holder_file import read_holder
from cutwater.client.cluster.metadata_client import parse_servers, require_listener
from cutwater.errors import CutwaterError

if TYPE_CHECKING:
    from cutwater.client.client import Client


@contextmanager
def open_client(log: LogTarget, *, may_create: bool = False, patient: bool = False) -> Iterator[Client]:
    """Yield a connected client; an embedded log is opened, unless another process has it open. ``patient``: try until
    the time is up even if no server listens there."""
    place = log.place
    log.check_runs()
    # The servers of an embedded log write many log messages that do not help a user who asked for records.
    logging.getLogger("cutwater").setLevel(logging.ERROR)
    if isinstance(place, str):
        if not patient:
            asyncio.run(require_listener(parse_servers(place), log.local))
        # Imports Arrow, which takes long and is not needed for help.
        from cutwater.client.client import connect  # noqa: PLC0415

        access = log.access()
        try:
            client = connect(place, timeout=log.timeout, tls=access.tls, token=access.token)
        except CutwaterError as error:
            if log.local is not None and error.retriable:
                error.message += f". `cutwater cluster health --dir {log.local}` says what is wrong"
            raise
    else:
        if not may_create:
            check_log(place)
        # Imports both servers, which takes long and is not needed by other commands.
        from cutwater import embedded  # noqa: PLC0415

        client = embedded.open(place, timeout=log.timeout)
    with client:
        yield client


def end_of_holder(log: LogTarget) -> Callable[[], bool]:
    """Return a function that tells whether the process that had opened an embedded log has closed it. Then the log can
    be opened again, by this process if no other does."""
    place = log.place
    if isinstance(place, str):
        return lambda: False
    before = read_holder(place)
    return lambda: before is None or read_holder(place) != before or not before.lives()
