"""Key pairs of servers, and what a server signs to prove which one it is (ADR 0036).

A server has an Ed25519 key pair. The private key is made once, stays in a file that only its owner can read, and never
travels. In a handshake each server signs what both sides have sent. That includes a nonce of the other side, so a
recorded proof is of no use later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from cutwater.errors import InvalidArgument, WrongIdentity
from cutwater.runtime import system
from cutwater.runtime.local_files import read_secret, write_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NONCE_BYTES = 32
KEY_BYTES = 32
SIGNATURE_BYTES = 64
_END_OF_PRIVATE = b"-----END PRIVATE KEY-----"
_WHAT = "the private key of this server"
_REPLACE = (
    "remove it, and the server gets a new one: an embedded log makes that known by itself, for a server of a cluster "
    "see docs/operating.md, 'Servers prove which ones they are'"
)
_WAY_OUT = (
    "restore the file from a backup; if the server has the same file on another volume, remove this one, and the next "
    "start writes it again; otherwise see docs/operating.md, 'Servers prove which ones they are'"
)

CONTEXT = b"cutwater server proof 1"


class ProvenServer(Struct, frozen=True):
    """A server that has proved to hold the private key of ``key``, which is in hexadecimal digits.

    ``server_book`` says whether the cluster knows that key as the key of this server.
    """

    kind: str
    name: str
    key: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class ServerKey:
    """The key pair of a server. ``public`` is the public key, in hexadecimal digits."""

    __slots__ = ("_private", "public")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: str = private.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"<ServerKey {self.public[:16]}>"

    @classmethod
    def generate(cls) -> ServerKey:
        # The library takes 50 ms to load, and clients never need it.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        return cls(Ed25519PrivateKey.from_private_bytes(system.token_bytes(KEY_BYTES)))

    @classmethod
    def from_pem(cls, data: bytes, path: Path) -> ServerKey:
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

        # Older files contain the private key only, and end here.
        block, end, rest = data.partition(_END_OF_PRIVATE)
        try:
            private = load_pem_private_key(block + end, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
            raise InvalidArgument(
                f"{path} is not the private key of a server, an Ed25519 key in PEM form, or is damaged: {_WAY_OUT}: "
                f"{error}"
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidArgument(f"{path} holds a private key of another kind than Ed25519, or is damaged: {_WAY_OUT}")
        key = cls(private)
        if rest.strip() and rest.split() != key._public_pem().split():
            raise InvalidArgument(
                f"{path}, the private key of this server, is damaged: the public key in the file does not belong to "
                f"the private key before it: {_WAY_OUT}"
            )
        return key

    def to_pem(self) -> bytes:
        """Return the private key, followed by the public key.

        Nearly every change of a private key gives another valid one. Only the public key shows that it is not the same.
        """
        from cryptography.hazmat.primitives import serialization as s  # noqa: PLC0415

        private = self._private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        return private + self._public_pem()

    def _public_pem(self) -> bytes:
        from cryptography.hazmat.primitives import serialization as s  # noqa: PLC0415

        return self._private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)

    def sign(self, statement: bytes) -> bytes:
        return self._private.sign(statement)


def is_signed(key: bytes, signature: bytes, statement: bytes) -> bool:
    """Return whether the owner of this public key has signed the statement."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def acceptor_statement(hello: bytes, said: tuple[int | str | bytes, ...]) -> bytes:
    """Return what the accepting side signs.

    This is the received HELLO, and the version, cluster, role, name, nonce and key of its own WELCOME.
    """
    return b"\0".join((CONTEXT, b"acceptor", _digest(hello) + _digest(msgspec.msgpack.encode(said))))


def connector_statement(hello: bytes, welcome: bytes) -> bytes:
    """Return what the connecting side signs: its own HELLO, and the received WELCOME."""
    return b"\0".join((CONTEXT, b"connector", _digest(hello) + _digest(welcome)))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def load_or_make(paths: Iterable[Path]) -> ServerKey:
    """Load the private key from these files, which must all hold the same one.

    Missing files are written. If all are missing, a new key is made.
    """
    paths = tuple(paths)
    found = {path: data for path in paths if (data := read_secret(path, _WHAT, _REPLACE)) is not None}
    keys = {path: ServerKey.from_pem(data, path) for path, data in found.items()}
    if len({key.public for key in keys.values()}) > 1:
        raise WrongIdentity(
            f"{' and '.join(map(str, keys))} hold different private keys, so they are not of one server, or one is "
            "damaged: start each server with its own files"
        )
    key = next(iter(keys.values())) if keys else ServerKey.generate()
    for path in paths:
        if path not in found:
            _write(path, key.to_pem())
    return key


def _write(path: Path, data: bytes) -> None:
    """Write the file durably. A crash leaves the whole file or none."""
    try:
        write_secret(path, data, is_lasting=True)
    except OSError as error:
        raise InvalidArgument(
            f"the private key of this server cannot be kept in {path}: {error.strerror or error}; name a place that "
            "may be written"
        ) from error
