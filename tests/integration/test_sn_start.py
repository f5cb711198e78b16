"""``cutwater sn start`` as a real command: what keeps it from starting, and how it says so."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme

from cutwater.cli.framework.exit_codes import EXIT_CODES, exit_code_of
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.format.checksum import crc32c
from cutwater.protocol import storage_api as api
from cutwater.protocol.errors import ConnectionLost, Unauthenticated
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storage.volume import NodeVolumes, node_path
from cutwater.types import ClusterId, LogStreamId, StorageNodeId
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import Endpoint
from tests.integration.sn_process import COMMAND, NodeProcess, environment, run

NOBODY = "127.0.0.1:1"
"""Where no metadata repository listens."""
PEM = {"certificate": "node.pem", "key": "node.key", "ca": "ca.pem"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.mkdir()
    return path


def start(*flags: str | Path, node: int = 1, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    which = ("--cluster-id", "1", "--id", str(node), "--metadata", NOBODY, "--listen", "127.0.0.1:0")
    return run("sn", "start", *which, *map(str, flags), env=env)


def says(ended: subprocess.CompletedProcess[str], code: str, *texts: str) -> None:
    """It ended with the exit code of this error, said so on standard error, and nothing else anywhere."""
    assert ended.returncode == EXIT_CODES[code], ended.stderr
    assert ended.stdout == ""
    assert f"code {code}, exit code {EXIT_CODES[code]}" in ended.stderr
    assert "Traceback" not in ended.stderr
    for text in texts:
        assert re.search(text, ended.stderr), f"{text!r} is not in {ended.stderr!r}"


def create_replica(volumes: list[Path], stream: int, node: int = 1) -> Path:
    held = NodeVolumes(volumes, ClusterId(1), StorageNodeId(node))
    with held.creating(LogStreamId(stream)) as path:
        SegmentStorage(path, ReplicaIdentity(ClusterId(1), StorageNodeId(node), LogStreamId(stream))).close()
    held.release()
    return held.replicas[LogStreamId(stream)]


# ----------------------------------------------------------------------------------------------- volumes


def test_a_missing_volume(tmp_path: Path) -> None:
    ended = start("--volumes", tmp_path / "nowhere")
    says(ended, "volume_unusable", r"error: volume .*/nowhere does not exist: create it, or mount it, before")


def test_a_file_instead_of_a_volume(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    says(start("--volumes", tmp_path / "file"), "volume_unusable", r"volume .*/file is not a directory: create it")


@contextmanager
def read_only_mount(path: Path) -> Iterator[None]:
    """A real file system that cannot be written to, also not by root."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_volume_that_is_mounted_read_only(volume: Path) -> None:
    with read_only_mount(volume):
        ended = start("--volumes", volume)
    says(ended, "volume_unusable", r"cannot be written \(Read-only file system\): give the user", "mount it read-write")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_volume_without_the_right_to_write(volume: Path) -> None:
    volume.chmod(0o500)
    says(start("--volumes", volume), "volume_unusable", r"cannot be written \(Permission denied\): give the user")


def test_one_log_stream_under_two_volumes(volume: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    path = create_replica([volume], 3)
    copy = node_path(other, ClusterId(1), StorageNodeId(1))
    shutil.copytree(path, copy / path.name)
    shutil.copy(path.parent / "node", copy / "node")
    ended = start("--volumes", volume, "--volumes", other)
    says(ended, "volume_conflict", "log stream 3 lies under two volumes, .*: one of them is an old copy; move that one")


def test_error_if_exists(volume: Path) -> None:
    create_replica([volume], 3)
    ended = start("--volumes", volume, "--error-if-exists")
    says(
        ended, "node_exists", "snid=1 exists, and --error-if-exists was said: start without it to go on with that data"
    )


def test_a_node_key_of_another_node(volume: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (volume, other):
        NodeVolumes([path], ClusterId(1), StorageNodeId(1)).release()
    ended = start("--volumes", volume, "--volumes", other)
    says(ended, "wrong_identity", "have different node keys, so they are not of the same storage node: start each node")


def test_a_directory_that_was_renamed(volume: Path) -> None:
    NodeVolumes([volume], ClusterId(1), StorageNodeId(2)).release()
    (volume / "cid=1" / "snid=2").rename(volume / "cid=1" / "snid=1")
    says(
        start("--volumes", volume), "wrong_identity", "says storage node 2 of cluster 1, not 1 of 1: the directory was"
    )


def test_a_replica_that_was_moved(volume: Path) -> None:
    path = create_replica([volume], 3)
    path.rename(path.with_name("lsid=4"))
    says(start("--volumes", volume), "wrong_identity", "holds log stream 3 .*, not log stream 4 .*: move the data back")


def test_a_lock_that_a_running_node_holds(volume: Path, tmp_path: Path) -> None:
    with NodeProcess(1, [volume], NOBODY, tmp_path / "log") as running:
        ended = start("--volumes", volume)
        says(ended, "volume_locked", rf"in use by a running storage node \(pid {running.pid}\): stop that one first")
        running.kill()
        running.start()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0


@pytest.mark.parametrize("name", ["node", "lsid=3/manifest", "lsid=3/0000000001-00000000000000000001.entries"])
def test_a_file_of_a_newer_version(volume: Path, name: str) -> None:
    create_replica([volume], 3)
    path = node_path(volume, ClusterId(1), StorageNodeId(1)) / name
    data = path.read_bytes()
    begin = data[:8] + struct.pack("<HH", 9, 0)
    path.write_bytes(begin + struct.pack("<I", crc32c(begin)) + data[16:])
    ended = start("--volumes", volume)
    says(ended, "newer_format", "has format version 9; this program reads versions up to 1: start the newer version")


def test_a_damaged_node_file(volume: Path) -> None:
    NodeVolumes([volume], ClusterId(1), StorageNodeId(1)).release()
    for name in ("node", "node.copy"):
        (node_path(volume, ClusterId(1), StorageNodeId(1)) / name).write_bytes(b"\0" * 100)
    ended = start("--volumes", volume)
    assert (ended.returncode, ended.stdout) == (EXIT_CODES["damaged"], "")
    assert "node is damaged" in ended.stderr
    assert "code damaged_file" in ended.stderr


def test_a_damaged_replica_does_not_keep_the_node_from_serving(volume: Path, tmp_path: Path) -> None:
    path = create_replica([volume], 3)
    create_replica([volume], 4)
    (path / "manifest").write_bytes(b"garbage")
    for entries in path.glob("*.entries"):
        entries.unlink()  # Their names would tell what the manifest said.
    with NodeProcess(1, [volume], NOBODY, tmp_path / "log") as node:
        assert (node.serving["replicas"], node.serving["unreadable"]) == (2, 1)
    assert "log stream 3 cannot be opened and waits to be learned from a peer" in (tmp_path / "log").read_text()
    assert (path / "manifest").read_bytes() == b"garbage", "nothing is done to it before there is a copy"


# --------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("flag", "address"),
    [
        ("--listen", "nonsense"),
        ("--listen", "127.0.0.1"),
        ("--listen", ":7001"),
        ("--metadata", "127.0.0.1:port"),
        ("--advertise", "127.0.0.1:70000"),
        ("--metrics", "nonsense"),
    ],
)
def test_what_is_no_address(volume: Path, flag: str, address: str) -> None:
    ended = start("--volumes", volume, flag, address)
    says(ended, "invalid_argument", rf"error: {flag}: '{address}' is not an address: write HOST:PORT, for example")


def test_a_port_in_use(volume: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = start("--volumes", volume, "--listen", address)
        says(
            ended,
            "cannot_listen",
            rf"cannot listen on {address}: .*in use: stop the process that uses it, or choose another",
        )
        ended = start("--volumes", volume, "--metrics", address)
        assert ended.returncode == EXIT_CODES["cannot_listen"]
        assert f"cannot listen for metrics on {address}" in ended.stderr


def test_beyond_this_machine_only_with_tls(volume: Path) -> None:
    ended = start("--volumes", volume, "--listen", "0.0.0.0:0")
    says(
        ended,
        "invalid_argument",
        r"--listen 0.0.0.0 can be reached from other machines",
        "--tls-certificate",
        "--insec",
    )
    ended = start("--volumes", volume, "--metrics", "0.0.0.0:0")
    says(ended, "invalid_argument", r"--metrics 0.0.0.0 can be reached from other machines")
    ended = start("--volumes", volume, "--tls-key", "key.pem")
    says(ended, "invalid_argument", "TLS needs all of --tls-certificate, --tls-key and --tls-ca")
    ended = start("--volumes", volume, "--listen", "0.0.0.0:0", "--insecure")
    says(
        ended, "invalid_argument", "others cannot connect to 0.0.0.0:0: say with --advertise HOST:PORT where they reach"
    )


def test_mutual_tls(volume: Path, tmp_path: Path) -> None:
    """Whoever has no certificate of the same authority gets nowhere."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "node.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "node.key"))
    (tmp_path / "node.key").chmod(0o600)
    files = [flag for name in ("certificate", "key", "ca") for flag in (f"--tls-{name}", str(tmp_path / PEM[name]))]
    trusting, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (trusting, known):
        authority.configure_trust(context)
    authority.issue_cert("client.example").configure_cert(known)

    async def describe(port: int, tls: ssl.SSLContext | None) -> api.NodeSelfDescription:
        endpoint = Endpoint(ClusterId(1), "client")
        connection = await connect(endpoint, "127.0.0.1", port, timeout_ms=5_000, tls=tls)
        try:
            return (await connection.call(api.DESCRIBE, None, timeout_ms=5_000)).value
        finally:
            connection.abort()
            await connection.closed

    with NodeProcess(1, [volume], NOBODY, tmp_path / "log", *files) as node:
        assert asyncio.run(describe(node.port, known)).node == 1
        with pytest.raises(Unauthenticated, match="a client certificate is needed"):
            asyncio.run(describe(node.port, trusting))
        with pytest.raises((ConnectionLost, DeadlineExceeded)):
            asyncio.run(describe(node.port, None))
    (tmp_path / "node.key").write_text("nonsense")
    ended = start("--volumes", volume, *files)
    says(ended, "invalid_argument", "cannot be used as certificate and private key for TLS")


# --------------------------------------------------------------------------------------------- the command


def test_a_missing_option_is_told() -> None:
    ended = run("sn", "start", "--id", "1")
    assert ended.returncode == 2
    assert "--cluster-id" in ended.stderr


def test_errors_as_json_and_with_a_traceback(tmp_path: Path) -> None:
    ended = start("--volumes", tmp_path / "nowhere", "-o", "json")
    error = json.loads(ended.stderr)["error"]
    assert (error["code"], error["exit_code"], error["retriable"]) == ("volume_unusable", ended.returncode, False)
    ended = start("--volumes", tmp_path / "nowhere", "--debug")
    assert "Traceback" in ended.stderr
    assert ended.returncode == EXIT_CODES["volume_unusable"]


def test_flags_come_before_the_environment(tmp_path: Path) -> None:
    env = {"CUTWATER_VOLUMES": str(tmp_path / "from-env")}
    assert "from-env does not exist" in start(env=env).stderr
    assert "from-flag does not exist" in start("--volumes", tmp_path / "from-flag", env=env).stderr


def test_the_version() -> None:
    ended = run("--version")
    assert ended.returncode == 0
    assert re.fullmatch(r"cutwater \d+\.\d+\.\d+\S*\n", ended.stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_serves_until_it_is_asked_to_stop(volume: Path, tmp_path: Path, number: signal.Signals) -> None:
    create_replica([volume], 3)
    flags = ("--metrics", "127.0.0.1:0", "--log-format", "json")
    with NodeProcess(1, [volume], NOBODY, tmp_path / "log", *flags) as node:
        serving = node.serving
        assert (serving["cluster"], serving["node"], serving["replicas"], serving["unreadable"]) == (1, 1, 1, 0)
        with urlopen(f"http://{serving['metrics']}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert 'cutwater_sn_replica_state{state="SEALING",stream="3"} 1.0' in metrics
        assert re.search(rf'cutwater_sn_volume_free_bytes{{volume="{volume}"}} \d', metrics)
        assert "cutwater_sn_entry_sync_seconds_bucket" in metrics
        node.signal(number)
        assert node.wait() == 0
        events = [json.loads(line)["event"] for line in node.log.read_text().splitlines()]
        assert events[-1] == "stopped"
        node.start()
        assert node.serving["incarnation"] == serving["incarnation"] + 1


def test_the_line_that_people_read(volume: Path, tmp_path: Path) -> None:
    command = NodeProcess(1, [volume], NOBODY, tmp_path / "log").arguments()
    with subprocess.Popen(
        [*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            process.terminate()
    assert re.fullmatch(
        r"storage node 1 of cluster 1 serves at 127\.0\.0\.1:\d+ with 0 replicas, opened in \d+ ms\n", line
    )


# ---------------------------------------------------------------------------------------------- exit codes


def test_the_table_of_exit_codes_is_documented() -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ((?:`[a-z_]+`(?:, )?)+) \|", text, re.MULTILINE)
    documented = {code: int(number) for number, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    assert documented == EXIT_CODES


def test_every_error_has_an_exit_code() -> None:
    import cutwater.protocol.errors
    import cutwater.storagenode.start  # noqa: F401

    def tree(cls: type[CutwaterError]) -> Iterator[type[CutwaterError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from tree(child)

    for cls in tree(CutwaterError):
        assert exit_code_of(cls.__new__(cls, "")) in EXIT_CODES.values(), cls
    known = {cls.code for cls in tree(CutwaterError)}
    assert set(EXIT_CODES) <= known, "a code that no error has"


STUCK = """
import asyncio, os, sys, time
from pathlib import Path
from cutwater.storagenode.start import NodeStartOptions, run_storage_node

def serving(serving):
    print("serving", flush=True)
    asyncio.get_running_loop().call_soon(time.sleep, 60)

def hang(error):
    print(error.code, flush=True)
    os._exit(19)

options = NodeStartOptions(1, 1, (Path(sys.argv[1]),), "127.0.0.1:0", ("127.0.0.1:1",), stop_seconds=0.1)
run_storage_node(options, serving, hang)
"""


def test_a_node_whose_disk_hangs_can_be_stopped(volume: Path) -> None:
    """As if the event loop were waiting for a sync that does not return."""
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(volume)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stop_timed_out\n"
            assert process.wait(30) == 19
        finally:
            process.kill()
