"""Which public keys belong to the servers of the cluster, as far as this server knows.

A proof shows that the peer holds a private key. It is a server of the cluster only if the cluster has noted the public
key under the kind and number that the peer claims. What the peer says of itself, its address, its token and its TLS
certificate decide nothing here: clients have those, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.wire.identity.server_keys import ProvenServer

if TYPE_CHECKING:
    from cutwater.wire.identity.handshake import Peer

N = TypeVar("N", bound=int)


class ServerBook:
    """Of one server. Filled with what decisions and the store say, by way of servers that have proved themselves."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, str]] = {STORAGE_NODE: {}, METADATA_NODE: {}}

    def note(self, kind: str, keys: Mapping[N, str], *, is_all: bool = False) -> None:
        """The keys of these servers, by number. ``is_all``: there are no others of this kind."""
        told = {str(int(number)): key for number, key in keys.items() if key}
        self._keys[kind] = told if is_all else {**self._keys[kind], **told}

    def keys(self, kind: str) -> dict[int, str]:
        return {int(name): key for name, key in self._keys[kind].items()}

    def is_known(self, server: ProvenServer) -> bool:
        """Whether the key is noted as the key of this very server."""
        return self._keys.get(server.kind, {}).get(server.name) == server.key

    def knows(self, peer: Peer) -> bool:
        """Whether the peer has proved to be a server of the cluster."""
        return peer.server is not None and self.is_known(peer.server)

    def has(self, kind: str, name: str) -> bool:
        """Whether any key is noted for this server."""
        return name in self._keys.get(kind, {})
