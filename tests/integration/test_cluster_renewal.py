"""Certificates, authorities and tokens of a local cluster are renewed by commands, while records are appended."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cutwater
from cutwater.admin import local_cluster
from cutwater.protocol.errors import ConnectionLost, Untrusted
from cutwater.runtime import processes
from tests.integration.cli_batch import CommandRun
from tests.integration.test_planted_secrets import Planted

pytestmark = pytest.mark.timeout(240)

HERE = ("--dir", "demo")
TOPIC = "orders"


class Appender:
    """Appends one record after another, as a named producer with a token, until it is stopped."""

    def __init__(self, servers: str, tls: ssl.SSLContext, token: str) -> None:
        self.log = cutwater.connect(servers, tls=tls, token=token, timeout=60)
        self.sent: list[bytes] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.log.producer(TOPIC, id="appender") as producer:
                while not self._stop.is_set():
                    value = b"record %d" % len(self.sent)
                    producer.send(value).result(60)
                    self.sent.append(value)
                    # The commands need the processor, too.
                    time.sleep(0.01)
        except BaseException as error:
            self.error = error

    def more(self) -> None:
        """Wait until some more were appended, from now on."""
        wanted, ends = len(self.sent) + 3, time.monotonic() + 60
        while self.error is None and len(self.sent) < wanted:
            assert time.monotonic() < ends, "appends do not go on"
            time.sleep(0.02)
        assert self.error is None, self.error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(120)
        self.log.close()


class Secured(Planted):
    """A secured cluster with two storage nodes, and a producer with a token."""

    def one(self, *words: str, code: int = 0) -> CommandRun:
        (done,) = self.run(((*words, *HERE), {}))
        assert done.code == code, done
        return done

    def token(self, name: str) -> str:
        return (self.path / name).read_text().strip()

    @property
    def authority(self) -> Path:
        return self.cluster / "certificates" / "servers-ca.pem"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    place = Secured(tmp_path)
    try:
        done = place.run(
            (("cluster", "start", *HERE, "--secure", "--storage-nodes", "2"), {}),
            (
                (
                    "token",
                    "create",
                    "app",
                    "--scope",
                    f"append,create,read topic:{TOPIC}",
                    "--scope",
                    "produce-as producer:appender",
                    "--save",
                    "app.token",
                    *HERE,
                ),
                {},
            ),
            (("acl", "allow", "app", "append,create,read", f"topic:{TOPIC}", *HERE), {}),
            (("acl", "allow", "app", "produce-as", "producer:appender", *HERE), {}),
            (("topic", "create", TOPIC, "--replication", "2", *HERE), {}),
        )
        assert [one.code for one in done] == [0] * len(done), done
        yield place
    finally:
        place.stop()


def test_everything_is_renewed_while_records_are_appended(secured: Secured) -> None:
    servers = local_cluster.load(secured.cluster).servers
    old_trust = secured.path / "old-trust.pem"
    old_trust.write_bytes(secured.authority.read_bytes())
    kept = secured.path / "kept"
    kept.mkdir()
    for name in ("admin.pem", "admin.key"):
        (kept / name).write_bytes((secured.cluster / "certificates" / name).read_bytes())
        (kept / name).chmod(0o600)
    appender = Appender(servers, cutwater.tls_context(secured.authority), secured.token("app.token"))
    try:
        appender.more()
        pids = set(local_cluster.load(secured.cluster).running())
        told = secured.one("cluster", "certificates", "renew").told
        assert "3 servers use a new certificate" in told
        appender.more()
        rotate_authority(secured, appender)
        # What only the old authorities vouch for is refused now, in both directions.
        with pytest.raises(Untrusted):
            cutwater.connect(servers, tls=cutwater.tls_context(old_trust), timeout=10)
        owner = cutwater.tls_context(secured.authority, certificate=kept / "admin.pem", key=kept / "admin.key")
        with pytest.raises((Untrusted, ConnectionLost)):
            cutwater.connect(servers, tls=owner, timeout=3)
        rotate_token(secured, appender)
        assert set(local_cluster.load(secured.cluster).running()) == pids, "no server was restarted"
        restart_a_node(secured, appender)
    finally:
        appender.close()
    assert appender.error is None
    tls = cutwater.tls_context(secured.authority)
    with cutwater.connect(servers, tls=tls, token=secured.token("new.token"), timeout=60) as log:
        found = [record.value for record in log.subscribe(TOPIC, follow=False)]
    assert found == appender.sent
    end_a_token(secured)


def rotate_authority(secured: Secured, appender: Appender) -> None:
    assert (
        "there are no new authorities"
        in secured.one("cluster", "certificates", "renew", "--authority", "finish", code=2).told
    )
    told = secured.one("cluster", "certificates", "renew", "--authority", "begin").told
    assert "trust the old and the new authorities" in told
    assert (
        "beside the old ones already"
        in secured.one("cluster", "certificates", "renew", "--authority", "begin", code=2).told
    )
    names = {one["name"] for one in json.loads(secured.one("cluster", "certificates", "list", "-o", "json").told)}
    assert {"servers-ca (new)", "servers-ca (old)", "clients-ca (new)", "sn1", "sn2", "mr1", "admin"} <= names
    appender.more()
    assert (
        "only the new authorities are trusted"
        in secured.one("cluster", "certificates", "renew", "--authority", "finish").told
    )
    appender.more()
    secured.one("whoami")


def rotate_token(secured: Secured, appender: Appender) -> None:
    """The running producer has the old token, and another one begins with the new token before the old one ends."""
    old = secured.token("app.token").split("_")[1]
    made = json.loads(secured.one("token", "rotate", old, "--old-ends", "1h", "--save", "new.token", "-o", "json").told)
    assert made["old"] == old != made["id"]
    listed = json.loads(secured.one("token", "list", "app", "-o", "json").told)
    assert {one["id"]: one["expires"] > 0 for one in listed} == {old: True, made["id"]: False}
    assert len({str(one["scopes"]) for one in listed}) == 1
    for name in ("app.token", "new.token"):
        (who,) = secured.run((("whoami", *HERE, "-o", "json"), {"CUTWATER_TOKEN": secured.token(name)}))
        assert json.loads(who.told)["principal"] == "app"
    appender.more()
    # A token never gets more time.
    again = secured.one("token", "rotate", old, "--old-ends", "2h", "-o", "json")
    assert json.loads(again.told)["old_ends"] == made["old_ends"]


def restart_a_node(secured: Secured, appender: Appender) -> None:
    """New connections among servers need the new certificates."""
    cluster = local_cluster.load(secured.cluster)
    processes.stop([cluster.storage_nodes[0].pid], 10.0)
    assert "started storage node 1" in secured.one("cluster", "restart").told
    appender.more()


def end_a_token(secured: Secured) -> None:
    old = secured.token("new.token")
    secured.one("token", "rotate", old.split("_")[1], "--old-ends", "2s", "--save", "newest.token")
    deadline = time.monotonic() + 60
    while True:
        (who,) = secured.run((("whoami", *HERE), {"CUTWATER_TOKEN": old}))
        if who.code == 32:
            break
        assert time.monotonic() < deadline, who
        time.sleep(0.3)
    assert "has expired: ask an administrator for another one" in who.told
    (who,) = secured.run((("whoami", *HERE), {"CUTWATER_TOKEN": secured.token("newest.token")}))
    assert who.code == 0
