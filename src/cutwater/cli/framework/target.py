"""Which cluster a command is about: one somewhere, a local one, or the log in a directory."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import typer

from cutwater.admin import local_cluster
from cutwater.admin.operations import Admin
from cutwater.cli.framework.command import Bundle
from cutwater.cli.framework.interrupts import Interrupts
from cutwater.cli.framework.security import NOBODY, Security
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.holder_file import with_secret
from cutwater.client.cluster.log_directory import (
    CLUSTER_FILE,
    FILES_OF_LOG,
    METADATA,
    check_has_order,
    check_no_address,
    other_files,
)
from cutwater.client.cluster.metadata_client import parse_servers, require_listener
from cutwater.errors import InvalidArgument, NotFound, Unavailable

T = TypeVar("T")
V = TypeVar("V", str | None, Path | None)

_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
"""Where an option may be said, as Typer calls it; what comes first counts most."""
Place: TypeAlias = Literal["servers", "directory", "path"]
_OPTIONS: dict[Place, str] = {"servers": "--servers", "directory": "--dir", "path": "--path"}
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


@dataclass(frozen=True)
class Log(Bundle):
    """Which log a command is about, and how it is reached. What is said closer to the command counts."""

    servers: ServersOption = None
    directory: DirOption = None
    path: PathOption = None
    timeout: TimeoutOption = 30.0
    security: Security = NOBODY

    @property
    def place(self) -> str | Path:
        """Where the cluster listens, or the path of an embedded log."""
        match self.nearest:
            case "servers" if self.servers is not None:
                parse_servers(self.servers)
                return self.servers
            case "directory" if self.directory is not None:
                return local_cluster.load(self.directory).servers
            case "path" if self.path is not None:
                return self.path
        if "path" in self.left_out:
            embedded, variables = "", "CUTWATER_SERVERS or CUTWATER_DIR"
        else:
            embedded, variables = (
                ", or --path DIR of an embedded log",
                "CUTWATER_SERVERS, CUTWATER_DIR or CUTWATER_PATH",
            )
        raise InvalidArgument(
            f"which cluster? Say --servers cutwater://HOST:PORT, or --dir DIR of a local one{embedded}; or set "
            f"{variables}, or put it into cutwater.toml"
        )

    @property
    def nearest(self) -> Place | None:
        """Which of them is said closest to the command; None if none is said."""
        given: dict[Place, object] = {"servers": self.servers, "directory": self.directory, "path": self.path}
        for source in _SOURCES:
            found = [name for name in given if given[name] is not None and _said.get(name) == source]
            check_one_place(found, source)
            if found:
                return found[0]
        return None

    @property
    def as_option(self) -> str:
        """How further commands about the same log are told which one it is."""
        given = {"servers": self.servers, "directory": self.directory, "path": self.path}
        return f"{_OPTIONS[self.nearest]} {shlex.quote(str(given[self.nearest]))}" if self.nearest is not None else ""

    @property
    def local(self) -> Path | None:
        """The directory of the local cluster that the command is about, if it is one."""
        return self.directory.absolute() if self.nearest == "directory" and self.directory is not None else None

    @property
    def disk(self) -> Path | None:
        """A directory on the disk of the log, if it is known to be on this machine."""
        return {"path": self.path, "directory": self.directory}.get(self.nearest or "")

    def check_runs(self) -> None:
        """Whoever needs a local cluster that was stopped is told at once, and how it is started again."""
        if self.local is not None and not local_cluster.load(self.local).running():
            raise Unavailable(f"no process of the cluster runs: {local_cluster.again(self.local)}")

    def access(self, servers: str = "") -> Access:
        """A local cluster listens on loopback, and believes everyone there. An embedded log, served at ``servers``,
        wants to see a secret that lies in its directory."""
        return with_secret(servers, self.security.access() if self.nearest == "servers" else ANYONE)

    @contextmanager
    def serving(self, *, may_create: bool = False) -> Iterator[str]:
        """Where to connect to. An embedded log that no other process has open is open as long as this lasts."""
        place = self.place
        if isinstance(place, str):
            yield place
            return
        # The servers of an embedded log have much to tell that is of no use to whoever runs a command.
        logging.getLogger("cutwater").setLevel(logging.ERROR)
        if not may_create:
            check_log(place)
        # Both servers come with it, which is much to load for those who need none.
        from cutwater import embedded  # noqa: PLC0415

        with embedded.open_to_administer(place, self.timeout):
            holder = embedded.holder_of(place)
            if holder is None:
                raise Unavailable(f"{place} was closed by the process that had it open: try again")
            yield holder.servers

    def administer(self, work: Callable[[Admin], Awaitable[T]], *, may_create: bool = False) -> T:
        """Do something with a cluster, and let go of it."""

        async def connected(url: str) -> T:
            await require_listener(parse_servers(url), self.local)
            timeout_ms = round(self.timeout * 1_000)
            async with Admin(parse_servers(url), timeout_ms=timeout_ms, access=self.access(url)) as admin:
                return await work(admin)

        self.check_runs()
        with self.serving(may_create=may_create) as url, Interrupts([signal.SIGINT]) as interrupts:
            return interrupts.run(connected(url))


@dataclass(frozen=True)
class Cluster(Log):
    """Of commands that are about storage nodes, of which an embedded log has one of its own."""

    left_out = frozenset({"path"})
    timeout: TimeoutOption = 10.0


def check_log(path: Path) -> None:
    """Whoever only looks does not make a new log out of a mistyped name."""
    check_no_address(path)
    if (path / CLUSTER_FILE).exists():
        raise InvalidArgument(f"{path} holds a local cluster, and no embedded log: say --dir {path}")
    if (path / METADATA).exists():
        # If it is that of a cluster, opening the log refuses it.
        return
    check_has_order(path)
    others = other_files(path, FILES_OF_LOG) if path.is_dir() else ""
    if others:
        raise NotFound(f"there is no log in {path}, but other files ({others}): name the directory of a log")
    if path.exists() and not path.is_dir():
        raise NotFound(f"{path} is no directory, and so no log: name the directory of one")
    raise NotFound(f"there is no log in {path}: `cutwater append TOPIC --create --path {path}` makes one")


def check_one_place(names: Collection[str], source: str) -> None:
    """Refuse several logs that are named in the same place, by the parameters that name them."""
    if len(names) <= 1:
        return
    options = [option for name, option in _OPTIONS.items() if name in names]
    if source == "ENVIRONMENT":
        variables = " and ".join(f"CUTWATER_{option.removeprefix('--').upper()}" for option in options)
        raise InvalidArgument(
            f"{variables} are set, and each names a log: unset one, or say {' or '.join(options)} with the command"
        )
    where = "cutwater.toml: take one out" if source == "DEFAULT_MAP" else "the command: say one"
    raise InvalidArgument(f"{' and '.join(options)} each name a log, and several were said in {where}")
