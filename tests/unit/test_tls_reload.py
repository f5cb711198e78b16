"""Certificates that change while they are in use: new files are taken, bad ones are not, and the end is seen coming."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from cutwater.admin.certificate_builder import AuthorityKind, issue_server
from cutwater.admin.private_authority import begin_rotation, end_rotation, now
from cutwater.errors import InvalidArgument
from cutwater.wire.identity import tls_watch
from cutwater.wire.identity.certificate_files import CertificateExpiry, ExpiryReports, TlsFiles, check_valid_now
from cutwater.wire.identity.tls import client_tls, load_tls
from cutwater.wire.identity.tls_reload import WatchedFiles
from cutwater.wire.identity.tls_watch import watching
from cutwater.wire.listen.certificate_metrics import certificate_metrics
from tests.certificate_kit import HOSTS, CertificateKit, handshake, metadata, storage

DAY = 86_400.0
SERVERS, CLIENTS = AuthorityKind.SERVERS, AuthorityKind.CLIENTS


@pytest.fixture
def kit(tmp_path: Path) -> CertificateKit:
    return CertificateKit(tmp_path / "authorities")


def serial(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The serial number of the certificate that the server shows."""
    found = handshake(server, client, "127.0.0.1")[1].getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_new_connections_get_the_new_certificate(kit: CertificateKit) -> None:
    tls = load_tls(kit.server(storage(1)))
    client = client_tls(kit.bundle(SERVERS))
    before = serial(tls.server, client)
    tls.certificates.look()
    assert serial(tls.server, client) == before, "nothing has changed"
    kit.server(storage(1))
    assert serial(tls.server, client) == before, "nothing has looked yet"
    tls.certificates.look()
    assert serial(tls.server, client) != before


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(kit: CertificateKit) -> None:
    files = kit.server(storage(1))
    tls = load_tls(files)
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"passphrase"))
    )
    with pytest.raises(InvalidArgument, match="encrypted with a passphrase"):
        load_tls(files)
    tls.certificates.look()
    assert "encrypted with a passphrase" in tls.certificates.trouble


def test_a_client_reads_its_files_again_at_each_connection(kit: CertificateKit) -> None:
    server = load_tls(kit.server(storage(1))).server
    place = kit.client("billing")
    client = client_tls(kit.bundle(SERVERS), place.certificate, place.key)

    def seen() -> str:
        found = handshake(server, client, "127.0.0.1")[0].getpeercert()
        assert found is not None
        return str(found["serialNumber"])

    before = seen()
    assert seen() == before
    kit.client("billing")
    assert seen() != before


def test_an_authority_that_was_removed_is_not_trusted_any_more(kit: CertificateKit) -> None:
    tls = load_tls(kit.server(storage(1)))
    old, trust = kit.client("old"), kit.bundle(SERVERS)
    clients = client_tls(trust, old.certificate, old.key)
    handshake(tls.server, clients, "127.0.0.1")
    begin_rotation(kit.directory, CLIENTS)
    tls.certificates.look()
    handshake(tls.server, clients, "127.0.0.1")
    end_rotation(kit.directory, CLIENTS)
    tls.certificates.look()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls.server, clients, "127.0.0.1")
    new = kit.client("new")
    handshake(tls.server, client_tls(trust, new.certificate, new.key), "127.0.0.1")


def empty(kit: CertificateKit, files: TlsFiles) -> None:
    files.certificate.write_bytes(b"")


def no_key(kit: CertificateKit, files: TlsFiles) -> None:
    files.key.unlink()


def another_key(kit: CertificateKit, files: TlsFiles) -> None:
    files.key.write_bytes(kit.server(storage(9)).key.read_bytes())


def open_key(kit: CertificateKit, files: TlsFiles) -> None:
    files.key.chmod(0o644)
    os.utime(files.key)


def another_server(kit: CertificateKit, files: TlsFiles) -> None:
    kit.server(storage(2), files.certificate.stem)


def another_role(kit: CertificateKit, files: TlsFiles) -> None:
    kit.server(metadata(1), files.certificate.stem)


def early(kit: CertificateKit, files: TlsFiles) -> None:
    kit.server(storage(1), files.certificate.stem, age_days=-1, days=1)


def expired(kit: CertificateKit, files: TlsFiles) -> None:
    kit.server(storage(1), files.certificate.stem, age_days=20, days=10)


def no_authority(kit: CertificateKit, files: TlsFiles) -> None:
    files.authority.unlink()


def one_authority_for_both(kit: CertificateKit, files: TlsFiles) -> None:
    assert files.client_authority is not None
    files.client_authority.write_bytes(files.authority.read_bytes() + files.client_authority.read_bytes())


def another_authority(kit: CertificateKit, files: TlsFiles) -> None:
    files.authority.write_bytes(CertificateKit(kit.directory / "other").bundle(SERVERS).read_bytes())


BAD: dict[str, tuple[Callable[[CertificateKit, TlsFiles], None], str]] = {
    "empty": (empty, "cannot be used as certificate and private key"),
    "no key": (no_key, "No such file"),
    "another key": (another_key, "cannot be used as certificate and private key"),
    "a key that others can read": (open_key, "can be used by other users"),
    "another server": (another_server, "is a certificate for 'cutwater://1/sn/2', and this is storage node 1"),
    "another role": (another_role, "is a certificate for 'cutwater://1/mr/1', and this is storage node 1"),
    "not valid yet": (early, "is not valid yet"),
    "expired": (expired, "has expired on"),
    "no authority": (no_authority, "cannot be used as an authority"),
    "one authority for both": (one_authority_for_both, "hold the same authority"),
    "another authority": (another_authority, "was not issued by an authority in"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_new_files_are_reported_once_and_the_old_ones_stay(
    kit: CertificateKit, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, told = BAD[case]
    files = kit.server(storage(1))
    tls = load_tls(files)
    tls.certificates.claim(storage(1))
    client = client_tls(kit.bundle(SERVERS))
    before = serial(tls.server, client)
    good = {path: path.read_bytes() for path in files.paths}
    spoil(kit, files)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            tls.certificates.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "those from before stay in use" in caplog.text
    assert told in caplog.text
    assert told in tls.certificates.trouble
    assert {metric.name: metric.samples[0].value for metric in certificate_metrics("", tls)}[
        "certificate_files_unusable"
    ] == 1
    clients_trust = kit.directory / "trust.pem"
    clients_trust.write_bytes(good[files.authority])
    assert serial(tls.server, client_tls(clients_trust)) == before
    # A repaired file is used.
    for path, data in good.items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
    tls.certificates.look()
    assert tls.certificates.trouble == ""
    assert serial(tls.server, client) == before


def test_a_certificate_that_becomes_valid_is_used_without_another_change(
    kit: CertificateKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutwater.runtime import system

    files = kit.server(storage(1))
    tls = load_tls(files)
    kit.server(storage(1), files.certificate.stem, age_days=-2, days=9)
    tls.certificates.look()
    assert "not valid yet" in tls.certificates.trouble
    later = system.wall_time_ns() + round(3 * DAY * 1e9)
    monkeypatch.setattr(system, "wall_time_ns", lambda: later)
    tls.certificates.look()
    assert tls.certificates.trouble == ""


def test_a_server_is_not_started_with_the_certificate_of_another(kit: CertificateKit) -> None:
    with pytest.raises(InvalidArgument, match="is a certificate for 'cutwater://1/sn/2', and this is storage node 1"):
        load_tls(kit.server(storage(2))).certificates.claim(storage(1))
    with pytest.raises(InvalidArgument, match="cluster 2"):
        load_tls(kit.server(storage(2))).certificates.claim(storage(2, cluster=2))


def test_with_one_authority_a_certificate_may_name_no_server(kit: CertificateKit) -> None:
    place = kit.client("billing")
    files = TlsFiles(place.certificate, place.key, kit.bundle(CLIENTS))
    load_tls(files).certificates.claim(storage(1))
    named = kit.server(storage(2))
    files = TlsFiles(named.certificate, named.key, named.authority)
    with pytest.raises(InvalidArgument, match="is a certificate for 'cutwater://1/sn/2'"):
        load_tls(files).certificates.claim(storage(1))


def test_settings_of_the_context_hold_for_the_following_ones(kit: CertificateKit) -> None:
    server = load_tls(kit.server(storage(1))).server
    client = client_tls(kit.bundle(SERVERS))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "db.example")
    client.check_hostname = False
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    begin_rotation(kit.directory, SERVERS)
    assert handshake(server, client, "db.example")[1].version() == "TLSv1.2"


def test_files_are_found_from_another_directory(
    kit: CertificateKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = kit.server(storage(1))
    monkeypatch.chdir(kit.directory)
    names = [Path(path.name) for path in files.paths]
    tls, client = load_tls(TlsFiles(*names)), client_tls(names[2])
    monkeypatch.chdir(tmp_path)
    before = serial(tls.server, client)
    kit.server(storage(1))
    tls.certificates.look()
    assert serial(tls.server, client) != before
    assert caplog.records == []


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")

    def make(is_replacement: bool) -> str:
        found = path.read_text()
        if found == "1":
            path.write_text("22")
        return found

    watched = WatchedFiles([path], make)
    assert watched.current == "1"
    assert watched.look() == "22"


# ------------------------------------------------------------------------------------------ the end of a certificate


def expiry(until: float, which: str = "own") -> CertificateExpiry:
    return CertificateExpiry(which, Path("a.pem"), "CN=a", 0.0, until)


def test_an_end_that_is_near_is_reported_once_a_day() -> None:
    reports, end = ExpiryReports(), 100 * DAY
    assert reports.due([expiry(end)], end - 30 * DAY - 1) == []
    hours = [end - 30 * DAY + hour * 3_600 for hour in range(24 * 32)]
    told = [line for at in hours for line in reports.due([expiry(end)], at)]
    assert len(told) == 32
    assert [line for line in told if "has expired" in line] == told[30:]
    assert "expires soon, on 1970-04-11 00:00 UTC: renew it" in told[0]


def test_a_new_certificate_ends_the_reports_of_the_old_one() -> None:
    reports = ExpiryReports()
    assert len(reports.due([expiry(DAY), expiry(DAY, "authority")], 0.0)) == 2
    assert reports.due([expiry(365 * DAY), expiry(DAY, "authority")], 10.0) == []
    assert len(reports.due([expiry(2 * DAY)], 20.0)) == 1, "another one that is near its end"


@pytest.mark.parametrize(("at", "is_valid"), [(9.9, False), (10.0, True), (19.9, True), (20.0, False)])
def test_validity(at: float, is_valid: bool) -> None:
    found = CertificateExpiry("own", Path("a.pem"), "CN=a", 10.0, 20.0)
    if is_valid:
        check_valid_now(found, at)
    else:
        with pytest.raises(InvalidArgument, match=r"a\.pem (has expired on|is not valid yet)"):
            check_valid_now(found, at)


def test_the_metric(kit: CertificateKit) -> None:
    tls = load_tls(kit.server(storage(1), days=10))
    metric = next(iter(certificate_metrics("cutwater_sn_", tls)))
    assert metric.name == "cutwater_sn_certificate_expires_seconds"
    found = {sample.labels["certificate"]: sample.value / DAY for sample in metric.samples}
    assert {which: round(days) for which, days in found.items()} == {
        "own": 10,
        "authority": 3_650,
        "client_authority": 3_650,
    }
    assert list(certificate_metrics("cutwater_sn_", None)) == []


def test_of_two_authorities_the_end_of_the_first_counts(kit: CertificateKit) -> None:
    begin_rotation(kit.directory, SERVERS, days=50)
    issued = issue_server(kit.authority(SERVERS), storage(1), HOSTS, now=now() + timedelta(days=1))
    tls = load_tls(kit.files(kit.write("one", issued)))
    until = {found.which: found.until for found in tls.certificates.expiries}["authority"]
    assert round((until - now().timestamp()) / DAY) == 50


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_gets_no_ticket(kit: CertificateKit, version: ssl.TLSVersion) -> None:
    """Whoever had one could go on with a certificate that is not trusted any more."""
    server, client = load_tls(kit.server(storage(1))).server, client_tls(kit.bundle(SERVERS))
    client.minimum_version = client.maximum_version = version
    here, there = handshake(server, client, "127.0.0.1")
    here.write(b"x")
    assert there.read(1) == b"x"
    assert there.session is None or not there.session.has_ticket


def test_a_server_says_that_its_certificate_expires_soon(kit: CertificateKit, caplog: pytest.LogCaptureFixture) -> None:
    files = kit.server(storage(1), days=20)

    async def main() -> None:
        async with watching(load_tls(files), storage(1)), asyncio.timeout(20):
            while "expires soon, on " not in caplog.text:
                await asyncio.sleep(0.01)
            before = signal.getsignal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is not before
        async with watching(None, storage(1)):
            pass

    asyncio.run(main())
    assert len(caplog.records) == 1
    assert str(files.certificate) in caplog.text


def test_a_server_uses_new_files_when_it_gets_a_signal(kit: CertificateKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_watch, "LOOK_SECONDS", 1_000.0)
    tls, client = load_tls(kit.server(storage(1))), client_tls(kit.bundle(SERVERS))
    before = serial(tls.server, client)

    async def main() -> None:
        async with watching(tls, storage(1)), asyncio.timeout(20):
            await asyncio.sleep(0.05)
            kit.server(storage(1))
            os.kill(os.getpid(), signal.SIGHUP)
            while serial(tls.server, client) == before:
                await asyncio.sleep(0.01)

    asyncio.run(main())
