"""Certificates and authorities are replaced under a cluster of real processes while records are appended."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import cutwater
from cutwater.admin.certificate_builder import AuthorityKind
from cutwater.admin.operations import Admin
from cutwater.admin.private_authority import begin_rotation, end_rotation
from cutwater.client.cluster.credentials import Access
from cutwater.protocol import storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.errors import ConnectionLost, Unproven, Untrusted
from cutwater.types import ClusterId, Incarnation, LeaderEpoch, NodeState, Report, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.certificate_files import TlsFiles
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import client_tls
from tests.certificate_kit import CLUSTER, CertificateKit, metadata, storage
from tests.integration.sn_process import COMMAND, SECONDS_MAX, environment, run

pytestmark = pytest.mark.timeout(240)

SERVERS, CLIENTS = AuthorityKind.SERVERS, AuthorityKind.CLIENTS
TOPIC = "orders"
NODES = 3


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what}: not within {seconds} s"
        time.sleep(0.05)


class ServerProcess:
    """A server as a process. It can be killed and started again at the same address."""

    def __init__(self, stack: ExitStack, name: ServerName, log: Path, *arguments: str) -> None:
        self.name, self.log, self._arguments = name, log, arguments
        self.address = "127.0.0.1:0"
        self.metrics = ""
        self.process: subprocess.Popen[str] | None = None
        stack.callback(self.kill)
        self.start()

    def start(self) -> None:
        flags = ("--listen", self.address, "--metrics", "127.0.0.1:0", "-o", "json")
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *self._arguments, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-2_000:]
        said = json.loads(line)
        self.address, self.metrics = said["address"], said["metrics"]

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(SECONDS_MAX)
            assert process.stdout is not None
            process.stdout.close()

    def look(self) -> None:
        """Make it look at its files."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def shows(self) -> str:
        """The serial number of the certificate that it shows to new connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(parse_address(self.address), timeout=20) as plain,
            context.wrap_socket(plain) as tls,
        ):
            data = tls.getpeercert(binary_form=True)
        assert data is not None
        return serial_of(data)

    def metric(self, name: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return {labels: float(value) for labels, value in re.findall(rf"^{name}(\S*) (\S+)$", text, re.M)}


def serial_of(der: bytes) -> str:
    from cryptography.x509 import load_der_x509_certificate

    return str(load_der_x509_certificate(der).serial_number)


def serial_in(path: Path) -> str:
    return serial_of(ssl.PEM_cert_to_DER_cert(path.read_text()))


class SecuredCluster:
    """One metadata node and three storage nodes, each with its own certificate."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.kit = CertificateKit(directory / "authorities")
        self.files: dict[ServerName, TlsFiles] = {}
        store = ("--store", f"sqlite:{directory / 'metadata.sqlite'}")
        self.metadata = self._start(stack, directory, metadata(1), "mr", "start", *store)
        self.nodes = []
        for number in range(1, NODES + 1):
            volume = directory / f"volume{number}"
            volume.mkdir()
            where = ("--volumes", str(volume), "--metadata", self.metadata.address)
            self.nodes.append(self._start(stack, directory, storage(number), "sn", "start", *where))
        self.mine = self.kit.client("billing")
        asyncio.run(self._add_nodes())

    def _start(self, stack: ExitStack, directory: Path, name: ServerName, *arguments: str) -> ServerProcess:
        files = self.files[name] = self.kit.server(name)
        log = directory / f"{files.certificate.stem}.log"
        which = ("--cluster-id", str(CLUSTER), "--id", str(name.number))
        return ServerProcess(stack, name, log, *arguments, *which, *flags(files))

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.metadata, *self.nodes]

    def tls(self) -> ssl.SSLContext:
        return client_tls(self.kit.bundle(SERVERS), self.mine.certificate, self.mine.key)

    async def _add_nodes(self) -> None:
        async with Admin((self.metadata.address,), timeout_ms=60_000, access=Access(self.tls())) as admin:
            for node in self.nodes:
                await admin.add_storage_node(node.address)

    def connect(self) -> cutwater.Client:
        return cutwater.connect(f"cutwater://{self.metadata.address}", tls=self.tls(), timeout=60)

    def renew(self) -> None:
        """New certificates for all servers, and all of them show these."""
        for server in self.servers:
            self.kit.server(server.name)
            server.look()
        for server in self.servers:
            wanted = serial_in(self.files[server.name].certificate)
            until(lambda server=server, wanted=wanted: server.shows() == wanted, f"{server.name} shows the new one")

    def after(self, change: Callable[[], object]) -> None:
        """Change a file that all servers read, and wait until they have read it."""
        before = {server: server.log.read_text().count("new connections use the new files") for server in self.servers}
        change()
        for server in self.servers:
            server.look()
        for server, count in before.items():
            until(
                lambda server=server, count=count: (
                    server.log.read_text().count("new connections use the new files") > count
                ),
                f"{server.name} has read its files",
            )


def flags(files: TlsFiles) -> list[str]:
    assert files.client_authority is not None
    return [
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
        *("--tls-ca", str(files.authority), "--tls-client-ca", str(files.client_authority)),
    ]


class Appender:
    """Appends one record after another with one client, until it is stopped. No append may fail."""

    def __init__(self, cluster: SecuredCluster) -> None:
        self.log = cluster.connect()
        self.log.create_topic(TOPIC, streams=1, replication=NODES)
        self.sent: list[bytes] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            # A producer finds out what became of records whose server was killed.
            with self.log.producer(TOPIC, id="appender") as producer:
                while not self._stop.is_set():
                    value = b"record %d" % len(self.sent)
                    producer.send(value).result(60)
                    self.sent.append(value)
        except BaseException as error:
            self.error = error

    def more(self) -> None:
        """Wait until some more were appended, from now on."""
        wanted = len(self.sent) + 5
        until(lambda: self.error is not None or len(self.sent) >= wanted, "appends go on")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        self.log.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with ExitStack() as stack:
        yield SecuredCluster(stack, tmp_path_factory.mktemp("rotation"))


@pytest.fixture(scope="module")
def appender(cluster: SecuredCluster) -> Iterator[Appender]:
    found = Appender(cluster)
    try:
        yield found
    finally:
        found.close()


def appended_is_there(cluster: SecuredCluster, appender: Appender) -> None:
    """A new client reads what was acknowledged so far, and only that."""
    appender.more()
    sent = list(appender.sent)
    with cluster.connect() as log:
        found = [record.value for record in log.subscribe(TOPIC, follow=False)]
    assert found[: len(sent)] == sent


def test_certificates_of_servers_are_rotated(cluster: SecuredCluster, appender: Appender) -> None:
    appender.more()
    before = [server.shows() for server in cluster.servers]
    cluster.renew()
    assert not set(before) & {server.shows() for server in cluster.servers}
    appended_is_there(cluster, appender)
    # New connections among servers work, too.
    node = cluster.nodes[2]
    node.kill()
    node.start()
    appended_is_there(cluster, appender)


def test_the_authority_of_servers_is_rotated(cluster: SecuredCluster, appender: Appender) -> None:
    kit = cluster.kit
    appender.more()
    old_trust = kit.directory / "old-trust.pem"
    old_trust.write_bytes(kit.bundle(SERVERS).read_bytes())
    old_leaf = kit.server(storage(1), "old-leaf")
    cluster.after(lambda: begin_rotation(kit.directory, SERVERS))
    cluster.renew()
    appended_is_there(cluster, appender)
    cluster.after(lambda: end_rotation(kit.directory, SERVERS))
    appended_is_there(cluster, appender)
    # Servers connect to each other with the new ones alone.
    node = cluster.nodes[0]
    node.kill()
    node.start()
    appended_is_there(cluster, appender)
    with pytest.raises(Untrusted):
        cutwater.connect(f"cutwater://{cluster.metadata.address}", tls=client_tls(old_trust), timeout=10)
    context = client_tls(kit.bundle(SERVERS), old_leaf.certificate, old_leaf.key)
    with pytest.raises((Untrusted, ConnectionLost)):
        asyncio.run(_as_server(cluster.metadata.address, context, "1"))


def test_the_authority_of_clients_is_rotated(cluster: SecuredCluster, appender: Appender) -> None:
    kit = cluster.kit
    old = kit.client("old-client")
    cluster.after(lambda: begin_rotation(kit.directory, CLIENTS))
    appended_is_there(cluster, appender)
    # The client that runs finds its new certificate when it connects again.
    kit.client("billing")
    cluster.after(lambda: end_rotation(kit.directory, CLIENTS))
    node = cluster.nodes[1]
    node.kill()
    node.start()
    appended_is_there(cluster, appender)
    with pytest.raises((Untrusted, ConnectionLost)):
        cutwater.connect(
            f"cutwater://{cluster.metadata.address}",
            tls=client_tls(kit.bundle(SERVERS), old.certificate, old.key),
            timeout=3,
        )


def test_a_bad_new_file_is_reported_and_the_old_one_stays(cluster: SecuredCluster, appender: Appender) -> None:
    node = cluster.nodes[0]
    files, before = cluster.files[node.name], node.shows()
    good = {path: path.read_bytes() for path in (files.certificate, files.key)}
    another = cluster.kit.server(storage(2), "another")
    files.key.write_bytes(another.key.read_bytes())
    files.certificate.write_bytes(another.certificate.read_bytes())
    # No signal: it looks by itself.
    until(
        lambda: "is a certificate for 'cutwater://1/sn/2', and this is storage node 1" in node.log.read_text(),
        "it is reported",
    )
    until(lambda: node.metric("cutwater_sn_certificate_files_unusable") == {"": 1.0}, "it is in the metrics")
    assert node.shows() == before
    appended_is_there(cluster, appender)
    for path, data in good.items():
        path.write_bytes(data)
    node.look()
    until(lambda: node.metric("cutwater_sn_certificate_files_unusable") == {"": 0.0}, "it is well again")
    assert node.shows() == before


def test_the_end_of_certificates_is_in_the_metrics(cluster: SecuredCluster) -> None:
    for server, prefix in ((cluster.metadata, "cutwater_mr"), (cluster.nodes[0], "cutwater_sn")):
        found = server.metric(f"{prefix}_certificate_expires_seconds")
        assert {labels: round(seconds / 86_400) for labels, seconds in found.items()}.keys() == {
            '{certificate="own"}',
            '{certificate="authority"}',
            '{certificate="client_authority"}',
        }
        assert 300 < found['{certificate="own"}'] / 86_400 <= 365


async def _as_server(address: str, tls: ssl.SSLContext, name: str) -> Connection:
    host, port = parse_address(address)
    endpoint = Endpoint(ClusterId(CLUSTER), STORAGE_NODE, name, key=ServerKey.generate())
    return await connect(endpoint, host, port, timeout_ms=10_000, tls=tls, expect=lambda server: None)


def test_a_certificate_alone_is_no_server(cluster: SecuredCluster, appender: Appender) -> None:
    """The certificate of node 1 without the private key that the cluster has noted, and that of node 2 as node 1."""
    kit = cluster.kit
    report = Report(StorageNodeId(1), Incarnation(1 << 40), 1 << 40, LeaderEpoch(1 << 30), NodeState.READY, ())

    def shown(files: TlsFiles) -> ssl.SSLContext:
        return client_tls(kit.bundle(SERVERS), files.certificate, files.key)

    async def main() -> None:
        connection = await _as_server(cluster.metadata.address, shown(cluster.files[storage(1)]), "1")
        connection.notify(storage_api.REPORT, report)
        async with asyncio.timeout(20):
            await connection.closed
        assert isinstance(connection.error, Unproven)
        assert "has another key" in connection.error.message
        for address in (cluster.metadata.address, cluster.nodes[2].address):
            with pytest.raises(Unproven, match="its certificate is for 'cutwater://1/sn/2'"):
                await _as_server(address, shown(cluster.files[storage(2)]), "1")

    asyncio.run(main())
    appended_is_there(cluster, appender)


def test_a_server_that_has_another_ones_certificate_does_not_start(cluster: SecuredCluster, tmp_path: Path) -> None:
    told = run(
        *("sn", "start", "--cluster-id", "1", "--id", "4", "--volumes", str(tmp_path)),
        *("--metadata", cluster.metadata.address, "--listen", "127.0.0.1:0", *flags(cluster.files[storage(2)])),
    )
    assert told.returncode == 2
    assert "is a certificate for 'cutwater://1/sn/2', and this is storage node 4 of cluster 1" in told.stderr
    told = run(
        *("mr", "start", "--cluster-id", "1", "--id", "1", "--store", f"sqlite:{tmp_path / 'm'}"),
        *("--tls-client-ca", str(cluster.kit.bundle(CLIENTS))),
    )
    assert told.returncode == 2
    assert "--tls-client-ca needs --tls-certificate, --tls-key and --tls-ca" in told.stderr
