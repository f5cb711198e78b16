"""Real connections over TLS: which certificates make a peer a server, in both directions, and what others are told."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from cutwater.admin.certificate_builder import (
    Authority,
    AuthorityKind,
    IssuedCertificate,
    build_authority,
    certificates_pem,
    issue_server,
    key_pem,
)
from cutwater.admin.private_authority import CertificatePaths, authority_paths, now, write_issued
from cutwater.client.cluster.credentials import Access, metadata_node, open_connection, storage_node
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import ConnectionLost, Unauthenticated, Unproven, Untrusted
from cutwater.runtime.event_loop import run
from cutwater.types import ClusterId
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import Credentials, PeerIdentity
from cutwater.wire.identity.certificate_files import TlsFiles
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.identity.server_certificates import Wants
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import Tls, client_tls, load_tls
from cutwater.wire.listen.server import Listener, listen
from tests.certificate_kit import CLUSTER, DNS, HOSTS, CertificateKit, common, hostile, metadata, storage, tlv

pytestmark = pytest.mark.timeout(60)

KEY = ServerKey.generate()
SERVERS, CLIENTS = AuthorityKind.SERVERS, AuthorityKind.CLIENTS
TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertificateKit:
    return CertificateKit(tmp_path_factory.mktemp("pki") / "authorities")


class Door:
    """A listener of a server, and the credentials that it saw."""

    listener: Listener

    def __init__(self) -> None:
        self.seen: list[Credentials] = []
        self.opened: list[Connection] = []
        self.accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self.peers: list[Peer] = []

    async def from_server(
        self, tls: ssl.SSLContext, name: str, role: str = STORAGE_NODE, *, has_key: bool = True, token: str = ""
    ) -> Connection:
        """Connect as a server. Returns when the listener believes it."""
        endpoint = Endpoint(ClusterId(CLUSTER), role, name, key=KEY if has_key else None)
        return await self._connect(endpoint, tls, token, expect=(lambda server: None) if has_key else None)

    async def from_client(self, tls: ssl.SSLContext, role: str = "client", token: str = "") -> Connection:
        return await self._connect(Endpoint(ClusterId(0), role), tls, token, expect=None)

    async def _connect(self, endpoint: Endpoint, tls: ssl.SSLContext, token: str, expect: Any) -> Connection:
        connection = await connect(
            endpoint, "127.0.0.1", self.listener.port, timeout_ms=10_000, tls=tls, token=token, expect=expect
        )
        self.opened.append(connection)
        # The connecting side is done before its proof is judged.
        self.peers.append(await asyncio.wait_for(self.accepted.get(), 10))
        return connection


@asynccontextmanager
async def door(tls: Tls, role: str = STORAGE_NODE, name: str = "1") -> AsyncIterator[Door]:
    found = Door()

    def authenticate(credentials: Credentials) -> PeerIdentity:
        found.seen.append(credentials)
        return tls.authenticate(credentials)

    def opened(connection: Connection) -> None:
        assert connection.peer is not None
        found.accepted.put_nowait(connection.peer)

    endpoint = Endpoint(ClusterId(CLUSTER), role, name, key=ServerKey.generate())
    found.listener = await listen(endpoint, "127.0.0.1", 0, tls=tls.server, authenticate=authenticate, on_open=opened)
    try:
        yield found
    finally:
        for connection in found.opened:
            connection.abort()
        await found.listener.close(timeout_ms=100)


def one_authority(kit: CertificateKit, place: CertificatePaths | TlsFiles, kind: AuthorityKind = SERVERS) -> TlsFiles:
    return TlsFiles(place.certificate, place.key, kit.bundle(kind))


def shows(kit: CertificateKit, place: CertificatePaths | TlsFiles) -> ssl.SSLContext:
    """How any process connects that trusts the servers' authority and has these files."""
    return client_tls(kit.bundle(SERVERS), place.certificate, place.key)


def forged(kit: CertificateKit, authority: Authority, name: str) -> CertificatePaths:
    """A certificate of another authority that says that it is of storage node 1."""
    mislabelled = Authority(SERVERS, authority.certificate, authority.key)
    return kit.write(name, issue_server(mislabelled, storage(1), HOSTS, now=now()))


def test_servers_believe_each_other(kit: CertificateKit) -> None:
    async def main() -> None:
        async with door(load_tls(kit.server(storage(1)))) as here:
            node, mr = kit.server(storage(2)), kit.server(metadata(1))
            await here.from_server(load_tls(node).client, "2")
            await here.from_server(load_tls(mr).client, "1", METADATA_NODE)
            # A server may also connect without speaking as one.
            await here.from_client(load_tls(mr).client, "metadata repository, as a client")
            assert [str(peer.server) for peer in here.peers] == ["storage node 2", "metadata repository 1", "None"]
            assert [seen.server for seen in here.seen] == [
                "cutwater://1/sn/2",
                "cutwater://1/mr/1",
                "cutwater://1/mr/1",
            ]

    run(main())


def test_clients_are_let_in_and_are_no_servers(kit: CertificateKit) -> None:
    async def main() -> None:
        async with door(load_tls(kit.server(storage(1)), {TOKEN: PeerIdentity("billing")})) as here:
            await here.from_client(shows(kit, kit.client("alice")))
            await here.from_client(client_tls(kit.bundle(SERVERS)), token=TOKEN)
            assert [seen.server for seen in here.seen] == ["", ""]
            assert [peer.server for peer in here.peers] == [None, None]
            assert [seen.certificate.get("subject") for seen in here.seen] == [((("commonName", "alice"),),), None]

    run(main())


Attack = Callable[[CertificateKit, Door], Awaitable[Any]]


async def node_2_as_node_1(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.server(storage(2))), "1")


async def node_2_as_node_1_without_a_key(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.server(storage(2))), "1", has_key=False)


async def storage_node_as_metadata_node(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.server(storage(1))), "1", METADATA_NODE)


async def node_of_another_cluster(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.server(storage(1, cluster=2), "cluster2")), "1")


async def client_as_node(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.client("alice")), "1")


async def client_that_names_a_server(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, forged(kit, kit.authority(CLIENTS), "forged")), "1")


async def client_that_names_a_server_as_a_client(kit: CertificateKit, here: Door) -> None:
    await here.from_client(shows(kit, forged(kit, kit.authority(CLIENTS), "forged")))


async def token_as_node(kit: CertificateKit, here: Door) -> None:
    await here.from_server(client_tls(kit.bundle(SERVERS)), "1", token=TOKEN)


async def wrong_authority(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, forged(kit, build_authority(SERVERS, now=now()), "stranger")), "1")


async def expired(kit: CertificateKit, here: Door) -> None:
    await here.from_server(shows(kit, kit.server(storage(2), "expired", age_days=20, days=10)), "2")


async def no_certificate(kit: CertificateKit, here: Door) -> None:
    await here.from_client(client_tls(kit.bundle(SERVERS)))


NOT_ISSUED = "a certificate of the clients' authority is never a server's"
ATTACKS: dict[Attack, tuple[type[CutwaterError] | tuple[type[CutwaterError], ...], str]] = {
    node_2_as_node_1: (Unproven, r"storage node 1 of cluster 1, and its certificate is for 'cutwater://1/sn/2'"),
    node_2_as_node_1_without_a_key: (Unproven, r"its certificate is for 'cutwater://1/sn/2'"),
    storage_node_as_metadata_node: (Unproven, r"metadata repository 1 of cluster 1, .* 'cutwater://1/sn/1'"),
    node_of_another_cluster: (Unproven, r"cluster 1, and its certificate is for 'cutwater://2/sn/1'"),
    client_as_node: (Unproven, NOT_ISSUED),
    client_that_names_a_server: (Unproven, NOT_ISSUED),
    client_that_names_a_server_as_a_client: (Unproven, NOT_ISSUED),
    token_as_node: (Unproven, "a server needs one of the servers' authority"),
    # TLS itself refuses these, and with TLS 1.3 the peer may only see that the connection was closed.
    wrong_authority: ((Untrusted, ConnectionLost), "certificate"),
    expired: ((Untrusted, ConnectionLost), "certificate"),
    no_certificate: (Unauthenticated, "a client certificate or a token is needed"),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_peer_that_is_no_server_is_refused_in_words(kit: CertificateKit, attack: Attack) -> None:
    error, told = ATTACKS[attack]

    async def main() -> None:
        async with door(load_tls(kit.server(storage(1)), {TOKEN: PeerIdentity("billing")})) as here:
            with pytest.raises(error, match=told):
                await attack(kit, here)
            # The door is open for others.
            await here.from_server(load_tls(kit.server(storage(2))).client, "2")

    run(main())


def test_what_a_connecting_server_checks(kit: CertificateKit) -> None:
    """A process took the address of node 1, with what certificate it could get."""
    other, client = build_authority(SERVERS, now=now()), kit.authority(CLIENTS)
    cases: list[tuple[TlsFiles | CertificatePaths, type[CutwaterError], str]] = [
        (kit.server(storage(2)), Unproven, "'cutwater://1/sn/2'"),
        (kit.server(metadata(1)), Unproven, "'cutwater://1/mr/1'"),
        (forged(kit, client, "forged"), Untrusted, "certificate verify failed"),
        (forged(kit, other, "stranger"), Untrusted, "certificate verify failed"),
        (kit.server(storage(1), "old", age_days=20, days=10), Untrusted, "certificate has expired"),
        (kit.client("alice"), Untrusted, "certificate verify failed"),
    ]

    async def main() -> None:
        mine = load_tls(kit.server(storage(3)))
        for files, error, told in cases:
            # Both sides of the impostor trust everything that there is.
            async with door(_impostor(kit, files)) as here:
                for tls in (mine.client, client_tls(kit.bundle(SERVERS))):
                    with pytest.raises(error, match=told):
                        await here.from_server(tls, "3")
                with pytest.raises(error, match=told):
                    await here.from_client(client_tls(kit.bundle(SERVERS)))

    run(main())


def _impostor(kit: CertificateKit, files: TlsFiles | CertificatePaths) -> Tls:
    tls = load_tls(TlsFiles(files.certificate, files.key, kit.bundle(SERVERS)))
    return Tls(tls.server, tls.client, lambda credentials: PeerIdentity("anyone"), tls.certificates)


def test_an_authority_between_is_no_servers_authority(tmp_path: Path) -> None:
    """The clients' authority is below the servers' one. The chain leads to the right root, by the wrong issuer."""
    kit = CertificateKit(tmp_path / "authorities")
    root = _authority(None)
    bundle = IssuedCertificate(certificates_pem([root.certificate]), key_pem(root.key))
    write_issued(authority_paths(kit.directory, SERVERS), bundle, replace=True)
    below = _authority(root)
    place = kit.write("below", issue_server(below, storage(1), HOSTS, now=now()))
    place.certificate.write_bytes(place.certificate.read_bytes() + certificates_pem([below.certificate]))
    servers = kit.files(kit.write("two", issue_server(root, storage(2), HOSTS, now=now())))

    async def main() -> None:
        async with door(load_tls(servers), name="2") as here:
            with pytest.raises(Unproven, match=NOT_ISSUED):
                await here.from_server(shows(kit, place), "1")
        async with door(_impostor(kit, place)) as here:
            with pytest.raises(Unproven, match=NOT_ISSUED):
                await here.from_server(load_tls(servers).client, "2")

    run(main())


def _authority(above: Authority | None) -> Authority:
    """An authority that may have others below it, as some operators have."""
    made = build_authority(SERVERS, now=now())
    issuer = above or made
    certificate = (
        x509.CertificateBuilder()
        .subject_name(made.certificate.subject)
        .issuer_name(issuer.certificate.subject)
        .public_key(made.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - timedelta(days=1))
        .not_valid_after(now() + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(issuer.key, hashes.SHA256())
    )
    return Authority(SERVERS, certificate, made.key)


# ------------------------------------------------------------------------------------------------------ one authority


def test_with_one_authority_names_count_where_there_are_any(kit: CertificateKit) -> None:
    async def main() -> None:
        plain = one_authority(kit, kit.client("unnamed"), CLIENTS)
        async with door(load_tls(plain)) as here:
            # As before: any certificate of the authority, and the proof of the key decides elsewhere. A client's
            # certificate cannot serve, so the side that connects does not verify it.
            context = client_tls(kit.bundle(CLIENTS), plain.certificate, plain.key)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            await here.from_server(context, "1")
        named = one_authority(kit, kit.server(storage(1)))
        async with door(load_tls(named)) as here:
            with pytest.raises(Unproven, match="its certificate is for 'cutwater://1/sn/2'"):
                await here.from_server(shows(kit, kit.server(storage(2))), "1")
            await here.from_server(shows(kit, kit.server(storage(2))), "2")
            assert [seen.server for seen in here.seen] == [""]

    run(main())


def test_a_peer_that_goes_away_is_logged_with_the_reason(kit: CertificateKit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with door(load_tls(kit.server(storage(1)))) as here:
            _, writer = await asyncio.open_connection(here.listener.host, here.listener.port)
            writer.close()
            async with asyncio.timeout(20):
                while "was not let in" not in caplog.text:
                    await asyncio.sleep(0.01)
        assert "127.0.0.1 was not let in: it closed the connection before it had greeted" in caplog.text

    run(main())


def test_names_that_are_no_text_are_refused(kit: CertificateKit, caplog: pytest.LogCaptureFixture) -> None:
    names = tlv(DNS, b"\xff\xfe")
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with door(load_tls(kit.server(storage(1)))) as here:
            place = kit.write("hostile", hostile(kit.authority(CLIENTS), common("x"), names))
            with pytest.raises(ConnectionLost, match="certificate"):
                await here.from_client(shows(kit, place))
            async with asyncio.timeout(20):
                # The listener knows why, and keeps no place for it.
                while "127.0.0.1 was not let in: 'utf-8' codec can't decode byte 0xff" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert here.listener.gate.snapshot().handshakes == 0
            await here.from_client(shows(kit, kit.client("alice")))
        place = kit.write("hostile", hostile(kit.authority(SERVERS), common("x"), names))
        async with door(_impostor(kit, place)) as here:
            context = client_tls(kit.bundle(SERVERS))
            context.check_hostname = False
            with pytest.raises(Untrusted, match="has a name that is no text"):
                await here.from_client(context)

    run(main())


# Tokens.


def test_a_client_shows_its_token_only_to_the_server_that_it_wants(kit: CertificateKit) -> None:
    async def main() -> None:
        access = Access(client_tls(kit.bundle(SERVERS)), TOKEN)

        async def reach(address: str, wants: Wants, cluster: int = CLUSTER) -> Connection:
            endpoint = Endpoint(ClusterId(cluster), "client")
            return await open_connection(endpoint, address, access, wants=wants, timeout_ms=5_000)

        async with door(load_tls(kit.server(storage(2)), {TOKEN: PeerIdentity("billing")})) as here:
            address = f"127.0.0.1:{here.listener.port}"

            refusals: tuple[tuple[Wants, int, type[CutwaterError], str], ...] = (
                (storage_node(address, 1), CLUSTER, ConnectionLost, "certificate of storage node 2 of cluster 1, and"),
                (storage_node(address, 2), 7, Unproven, "a server of cluster 7 is wanted there"),
                (metadata_node(address), CLUSTER, InvalidArgument, "is a storage node, and clients ask metadata nodes"),
            )
            for wants, cluster, error, told in refusals:
                with pytest.raises(error, match=told):
                    await reach(address, wants, cluster)
            assert not here.seen, "nothing was shown"
        # What it says of itself in its greeting is compared with its certificate as before.
        async with door(load_tls(kit.server(storage(2)), {TOKEN: PeerIdentity("billing")}), name="2") as here:
            address = f"127.0.0.1:{here.listener.port}"
            for wants in (storage_node(address, 2), storage_node(address, 1, 2), storage_node(address)):
                here.opened.append(await reach(address, wants))
            assert [shown.token for shown in here.seen] == [TOKEN] * 3

    asyncio.run(main())
