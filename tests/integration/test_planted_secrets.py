"""Secrets are planted, and commands, servers and their logs are driven: no secret shows anywhere."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cutwater.admin import local_cluster
from cutwater.runtime import processes
from tests.integration.cli_batch import CommandRun, run_commands

pytestmark = pytest.mark.timeout(400)

WRONG = f"cwt_{'a' * 16}_{secrets.token_hex(32)}"
"""A token that no server knows: a wrong one is a secret, too, perhaps of another cluster."""
PASSWORD = secrets.token_hex(12)
"""In an address of etcd or of servers, where no password belongs."""

Command = tuple[tuple[str, ...], dict[str, str]]


class Planted:
    """A secured cluster whose servers log all that they can, and what was planted in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.cluster = path, path / "demo"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}
        self.environment = {**kept, "CUTWATER_LOG_LEVEL": "debug", "XDG_CONFIG_HOME": str(path / "config")}
        self.secrets: dict[str, bytes] = {"a wrong token": WRONG.encode()[-64:], "a password": PASSWORD.encode()}

    def run(self, *commands: Command) -> list[CommandRun]:
        return run_commands(commands, self.path, self.environment)

    def plant_files(self) -> None:
        """Note the secrets in all files that hold one."""
        tokens = [self.cluster / name for name in ("admin.token", "agent1.token")]
        for path in (*tokens, self.path / "app.token", self.path / "late.token"):
            self.secrets[path.name] = path.read_text().strip().rpartition("_")[2].encode()
        keys = [*(self.cluster / "certificates").glob("*.key"), self.cluster / "metadata.sqlite.key"]
        keys += self.cluster.rglob("server-key")
        assert len(keys) >= 6
        for path in keys:
            block = re.search(rb"BEGIN PRIVATE KEY-----\n(.*?)-----END", path.read_bytes(), re.DOTALL)
            assert block is not None, path
            # The end of the block is what differs from key to key.
            self.secrets[str(path.relative_to(self.cluster))] = block.group(1).strip().splitlines()[-1][-40:]

    def found_in(self, data: bytes) -> list[str]:
        return [name for name, secret in self.secrets.items() if secret in data]

    def stop(self) -> None:
        members = local_cluster.load(self.cluster).processes() if (self.cluster / "cluster.json").exists() else []
        processes.stop([member.pid for member in members if member.pid], 10.0)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    place = Planted(tmp_path_factory.mktemp("planted"))
    here = ("--dir", "demo")
    try:
        done = place.run(
            (("cluster", "start", *here, "--secure", "--storage-nodes", "1", "--agents", "1", "--debug"), {}),
            (("token", "create", "app", "--save", "app.token", *here), {}),
            (("token", "create", "late", "--expires", "1d", "--save", "late.token", *here, "-o", "json"), {}),
            (("acl", "allow", "app", "append,create,describe", "topic:orders", *here), {}),
        )
        assert [one.code for one in done] == [0] * len(done), done
        place.plant_files()
        assert [place.found_in(one.told.encode()) for one in done] == [[]] * len(done)
        yield place
    finally:
        place.stop()


def both(*words: str, **extra: str) -> list[Command]:
    """A command for people, and for programs with everything that helps to debug."""
    return [(words, extra), ((*words, "-o", "json", "--debug"), extra)]


def commands(place: Planted) -> list[Command]:
    here = ("--dir", "demo")
    late = (place.path / "late.token").read_text().strip()
    app = (place.path / "app.token").read_text().strip()
    identifier = app.split("_")[1]
    servers = local_cluster.load(place.cluster).servers
    trusting = ("--servers", servers, "--tls-ca", "demo/certificates/servers-ca.pem")
    key = (place.cluster / "certificates" / "sn1.key").read_text()
    found: list[Command] = []
    for words in (
        ("whoami",),
        ("token", "list"),
        ("token", "describe", identifier),
        ("acl", "list"),
        ("acl", "test", "app", "append", "topic:orders"),
        ("principal", "list"),
        ("principal", "describe", "app"),
        ("cluster", "status"),
        ("cluster", "health"),
        ("cluster", "events"),
        ("doctor",),
        ("sn", "list"),
    ):
        found += both(*words, *here)
    for words in (("whoami",), ("topic", "list"), ("token", "list")):
        # In the environment, in a file, wrong, and of a principal that may not.
        found += both(*words, *here, CUTWATER_TOKEN=app)
        found += both(*words, *trusting, CUTWATER_TOKEN=WRONG)
        found += both(*words, *trusting, "--token-file", "late.token")
    # In the wrong place.
    found += both("token", "revoke", app, *here)
    found += both("token", "describe", WRONG, *here)
    found += both("token", "create", WRONG, *here)
    found += both("acl", "allow", late, "append", "topic:orders", *here)
    found += both("acl", "test", app, app, app, *here)
    found += both("acl", "allow", "app", "append", app, *here)
    found += both("group", "create", app, *here)
    found += both("whoami", *trusting, "--token-file", WRONG)
    found += both("whoami", WRONG)
    found += both(WRONG)
    found += both("topic", "create", WRONG, *here)
    found += both("whoami", "--servers", f"cutwater://admin:{PASSWORD}@127.0.0.1:1")
    found += both("whoami", "--servers", f"cutwater://admin:{PASSWORD}@127.0.0.1")
    found += both("whoami", "--servers", f"http://admin:{PASSWORD}@127.0.0.1:1")
    # A private key as a token, and a token as a private key.
    found += both("whoami", *trusting, CUTWATER_TOKEN=key)
    wrong_files = ("--tls-certificate", "demo/certificates/sn1.pem", "--tls-key", "app.token")
    found += both("whoami", *trusting, *wrong_files)
    found += both("whoami", *trusting, "--token-file", "demo/certificates/sn1.key")
    found += both("cluster", "secure", "--servers", servers, "--key-file", "app.token")
    # Stores.
    for store in (
        f"etcd://root:{PASSWORD}@127.0.0.1:1/p",
        f"etcd://127.0.0.1:1/p?password={PASSWORD}",
        f"postgres://root:{PASSWORD}@127.0.0.1/p",
    ):
        found += both("mr", "recover-admin", "--store", store)
        found += both("mr", "start", "--cluster-id", "1", "--id", "1", "--store", store)
        found += both("config", "show", "--origin", CUTWATER_STORE=store)
    found += both("config", "show", "--origin", CUTWATER_TOKEN=app, CUTWATER_TOKENN=WRONG)
    found += both("mr", "recover-admin", "--store", "sqlite:demo/metadata.sqlite", "--principal", WRONG)
    found.append((("mr", "recover-admin", "--store", "sqlite:demo/metadata.sqlite", "--save", "rescue.token"), {}))
    found += both("audit", "search", *here)
    return found


def check_commands(planted: Planted) -> None:
    config = planted.path / "cutwater.toml"
    done = planted.run(*commands(planted))
    config.write_text(f'token = "{WRONG}"\n')
    config.chmod(0o600)
    done += planted.run(*both("config", "show", "--origin"), *both("whoami", "--dir", "demo"))
    config.write_text(f'token = ["{WRONG}"]\n')
    done += planted.run(*both("whoami", "--dir", "demo"))
    config.unlink()
    rescue = (planted.path / "rescue.token").read_text().strip()
    planted.secrets["rescue.token"] = rescue.rpartition("_")[2].encode()
    leaks = [(one.words, names) for one in done if (names := planted.found_in(one.told.encode()))]
    assert leaks == [], f"{leaks}"
    internal = [one for one in done if "internal error" in one.told]
    assert internal == []
    assert sum(one.code == 0 for one in done) >= 25
    assert sum(one.code != 0 for one in done) >= 40
    # What is meant to show the caller does so: the tracebacks of --debug are there.
    assert any("Traceback" in one.told for one in done)


def check_processes(planted: Planted) -> None:
    """A command line is for every user of the machine, the environment only for the owner: servers get neither."""
    cluster = local_cluster.load(planted.cluster)
    pids = cluster.running()
    assert len(pids) == 3
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert planted.found_in(Path(f"/proc/{pid}/{name}").read_bytes()) == []
        assert b"CUTWATER_LOG_LEVEL=debug" in Path(f"/proc/{pid}/environ").read_bytes()
    # Servers that a command starts again with a token in its environment do not get it.
    token = (planted.cluster / "admin.token").read_text().strip()
    processes.stop(pids, 10.0)
    (restarted,) = planted.run((("cluster", "restart", "--dir", "demo"), {"CUTWATER_TOKEN": token}))
    assert restarted.code == 0, restarted
    again = local_cluster.load(planted.cluster).running()
    assert len(again) == 3
    assert not set(again) & set(pids)
    for pid in again:
        for name in ("cmdline", "environ"):
            assert planted.found_in(Path(f"/proc/{pid}/{name}").read_bytes()) == []


def check_logs_and_audit(planted: Planted) -> None:
    """With the denials and errors of the commands."""
    refused = {"CUTWATER_TOKEN": (planted.path / "app.token").read_text().strip()}
    planted.run((("topic", "delete", "orders", "--dir", "demo"), refused))
    deadline = time.monotonic() + 60
    while True:
        (search,) = planted.run((("audit", "search", "--dir", "demo", "-o", "json"), {}))
        assert search.code == 0, search
        if '"denied"' in search.told and '"delete-topic"' in search.told:
            break
        assert time.monotonic() < deadline, search.told
        time.sleep(0.5)
    records = [json.loads(line) for line in search.told.splitlines() if line.startswith("{")]
    assert {"create-token", "allow-rights"} <= {record["operation"] for record in records}
    assert planted.found_in(search.told.encode()) == []
    logs = list(planted.cluster.glob("*.log"))
    assert {path.name for path in logs} == {"mr1.log", "sn1.log", "agent1.log", "service.log"}
    text = b"".join(path.read_bytes() for path in logs)
    assert b"was not let in" in text
    assert planted.found_in(text) == []


def requests(planted: Planted) -> list[tuple[str, str, dict[str, Any]]]:
    """Requests to the service, with secrets where they belong and in every place where they do not."""
    app, admin = [(planted.path / name).read_text().strip() for name in ("app.token", "demo/admin.token")]
    shown = {"Authorization": f"Bearer {app}"}
    found: list[tuple[str, str, dict[str, Any]]] = []
    for token in (app, admin, WRONG, ""):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for path in ("/v1/whoami", "/v1/cluster", "/v1/topics/orders", "/v1/audit", "/v1/jobs", "/v1/nodes"):
            found.append(("GET", path, {"headers": headers}))
    for path in (f"/v1/topics/{app}", f"/v1/cursors/{WRONG}", f"/v1/jobs/{WRONG}", f"/v1/runs/{app}", f"/{app}"):
        found.append(("GET", path, {"headers": shown}))
    for query in (f"token={app}", f"access_token={WRONG}", f"limit={app}", f"start={app}", f"where=value='{app}' and"):
        found.append(("GET", f"/v1/topics/orders/records?{query}", {"headers": shown}))
    found.append(("GET", f"/v1/audit?operation={WRONG}", {"headers": {"Authorization": f"Bearer {admin}"}}))
    for headers in (
        {"Authorization": f"Basic {app}"},
        {"Authorization": app},
        {"Cookie": f"__Host-cutwater={app}"},
        {"Cookie": f"__Host-cutwater={WRONG}"},
        {**shown, "Host": WRONG},
        {**shown, "Origin": f"https://{WRONG}"},
        {**shown, "Sec-Fetch-Site": WRONG},
        {**shown, "Content-Type": WRONG},
        {**shown, "Last-Event-ID": WRONG},
        {**shown, "Idempotency-Key": WRONG},
    ):
        found.append(("GET", "/v1/whoami", {"headers": headers}))
        found.append(("POST", "/v1/jobs", {"headers": headers, "content": json.dumps({"name": WRONG, WRONG: app})}))
        found.append(("DELETE", f"/v1/jobs/{WRONG}", {"headers": headers}))
    found.append(("POST", "/v1/session", {"headers": shown}))
    found.append(("POST", "/v1/session", {"headers": shown, "content": app}))
    return found


def check_service(planted: Planted) -> None:
    """The service has a token of its own, and sees those of its callers."""
    (made,) = planted.run((("token", "create", "rest", "--save", "rest.token", "--dir", "demo"), {}))
    assert made.code == 0, made
    planted.secrets["rest.token"] = (planted.path / "rest.token").read_text().strip().rpartition("_")[2].encode()
    command = [sys.executable, "-m", "cutwater.cli", "service", "start", "--dir", "demo", "--listen", "127.0.0.1:0"]
    command += ["--own-token-file", "rest.token", "--allow-submit", "-o", "json"]
    log = planted.path / "demo" / "service.log"
    with log.open("wb") as errors:
        service = subprocess.Popen(
            command, cwd=planted.path, env=planted.environment, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        statuses: Counter[int] = Counter()
        with httpx.Client(base_url=json.loads(line)["url"], timeout=20) as http:
            for method, path, more in requests(planted):
                answer = http.request(method, path, **more)
                statuses[answer.status_code] += 1
                headers = {name: value for name, value in answer.headers.items() if name != "set-cookie"}
                told = json.dumps(headers).encode() + answer.content
                assert planted.found_in(told) == [], (method, path.partition("cwt_")[0], answer.status_code)
                for cookie in answer.headers.get_list("set-cookie"):
                    secret = cookie.partition(";")[0].rpartition("_")[2].encode()
                    if len(secret) == 64:
                        planted.secrets["a session"] = secret
        assert {200, 201, 400, 401, 403, 404, 421} <= set(statuses), statuses
        for name in ("cmdline", "environ"):
            assert planted.found_in(Path(f"/proc/{service.pid}/{name}").read_bytes()) == []
    finally:
        service.terminate()
        rest, _ = service.communicate(timeout=30)
    assert planted.found_in(line + rest) == []
    assert planted.found_in(log.read_bytes()) == []
    assert "a session" in planted.secrets


def check_files(planted: Planted) -> None:
    """Neither in the store nor in the data: only in the file that its owner asked for."""
    own = {"admin.token", "agent1.token", "app.token", "late.token", "rescue.token", "rest.token"}
    files = [path for path in planted.path.rglob("*") if path.is_file() and path.name not in own]
    names = {name for name in planted.secrets if name.endswith(".token") or name.startswith("a ")}
    found = [(path, name) for path in files for name in planted.found_in(path.read_bytes()) if name in names]
    assert found == []
    assert "metadata.sqlite" in {path.name for path in files}


def test_no_secret_shows_anywhere(planted: Planted) -> None:
    check_commands(planted)
    check_processes(planted)
    check_service(planted)
    check_logs_and_audit(planted)
    check_files(planted)
