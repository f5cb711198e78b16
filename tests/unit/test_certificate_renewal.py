"""Renewal of the certificates of a local cluster that is killed at each of its writes. No server runs here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import Certificate

from cutwater.admin import certificate_renewal, private_authority
from cutwater.admin.certificate_builder import AuthorityKind
from cutwater.admin.certificate_renewal import begin_authority, finish_authority, renew
from cutwater.admin.cluster_certificates import make_certificates
from cutwater.admin.local_cluster import ClusterMember, LocalCluster, load, server_name
from cutwater.errors import InvalidArgument
from cutwater.runtime.local_files import MachineFiles
from cutwater.wire.identity.certificate_files import read_certificates

ADDRESS = "127.0.0.1:1"


class Killed(BaseException):
    pass


def made(directory: Path) -> dict[AuthorityKind, bytes]:
    """Make a cluster; return the keys of its authorities."""
    directory.mkdir()
    cluster = LocalCluster(
        f"cutwater://{ADDRESS}", [ClusterMember(1, 0, ADDRESS)], [ClusterMember(1, 0, "127.0.0.1:2")]
    )
    cluster.has_tls = True
    cluster.save(directory)
    start(directory)
    return {kind: key_of(directory, kind) for kind in AuthorityKind}


def start(directory: Path) -> None:
    """Do what a start of the cluster does with its certificates, and check that servers can use them."""
    cluster = load(directory)
    make_certificates(directory, [server_name(cluster, node) for node in cluster.nodes])
    folder = directory / "certificates"
    for name, kind in (
        ("mr1", AuthorityKind.SERVERS),
        ("sn1", AuthorityKind.SERVERS),
        ("admin", AuthorityKind.CLIENTS),
    ):
        (own,) = read_certificates(folder / f"{name}.pem")
        key = load_pem_private_key((folder / f"{name}.key").read_bytes(), password=None)
        assert own.public_key() == key.public_key()
        trusted = read_certificates(private_authority.authority_paths(folder, kind).certificate)
        assert any(is_issued_by(own, one) for one in trusted)


def is_issued_by(certificate: Certificate, authority: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_of(directory: Path, kind: AuthorityKind) -> bytes:
    return private_authority.authority_paths(directory / "certificates", kind).key.read_bytes()


def killed_at(write: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kill the work before this one of its files gets its name. Returns whether it has so many."""
    real, count = MachineFiles.replace, 0

    def replace(self: MachineFiles, source: Path, target: Path) -> None:
        nonlocal count
        if count == write:
            raise Killed
        count += 1
        real(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(MachineFiles, "replace", replace)
        try:
            work()
        except Killed:
            return True
    return False


def test_a_renewal_that_is_killed_leaves_a_cluster_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = 0
    made(tmp_path / "c")
    while killed_at(write, lambda: renew(tmp_path / "c"), monkeypatch):
        start(tmp_path / "c")
        write += 1
    assert write == 6, "three keys and three certificates"


@pytest.mark.parametrize("phase", [begin_authority, finish_authority])
def test_a_rotation_that_is_killed_goes_on_and_replaces_both_authorities(
    phase: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_renewal, "LOOK_SECONDS", 0.0)
    write, is_killed = 0, True
    while is_killed:
        directory = tmp_path / f"c{write}"
        old = made(directory)
        if phase is finish_authority:
            begin_authority(directory)
        is_killed = killed_at(write, lambda at=directory: phase(at), monkeypatch)
        start(directory)
        for again in (begin_authority, finish_authority):
            with suppress(InvalidArgument):
                # One of them may have nothing to do.
                again(directory)
            start(directory)
        if phase is finish_authority and private_authority.is_rotating(
            directory / "certificates", AuthorityKind.SERVERS
        ):
            # It had ended already, so these commands began another one.
            finish_authority(directory)
        start(directory)
        for kind in AuthorityKind:
            assert key_of(directory, kind) != old[kind], (write, kind)
            assert not private_authority.is_rotating(directory / "certificates", kind), (write, kind)
        write += 1
    assert write > 6
