"""The identity of a storage node, as a small file on each of its volumes."""

from __future__ import annotations

from pathlib import Path

from msgspec import UNSET, Struct, UnsetType, structs

from cutwater.errors import WrongIdentity
from cutwater.format.errors import DamagedFile
from cutwater.storage.files import StorageFiles, replace
from cutwater.storage.format import NODE, decode_struct, encode_struct
from cutwater.types import ClusterId, Incarnation, StorageNodeId

FILE_BYTES_MAX = 64 * 1024

NODE_FILES = ("node", "node.copy")
"""Files of the node's identity, which no other server knows, so there are two.

The copy is written first: before a start uses its number, both files have it.
"""

_ADVICE = "restore it from another volume of the node"


class NodeIdentity(Struct, frozen=True):
    """The node that owns the data.

    ``cluster_key`` is None until the node has been added to a cluster. ``added`` lists volumes that were added while
    the node ran and that it was not started with since. ``metadata_keys`` are the public keys of the metadata nodes
    that the node trusts, by number. ``secured``: access control was on when the node last heard of it.
    """

    cluster: ClusterId
    node: StorageNodeId
    node_key: str
    cluster_key: str | None = None
    incarnation: Incarnation = Incarnation(0)
    added: tuple[str, ...] = ()
    metadata_keys: dict[int, str] = {}
    secured: bool | UnsetType = UNSET
    """The field is younger than the format, and not stored if it is not set."""


def load_identity(files: StorageFiles, directory: Path, cluster: ClusterId, node: StorageNodeId) -> NodeIdentity | None:
    """Return the newer of the readable copies, or None if there is no copy. They must be of this node.

    Raises ``DamagedFile`` or ``OSError`` if there are copies and none can be read.
    """
    found: list[NodeIdentity] = []
    damage: DamagedFile | OSError | None = None
    for path in (directory / name for name in NODE_FILES):
        if not files.exists(path):
            continue
        try:
            identity = _load(files, path)
        except (DamagedFile, OSError) as error:
            damage = damage or error
            continue
        if (identity.cluster, identity.node) != (cluster, node):
            raise WrongIdentity(
                f"{path} says storage node {identity.node} of cluster {identity.cluster}, not {node} of {cluster}: the "
                "directory was renamed or copied; give it its old name back"
            )
        found.append(identity)
    if not found and damage is not None:
        raise damage
    return max(found, key=lambda identity: identity.incarnation, default=None)


def _load(files: StorageFiles, path: Path) -> NodeIdentity:
    file = files.open(path)
    data = file.pread(FILE_BYTES_MAX + 1, 0)
    if len(data) > FILE_BYTES_MAX:
        raise DamagedFile(path, f"implausible size: {file.size()} bytes", _ADVICE)
    try:
        return decode_struct(data, NODE, path, NodeIdentity)
    except DamagedFile as error:
        # The usual advice for damaged files, to copy from a peer, does not help here.
        raise DamagedFile(path, error.what, _ADVICE) from error


def save_identity(files: StorageFiles, directory: Path, identity: NodeIdentity) -> None:
    for name in reversed(NODE_FILES):
        replace(files, directory / name, encode_struct(NODE, identity))


def merged(identity: NodeIdentity, other: NodeIdentity, path: Path) -> NodeIdentity:
    """Merge two identities, since a start may have died between two volumes. Later values count; keys never change.

    ``path`` is where the other one lies.
    """
    keys = {key for key in (identity.cluster_key, other.cluster_key) if key is not None}
    if len(keys) > 1:
        raise WrongIdentity(f"{path} belongs to another cluster with the same id: start each node with its own volumes")
    return structs.replace(
        identity,
        cluster_key=keys.pop() if keys else None,
        incarnation=Incarnation(max(identity.incarnation, other.incarnation)),
        metadata_keys=other.metadata_keys | identity.metadata_keys,
        secured=other.secured or identity.secured,
    )
