"""A client for commands that write or read records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cutwater.cli.servers import check_log, chosen
from cutwater.client.client import Client, connect
from cutwater.embedded import open_log


@contextmanager
def open_client(
    servers: str | None, directory: Path | None, path: Path | None, timeout: float, *, may_create: bool = False
) -> Iterator[Client]:
    """Connected as long as this lasts; an embedded log is opened, unless another process has it open."""
    place = chosen(servers, directory, path)
    # The servers of an embedded log have much to tell that is of no use to whoever asked for records.
    logging.getLogger("cutwater").setLevel(logging.ERROR)
    if isinstance(place, str):
        client = connect(place, timeout=timeout)
    else:
        if not may_create:
            check_log(place)
        client = open_log(place, timeout=timeout)
    with client:
        yield client
