"""Checks that a directory may hold a log, so that a mistyped path does not mix a log's files with others."""

from __future__ import annotations

import re
from pathlib import Path

from cutwater.client.cluster.metadata_client import SCHEME
from cutwater.errors import InvalidArgument, NotFound
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles

CLUSTER_FILE = "cluster.json"
METADATA = "metadata.sqlite"
VOLUME = "volume"
FILES_OF_LOG = re.compile(r"lock|holder\.(json(\.new)?|lock|log)|metadata\.sqlite([-.].*)?|volume")
FILES_OF_CLUSTER = re.compile(
    r"cluster\.json\.new|metadata\.sqlite([-.].*)?|etcd|certificates(\.new)?|admin\.token|(mr|sn)\d+(\.(log|key(\.tmp)?))?"
    r"|agent\d+(\.(log|token))?|jobs"
)
_LOGS_OF_SERVERS = re.compile(r"(mr|sn)\d+\.log")
SHOWN_MAX = 3
"""How many of the files in the way are named."""
_IGNORED = re.compile(r"\..*|lost\+found")
"""Hidden files, which tools leave everywhere, and the directory of a new file system."""


def check_may_hold(directory: Path, what: str, own: re.Pattern[str], mark: str) -> None:
    """Refuse a directory with other files, unless it is already a ``what``, which has the file ``mark``. An incomplete
    one, left by an interrupted start, contains only names that match ``own``."""
    if system.made(MachineFiles).exists(directory / mark):
        return
    if shown := other_files(directory, own):
        raise InvalidArgument(
            f"{directory} is no {what}, but holds other files ({shown}): name an empty directory or a new one, such as "
            f"{directory / 'cutwater'}"
        )


def check_has_order(directory: Path) -> None:
    """Refuse a log whose records exist without the file that holds their order. The file is made before the volume, so
    this is not an incomplete log."""
    if not system.made(MachineFiles).exists(directory / METADATA) and _has_records(directory / VOLUME):
        raise NotFound(
            f"{directory / METADATA} is missing, the file of the order layer, without which the log cannot be read; "
            f"the records are still in {directory / VOLUME}: put the file back, from where it was moved to or from a "
            "backup, and remove nothing; for a new log, name another directory"
        )


def _has_records(volume: Path) -> bool:
    clusters = (volume / name for name in _names(volume) if name.startswith("cid="))
    nodes = (cluster / name for cluster in clusters for name in _names(cluster) if name.startswith("snid="))
    return any(map(_names, nodes))


def holds_log(directory: Path) -> bool:
    """Return whether the directory holds an embedded log, or an incomplete one."""
    names = _names(directory)
    if CLUSTER_FILE in names:
        return False
    return {METADATA, VOLUME} <= names or ("lock" in names and not other_files(directory, FILES_OF_LOG))


def holds_half_a_cluster(directory: Path) -> bool:
    """Return whether a local cluster was begun there that never ran."""
    names = _names(directory)
    return not {CLUSTER_FILE, VOLUME} & names and any(map(_LOGS_OF_SERVERS.fullmatch, names))


def _names(directory: Path) -> set[str]:
    files = system.made(MachineFiles)
    return set(files.names(directory)) if files.is_dir(directory) else set()


def check_no_address(path: Path) -> None:
    """Refuse the address of a cluster in the place of a directory, and say what takes an address."""
    scheme = SCHEME.rstrip("/")
    # ``Path`` has removed one of the slashes.
    if str(path).startswith(f"{scheme}/"):
        url = SCHEME + str(path).removeprefix(scheme).lstrip("/")
        raise InvalidArgument(
            f"{url!r} is where a cluster listens, and not a directory: use cutwater.connect, or --servers with "
            "a command"
        )


def other_files(directory: Path, own: re.Pattern[str]) -> str:
    """Return the names of some files that are in the way and do not match ``own``; empty if there are none."""
    names = system.made(MachineFiles).names(directory)
    strange = [name for name in names if not own.fullmatch(name) and not _IGNORED.fullmatch(name)]
    return ", ".join(strange[:SHOWN_MAX]) + (", …" if len(strange) > SHOWN_MAX else "")
