"""TLS, mutual TLS and tokens, end to end: real servers and commands, certificates of a test's own authority."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

import cutwater
from cutwater.admin.operations import Admin
from cutwater.cli.framework.server_options import ServerOptions
from cutwater.client.cluster.credentials import Access
from cutwater.errors import CutwaterError, InvalidArgument, Refused
from cutwater.protocol.errors import ConnectionLost, Unauthenticated, Untrusted
from cutwater.wire.identity.tls import TOKEN_FILE_UNTIL
from tests.certificate_kit import CertificateKit, storage
from tests.integration.sn_process import COMMAND, SECONDS_MAX, environment, run

pytestmark = pytest.mark.timeout(180)

TOKEN = "a-token-that-nobody-guesses"


class Pki(NamedTuple):
    """Files of one authority, and what it signed for one name."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def flags(self) -> list[str]:
        return ["--tls-ca", str(self.ca), "--tls-certificate", str(self.certificate), "--tls-key", str(self.key)]


def signed(directory: Path, authority: trustme.CA, name: str, host: str) -> Pki:
    files = Pki(*(directory / f"{name}.{kind}" for kind in ("ca", "pem", "key")))
    issued = authority.issue_cert(host)
    authority.cert_pem.write_to_path(str(files.ca))
    issued.cert_chain_pems[0].write_to_path(str(files.certificate))
    issued.private_key_pem.write_to_path(str(files.key))
    files.key.chmod(0o600)
    return files


class Secured(NamedTuple):
    servers: str
    """Take certificates and tokens."""
    strict: str
    """A metadata node that takes certificates only."""
    misnamed: str
    """One whose certificate is for another host."""
    mine: Pki
    stranger: Pki
    directory: Path


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """The address of a server that runs as long as this lasts."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "-o", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.kill()
        process.wait(SECONDS_MAX)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    here = signed(directory, authority, "server", "127.0.0.1")
    elsewhere = signed(directory, authority, "elsewhere", "db.example")
    mine = signed(directory, authority, "client", "client.example")
    stranger = signed(directory, trustme.CA(), "stranger", "127.0.0.1")
    (directory / "tokens").write_text(f"# name and token\n\nbilling {TOKEN}\n")
    (directory / "tokens").chmod(0o600)
    (directory / "volume").mkdir()
    tokens = ["--tokens", str(directory / "tokens")]

    def metadata(number: int, *flags: str) -> list[str]:
        store = f"sqlite:{directory / f'{number}.sqlite'}"
        where = ["--cluster-id", str(number), "--id", "1", "--store", store, "--listen", "127.0.0.1:0"]
        return ["mr", "start", *where, *flags]

    with ExitStack() as stack:
        address = stack.enter_context(server(*metadata(1, *here.flags, *tokens)))
        strict = stack.enter_context(server(*metadata(2, *here.flags)))
        misnamed = stack.enter_context(server(*metadata(3, *elsewhere.flags)))
        node = stack.enter_context(
            server(
                *("sn", "start", "--cluster-id", "1", "--id", "1", "--volumes", str(directory / "volume")),
                *("--metadata", address, "--listen", "127.0.0.1:0", *here.flags, *tokens),
            )
        )
        urls = [f"cutwater://{found}" for found in (address, strict, misnamed)]
        told = run("sn", "add", node, "--servers", urls[0], *mine.flags)
        assert told.returncode == 0, told.stderr
        yield Secured(*urls, mine, stranger, directory)


def connect(servers: str, files: Pki | None, *, shows: bool = True, token: str = "") -> cutwater.Client:
    tls = None
    if files is not None:
        tls = cutwater.tls_context(files.ca, **({"certificate": files.certificate, "key": files.key} if shows else {}))
    return cutwater.connect(servers, tls=tls, token=token, timeout=60)


@pytest.mark.parametrize("how", ["certificate", "token"])
def test_a_client_writes_and_reads(secured: Secured, how: str) -> None:
    is_certificate = how == "certificate"
    with connect(secured.servers, secured.mine, shows=is_certificate, token="" if is_certificate else TOKEN) as log:
        log.create_topic(how)
        ack = log.append(how, b"private")
        with log.producer(how, id=f"by {how}") as producer:
            assert producer.send(b"more").result().glsn > ack.glsn
        assert [record.value for record in log.subscribe(how, follow=False)] == [b"private", b"more"]


CASES: dict[str, tuple[str, dict[str, Any], type[CutwaterError], str]] = {
    "another authority": ("servers", {"files": "stranger"}, Untrusted, "No authority that is trusted here"),
    "another host name": ("misnamed", {"files": "mine"}, Untrusted, "127.0.0.1"),
    "no certificate where one is required": (
        "strict",
        {"files": "mine", "shows": False},
        Unauthenticated,
        "a client certificate is needed",
    ),
    "a token where a certificate is required": (
        "strict",
        {"files": "mine", "shows": False, "token": TOKEN},
        Unauthenticated,
        "a client certificate is needed",
    ),
    "neither certificate nor token": (
        "servers",
        {"files": "mine", "shows": False},
        Unauthenticated,
        "a client certificate or a token is needed",
    ),
    "a wrong token": (
        "servers",
        {"files": "mine", "shows": False, "token": "another-one-entirely"},
        Unauthenticated,
        "token is not known",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_not_believed_is_told_why_and_does_not_wait(secured: Secured, case: str) -> None:
    where, options, error, told = CASES[case]
    files = getattr(secured, options["files"])
    with pytest.raises(error, match=told) as caught:
        connect(getattr(secured, where), files, **{k: v for k, v in options.items() if k != "files"})
    assert isinstance(caught.value, Refused)
    assert not caught.value.retriable


def test_plain_text_gets_nowhere(secured: Secured) -> None:
    with pytest.raises(ConnectionLost, match="it may want TLS, which was not used"):
        cutwater.connect(secured.servers, timeout=1)


def test_admin_with_and_without_a_certificate(secured: Secured) -> None:
    servers = (secured.servers.removeprefix("cutwater://"),)
    mine = secured.mine

    async def nodes(access: Access) -> int:
        async with Admin(servers, timeout_ms=60_000, access=access) as admin:
            return len((await admin.describe()).nodes)

    tls = cutwater.tls_context(mine.ca, certificate=mine.certificate, key=mine.key)
    assert asyncio.run(nodes(Access(tls))) == 1
    assert asyncio.run(nodes(Access(cutwater.tls_context(mine.ca), TOKEN))) == 1
    with pytest.raises(Unauthenticated):
        asyncio.run(nodes(Access(cutwater.tls_context(mine.ca))))


def test_commands(secured: Secured) -> None:
    mine, where = secured.mine, ["--servers", secured.servers]
    token = {"CUTWATER_TLS_CA": str(mine.ca), "CUTWATER_TOKEN": TOKEN}
    assert run("topic", "create", "commands", *where, *mine.flags).returncode == 0
    told = run("verify", *where, env=token)
    assert told.returncode == 0, told.stderr
    assert re.fullmatch(r"all is intact: [1-9]\d* replicas?, 0 groups that runs have published\n", told.stdout)
    assert run("doctor", *where, *mine.flags, "-o", "json").stdout.count('"cluster","verdict":"ok"') == 1
    told = run("topic", "list", *where, "--tls-ca", str(mine.ca))
    assert (told.returncode, "code unauthenticated" in told.stderr) == (32, True), told.stderr
    told = run("tail", *where, "--tls-ca", str(secured.stranger.ca), env={"CUTWATER_TOKEN": TOKEN})
    assert (told.returncode, "code untrusted" in told.stderr) == (32, True), told.stderr
    told = run("config", "show", "--origin", env=token)
    assert "(secret)" in told.stdout
    assert TOKEN not in told.stdout


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("billing", "line 1: a name and a token are wanted"),
        ("\nbilling short", "line 2: the token of 'billing' has less than 16 characters"),
        (f"a {TOKEN}\nb {TOKEN}", "line 2: 'b' has the same token as 'a'"),
        ("# nothing", "has no token"),
        (None, "cannot be read"),
    ],
)
def test_files_of_tokens(secured: Secured, tmp_path: Path, lines: str | None, told: str) -> None:
    if lines is not None:
        (tmp_path / "tokens").write_text(lines)
        (tmp_path / "tokens").chmod(0o600)
    from cutwater.wire.identity.tls import read_tokens

    with pytest.raises(InvalidArgument, match=told):
        read_tokens(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--listen", "0.0.0.0:0"], "without encryption and by anyone: give --tls-certificate"),
        (["--listen", "0.0.0.0:0", "--insecure"], "say with --advertise HOST:PORT"),
        (["--metrics", "0.0.0.0:0"], "--metrics 0.0.0.0 can be reached from other machines"),
        (["--tls-ca", "ca.pem"], "TLS needs all of"),
        (["--tokens", "tokens"], "--tokens needs TLS"),
        (["--tls-ca", "no.pem", "--tls-certificate", "no.pem", "--tls-key", "no.key"], "no.pem cannot be used"),
    ],
)
def test_a_listener_that_strangers_could_reach_is_refused(tmp_path: Path, flags: list[str], told: str) -> None:
    (tmp_path / "volume").mkdir()
    metadata = run("mr", "start", "--cluster-id", "1", "--id", "1", "--store", f"sqlite:{tmp_path / 'm'}", *flags)
    node = run(
        *("sn", "start", "--cluster-id", "1", "--id", "1", "--metadata", "127.0.0.1:1"),
        *("--volumes", str(tmp_path / "volume"), *flags),
    )
    for ended in (metadata, node):
        assert (ended.returncode, told in ended.stderr) == (2, True), ended.stderr


def test_a_server_with_a_file_of_tokens_says_until_when(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = CertificateKit(tmp_path / "authorities").server(storage(1))
    tokens = tmp_path / "tokens"
    tokens.write_text("billing a-token-that-nobody-guesses\n")
    tokens.chmod(0o600)
    options = ServerOptions(
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_ca=files.authority,
        tls_client_ca=files.client_authority,
        tokens=tokens,
    )
    with caplog.at_level(logging.WARNING, "cutwater"):
        assert options.tls() is not None
    (record,) = caplog.records
    told = record.getMessage()
    assert f"supported until {TOKEN_FILE_UNTIL}" in told
    assert "cutwater token import" in told
    assert "nobody-guesses" not in told
