"""The volumes of a storage node: which directories belong to it, and which process may use them.

::

    <volume>/cid=<cid>/snid=<snid>/            the storage node's path on this volume
        lock                                   locked while the node runs; contains the id of its process
        node                                   keys of cluster and node, number of starts
        staged/                                parts that are staged and not published yet, see ``part_files.py``
        lsid=<lsid>/                           one replica
        lsid=<lsid>.new/                       a replica that is being created; it counts once it is renamed
        lsid=<lsid>.removed/                   a replica whose topic was deleted, until its files are removed
        lsid=<lsid>.damaged-<start>/           a replica that could not be opened and was replaced by a copy from a
                                               peer; the second one of the same start ends with -2, and so on

The name of a directory proves nothing, because directories can be copied and mounted elsewhere. So random keys, made
once, are stored with the data on every volume, and all volumes of a node must have the same ones.

A node uses the volumes that it is started with and those that were added while it ran. It remembers the added volumes,
on all its volumes, until it is started with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET, structs

from cutwater.errors import InvalidArgument, Refused, WrongIdentity
from cutwater.format.errors import DamagedFile, DiskFull, NodeExists, VolumeConflict, VolumeLocked, VolumeUnusable
from cutwater.runtime import system
from cutwater.storage.files import TEMPORARY, Lock, OsFiles, StorageFiles, is_full
from cutwater.storage.node_identity import NODE_FILES, NodeIdentity, load_identity, merged, save_identity
from cutwater.types import ClusterId, Incarnation, LogStreamId, StorageNodeId

PID_BYTES_MAX = 20
NEW = ".new"
REMOVED = ".removed"
SPOOL_NAME = "denials.spool"
"""Denials that wait for the audit. They go with the volume."""
STAGED_NAME = "staged"
SERVER_KEY_NAME = "server-key"
"""The private key of the node, in a file beside ``node``."""


N = TypeVar("N", bound=int)


def node_path(volume: Path, cluster: ClusterId, node: StorageNodeId) -> Path:
    return volume / f"cid={cluster}" / f"snid={node}"


def replica_path(volume: Path, cluster: ClusterId, node: StorageNodeId, stream: LogStreamId) -> Path:
    return node_path(volume, cluster, node) / f"lsid={stream}"


def free_bytes(volumes: Iterable[Path]) -> dict[Path, int]:
    """Return the free bytes of each volume; 0 if they cannot be found out. Volumes of one file system share them."""
    by_device: dict[int, int] = {}
    found = {}
    for volume in volumes:
        try:
            space = system.free_space(volume)
            found[volume] = by_device.setdefault(space.device, space.free_bytes)
        except OSError:
            found[volume] = 0
    return found


class NodeVolumes:
    """The volumes of a running storage node, locked until ``release``.

    ``forget`` lists added volumes that are lost. ``forget_metadata_keys``: all metadata nodes were replaced, so trust
    those that answer now.
    """

    def __init__(
        self,
        volumes: Sequence[Path],
        cluster: ClusterId,
        node: StorageNodeId,
        *,
        error_if_exists: bool = False,
        forget: Sequence[Path] = (),
        forget_metadata_keys: bool = False,
        files: StorageFiles | None = None,
        make_key: Callable[[], str] = lambda: system.token_hex(16),
        room: Callable[[Iterable[Path]], dict[Path, int]] = free_bytes,
    ) -> None:
        self.files: StorageFiles = files or system.made(OsFiles)
        self._cluster, self._node, self._room = cluster, node, room
        self.volumes = tuple(volumes)
        self._locks: dict[Path, Lock] = {}
        self._changing = threading.RLock()
        """Held while the set of volumes changes, or one of them is chosen."""
        self._making: dict[LogStreamId, Path] = {}
        """Replicas that are being created, and their paths."""
        self._check_volumes()
        if error_if_exists:
            self._check_new()
        try:
            for volume in self.volumes:
                self._lock(volume)
            added = self._find_added(forget)
            for volume in added:
                self._lock(volume)
            self.volumes = (*self.volumes, *added)
            self.identity = self._agree(make_key, tuple(map(str, added)))
            if forget_metadata_keys and self.identity.metadata_keys:
                self._save_all(structs.replace(self.identity, metadata_keys={}))
            self.replicas: dict[LogStreamId, Path] = {}
            self.unsynced: set[LogStreamId] = set()
            """Replicas whose names could not be made durable when they were created."""
            for volume in self.volumes:
                self.replicas |= self._scan(volume)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    # Starting.

    def _check_volumes(self) -> None:
        if not self.volumes:
            raise VolumeUnusable("a storage node needs at least one volume: give one with --volumes DIR")
        seen: set[Path] = set()
        for volume in self.volumes:
            self._check_volume(volume, "before the storage node starts")
            real = self.files.real_path(volume)
            if real in seen:
                raise VolumeUnusable(f"volume {volume} was given twice: name each volume once")
            seen.add(real)

    def _check_volume(self, volume: Path, when: str) -> None:
        if not self.files.is_dir(volume):
            what = "is not a directory" if self.files.exists(volume) else "does not exist"
            raise VolumeUnusable(f"volume {volume} {what}: create it, or mount it, {when}")
        probe = volume / f".cutwater-{self._cluster}-{self._node}{TEMPORARY}"
        with self._at(volume):
            self.files.create(probe)
            self.files.unlink(probe)

    @contextmanager
    def _at(self, volume: Path, doing: str = "written") -> Iterator[None]:
        """Turn errors of the file system into errors of Cutwater."""
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise DiskFull(f"volume {volume}: no room is left ({error.strerror}): make room there") from error
            raise VolumeUnusable(
                f"volume {volume} cannot be {doing} ({error.strerror}): give the user that runs the storage node the "
                "right to read and write there, and mount it read-write"
            ) from error

    def _path(self, volume: Path) -> Path:
        return node_path(volume, self._cluster, self._node)

    def _check_new(self) -> None:
        for volume in self.volumes:
            if self.files.exists(self._path(volume)):
                raise NodeExists(
                    f"{self._path(volume)} exists, and --error-if-exists was said: start without it to go on with that "
                    "data, or choose another --id or another volume"
                )

    def _lock(self, volume: Path) -> None:
        path = self._path(volume)
        with self._at(volume):
            self.files.make_dir(path)
            # A process that died may have left names, of a replica for example, that are not durable yet.
            for directory in (volume, path.parent, path):
                self.files.sync_dir(directory)
            # The volume itself belongs to the operator. These directories are ours, and earlier versions let everyone
            # read them.
            self.files.close_to_others(path.parent)
            self.files.close_to_others(path)
            lock = self.files.lock(path / "lock")
        if lock is None:
            raise VolumeLocked(
                f"{path} is in use by a running storage node{self._holder(path)}: stop that one first, or choose "
                "another --id or volume"
            )
        self._locks[volume] = lock

    def _holder(self, path: Path) -> str:
        """Return the process that holds the lock, if it wrote its id."""
        with suppress(OSError):
            pid = self.files.open(path / "lock").pread(PID_BYTES_MAX, 0).strip()
            if pid.isdigit():
                return f" (pid {int(pid)})"
        return ""

    def _find_added(self, forget: Sequence[Path]) -> list[Path]:
        """Find the volumes that were added while the node ran.

        An empty directory in the place of such a volume is a disk that is not mounted. It must not be taken for a
        volume without replicas.
        """
        said = [identity for volume in self.volumes if (identity := self._load(volume)) is not None]
        known = {self.files.real_path(volume) for volume in (*self.volumes, *forget)}
        found = []
        for path in dict.fromkeys(path for identity in said for path in identity.added):
            volume = Path(path)
            if self.files.real_path(volume) in known:
                continue
            remedy = f"; if it is lost for good, start once with --forget-volume {volume}"
            what = f"volume {volume}, which storage node {self._node} got while it ran,"
            if not self.files.is_dir(volume):
                raise VolumeUnusable(f"{what} does not exist: mount it{remedy}")
            if self._load(volume) is None:
                raise VolumeUnusable(f"{what} holds nothing of this node now: is it mounted?{remedy[1:]}")
            found.append(volume)
        return found

    def _agree(self, make_key: Callable[[], str], added: tuple[str, ...]) -> NodeIdentity:
        """Return the identity that all volumes agree on, and write it to volumes that are new to the node."""
        found = {volume: identity for volume in self.volumes if (identity := self._load(volume)) is not None}
        if not found:
            for volume in self.volumes:
                self._check_not_bare(volume)
        identity = NodeIdentity(self._cluster, self._node, make_key())
        for volume, other in found.items():
            if volume == next(iter(found)):
                identity = other
            if other.node_key != identity.node_key:
                raise WrongIdentity(
                    f"{self._path(next(iter(found)))} and {self._path(volume)} have different node keys, so they are "
                    "not of the same storage node: start each node with its own volumes"
                )
            identity = merged(identity, other, self._path(volume))
        identity = structs.replace(identity, added=added)
        for volume in self.volumes:
            if found.get(volume) != identity:
                self._save(volume, identity)
        return identity

    def _check_not_bare(self, volume: Path) -> None:
        with self._at(volume, "read"):
            replicas = [name for name in self.files.names(self._path(volume)) if name.startswith("lsid=")]
            replicas += self._staged_on(volume)
        if replicas:
            raise DamagedFile(
                self._path(volume) / "node",
                f"it is missing, next to {replicas[0]}",
                "without the keys the owner of this data is unknown: restore the file, or move the data away",
            )

    def _load(self, volume: Path) -> NodeIdentity | None:
        with self._at(volume, "read"):
            return load_identity(self.files, self._path(volume), self._cluster, self._node)

    def _save(self, volume: Path, identity: NodeIdentity) -> None:
        with self._at(volume):
            save_identity(self.files, self._path(volume), identity)

    def _scan(self, volume: Path) -> dict[LogStreamId, Path]:
        """Find every replica on this volume. Raises if one of them also lies on another volume."""
        path = self._path(volume)
        with self._at(volume, "read"):
            names = self.files.names(path)
        for name in names:
            if name.endswith(REMOVED):
                self._erase(path / name)
        found = {stream: path / f"lsid={stream}" for stream in _streams(names)}
        for stream, there in found.items():
            other = self.replicas.get(stream) or self._making.get(stream)
            if other is not None:
                raise VolumeConflict(
                    f"log stream {stream} lies under two volumes, {other} and {there}: one of them is an old copy; "
                    "move that one away"
                )
        return found

    # Running.

    @property
    def staged(self) -> tuple[Path, ...]:
        """The directories of staged parts, one per volume."""
        return tuple(self._path(volume) / STAGED_NAME for volume in self.volumes)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Choose the directory for the next staged part, on the volume with most room. It is not removed meanwhile."""
        with self._changing:
            room = self._room(self.volumes)
            yield self._path(max(self.volumes, key=lambda volume: room[volume])) / STAGED_NAME

    def check_cluster_key(self, cluster_key: str) -> None:
        if self.identity.cluster_key not in (None, cluster_key):
            raise WrongIdentity(
                f"storage node {self._node} holds data of another cluster that also has the id {self._cluster}: check "
                "--metadata, or start with other volumes"
            )

    def adopt(self, cluster_key: str, metadata_keys: Mapping[N, str]) -> None:
        """Note the cluster that the node belongs to, which never changes.

        The keys of its metadata nodes may change. The caller has proved to be one of the metadata nodes that were known
        before, if any were.
        """
        self.check_cluster_key(cluster_key)
        keys = self.identity.metadata_keys | {int(node): key for node, key in metadata_keys.items()}
        if (self.identity.cluster_key, self.identity.metadata_keys) != (cluster_key, keys):
            self._save_all(structs.replace(self.identity, cluster_key=cluster_key, metadata_keys=keys))

    def note_secured(self, secured: bool) -> None:
        """Note durably whether access control is on."""
        if bool(self.identity.secured) is not secured:
            self._save_all(structs.replace(self.identity, secured=secured or UNSET))

    def believe_only(self, metadata_keys: Mapping[N, str]) -> None:
        """Trust exactly these metadata nodes. For a process that also runs them, and so knows their keys.

        Joining shows whether they belong to the cluster whose data this is.
        """
        keys = {int(node): key for node, key in metadata_keys.items()}
        if self.identity.metadata_keys and self.identity.metadata_keys != keys:
            self._save_all(structs.replace(self.identity, metadata_keys=keys))

    @property
    def server_key_files(self) -> tuple[Path, ...]:
        """The files of the node's private key, one per volume."""
        return tuple(self._path(volume) / SERVER_KEY_NAME for volume in self.volumes)

    @property
    def spool_file(self) -> Path:
        """The file for denials that wait for the audit."""
        return self._path(self.volumes[0]) / SPOOL_NAME

    def next_incarnation(self) -> Incarnation:
        """Return the number of this start. It is durably larger than that of every start before."""
        self._save_all(structs.replace(self.identity, incarnation=Incarnation(self.identity.incarnation + 1)))
        return self.identity.incarnation

    def pass_incarnation(self, heard: Incarnation) -> Incarnation:
        """Return a number of this start that is durably larger than one that others have heard of."""
        latest = Incarnation(max(self.identity.incarnation, heard) + 1)
        self._save_all(structs.replace(self.identity, incarnation=latest))
        return latest

    def _save_all(self, identity: NodeIdentity) -> None:
        with self._changing:
            for volume in self.volumes:
                self._save(volume, identity)
            self.identity = identity

    def add(self, volume: Path) -> list[LogStreamId]:
        """Use one more volume from now on, also after a restart. Returns the replicas that lie there already.

        A volume that is in use already is no error.
        """
        if not volume.is_absolute():
            raise InvalidArgument(f"say where volume {volume} is on the machine of the storage node, from / on")
        with self._changing:
            if self._same(volume) is not None:
                return []
            self._check_volume(volume, "first")
            self._lock(volume)
            try:
                self._check_ours(volume)
                found = self._scan(volume)
                identity = structs.replace(self.identity, added=(*self.identity.added, str(volume)))
                # Write the new volume first, before the other volumes say that it belongs to them.
                self._save(volume, identity)
                self._save_all(identity)
            except BaseException:
                self._locks.pop(volume).release()
                raise
            self.volumes = (*self.volumes, volume)
            self.replicas |= found
            return sorted(found)

    def _same(self, volume: Path) -> Path | None:
        """Return the volume in use that is the same directory, under any name."""
        real = self.files.real_path(volume)
        return next((own for own in self.volumes if self.files.real_path(own) == real), None)

    def _check_ours(self, volume: Path) -> None:
        """Raise if the volume to be added holds data of another node."""
        found = self._load(volume)
        if found is None:
            self._check_not_bare(volume)
            return
        if found.node_key != self.identity.node_key:
            raise WrongIdentity(
                f"{self._path(volume)} has another node key than storage node {self._node}, so it is not of the same "
                "node: choose another directory, or move that data away"
            )
        merged(self.identity, found, self._path(volume))
        if found.incarnation > self.identity.incarnation:
            raise Refused(
                f"{self._path(volume)} was used by a later start of storage node {self._node} than this one, so it may "
                "be ahead of the rest: stop the node and start it with all its volumes"
            )

    def take_away(self, volume: Path) -> None:
        """Stop using a volume. Refused while any data lies there."""
        with self._changing:
            own = self._same(volume)
            if own is None:
                known = ", ".join(map(str, self.volumes))
                raise VolumeUnusable(f"{volume} is not a volume of storage node {self._node}: choose one of {known}")
            others = tuple(other for other in self.volumes if other != own)
            if not others:
                raise Refused(f"{own} is the only volume of storage node {self._node}: add another one first")
            self._check_empty(own)
            added = tuple(path for path in self.identity.added if Path(path) != own)
            self._save_all(structs.replace(self.identity, added=added))
            self.volumes = others
            path = self._path(own)
            # Files that are left from here on do no harm.
            with suppress(OSError):
                for name in (*NODE_FILES, "lock", SERVER_KEY_NAME, SPOOL_NAME):
                    self.files.unlink(path / name)
                if self.files.is_dir(path / STAGED_NAME):
                    self.files.remove_dir(path / STAGED_NAME)
                self.files.remove_dir(path)
                self.files.remove_dir(path.parent)
            self._locks.pop(own).release()

    def _check_empty(self, volume: Path) -> None:
        path = self._path(volume)
        with self._at(volume, "read"):
            names = set(self.files.names(path)) - {"lock", *NODE_FILES, SERVER_KEY_NAME, SPOOL_NAME, STAGED_NAME}
            staged = self._staged_on(volume)
        if staged:
            raise Refused(
                f"volume {volume} of storage node {self._node} is in use: {len(staged)} parts are staged there, and "
                "go when their batches are published or expire: try again then"
            )
        replicas = sorted({s for s, at in (*self.replicas.items(), *self._making.items()) if at.parent == path})
        other = sorted(name for name in names if not any(name.startswith(f"lsid={s}") for s in replicas))
        if replicas or other:
            lies = [f"replicas of log streams {', '.join(map(str, replicas))}"] if replicas else []
            lies += [f"{', '.join(other)} (nothing that the node uses)"] if other else []
            raise Refused(
                f"volume {volume} of storage node {self._node} is in use: {path} holds {' and '.join(lies)}. A replica "
                "goes with its topic; or stop the node and start it with other --volumes, and it learns what it lacks "
                "from the other replicas. Move away by hand what the node does not use"
            )

    def _staged_on(self, volume: Path) -> list[str]:
        path = self._path(volume) / STAGED_NAME
        return self.files.names(path) if self.files.is_dir(path) else []

    def _roomiest(self) -> Path:
        """Return the volume with most room for one more replica. Those there share it, since they grow as well."""
        # Copy to lists, because other threads remove replicas.
        parents = [path.parent for path in (*list(self.replicas.values()), *list(self._making.values()))]
        counts = {volume: parents.count(self._path(volume)) for volume in self.volumes}
        room = self._room(self.volumes)
        return max(self.volumes, key=lambda volume: (room[volume] // (counts[volume] + 1), -counts[volume]))

    @contextmanager
    def creating(self, stream: LogStreamId) -> Iterator[Path]:
        """Choose the path for a new replica, on the volume with most room. It is renamed to its final name at the end.

        So a directory with the final name is always complete, and an empty one is never taken for a new replica.
        """
        with self._changing:
            there = self.replicas.get(stream)
            if there is not None:
                raise VolumeConflict(f"log stream {stream} already lies at {there}, so it cannot be created")
            path = self._making[stream] = self._path(self._roomiest()) / f"lsid={stream}"
        try:
            making = path.with_name(path.name + NEW)
            with self._at(path.parent, "read"):
                is_left = making.name in self.files.names(path.parent)
            if is_left:
                # An earlier attempt failed, or its process died. What it left behind may be damaged, and holds nothing.
                self._erase(making)
            yield making
            with self._at(path.parent):
                self.files.rename(making, path)
                # From here on it lies there, even if the name cannot be made durable now.
                self.replicas[stream] = path
                self.unsynced.add(stream)
                self.files.sync_dir(path.parent)
                self.unsynced.discard(stream)
        finally:
            del self._making[stream]

    def sync_name(self, stream: LogStreamId) -> None:
        """Make durable that a replica exists. ``creating`` does this too, but may have failed."""
        parent = self.replicas[stream].parent
        with self._at(parent):
            self.files.sync_dir(parent)
            self.unsynced.discard(stream)

    def set_aside(self, stream: LogStreamId) -> Path:
        """Rename a replica that cannot be opened, so that a copy from a peer can be made. Returns its new path.

        It is kept, since what is left of it may be the only copy.
        """
        path = self.replicas[stream]
        name = f"{path.name}.damaged-{self.identity.incarnation}"
        with self._at(path.parent):
            taken = set(self.files.names(path.parent))
            # A directory that was kept before is never replaced.
            numbered = chain([name], (f"{name}-{again}" for again in count(2)))
            aside = path.with_name(next(free for free in numbered if free not in taken))
            self.files.rename(path, aside)
            # From here on it no longer lies there. If the sync fails, the next replica in its place makes up for it.
            del self.replicas[stream]
            self.unsynced.discard(stream)
            self.files.sync_dir(path.parent)
        return aside

    def remove(self, stream: LogStreamId) -> None:
        """Remove a replica permanently. Once it is renamed it is gone, even if its files are not removed yet."""
        path = self.replicas[stream]
        doomed = path.with_name(path.name + REMOVED)
        with self._at(path.parent):
            self.files.rename(path, doomed)
            # Even if the sync fails, no replica lies there any more.
            del self.replicas[stream]
            self.unsynced.discard(stream)
            try:
                self.files.sync_dir(path.parent)
            finally:
                self._erase(doomed)

    def _erase(self, path: Path) -> None:
        with self._at(path.parent):
            for name in self.files.names(path):
                self.files.unlink(path / name)
            self.files.remove_dir(path)


def _streams(names: Iterable[str]) -> list[LogStreamId]:
    """Return the log streams among these names. Other names in the directory are ignored."""
    numbers = [name.removeprefix("lsid=") for name in names if name.startswith("lsid=")]
    return [LogStreamId(int(number)) for number in numbers if number.isascii() and number.isdecimal()]
