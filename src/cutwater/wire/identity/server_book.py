"""The public keys of the servers of the cluster, as far as this server knows them.

A proof shows that the peer holds a private key. It is a server of the cluster only if the cluster has noted the public
key under the kind and number that the peer claims. The peer's own claims, its address, its token and its TLS
certificate decide nothing here, since clients have those too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.wire.identity.server_keys import ProvenServer

if TYPE_CHECKING:
    from cutwater.wire.identity.handshake import Peer

N = TypeVar("N", bound=int)


class ServerBook:
    """The keys that one server knows.

    They come from decisions and the store, by way of servers that proved their identity.
    """

    __slots__ = ("_keys", "refused")

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, str]] = {STORAGE_NODE: {}, METADATA_NODE: {}}
        self.refused: Counter[str] = Counter()
        """By method: calls that only servers may make, of peers that have not proved to be the right one."""

    def note(self, kind: str, keys: Mapping[N, str], *, is_all: bool = False) -> None:
        """Note the keys of these servers, by number. ``is_all``: there are no other servers of this kind."""
        told = {str(int(number)): key for number, key in keys.items() if key}
        self._keys[kind] = told if is_all else {**self._keys[kind], **told}

    def keys(self, kind: str) -> dict[int, str]:
        return {int(name): key for name, key in self._keys[kind].items()}

    def is_known(self, server: ProvenServer) -> bool:
        """Return whether the key is noted as the key of exactly this server."""
        return self._keys.get(server.kind, {}).get(server.name) == server.key

    def knows(self, peer: Peer) -> bool:
        """Return whether the peer has proved to be a server of the cluster."""
        return peer.server is not None and self.is_known(peer.server)

    def has(self, kind: str, name: str) -> bool:
        """Return whether any key is noted for this server."""
        return name in self._keys.get(kind, {})
