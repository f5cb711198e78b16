"""Opens the store that an address names: ``sqlite:PATH``, ``etcd://HOST:PORT,HOST:PORT/PREFIX`` or ``memory:``."""

from __future__ import annotations

from pathlib import Path

from cutwater.errors import InvalidArgument
from cutwater.metadata.etcd.address import parse_address
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.metadata.stores.store_interface import TIMEOUT_MS, MetadataStore
from cutwater.runtime.redaction import without_secrets
from cutwater.types import ClusterId

FORMS = "sqlite:PATH, etcd://HOST:PORT,HOST:PORT/PREFIX or memory:"


def sqlite_key_file(path: Path) -> Path:
    """Return the path of the private key of the metadata node that uses this database."""
    return path.with_name(f"{path.name}.key")


async def open_store(
    url: str, *, cluster: ClusterId, timeout_ms: int = TIMEOUT_MS, may_wait: bool = False
) -> MetadataStore:
    """Open the store of the cluster. A database is opened, or created if it does not exist; etcd is contacted at the
    first call. ``may_wait``: the event loop may wait for the disk, because nothing else on it has deadlines to miss."""
    scheme, colon, rest = url.partition(":")
    match scheme:
        case "memory" if colon and not rest:
            return MemoryStore()
        case "sqlite" if rest:
            return await SqliteStore.open(Path(rest), cluster, timeout_ms=timeout_ms, may_wait=may_wait)
        case "etcd" if colon:
            return _open_etcd(url, cluster)
    raise InvalidArgument(f"{without_secrets(url)!r} names no metadata store: write {FORMS}")


def _open_etcd(url: str, cluster: ClusterId) -> MetadataStore:
    address = parse_address(url)
    try:
        # Only users of etcd need its packages.
        from cutwater.metadata.stores.etcd_store import EtcdStore  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"{url!r} needs the package {error.name}, which is not installed: pip install 'cutwater[etcd]'"
        ) from error
    return EtcdStore(address, cluster)
