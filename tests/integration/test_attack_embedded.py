"""An attack on an embedded log by another user of the machine: it can neither read its files nor connect to it. What
the log's own user does goes on working. As root the attacker is a process of the user ``nobody``; otherwise only modes
and connections without the secret are looked at, which is what such a process would meet."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from msgspec import msgpack, structs

import cutwater
from cutwater import embedded
from cutwater.admin.operations import Admin
from cutwater.client.cluster.credentials import ANYONE
from cutwater.client.cluster.holder_file import directory_of, read_holder, url_of, with_secret
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.errors import InvalidArgument
from cutwater.protocol import metadata_api
from cutwater.protocol.errors import Unauthenticated, Unproven
from cutwater.wire.addresses import parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.codec import encode_frame
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import read_tokens
from cutwater.wire.listen.server import listen
from cutwater.wire.messages import FrameKind
from tests.integration.sn_process import run
from tests.integration.test_tls import signed

pytestmark = pytest.mark.timeout(120)

ATTACK = """
import json, os, socket, sys
directory, port, uid, gid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
os.setgroups([]); os.setgid(gid); os.setuid(uid)
found = {"read": [], "changed": [], "listed": []}
for name in json.loads(sys.argv[5]):
    path = os.path.join(directory, name)
    for kind, flags in (("read", os.O_RDONLY), ("changed", os.O_WRONLY)):
        try:
            os.close(os.open(path, flags))
            found[kind].append(name)
        except OSError:
            pass
try:
    found["listed"] = os.listdir(directory)
except OSError:
    pass
connection = socket.create_connection(("127.0.0.1", port), 10)
connection.sendall(bytes.fromhex(sys.argv[6]))
connection.settimeout(10)
answer = b""
try:
    while data := connection.recv(65536):
        answer += data
except OSError:
    pass
found["answer"] = answer.decode("latin-1")
print(json.dumps(found))
"""


def walk(directory: Path) -> list[Path]:
    return [Path(at) / name for at, directories, files in os.walk(directory) for name in (*directories, *files)]


def hello(token: str, role: str = "client") -> bytes:
    """A greeting as a client makes it, as bytes."""
    header = msgpack.encode(("cutwater", 1, 1, 0, role, "", token, (1 << 24, 1 << 20, 1_000, 1 << 26)))
    return encode_frame(FrameKind.HELLO, 0, header)


def port_of(directory: Path) -> int:
    holder = read_holder(directory)
    assert holder is not None
    (address,) = parse_servers(holder.servers)
    return int(address.rpartition(":")[2])


@pytest.fixture
def umask() -> Iterator[None]:
    """Files of the test are made as with the most usual umask, whatever the machine has."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_another_user_cannot_read_or_connect(tmp_path: Path, umask: None) -> None:
    # Those above are for everyone, as /home is.
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/tmp") and Path("/tmp") in above.parents:
            above.chmod(0o755)
    directory = tmp_path / "data"
    with cutwater.open(directory) as log:
        log.create_topic("secrets")
        log.append("secrets", b"the password is swordfish")
        modes = {path.relative_to(directory): stat.S_IMODE(path.stat().st_mode) for path in walk(directory)}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o027}
        assert modes[Path("holder.json")] == 0o600
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            names = json.dumps([str(path) for path in modes])
            arguments = [str(directory), str(port_of(directory)), str(nobody.pw_uid), str(nobody.pw_gid), names]
            told = subprocess.run(
                [sys.executable, "-S", "-c", ATTACK, *arguments, hello("").hex()],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            found = json.loads(told.stdout)
            assert found["read"] == found["changed"] == found["listed"] == []
            assert "can read its directory" in found["answer"]
            assert "swordfish" not in found["answer"]


def ports_of(directory: Path) -> list[int]:
    """Of the metadata repository and of the storage node."""

    async def ask() -> list[str]:
        holder = read_holder(directory)
        assert holder is not None
        async with Admin(parse_servers(holder.servers), access=with_secret(holder.servers, ANYONE)) as admin:
            return [node.address for node in (await admin.describe()).nodes]

    (node,) = asyncio.run(ask())
    return [port_of(directory), int(node.rpartition(":")[2])]


@pytest.mark.parametrize("token", ["", "guessed"])
def test_a_connection_without_the_secret_is_refused(tmp_path: Path, token: str) -> None:
    with cutwater.open(tmp_path) as log:
        log.create_topic("t")
        for port in ports_of(tmp_path):
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(hello(token))
                connection.settimeout(10)
                answer = connection.recv(65_536)
            assert b"unauthenticated" in answer
            assert b"open it by its path" in answer
        with pytest.raises(Unauthenticated, match="open it by its path"):
            cutwater.connect(f"cutwater://127.0.0.1:{port_of(tmp_path)}", token=token, timeout=10)
        told = run("topic", "list", "--servers", f"cutwater://127.0.0.1:{port_of(tmp_path)}")
        assert told.returncode != 0
        assert "open it by its path" in " ".join(told.stderr.split())


def test_another_server_is_not_let_in_either(tmp_path: Path) -> None:
    """Without the secret a role changes nothing."""
    with cutwater.open(tmp_path):
        for role in ("storage node", "metadata repository"):
            with socket.create_connection(("127.0.0.1", port_of(tmp_path)), 10) as connection:
                connection.sendall(hello("", role))
                connection.settimeout(10)
                assert b"unauthenticated" in connection.recv(65_536)


def test_processes_of_the_same_user_go_on_as_before(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    script = (
        "import cutwater, sys\n"
        "with cutwater.open(sys.argv[1]) as log:\n"
        "    print(log.append('t', b'from another process').glsn)\n"
    )
    with cutwater.open(directory) as log:
        log.create_topic("t")
        log.append("t", b"first")
        by_script = subprocess.run(
            [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, timeout=60, check=True
        )
        assert int(by_script.stdout) >= 2
        (tmp_path / "record").write_bytes(b"by a command")
        told = run("append", "t", str(tmp_path / "record"), "--path", str(directory))
        assert told.returncode == 0, told.stderr
        told = run("doctor", "--path", str(directory))
        assert "unauthenticated" not in told.stdout + told.stderr
        assert "log" in told.stdout
        shown = run("topic", "list", "--path", str(directory), "-o", "json")
        assert '"t"' in shown.stdout, shown.stderr
        assert run("verify", "--path", str(directory)).returncode == 0
        assert len([record.value for record in log.subscribe("t", follow=False)]) == 3


@pytest.mark.parametrize("name", ["data", "with space, comma and ü", "100%"])
def test_where_a_log_is_served_says_where_the_secret_is(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    with cutwater.open(directory) as log:
        log.create_topic("t")
        assert directory_of(log.servers) == directory
        assert url_of(parse_servers(log.servers)[0], directory) == log.servers
        with cutwater.connect(log.servers) as other:
            assert other.append("t", b"x").glsn >= 1
        assert run("topic", "list", "--servers", log.servers).returncode == 0
        before = log.servers
    nobody = structs.replace(ANYONE, server_keys=())
    assert with_secret(before, ANYONE) == nobody
    with cutwater.open(directory):
        # Another process may listen there now: it gets no secret that is not its own, and is not believed.
        assert with_secret(before, ANYONE) == nobody
    assert directory_of("cutwater://a:1,b:2") is None
    assert directory_of("cutwater://a:1/") is None


def test_whoever_takes_the_port_of_a_log_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    """It gets the secret, which is worth nothing any more, and can serve no records."""
    directory = tmp_path / "log"
    with cutwater.open(directory) as log:
        log.create_topic("t")
        servers = log.servers
        left = (directory / "holder.json").read_bytes()
        (_, port) = parse_address(parse_servers(servers)[0])

    async def main() -> None:
        methods = Methods()
        methods.answers(metadata_api.ASK)(lambda call: pytest.fail("a forger was asked"))
        forger = Endpoint(embedded.CLUSTER, "metadata repository", "1", methods, key=ServerKey.generate())
        listener = await listen(forger, "127.0.0.1", port)
        try:
            # As if it was killed, and then as if it was closed.
            (directory / "holder.json").write_bytes(left)
            for _ in range(2):
                with pytest.raises(Unproven, match="is not the embedded log that is wanted"):
                    await cutwater.AsyncClient.connect(servers, timeout=5)
                (directory / "holder.json").unlink(missing_ok=True)
        finally:
            await listener.close(timeout_ms=100)

    asyncio.run(main())


def test_the_secret_is_another_one_each_time_and_in_no_message(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        with cutwater.open(tmp_path):
            holder = read_holder(tmp_path)
            assert holder is not None
            tokens.append(holder.token)
            assert holder.token not in repr(holder)
            assert holder.token not in repr(with_secret(holder.servers, ANYONE))
            assert holder.token not in holder.servers
            assert not any(holder.token.encode() in path.read_bytes() for path in others(tmp_path))
        assert not (tmp_path / "holder.json").exists()
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) == 64


def others(directory: Path) -> list[Path]:
    return [path for path in walk(directory) if path.is_file() and path.name != "holder.json"]


def test_a_directory_of_an_earlier_version_is_closed_when_it_is_opened(tmp_path: Path, umask: None) -> None:
    directory = tmp_path / "data"
    with cutwater.open(directory) as log:
        log.create_topic("t")
        log.append("t", b"kept")
    for path in (directory, *walk(directory)):
        # Earlier versions had no private keys, and one that others can read is refused.
        if path.is_dir() or b"PRIVATE KEY" not in path.read_bytes():
            path.chmod(0o755 if path.is_dir() else 0o644)
    with cutwater.open(directory) as log:
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"kept"]
        for path in (directory, directory / "volume", *(directory / "volume").glob("cid=*/snid=*")):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        assert stat.S_IMODE((directory / "metadata.sqlite").stat().st_mode) == 0o640


def test_a_directory_that_was_given_to_a_group_stays_the_groups(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(0o750)
    with cutwater.open(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        assert stat.S_IMODE((directory / "holder.json").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_that_the_log_is_not_theirs(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if Path("/tmp") in above.parents:
            above.chmod(0o755)
    directory = tmp_path / "data"
    with cutwater.open(directory):
        (directory).chmod(0o755)
        script = (
            "import os, sys\n"
            "import cutwater, cutwater.embedded\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try:\n"
            "    cutwater.embedded.read_holder(cutwater.embedded.Path(sys.argv[1]))\n"
            "except cutwater.CutwaterError as error:\n"
            "    print(type(error).__name__, error)\n"
        )
        told = subprocess.run(
            [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, timeout=60, check=False
        )
        assert "Refused" in told.stdout, told.stderr
        assert "run as that user" in told.stdout


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    files = signed(tmp_path, trustme.CA(), "mine", "127.0.0.1")
    files.key.chmod(mode)
    with pytest.raises(InvalidArgument, match=rf"mine\.key.*mode {mode:04o}.*chmod 600") as caught:
        cutwater.tls_context(files.ca, certificate=files.certificate, key=files.key)
    assert "replace it" in str(caught.value)
    files.key.chmod(0o600)
    cutwater.tls_context(files.ca, certificate=files.certificate, key=files.key)
    tokens = tmp_path / "tokens"
    tokens.write_text("me a-token-that-nobody-guesses\n")
    tokens.chmod(mode)
    with pytest.raises(InvalidArgument, match="a file of tokens, can be used by other users"):
        read_tokens(tokens)
    tokens.chmod(0o400)
    assert list(read_tokens(tokens)) == ["a-token-that-nobody-guesses"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_may_be_given_to_a_group(tmp_path: Path) -> None:
    files = signed(tmp_path, trustme.CA(), "given", "127.0.0.1")
    os.chown(files.key, 65534, 65534)
    files.key.chmod(0o640)
    cutwater.tls_context(files.ca, certificate=files.certificate, key=files.key)
    files.key.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 640"):
        cutwater.tls_context(files.ca, certificate=files.certificate, key=files.key)


def test_servers_refuse_a_key_that_others_can_read(tmp_path: Path) -> None:
    files = signed(tmp_path, trustme.CA(), "server", "127.0.0.1")
    files.key.chmod(0o644)
    where = ["--cluster-id", "1", "--id", "1", "--store", f"sqlite:{tmp_path / 'metadata.sqlite'}"]
    told = run("mr", "start", *where, "--listen", "127.0.0.1:0", *files.flags)
    assert told.returncode == 2
    assert f"chmod 600 {files.key}" in " ".join(told.stderr.split())


def test_files_of_servers_and_local_clusters_are_their_owners(tmp_path: Path, umask: None) -> None:
    directory = tmp_path / "cluster"
    told = run("cluster", "start", "--dir", str(directory), "--storage-nodes", "1")
    try:
        assert told.returncode == 0, told.stderr
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        open_to_others = {
            str(path): oct(path.stat().st_mode) for path in walk(directory) if path.stat().st_mode & 0o027
        }
        assert not open_to_others
    finally:
        run("cluster", "stop", "--dir", str(directory))
