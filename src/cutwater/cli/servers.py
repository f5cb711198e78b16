"""Which cluster a command is about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cutwater.admin import local_cluster
from cutwater.admin.operations import Admin
from cutwater.client.repository import parse_servers
from cutwater.errors import InvalidArgument

T = TypeVar("T")

ServersOption = Annotated[
    str | None,
    typer.Option(
        "--servers", envvar="CUTWATER_SERVERS", metavar="cutwater://HOST:PORT,…", help="Where the cluster listens."
    ),
]
DirOption = Annotated[
    Path | None, typer.Option("--dir", envvar="CUTWATER_DIR", help="The directory of a local cluster.")
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds that the command may take.")
]


def addresses_of(servers: str | None, directory: Path | None) -> tuple[str, ...]:
    if servers is not None:
        return parse_servers(servers)
    if directory is not None:
        return local_cluster.load(directory).addresses
    raise InvalidArgument(
        "which cluster? Say --servers cutwater://HOST:PORT, or --dir DIR of a local one, or set CUTWATER_SERVERS"
    )


def with_admin(servers: str | None, directory: Path | None, timeout: float, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Do something with a cluster, and let go of it."""

    async def connected() -> T:
        async with Admin(addresses_of(servers, directory), timeout_ms=round(timeout * 1_000)) as admin:
            return await work(admin)

    return asyncio.run(connected())
