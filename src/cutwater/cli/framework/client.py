"""A client for commands that write or read records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cutwater.cli.framework.target import Log, check_log
from cutwater.client.cluster.metadata_client import parse_servers, require_listener
from cutwater.errors import CutwaterError

if TYPE_CHECKING:
    from cutwater.client.client import Client


@contextmanager
def open_client(log: Log, *, may_create: bool = False, patient: bool = False) -> Iterator[Client]:
    """Connected as long as this lasts; an embedded log is opened, unless another process has it open. ``patient``: try
    until the time is up also if nobody listens there."""
    place = log.place
    log.check_runs()
    # The servers of an embedded log have much to tell that is of no use to whoever asked for records.
    logging.getLogger("cutwater").setLevel(logging.ERROR)
    if isinstance(place, str):
        if not patient:
            asyncio.run(require_listener(parse_servers(place), log.local))
        # Arrow comes with it, which is much to load for those who only ask what a command can do.
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
        # Both servers come with it, which is much to load for those who need none.
        from cutwater import embedded  # noqa: PLC0415

        client = embedded.open(place, timeout=log.timeout)
    with client:
        yield client


def end_of_holder(log: Log) -> Callable[[], bool]:
    """Tells whether an embedded log that this process is connected to was closed by the process that had opened it.
    Then it can be opened again, by this one if no other does."""
    place = log.place
    if isinstance(place, str):
        return lambda: False
    from cutwater.embedded import holder_of  # noqa: PLC0415

    before = holder_of(place)
    return lambda: before is None or holder_of(place) != before or not before.lives()
