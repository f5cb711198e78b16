"""Which cluster a command is about: one somewhere, a local one, or the log in a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from cutwater.admin import local_cluster
from cutwater.admin.operations import Admin
from cutwater.cli.security import client_tls
from cutwater.client.access import Access
from cutwater.client.repository import parse_servers, require_listener
from cutwater.errors import InvalidArgument, NotFound, Unavailable

T = TypeVar("T")
V = TypeVar("V", str | None, Path | None)

_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
"""Where an option may be said, as Typer calls it; what comes first counts most."""
_PLACES: tuple[Literal["servers", "directory", "path"], ...] = ("servers", "directory", "path")
_said: dict[str, str] = {}
"""Where each of the options below was said in this process."""


def _note(ctx: typer.Context, parameter: typer.CallbackParam, value: V) -> V:
    source = ctx.get_parameter_source(parameter.name or "")
    _said[parameter.name or ""] = source.name if source is not None else ""
    return value


ServersOption = Annotated[
    str | None,
    typer.Option(
        "--servers",
        envvar="CUTWATER_SERVERS",
        metavar="cutwater://HOST:PORT,…",
        help="Where the cluster listens.",
        callback=_note,
    ),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", envvar="CUTWATER_DIR", help="The directory of a local cluster.", callback=_note),
]
PathOption = Annotated[
    Path | None,
    typer.Option("--path", envvar="CUTWATER_PATH", help="The directory of an embedded log.", callback=_note),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds that the command may take.")
]


def chosen(servers: str | None, directory: Path | None, path: Path | None) -> str | Path:
    """Where the cluster listens, or the path of an embedded log. What is said closer to the command counts."""
    match nearest(servers, directory, path):
        case "servers" if servers is not None:
            parse_servers(servers)
            return servers
        case "directory" if directory is not None:
            return local_cluster.load(directory).servers
        case "path" if path is not None:
            return path
    raise InvalidArgument(
        "which cluster? Say --servers cutwater://HOST:PORT, or --dir DIR of a local one, or --path DIR of an embedded "
        "log; or set CUTWATER_SERVERS, CUTWATER_DIR or CUTWATER_PATH, or put it into cutwater.toml"
    )


def nearest(
    servers: str | None, directory: Path | None, path: Path | None
) -> Literal["servers", "directory", "path"] | None:
    """Which of them is said closest to the command; None if none is said."""
    given = {name for name, value in zip(_PLACES, (servers, directory, path), strict=True) if value is not None}
    for source in _SOURCES:
        found = [name for name in _PLACES if name in given and _said.get(name) == source]
        if len(found) > 1:
            raise InvalidArgument("--servers, --dir and --path each name a log, and several were said: say one")
        if found:
            return found[0]
    return None


def check_log(path: Path) -> None:
    """Whoever only looks does not make a new log out of a mistyped name."""
    if not (path / "metadata.sqlite").exists():
        raise NotFound(f"there is no log in {path}: `cutwater append TOPIC --create --path {path}` makes one")


@contextmanager
def serving(
    servers: str | None, directory: Path | None, path: Path | None, timeout: float, *, may_create: bool = False
) -> Iterator[str]:
    """Where to connect to. An embedded log that no other process has open is open as long as this lasts."""
    place = chosen(servers, directory, path)
    if isinstance(place, str):
        yield place
        return
    if not may_create:
        check_log(place)
    # Both servers come with it, which is much to load for those who need none.
    from cutwater.embedded import holder_of, open_log  # noqa: PLC0415

    with open_log(place, timeout=timeout):
        holder = holder_of(place)
        if holder is None:
            raise Unavailable(f"{place} was closed by the process that had it open: try again")
        yield holder.servers


def with_admin(
    servers: str | None,
    directory: Path | None,
    timeout: float,
    work: Callable[[Admin], Awaitable[T]],
    *,
    path: Path | None = None,
    may_create: bool = False,
) -> T:
    """Do something with a cluster, and let go of it."""

    async def connected(url: str) -> T:
        await require_listener(parse_servers(url))
        access = Access(client_tls())
        async with Admin(parse_servers(url), timeout_ms=round(timeout * 1_000), access=access) as admin:
            return await work(admin)

    with serving(servers, directory, path, timeout, may_create=may_create) as url:
        return asyncio.run(connected(url))
