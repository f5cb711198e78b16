"""A private authority: what it issues, what it refuses, and how it is kept on disk."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from cutwater.admin import private_authority as p
from cutwater.admin.certificate_builder import Authority, AuthorityKind, build_authority, issue_client, issue_server
from cutwater.errors import InvalidArgument
from cutwater.wire.identity.certificate_files import TlsFiles, read_certificates
from cutwater.wire.identity.tls import client_tls, load_tls
from tests.certificate_kit import CertificateKit, handshake, storage

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SERVERS, CLIENTS = AuthorityKind.SERVERS, AuthorityKind.CLIENTS


def leaf(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_lifetimes() -> None:
    authority = build_authority(SERVERS, now=NOW)
    assert authority.certificate.not_valid_after_utc == NOW + timedelta(days=3_650)
    assert authority.certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    later = NOW + timedelta(days=100)
    found = leaf(issue_server(authority, storage(1), ["a.example"], now=later).certificate)
    assert found.not_valid_after_utc == later + timedelta(days=365)
    # No certificate outlives its authority.
    at_the_end = NOW + timedelta(days=3_600)
    found = leaf(issue_server(authority, storage(1), ["a.example"], now=at_the_end).certificate)
    assert found.not_valid_after_utc == authority.certificate.not_valid_after_utc
    with pytest.raises(InvalidArgument, match="has expired"):
        issue_server(authority, storage(1), ["a.example"], now=NOW + timedelta(days=3_650))
    with pytest.raises(InvalidArgument, match="1 day or more"):
        issue_server(authority, storage(1), ["a.example"], now=NOW, days=0)


def test_what_is_in_a_certificate_of_a_server() -> None:
    authority = build_authority(SERVERS, now=NOW)
    found = leaf(issue_server(authority, storage(2), ["db.example", "10.0.0.1", "::1"], now=NOW).certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["cutwater://1/sn/2"]
    assert names.get_values_for_type(x509.DNSName) == ["db.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    found.verify_directly_issued_by(authority.certificate)


def test_a_client_cannot_serve() -> None:
    found = leaf(issue_client(build_authority(CLIENTS, now=NOW), "billing", now=NOW).certificate)
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_serials_and_names_of_authorities_are_random() -> None:
    made = [build_authority(SERVERS, now=NOW).certificate for _ in range(3)]
    assert len({found.serial_number for found in made}) == 3
    assert len({found.subject for found in made}) == 3


@pytest.mark.parametrize("principal", ["", " a", "a\n", "a\0b", "x" * 65])
def test_a_principal_that_cannot_be_shown_is_refused(principal: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be the name of a client"):
        issue_client(build_authority(CLIENTS, now=NOW), principal, now=NOW)


@pytest.mark.parametrize("uri", ["cutwater://1/sn/1", "CUTWATER://1/sn/1"])
def test_a_client_gets_no_name_of_a_server(uri: str) -> None:
    with pytest.raises(InvalidArgument, match="names of servers"):
        issue_client(build_authority(CLIENTS, now=NOW), "billing", now=NOW, uris=[uri])


@pytest.mark.parametrize("hosts", [[], [""], ["db.example:7001"], ["*.example"], ["http://x"], ["d\u00fc.example"]])
def test_hosts_that_are_none(hosts: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        issue_server(build_authority(SERVERS, now=NOW), storage(1), hosts, now=NOW)


def test_each_authority_issues_its_own_kind_only() -> None:
    with pytest.raises(InvalidArgument, match="clients authority issues no certificates of servers"):
        issue_server(build_authority(CLIENTS, now=NOW), storage(1), ["a"], now=NOW)
    with pytest.raises(InvalidArgument, match="servers authority issues no certificates of clients"):
        issue_client(build_authority(SERVERS, now=NOW), "billing", now=NOW)


def test_no_key_is_in_a_repr() -> None:
    authority = build_authority(CLIENTS, now=NOW)
    issued = issue_client(authority, "billing", now=NOW)
    secret = issued.key.decode().splitlines()[1]
    assert secret not in repr(issued)
    assert "EllipticCurve" not in repr(authority)


# ---------------------------------------------------------------------------------------------------- files


def test_files_and_their_modes(tmp_path: Path) -> None:
    directory = tmp_path / "authorities"
    p.make_authorities(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == {
        "servers-ca.pem": 0o640,
        "servers-ca.key": 0o600,
        "clients-ca.pem": 0o640,
        "clients-ca.key": 0o600,
    }
    kit_files = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(InvalidArgument, match="would be overwritten"):
        p.make_authorities(directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == kit_files
    issued = issue_server(p.load_authority(directory, SERVERS), storage(1), ["a.example"], now=p.now())
    place = p.CertificatePaths(tmp_path / "node" / "1.pem", tmp_path / "node" / "1.key")
    p.write_issued(place, issued)
    assert place.key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidArgument, match="would be overwritten"):
        p.write_issued(place, issued)
    place.certificate.unlink()
    with pytest.raises(InvalidArgument, match=r"1\.key would be overwritten"):
        p.write_issued(place, issued)
    p.write_issued(place, issued, replace=True)
    assert place.certificate.read_bytes() == issued.certificate


def swap(directory: Path) -> None:
    """The clients' authority in the place of the servers'."""
    for ending in ("pem", "key"):
        (directory / f"servers-ca.{ending}").write_bytes((directory / f"clients-ca.{ending}").read_bytes())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: (d / "servers-ca.key").chmod(0o644), "can be used by other users"),
        (lambda d: (d / "servers-ca.key").unlink(), "does not exist"),
        (lambda d: (d / "servers-ca.key").write_bytes(b"x"), "is no private key"),
        (lambda d: (d / "servers-ca.pem").write_bytes(b"x"), "certificates in PEM form are wanted"),
        (lambda d: (d / "servers-ca.pem").write_bytes((d / "clients-ca.pem").read_bytes()), "has no certificate for"),
        (swap, "is not the certificate of a servers authority"),
    ],
)
def test_what_is_read_back_is_checked(tmp_path: Path, damage: object, told: str) -> None:
    p.make_authorities(tmp_path / "a")
    assert isinstance(p.load_authority(tmp_path / "a", SERVERS), Authority)
    assert callable(damage)
    damage(tmp_path / "a")
    with pytest.raises(InvalidArgument, match=told):
        p.load_authority(tmp_path / "a", SERVERS)


def test_rotation_of_an_authority(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "a")
    old = kit.server(storage(1), "old")
    p.begin_rotation(kit.directory, SERVERS)
    new = kit.server(storage(1), "new")
    bundle = kit.bundle(SERVERS)
    assert len(read_certificates(bundle)) == 2
    with pytest.raises(InvalidArgument, match="a rotation is under way"):
        p.begin_rotation(kit.directory, SERVERS)
    for files in (old, new):
        handshake(load_tls(files).server, client_tls(bundle), "127.0.0.1")
    p.end_rotation(kit.directory, SERVERS)
    handshake(load_tls(new).server, client_tls(bundle), "127.0.0.1")
    with pytest.raises(InvalidArgument, match="was not issued by an authority in"):
        load_tls(old)


def test_a_crash_in_the_middle_of_a_rotation_leaves_the_old_authority(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "a")
    before = kit.authority(SERVERS)
    key = (kit.directory / "servers-ca.key").read_bytes()
    p.begin_rotation(kit.directory, SERVERS)
    (kit.directory / "servers-ca.key").write_bytes(key)
    assert kit.authority(SERVERS).certificate == before.certificate
    handshake(load_tls(kit.server(storage(1))).server, client_tls(kit.bundle(SERVERS)), "127.0.0.1")
    p.end_rotation(kit.directory, SERVERS)
    assert read_certificates(kit.bundle(SERVERS)) == [before.certificate]


def test_a_client_trusts_the_servers_authority_only(tmp_path: Path) -> None:
    kit = CertificateKit(tmp_path / "a")
    server = load_tls(kit.server(storage(1))).server
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_tls(kit.bundle(CLIENTS)), "127.0.0.1")


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "issue_server" in block)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    home = Path("authorities")
    files = TlsFiles(Path("node2.pem"), Path("node2.key"), home / "servers-ca.pem", home / "clients-ca.pem")
    tls = load_tls(files)
    tls.certificates.claim(storage(2))
    client = client_tls(home / "servers-ca.pem", Path("billing.pem"), Path("billing.key"))
    handshake(tls.server, client, "10.0.0.2")
    handshake(tls.server, client, "db2.example")
