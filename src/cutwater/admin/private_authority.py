"""The private authorities of a cluster, kept as files: made, read back and checked, rotated, and used to issue.

A directory (0700) holds, for ``servers`` and for ``clients``::

    servers-ca.pem   certificates of the authority, the new and the old one during a rotation
    servers-ca.key   the private key that issues now (0600)

Files are written whole or not at all, and are durable on return. Nothing is overwritten unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from msgspec import Struct

from cutwater.admin.certificate_builder import (
    AUTHORITY_DAYS,
    Authority,
    AuthorityKind,
    IssuedCertificate,
    build_authority,
    certificates_pem,
    key_pem,
    kind_of,
)
from cutwater.errors import InvalidArgument
from cutwater.runtime import system
from cutwater.runtime.local_files import make_directory, read_secret, write_secret
from cutwater.runtime.permissions import FILE_MODE
from cutwater.wire.identity.certificate_files import read_certificates


class CertificatePaths(Struct, frozen=True):
    """A certificate and its private key on disk."""

    certificate: Path
    key: Path


def authority_paths(directory: Path, kind: AuthorityKind) -> CertificatePaths:
    return CertificatePaths(directory / f"{kind}-ca.pem", directory / f"{kind}-ca.key")


def now() -> datetime:
    return datetime.fromtimestamp(system.wall_time_ns() // 1_000_000_000, UTC)


def make_authorities(directory: Path, *, days: int = AUTHORITY_DAYS) -> None:
    """Make the servers' and the clients' authority. Raises if the directory has a file of one already."""
    places = {kind: authority_paths(directory, kind) for kind in AuthorityKind}
    _refuse_existing([path for place in places.values() for path in (place.certificate, place.key)])
    make_directory(directory)
    for kind, place in places.items():
        made = build_authority(kind, now=now(), days=days)
        _write(place, [made.certificate], made.key)


def load_authority(directory: Path, kind: AuthorityKind) -> Authority:
    """Read an authority back: the certificate that belongs to its private key. Raises if they do not fit."""
    place = authority_paths(directory, kind)
    data = read_secret(place.key, f"the private key of the {kind} authority", "make a new authority")
    if data is None:
        raise InvalidArgument(f"{place.key}, the private key of the {kind} authority, does not exist")
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{place.key} is no private key in PEM form, or is damaged: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgument(f"{place.key} is a private key of another kind than ECDSA: it was not made here")
    for certificate in read_certificates(place.certificate):
        if certificate.public_key() == key.public_key():
            if kind_of(certificate) is not kind:
                raise InvalidArgument(f"{place.certificate} is not the certificate of a {kind} authority made here")
            return Authority(kind, certificate, key)
    raise InvalidArgument(f"{place.certificate} has no certificate for the private key {place.key}: restore both")


def write_issued(place: CertificatePaths, issued: IssuedCertificate, *, replace: bool = False) -> None:
    """Write a certificate and its key. ``replace``: they take the place of earlier ones.

    A server that runs may find the new key with the old certificate for a moment. It keeps what it has and looks again.
    """
    if not replace:
        _refuse_existing([place.certificate, place.key])
    make_directory(place.certificate.parent)
    write_secret(place.key, issued.key, is_lasting=True)
    _write_public(place.certificate, issued.certificate)


def is_rotating(directory: Path, kind: AuthorityKind) -> bool:
    """Return whether a new authority issues, and the old one is still trusted."""
    found = read_certificates(authority_paths(directory, kind).certificate)
    # If the beginning was interrupted, the old one still issues, and nothing was issued by the new one.
    return len(found) > 1 and load_authority(directory, kind).certificate == found[0]


def begin_rotation(directory: Path, kind: AuthorityKind, *, days: int = AUTHORITY_DAYS) -> Authority:
    """Make a new authority, which issues from now on. The old one is trusted until the rotation ends."""
    place = authority_paths(directory, kind)
    old = load_authority(directory, kind)
    if is_rotating(directory, kind):
        raise InvalidArgument(
            f"{place.certificate} holds the old authority, too, so a rotation is under way: end it first, when all "
            f"{kind} have new certificates"
        )
    made = build_authority(kind, now=now(), days=days)
    # In this order, a crash leaves an authority that works: the old key has its certificate in the file.
    _write_public(place.certificate, certificates_pem([made.certificate, old.certificate]))
    write_secret(place.key, key_pem(made.key), is_lasting=True)
    return made


def end_rotation(directory: Path, kind: AuthorityKind) -> None:
    """Trust only the authority that issues now. Certificates of the old one are refused from then on."""
    place = authority_paths(directory, kind)
    _write_public(place.certificate, certificates_pem([load_authority(directory, kind).certificate]))


def _write(place: CertificatePaths, certificates: Sequence[x509.Certificate], key: ec.EllipticCurvePrivateKey) -> None:
    write_secret(place.key, key_pem(key), is_lasting=True)
    _write_public(place.certificate, certificates_pem(certificates))


def _write_public(path: Path, data: bytes) -> None:
    write_secret(path, data, is_lasting=True)
    path.chmod(FILE_MODE)


def _refuse_existing(paths: Sequence[Path]) -> None:
    found = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if found:
        raise InvalidArgument(
            f"{' and '.join(found)} would be overwritten: choose another directory, or remove what is not needed"
        )
