"""The log that a command is about: a cluster anywhere, a local cluster, or the embedded log in a directory."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import typer

from cutwater.admin import local_cluster
from cutwater.admin.operations import Admin
from cutwater.cli.framework.command import Bundle
from cutwater.cli.framework.interrupts import Interrupts
from cutwater.cli.framework.security import NO_CREDENTIALS, Security
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.holder_file import read_holder, with_secret
from cutwater.client.cluster.log_directory import (
    CLUSTER_FILE,
    FILES_OF_LOG,
    METADATA,
    check_has_order,
    check_no_address,
    other_files,
)
from cutwater.client.cluster.metadata_client import parse_servers, require_listener
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from cutwater.client.async_client import AsyncClient
    from cutwater.client.client import Client

T = TypeVar("T")
V = TypeVar("V", str | None, Path | None)

_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
"""Where an option may be set, by Typer's names, in order of precedence."""
Place: TypeAlias = Literal["servers", "directory", "path"]
_OPTIONS: dict[Place, str] = {"servers": "--servers", "directory": "--dir", "path": "--path"}
_said: dict[str, str] = {}
"""Where each of the options below was set in this process."""


def _note(ctx: typer.Context, parameter: typer.CallbackParam, value: V) -> V:
    source = ctx.get_parameter_source(parameter.name or "")
    _said[parameter.name or ""] = source.name if source is not None else ""
    return value


ReplicationOption = Annotated[
    int | None, typer.Option(help="Copies of every record; by default three, or as many as there are nodes.")
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds that the command may take.")
]


@dataclass(frozen=True)
class LogTarget(Bundle):
    """The log that a command is about, and how it is reached. The setting with the highest precedence counts."""

    servers: Annotated[
        str | None,
        typer.Option(
            envvar="CUTWATER_SERVERS",
            metavar="cutwater://HOST:PORT,…",
            help="Where the cluster listens.",
            callback=_note,
        ),
    ] = None
    directory: Annotated[
        Path | None,
        typer.Option("--dir", envvar="CUTWATER_DIR", help="The directory of a local cluster.", callback=_note),
    ] = None
    path: Annotated[
        Path | None, typer.Option(envvar="CUTWATER_PATH", help="The directory of an embedded log.", callback=_note)
    ] = None
    timeout: TimeoutOption = 30.0
    security: Security = NO_CREDENTIALS

    @property
    def place(self) -> str | Path:
        """The address of the cluster, or the path of an embedded log."""
        match self.nearest:
            case "servers" if self.servers is not None:
                parse_servers(self.servers)
                return self.servers
            case "directory" if self.directory is not None:
                return local_cluster.load(self.directory).servers
            case "path" if self.path is not None:
                return self.path
        embedded, variables = ", or --path DIR of an embedded log", "CUTWATER_SERVERS, CUTWATER_DIR or CUTWATER_PATH"
        if "path" in self.left_out:
            embedded, variables = "", "CUTWATER_SERVERS or CUTWATER_DIR"
        raise InvalidArgument(
            f"which cluster? Say --servers cutwater://HOST:PORT, or --dir DIR of a local one{embedded}; or set "
            f"{variables}, or put it into cutwater.toml"
        )

    @property
    def nearest(self) -> Place | None:
        """The option that was set with the highest precedence; None if none was set."""
        for source in _SOURCES:
            found = [name for name in _OPTIONS if getattr(self, name) is not None and _said.get(name) == source]
            check_one_place(found, source)
            if found:
                return found[0]
        return None

    @property
    def as_option(self) -> str:
        """The option that names the same log to further commands."""
        nearest = self.nearest
        return f"{_OPTIONS[nearest]} {shlex.quote(str(getattr(self, nearest)))}" if nearest is not None else ""

    @property
    def local(self) -> Path | None:
        """The directory of the local cluster that the command is about, if it is one."""
        return self.directory.absolute() if self.nearest == "directory" and self.directory is not None else None

    @property
    def disk(self) -> Path | None:
        """A directory on the disk of the log, if it is known to be on this machine."""
        return {"path": self.path, "directory": self.directory}.get(self.nearest or "")

    def check_runs(self) -> None:
        """Fail at once if the local cluster was stopped, and say how to start it again."""
        if self.local is not None and not local_cluster.load(self.local).running():
            raise Unavailable(f"no process of the cluster runs: {local_cluster.again(self.local)}")

    def access(self, servers: str = "") -> Access:
        """Return the credentials. Those for a local cluster lie in its directory, if it was secured; a token that is
        given takes the place of the administrator's. An embedded log, served at ``servers``, demands a secret that lies
        in its directory."""
        return with_secret(servers, self._access())

    def _access(self) -> Access:
        if self.local is not None:
            return local_cluster.access_of(self.local, local_cluster.load(self.local), self.security.shown_token())
        return self.security.access() if self.nearest == "servers" else ANYONE

    @contextmanager
    def serving(self, *, may_create: bool = False) -> Iterator[str]:
        """Yield the address to connect to. An embedded log that no other process has open is opened for this
        context."""
        place = self.place
        if isinstance(place, str):
            yield place
            return
        with open_embedded(place, self.timeout, may_create=may_create, to_administer=True):
            holder = read_holder(place)
            if holder is None:
                raise Unavailable(f"{place} was closed by the process that had it open: try again")
            yield holder.servers

    @contextmanager
    def client(self, *, may_create: bool = False, patient: bool = False) -> Iterator[Client]:
        """Yield a connected client; an embedded log is opened, unless another process has it open. ``patient``: try
        until the time is up even if no server listens there."""
        place = self.place
        self.check_runs()
        logging.getLogger("cutwater").setLevel(logging.ERROR)
        if isinstance(place, str):
            if not patient:
                asyncio.run(require_listener(parse_servers(place), self.local))
            # Imports Arrow, which takes long and is not needed for help.
            from cutwater.client.client import connect  # noqa: PLC0415

            access = self.access()
            try:
                client = connect(place, timeout=self.timeout, tls=access.tls, token=access.token)
            except CutwaterError as error:
                if self.local is not None and error.retriable:
                    error.message += f". `cutwater cluster health --dir {self.local}` says what is wrong"
                raise
        else:
            client = open_embedded(place, self.timeout, may_create=may_create)
        with client:
            yield client

    def end_of_holder(self) -> Callable[[], bool]:
        """Return a function that tells whether the process that had opened an embedded log has closed it. Then the log
        can be opened again, by this process if no other does."""
        place = self.place
        if isinstance(place, str):
            return lambda: False
        before = read_holder(place)
        return lambda: before is None or read_holder(place) != before or not before.lives()

    def administer(self, work: Callable[[Admin], Awaitable[T]], *, may_create: bool = False) -> T:
        """Run an operation on a cluster, and disconnect."""

        async def connected(url: str) -> T:
            await require_listener(parse_servers(url), self.local)
            timeout_ms = round(self.timeout * 1_000)
            async with Admin(parse_servers(url), timeout_ms=timeout_ms, access=self.access(url)) as admin:
                return await work(admin)

        self.check_runs()
        with self.serving(may_create=may_create) as url, Interrupts([signal.SIGINT]) as interrupts:
            return interrupts.run(connected(url))

    def with_client(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run something that needs an asynchronous client of a cluster, and close the client."""
        # Imports Arrow, which takes long and is not needed for help.
        from cutwater.client.async_client import AsyncClient  # noqa: PLC0415

        async def connected(url: str) -> T:
            await require_listener(parse_servers(url), self.local)
            access = self.access()
            connecting = AsyncClient.connect(url, timeout=self.timeout, tls=access.tls, token=access.token)
            async with await connecting as client:
                return await work(client)

        self.check_runs()
        with self.serving() as url, Interrupts([signal.SIGINT]) as interrupts:
            return interrupts.run(connected(url))


@dataclass(frozen=True)
class ClusterTarget(LogTarget):
    """The target of commands about storage nodes; an embedded log has only one of its own."""

    left_out = frozenset({"path"})
    timeout: TimeoutOption = 10.0


def open_embedded(path: Path, timeout: float, *, may_create: bool, to_administer: bool = False) -> Client:
    """Open an embedded log, or connect to the process that has it open. ``to_administer``: even if it is damaged."""
    # Its servers write many log messages that do not help the user of a command.
    logging.getLogger("cutwater").setLevel(logging.ERROR)
    if not may_create:
        check_log(path)
    # Imports both servers, which takes long and is not needed by other commands.
    from cutwater import embedded  # noqa: PLC0415

    return embedded.open_to_administer(path, timeout) if to_administer else embedded.open(path, timeout=timeout)


def check_log(path: Path) -> None:
    """Refuse a path without a log, so that a command that only reads does not create one at a mistyped path."""
    check_no_address(path)
    if (path / CLUSTER_FILE).exists():
        raise InvalidArgument(f"{path} holds a local cluster, and no embedded log: say --dir {path}")
    if (path / METADATA).exists():
        # If it belongs to a cluster, opening the log refuses it.
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
