"""Roots: places for checkpoints and savepoints that the operator of an agent has named, and the paths below them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from cutwater.core.jobs.agents import AgentRoot
from cutwater.core.jobs.job_spec import DEFAULT_ROOT
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument, NotFound
from cutwater.runtime.local_files import make_directory
from cutwater.savepoints.files import is_local

SHARED = ",shared"
FILE = "file://"


class RootPlace(Struct, frozen=True):
    """``place`` is a directory of this machine, as an absolute path, or the URL of one in another file system."""

    name: str
    place: str
    is_shared: bool = False

    @property
    def described(self) -> AgentRoot:
        return AgentRoot(self.name, self.is_shared, self.place)

    @property
    def local(self) -> Path | None:
        """The directory, if it is one of this machine's file systems."""
        return Path(self.place) if is_local(self.place) else None

    def path(self, below: str) -> str:
        return f"{self.place.rstrip('/')}/{below}"


def parse_root(option: str, text: str) -> RootPlace:
    """Read what an option says: ``NAME=PLACE`` or ``NAME=PLACE,shared``."""
    name, equals, place = text.partition("=")
    is_shared = place.endswith(SHARED)
    place = place.removesuffix(SHARED).removeprefix(FILE)
    if not equals or not name or not place:
        raise InvalidArgument(
            f"{option} {text!r} is no root: write NAME=PLACE, such as default=/var/lib/cutwater/checkpoints, and "
            "NAME=PLACE,shared if every agent that has the name reaches the same files"
        )
    check_name("root", name)
    if is_local(place):
        if not place.startswith("/"):
            raise InvalidArgument(
                f"{option} {text!r}: {place!r} depends on the working directory: write a path from / on"
            )
        place = str(Path(place))
    return RootPlace(name, place, is_shared)


class Roots:
    """The roots of one kind, by name. ``default`` is the place of the root ``default`` if no root is named at all."""

    def __init__(self, kind: str, places: Iterable[RootPlace], default: Path) -> None:
        self._kind = kind
        given = tuple(places)
        names = [root.name for root in given]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"a {kind} root is named twice: {', '.join(names)}")
        found = given or (RootPlace(DEFAULT_ROOT, str(default)),)
        self.places: Mapping[str, RootPlace] = {root.name: root for root in found}

    @property
    def described(self) -> tuple[AgentRoot, ...]:
        return tuple(root.described for root in self.places.values())

    def make(self) -> None:
        """Make the directories of this machine that do not exist yet."""
        for root in self.places.values():
            if root.local is not None:
                try:
                    if not root.local.is_dir():
                        make_directory(root.local)
                except OSError as error:
                    raise InvalidArgument(
                        f"{self._kind} root {root.name!r} at {root.place} cannot be used: {error.strerror}"
                    ) from error

    def of(self, name: str) -> RootPlace:
        found = self.places.get(name)
        if found is None:
            raise NotFound(f"this agent has no {self._kind} root {name!r}: it has {', '.join(self.places)}")
        return found
