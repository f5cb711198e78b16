"""The small files of a replica: manifest, hard state and deduplication checkpoint.

Each is replaced as a whole, and its content stays in memory, so a damaged one can be written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.errors import WrongIdentity
from cutwater.format.errors import DamagedFile
from cutwater.storage.files import TEMPORARY, StorageFiles, replace
from cutwater.storage.format import DEDUP, HARD_STATE, MANIFEST, ReplicaManifest, decode_struct, encode_struct
from cutwater.storage.replica import commits, segment_log
from cutwater.storage.replica.segment_log import parse_name
from cutwater.storage.results import StorageFinding
from cutwater.types import LLSN, ClusterId, LogStreamId, StorageNodeId

FILE_BYTES_MAX = 1 << 30
MAGICS = {"manifest": MANIFEST, "state": HARD_STATE, "dedup": DEDUP}

T = TypeVar("T")


class ReplicaIdentity(Struct, frozen=True):
    cluster: ClusterId
    node: StorageNodeId
    stream: LogStreamId


class SmallFiles:
    """Call ``load_manifest`` or ``begin`` first, and then ``load_state``."""

    def __init__(self, files: StorageFiles, directory: Path, identity: ReplicaIdentity) -> None:
        self._files, self._directory, self._identity = files, directory, identity
        self.manifest: ReplicaManifest
        self.hard_state: HardState | None = None
        self.dedup: DedupCheckpoint | None = None
        self.lost: list[str] = []
        """Describes the files that could not be read when they were loaded."""

    # Opening.

    def is_new(self, names: Sequence[str]) -> bool:
        """Return whether the directory holds nothing, or only what a crash left of a beginning."""
        return not _known(names)

    def begin(self) -> None:
        """Begin an empty replica, whose first segment exists."""
        identity = self._identity
        self._save_manifest(ReplicaManifest(identity.cluster, identity.node, identity.stream, 1, LLSN(1)))

    def load_manifest(self, names: Sequence[str]) -> None:
        """Load the manifest. If it is missing or damaged, rebuild it from the names of the files in the directory."""
        if "manifest" not in names:
            missing = f"it is missing, next to {', '.join(_known(names)[:3])}"
            self._rebuild_manifest(names, DamagedFile(self._directory / "manifest", missing))
            return
        try:
            self.manifest = self._read("manifest", ReplicaManifest)
        except DamagedFile as error:
            self._rebuild_manifest(names, error)
        self._check_identity()

    def _rebuild_manifest(self, names: Sequence[str], error: DamagedFile) -> None:
        """Rebuild the manifest from the names of the other files.

        They say which generation there is, if there is only one, and where it begins. They do not say which entries of
        the first file are trimmed, but the hard state does.
        """
        entries = [one for one in (parse_name(name, segment_log.SUFFIX) for name in names) if one is not None]
        committed = [one for one in (parse_name(name, commits.SUFFIX) for name in names) if one is not None]
        generations = {generation for generation, _ in (*entries, *committed)}
        if not entries or len(generations) != 1:
            raise error
        first = min(llsn for _, llsn in entries)
        if committed:
            first = max(first, min(llsn for _, llsn in committed))
        identity = self._identity
        self._save_manifest(
            ReplicaManifest(identity.cluster, identity.node, identity.stream, generations.pop(), first, bool(committed))
        )

    def _check_identity(self) -> None:
        manifest, expected = self.manifest, self._identity
        found = (manifest.cluster, manifest.node, manifest.stream)
        if found != (expected.cluster, expected.node, expected.stream):
            raise WrongIdentity(
                f"{self._directory} holds log stream {found[2]} of storage node {found[1]} in cluster {found[0]}, not "
                f"log stream {expected.stream} of storage node {expected.node} in cluster {expected.cluster}: "
                "move the data back to where it was"
            )

    def load_state(self, names: Sequence[str]) -> None:
        self.hard_state = self._load("state", HardState, names)
        self.dedup = self._load("dedup", DedupCheckpoint, names)

    def _load(self, name: str, kind: type[T], names: Sequence[str]) -> T | None:
        """Return the content of a file, or None if it is missing or damaged. Damage is noted in ``lost``."""
        if name not in names:
            return None
        try:
            return self._read(name, kind)
        except DamagedFile as error:
            if name == "dedup" and self.manifest.first_llsn == 1:
                # Nothing was trimmed, so the headers of the entries contain the same.
                self._files.unlink(self._directory / name)
            else:
                self.lost.append(f"{error.path} is damaged ({error.what})")
            return None

    def _read(self, name: str, kind: type[T]) -> T:
        path = self._directory / name
        file = self._files.open(path)
        size = file.size()
        if size > FILE_BYTES_MAX:
            raise DamagedFile(path, f"implausible size: {size} bytes")
        return decode_struct(file.pread(size, 0), MAGICS[name], path, kind)

    # Saving. Everything is durable on return.

    def change_manifest(self, **changes: Any) -> None:
        self._save_manifest(structs.replace(self.manifest, **changes))

    def _save_manifest(self, manifest: ReplicaManifest) -> None:
        self._save("manifest", manifest)
        self.manifest = manifest

    def save_hard_state(self, hard_state: HardState) -> None:
        self._save("state", hard_state)
        self.hard_state = hard_state

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None:
        self._save("dedup", checkpoint)
        self.dedup = checkpoint

    def _save(self, name: str, content: Struct) -> None:
        replace(self._files, self._directory / name, encode_struct(MAGICS[name], content))

    # Damage.

    def findings(self) -> list[StorageFinding]:
        """Return the files that cannot be read any more."""
        return [finding for _, _, finding in self._damaged()]

    def repair(self) -> int:
        """Write damaged files again. Returns their number."""
        damaged = list(self._damaged())
        for name, content, _ in damaged:
            self._save(name, content)
        return len(damaged)

    def _damaged(self) -> Iterator[tuple[str, Struct, StorageFinding]]:
        contents = {"manifest": self.manifest, "state": self.hard_state, "dedup": self.dedup}
        for name, content in contents.items():
            if content is None:
                continue
            path = self._directory / name
            try:
                self._read(name, type(content))
            except DamagedFile as error:
                yield name, content, StorageFinding(str(path), error.what)
            except OSError as error:
                yield name, content, StorageFinding(str(path), str(error))


def _known(names: Sequence[str]) -> list[str]:
    begun = segment_log.file_name(1, LLSN(1), segment_log.SUFFIX)
    return [name for name in names if not name.endswith(TEMPORARY) and name != begun]
