"""The names in a verified certificate, exactly as they are written there. Pure.

Names are compared as they are: no case, no Unicode form and no wildcard makes two of them equal. The layer above
decides which name is a principal. A name that it uses must be plain (``check_plain``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from cutwater.protocol.errors import Unauthenticated

NAME_CHARS_MAX = 256


class PeerCertificateNames(Struct, frozen=True):
    """All names of a certificate, in their order. Names of other kinds, such as addresses, are left out."""

    common: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()

    def only_common(self) -> str:
        """Return the one common name. Raises if there is none, several, or one that is not plain.

        With several, two programs could take different ones for the name.
        """
        if len(self.common) != 1:
            found = "no common name" if not self.common else f"{len(self.common)} common names"
            raise Unauthenticated(f"the certificate has {found}: exactly one is wanted; get another certificate")
        return check_plain(self.common[0])


def certificate_names(certificate: Mapping[str, Any]) -> PeerCertificateNames:
    """Return the names of a certificate that has the form of ``ssl.SSLSocket.getpeercert``."""
    common = tuple(
        str(value) for group in certificate.get("subject", ()) for key, value in group if key == "commonName"
    )
    others = certificate.get("subjectAltName", ())
    return PeerCertificateNames(common, _of("DNS", others), _of("email", others), _of("URI", others))


def _of(kind: str, names: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    return tuple(str(value) for found, value in names if found == kind)


def check_plain(name: str) -> str:
    """Return the name. Raises if it is empty, too long, has spaces at an end, or characters that cannot be printed.

    A zero byte, a line end or a character that changes the direction of text could make it look like another name.
    """
    if not name or len(name) > NAME_CHARS_MAX:
        raise Unauthenticated(
            f"a name in the certificate has {len(name)} characters: 1 to {NAME_CHARS_MAX} are allowed; get another "
            "certificate"
        )
    if name != name.strip() or not name.isprintable():
        raise Unauthenticated(
            f"the name {shown(name)} in the certificate has spaces at an end, or characters that cannot be printed: "
            "get another certificate"
        )
    return name


def shown(name: str) -> str:
    """Return the name for messages and logs, in quotes. Characters beyond ASCII are escaped, so that names that look
    alike differ."""
    return ascii(name[: NAME_CHARS_MAX + 1])
