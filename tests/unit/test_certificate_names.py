"""Names of certificates, hostile ones among them: what a peer shows over TLS is what the functions return."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from cutwater.admin.certificate_builder import AuthorityKind, IssuedCertificate
from cutwater.protocol.errors import Unauthenticated
from cutwater.wire.identity.certificate_names import PeerCertificateNames, certificate_names, check_plain, shown
from cutwater.wire.identity.tls import client_tls, load_tls
from tests.certificate_kit import ADDRESS, DNS, EMAIL, URI, CertificateKit, common, handshake, hostile, storage, tlv


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertificateKit:
    return CertificateKit(tmp_path_factory.mktemp("pki") / "authorities")


def shows(kit: CertificateKit, issued: IssuedCertificate) -> dict[str, Any]:
    """What a server gets to see of a client's certificate."""
    place = kit.write("hostile", issued)
    server = load_tls(kit.server(storage(1))).server
    client = client_tls(kit.bundle(AuthorityKind.SERVERS), place.certificate, place.key)
    return dict(handshake(server, client, "127.0.0.1")[0].getpeercert() or {})


def test_names_are_in_order_and_of_their_kind(kit: CertificateKit) -> None:
    names = (
        *(tlv(URI, b"spiffe://b"), tlv(DNS, b"b.example"), tlv(EMAIL, b"B@example.org")),
        *(tlv(URI, b"spiffe://a"), tlv(DNS, b"a.example"), tlv(ADDRESS, bytes(4)), tlv(DNS, b"a.example")),
    )
    found = certificate_names(
        shows(kit, hostile(kit.authority(AuthorityKind.CLIENTS), common("billing"), b"".join(names)))
    )
    assert found == PeerCertificateNames(
        ("billing",), ("b.example", "a.example", "a.example"), ("B@example.org",), ("spiffe://b", "spiffe://a")
    )
    assert found.only_common() == "billing"


@pytest.mark.parametrize(
    "subject",
    [
        ("billing", "admin"),
        (),
        ("billing\0.example",),
        ("admin\u202e",),
        (" admin",),
        ("admin\n",),
        ("",),
    ],
)
def test_what_is_no_plain_single_name_is_refused(kit: CertificateKit, subject: tuple[str, ...]) -> None:
    if subject == ("",):
        found = PeerCertificateNames(subject)
    else:
        names = common(*subject) if subject else x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "x")])
        found = certificate_names(shows(kit, hostile(kit.authority(AuthorityKind.CLIENTS), names, None)))
    assert found.common == subject, "the name comes out as it went in"
    with pytest.raises(Unauthenticated):
        found.only_common()


def test_names_that_look_alike_differ(kit: CertificateKit) -> None:
    authority = kit.authority(AuthorityKind.CLIENTS)
    alike = ["admin", "\u0430dmin", "ADMIN", "\uff41dmin", "caf\u00e9", "cafe\u0301"]
    found = [certificate_names(shows(kit, hostile(authority, common(name), None))).only_common() for name in alike]
    assert found == alike
    assert len({shown(name) for name in found}) == len(alike)
    assert all(shown(name).isascii() for name in found)


def test_zero_bytes_in_alternative_names_stay(kit: CertificateKit) -> None:
    names = tlv(DNS, b"admin.example\0.evil.example") + tlv(URI, b"cutwater://1/sn/1\0")
    found = certificate_names(shows(kit, hostile(kit.authority(AuthorityKind.CLIENTS), common("x"), names)))
    assert found.dns == ("admin.example\0.evil.example",)
    assert found.uris == ("cutwater://1/sn/1\0",)
    with pytest.raises(Unauthenticated, match="cannot be printed"):
        check_plain(found.dns[0])


def test_names_that_are_no_text_are_refused_by_tls(kit: CertificateKit) -> None:
    issued = hostile(kit.authority(AuthorityKind.CLIENTS), common("x"), tlv(DNS, b"\xff\xfe"))
    with pytest.raises(UnicodeDecodeError):
        shows(kit, issued)


@pytest.mark.parametrize("name", ["x" * 257, ""])
def test_length_of_a_name(name: str) -> None:
    with pytest.raises(Unauthenticated, match="1 to 256 are allowed"):
        check_plain(name)
    assert check_plain("x" * 256)


def test_no_certificate_has_no_names() -> None:
    assert certificate_names({}) == PeerCertificateNames()
