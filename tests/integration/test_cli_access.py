"""Access control from the command line, on real local clusters: the tutorial, denials, revocation, recovery."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cutwater import PermissionDenied, connect, tls_context
from cutwater.admin import local_cluster
from cutwater.admin.access_calls import id_of_token, new_token
from cutwater.admin.cluster_security import save_token
from cutwater.admin.operations import Admin
from cutwater.admin.proven_admin import proven_admin, read_server_key
from cutwater.runtime import processes

pytestmark = pytest.mark.timeout(240)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "access.md"


class Place:
    """A directory with a cluster in ``demo``, in which commands run as a user types them."""

    def __init__(self, path: Path) -> None:
        self.path, self.cluster = path, path / "demo"
        program = path / "bin" / "cutwater"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cutwater.cli "$@"\n')
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}
        self.environment = {**kept, "PATH": f"{program.parent}:{os.environ['PATH']}"}

    def shell(self, line: str, code: int = 0) -> str:
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == code, (line, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def json(self, line: str) -> Any:
        return json.loads(self.shell(f"{line} --dir demo -o json"))

    def stop(self) -> None:
        members = local_cluster.load(self.cluster).processes() if (self.cluster / "cluster.json").exists() else []
        processes.stop([member.pid for member in members if member.pid], 10.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """What the tutorial leaves behind. The page has exactly four commands, and they run as they stand there."""
    heading = "## A secured local cluster and a first restricted producer in four commands\n\n"
    (block,) = re.findall(rf"{heading}```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 4
    place = Place(tmp_path_factory.mktemp("access"))
    # One storage node is enough here, and makes the test quicker.
    place.environment["CUTWATER_CLUSTER_START_STORAGE_NODES"] = "1"
    try:
        started, made, allowed, appended = (place.shell(command) for command in commands)
        assert "access control is enforced" in started
        assert "is in orders-app.token" in made
        assert allowed == "orders-app may append, create topic:orders\n"
        assert "appended 2 records to topic 'orders'" in appended
        yield place
    finally:
        place.stop()


def test_secrets_lie_in_files_for_their_owner_only(secured: Place) -> None:
    for path in (secured.cluster / "admin.token", secured.path / "orders-app.token"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert re.fullmatch(r"cwt_[0-9a-f]{16}_[0-9a-f]{64}\n", path.read_text())
    for path in (secured.cluster / "certificates").glob("*.key"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_restricted_producer_is_refused_elsewhere_with_the_command_that_helps(secured: Place) -> None:
    append = "echo x | cutwater append payments --dir demo --token-file orders-app.token"
    secured.shell("cutwater topic create payments --dir demo")
    # What it may not describe does not exist for it.
    assert "there is no topic 'payments'; topics: orders" in secured.shell(append, code=30)
    told = secured.shell(f"{append} --create", code=40)
    (command,) = re.findall(r"an administrator can, with `(.*)`", told)
    assert command == "cutwater acl allow orders-app create,append topic:payments", "both at once"
    read = "cutwater subscribe orders --dir demo --token-file orders-app.token"
    assert "orders-app lacks the right read on topic:orders" in secured.shell(read, code=40)
    secured.shell("cutwater acl allow orders-app append topic:payments --dir demo")
    for one in (append, f"{append} --create"):
        assert "appended 1 record" in secured.shell(one), "it exists, so it need not be made"
    told = secured.shell(f"{append.replace('payments', 'other')} --create", code=40)
    assert "cutwater acl allow orders-app create,append topic:other" in told
    secured.shell("cutwater acl allow orders-app append topic:other --dir demo")
    told = secured.shell(f"{append.replace('payments', 'other')} --create", code=40)
    assert "cutwater acl allow orders-app create topic:other" in told
    told = secured.shell("cutwater audit search --dir demo --token-file orders-app.token", code=30)
    assert "cutwater acl allow orders-app audit-read cluster" in told
    secured.shell("cutwater acl remove orders-app topic:payments --dir demo")
    assert "there is no topic 'payments'" in secured.shell(append, code=30)


def test_a_limited_view_is_not_told_as_the_whole(secured: Place) -> None:
    restricted = "--dir demo --token-file orders-app.token"
    told = secured.shell(f"cutwater verify {restricted}", code=40)
    assert "orders-app lacks the right cluster-operate on cluster" in told
    assert "nothing was verified" in told
    for command in ("cluster status", "cluster events", "cluster health", "run list"):
        note = "note: what you may not describe is left out"
        told = secured.shell(f"cutwater {command} {restricted}")
        assert (note in told, "all is well" in told) == (True, False), command
        told = secured.shell(f"cutwater {command} --dir demo")
        assert note not in told, command
        json.loads(secured.shell(f"cutwater {command} {restricted} -o json"))
    assert "all is intact" in secured.shell("cutwater verify --dir demo")
    told = secured.shell(f"cutwater doctor {restricted}")
    assert "nothing is wrong with what" in told


def test_a_program_uses_the_token_over_tls(secured: Place) -> None:
    tls = tls_context(secured.cluster / "certificates" / "servers-ca.pem")
    token = (secured.path / "orders-app.token").read_text().strip()
    servers = local_cluster.load(secured.cluster).servers
    with connect(servers, tls=tls, token=token, timeout=30) as log:
        assert log.append("orders", b"cake").glsn > 0
        with pytest.raises(PermissionDenied, match="orders-app lacks the right delete on topic:orders") as denied:
            log.delete_topic("orders")
    assert (denied.value.principal, denied.value.right, denied.value.resource) == (
        *("orders-app", "delete", "topic:orders"),
    )


def test_whoami_names_the_principal_of_the_token_that_is_given(secured: Place) -> None:
    admin = secured.json("cutwater whoami")
    assert (admin["principal"], admin["is_admin"], admin["mode"]) == ("admin", True, "enforced")
    assert (secured.cluster / "admin.token").read_text().startswith(f"cwt_{admin['token']}_")
    other = secured.json("CUTWATER_TOKEN=$(cat orders-app.token) cutwater whoami")
    assert (other["principal"], other["is_admin"]) == ("orders-app", False)
    # The command line is closer than the environment.
    closer = secured.json("CUTWATER_TOKEN=$(cat orders-app.token) cutwater whoami --token-file demo/admin.token")
    assert closer["principal"] == "admin"


def test_rules_groups_quotas_and_principals_are_shown(secured: Place) -> None:
    async def change(admin: Admin) -> None:
        control = admin.control
        await control.create_group("readers", ["ann", "bob"])
        await control.change_group("readers", add=["eve"], remove=["bob"])
        await control.allow("group:readers", ["read"], "topic:orders*")
        await control.set_quota("group:readers", requests_per_s=10)
        assert [group.members for group in await control.groups()] == [("ann", "eve")]
        verdict = await control.check("eve", "read", "topic:orders-eu")
        assert (verdict.is_allowed, str(verdict.rule)) == (True, "group:readers read topic:orders*")
        assert not (await control.check("bob", "read", "topic:orders")).is_allowed
        assert {"ann", "eve", "admin", "orders-app"} <= set(await control.principals())

    administer(secured, change)
    assert "yes: the rule 'group:readers read topic:orders*'" in secured.shell(
        "cutwater acl test ann read topic:orders --dir demo"
    )
    assert "no: no rule gives ann" in secured.shell("cutwater acl test ann append topic:orders --dir demo", code=40)
    told = secured.shell("cutwater principal describe eve --dir demo")
    assert ("groups: readers" in told, "requests_per_s 10" in told) == (True, True)
    assert secured.json("cutwater quota show group:readers") == {
        "subject": "group:readers",
        "limits": {"requests_per_s": 10},
        "used": {"requests_per_s": 0},
    }
    told = secured.shell("cutwater quota show group:readers --dir demo").split()
    assert told[-5:] == ["requests_per_s", "0", "10", "0", "%"], told
    secured.shell("cutwater group delete readers --dir demo")
    assert secured.json("cutwater quota list") == []


def administer(place: Place, work: Callable[[Admin], Any]) -> None:
    async def run() -> None:
        cluster = local_cluster.load(place.cluster)
        access = local_cluster.access_of(place.cluster, cluster)
        async with Admin(cluster.addresses, access=access) as admin:
            await work(admin)

    asyncio.run(run())


def test_a_command_that_was_killed_goes_on_with_its_token(secured: Place) -> None:
    """It was killed after the cluster had made the token, and before the file had its name."""
    begun = secured.path / ".kept.token.begun"
    text = new_token()
    save_token(begun, text)

    async def change(admin: Admin) -> None:
        await admin.control.create_token("kept", text=text, expires_us=round((time.time() + 3_600) * 1_000_000))

    administer(secured, change)
    told = secured.shell("cutwater token create other --save kept.token --dir demo", code=31)
    assert "run that one again" in told
    for code in (0, 31):
        secured.shell("cutwater token create kept --expires 1d --save kept.token --dir demo", code=code)
    assert (secured.path / "kept.token").read_text().strip() == text
    assert not begun.exists()
    assert [one["id"] for one in secured.json("cutwater token list kept")] == [id_of_token(text)]
    assert secured.json("cutwater whoami --token-file kept.token")["principal"] == "kept"
    # A refusal leaves nothing behind.
    secured.shell("cutwater token create 'no name' --save other.token --dir demo", code=2)
    assert list(secured.path.glob("*other.token*")) == []
    made = secured.json(f"cutwater token rotate {id_of_token(text)} --save next.token")
    assert made["id"] in (secured.path / "next.token").read_text()


def test_a_revoked_token_is_refused(secured: Place) -> None:
    made = secured.json("cutwater token create short-lived --expires 1h --scope 'append topic:orders'")
    assert made["token"].startswith(f"cwt_{made['id']}_")
    secured.shell("cutwater acl allow short-lived append,read topic:orders --dir demo")
    secured.environment["SHORT"] = made["token"]
    assert secured.json("CUTWATER_TOKEN=$SHORT cutwater whoami")["principal"] == "short-lived"
    told = secured.shell("CUTWATER_TOKEN=$SHORT cutwater whoami --dir demo")
    assert re.search(r"\n  until:  20\S+ \S+ UTC\n  limited to: append topic:orders\n", told), told
    told = secured.shell("CUTWATER_TOKEN=$SHORT cutwater subscribe orders --dir demo", code=40)
    assert "with wider scopes" in told
    described = secured.shell(f"cutwater token describe {made['id']} --dir demo")
    assert ("limited to: append topic:orders" in described, made["token"] in described) == (True, False)
    told = secured.shell(f"cutwater token revoke {made['id']} {'0' * 16} --dir demo", code=30)
    assert (
        f"there is no token with this id: `cutwater token list` shows those that exist (revoked before: {made['id']})"
        in (told)
    )
    told = secured.shell("CUTWATER_TOKEN=$SHORT cutwater whoami --dir demo", code=32)
    assert ("the token is not known here" in told, made["token"] in told) == (True, False)


def test_doctor_names_lasting_and_unused_tokens(secured: Place) -> None:
    secured.shell("cutwater token create nobody-uses-it --save unused.token --dir demo")
    checks = {(check["name"], check["found"]): check["verdict"] for check in secured.json("cutwater doctor")}
    assert checks["access control", "enforced"] == "ok"
    found = [text for name, text in checks if name == "tokens"]
    assert any("without expiry" in text for text in found)
    assert any("never used" in text for text in found)


def test_it_is_not_turned_on_twice(secured: Place) -> None:
    told = secured.shell("cutwater cluster secure --dir demo", code=32)
    assert "access control is on already (enforced)" in told
    (secured.cluster / "admin.token").rename(secured.path / "kept.token")
    try:
        told = secured.shell("cutwater cluster secure --dir demo", code=32)
        assert "access control is on already (enforced)" in told
    finally:
        (secured.path / "kept.token").rename(secured.cluster / "admin.token")


def test_a_lost_administrator_is_recovered_from_the_store_while_the_cluster_runs(secured: Place) -> None:
    recover = "cutwater mr recover-admin --store sqlite:demo/metadata.sqlite --principal rescue --save rescue.token"
    assert "access control is enforced" in secured.shell(recover)
    whoami = "cutwater whoami --dir demo --token-file rescue.token -o json"

    def is_known() -> bool:
        done = subprocess.run(
            whoami, shell=True, cwd=secured.path, env=secured.environment, capture_output=True, timeout=90, check=False
        )
        return done.returncode == 0 and json.loads(done.stdout)["principal"] == "rescue"

    until(is_known)
    (made,) = secured.json("cutwater token list rescue --token-file rescue.token")
    assert made["creator"] == "_recovery"
    # The cluster goes on.
    append = "echo more | cutwater append orders --dir demo --token-file orders-app.token"
    assert "appended 1 record" in secured.shell(append)
    stopped = "cutwater mr recover-admin --store sqlite:demo/metadata.sqlite --principal again -o json"
    secured.shell("cutwater cluster stop --dir demo")
    made = json.loads(secured.shell(stopped))
    secured.shell("cutwater cluster restart --dir demo")
    secured.environment["AGAIN"] = made["token"]
    assert secured.json("CUTWATER_TOKEN=$AGAIN cutwater whoami")["is_admin"] is True
    assert "no database" in secured.shell("cutwater mr recover-admin --store sqlite:demo/none.sqlite", code=30)


def test_no_secret_is_in_any_file_of_the_servers(secured: Place) -> None:
    tokens = [(secured.cluster / "admin.token").read_text(), (secured.path / "orders-app.token").read_text()]
    secrets = [token.strip().rpartition("_")[2].encode() for token in tokens]
    files = [path for path in secured.cluster.rglob("*") if path.is_file() and path.name != "admin.token"]
    assert {"mr1.log", "sn1.log", "cluster.json", "metadata.sqlite"} <= {path.name for path in files}
    assert [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []


def test_a_running_cluster_is_secured_through_permissive_mode(tmp_path: Path) -> None:
    place = Place(tmp_path)
    try:
        place.shell("cutwater cluster start --dir demo --storage-nodes 1")
        place.shell("echo before | cutwater append orders --create --dir demo")
        assert place.json("cutwater cluster access") == {"mode": "off"}
        assert "only a caller with the key of a metadata node" in place.shell(
            "cutwater token create ann --dir demo", code=32
        )
        told = place.shell("cutwater cluster secure --dir demo --permissive")
        assert "access control is permissive" in told
        assert place.json("cutwater cluster access") == {"mode": "permissive"}
        place.shell("cutwater token create ann --save ann.token --dir demo")
        append = "echo x | cutwater append orders --dir demo --token-file ann.token"
        assert "appended 1 record" in place.shell(append)
        import_tokens(place)
        place.shell("cutwater cluster access enforced --dir demo")
        assert "there is no topic 'orders'" in place.shell(append, code=30)
        assert place.shell("cutwater subscribe orders --dir demo -o value") == "before\nx\n"
        # There is a way back from off, and the same token holds.
        told = place.shell("cutwater cluster access off --dir demo")
        assert "`cutwater cluster secure --dir demo` turns it on again" in told
        told = place.shell("cutwater cluster access enforced --dir demo", code=32)
        (way_back,) = re.findall(r"`(cutwater cluster secure[^`]*)`", told)
        assert "access control is enforced" in place.shell(f"{way_back} --dir demo")
        assert "there is no topic 'orders'" in place.shell(append, code=30)
        assert place.json("cutwater whoami")["principal"] == "admin"
    finally:
        place.stop()


def test_securing_goes_on_after_an_interruption_and_needs_no_token_to_start_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    token = place.cluster / "admin.token"
    try:
        place.shell("cutwater cluster start --dir demo --storage-nodes 1")
        # What a command leaves that was interrupted just before it would have set the mode.
        servers, key = local_cluster.load(place.cluster).addresses, place.cluster / "metadata.sqlite.key"

        async def begin() -> None:
            control = await proven_admin(servers, read_server_key(key), None)
            await control.allow("admin", ("cluster-admin",), "cluster")
            save_token(token, (await control.create_token("admin")).token)

        asyncio.run(begin())
        saved = token.read_text()
        place.shell("cutwater cluster stop --dir demo")
        told = place.shell("cutwater cluster start --dir demo --secure")
        assert "access control is enforced; servers and clients use TLS" in told
        assert token.read_text() == saved
        assert place.shell("cutwater whoami --dir demo").startswith("admin, an administrator\n")

        # The owner keeps the token elsewhere: the cluster is started all the same.
        kept = token.rename(tmp_path / "kept.token")
        place.shell("cutwater cluster stop --dir demo")
        assert "access control is enforced" in place.shell("cutwater cluster start --dir demo --secure")
        assert "stands for no principal" in place.shell("cutwater token list --dir demo", code=40)
        # And so it is with a token that does not hold.
        save_token(token, new_token())
        place.shell("cutwater cluster stop --dir demo")
        place.shell("cutwater cluster start --dir demo")
        assert "the token is not known here" in place.shell("cutwater whoami --dir demo", code=32)
        # To remove the file would be the wrong way out.
        assert "access control is on already" in place.shell("cutwater cluster secure --dir demo", code=32)
        assert "admin.token" not in place.shell("cutwater cluster secure --dir demo --permissive", code=32)
        assert place.shell(f"cutwater whoami --dir demo --token-file {kept}").startswith("admin, an administrator\n")
    finally:
        place.stop()


def test_a_token_of_an_earlier_cluster_does_not_pass_for_access_control(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.cluster.mkdir(0o700)
    save_token(place.cluster / "admin.token", new_token())
    try:
        told = place.shell("cutwater cluster start --dir demo --storage-nodes 1 --secure", code=31)
        assert "admin.token exists already" in told
        assert sorted(path.name for path in place.cluster.iterdir()) == ["admin.token"]
        place.shell("cutwater cluster start --dir demo --storage-nodes 1")
        told = place.shell("cutwater cluster secure --dir demo", code=31)
        assert "admin.token exists already" in told
        cluster = local_cluster.load(place.cluster)
        assert not cluster.has_tls
        # A start that was killed says so.
        cluster.starting = local_cluster.Starter()
        cluster.save(place.cluster)
        assert "`cutwater cluster restart" in place.shell("cutwater cluster secure --dir demo", code=34)
    finally:
        place.stop()


def import_tokens(place: Place) -> None:
    """The names in the file of tokens become principals, with tokens of the cluster in new files."""
    old = place.path / "old.tokens"
    old.write_text("billing a-token-that-nobody-guesses\nann/x another-token-nobody-guesses\n")
    old.chmod(0o600)
    command = "cutwater token import old.tokens --save-in tokens --dir demo"
    assert "'ann/x' cannot be the name of a file" in place.shell(command, code=2)
    assert place.json("cutwater token list billing") == []
    old.write_text("billing a-token-that-nobody-guesses\nmail another-token-nobody-guesses\n")
    told = place.shell(command)
    assert ("for billing is in tokens/billing.token" in told, "a-token" in told) == (True, False)
    again = place.json("cutwater token import old.tokens --save-in tokens")
    assert (again["made"], again["left_out"]) == ([], ["billing", "mail"])
    for name in ("billing", "mail"):
        path = place.path / "tokens" / f"{name}.token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert place.json(f"cutwater whoami --token-file tokens/{name}.token")["principal"] == name


def test_a_key_from_the_disk_of_a_metadata_node_is_needed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    try:
        place.shell("cutwater cluster start --dir demo --storage-nodes 1")
        servers = local_cluster.load(place.cluster).servers
        secure = f"cutwater cluster secure --servers {servers}"
        assert "--key-file is missing" in place.shell(secure, code=2)
        told = place.shell(f"{secure} --key-file nowhere.key", code=2)
        assert "does not exist" in told
        other = next((place.cluster / "sn1").rglob("server-key"))
        told = place.shell(f"{secure} --key-file {other}", code=32)
        assert "no metadata node at these addresses has this private key" in told
        told = place.shell(f"{secure} --key-file demo/metadata.sqlite.key")
        assert ("access control is enforced" in told, "without TLS" in told) == (True, True)
        *_, make, allow = told.splitlines()
        assert "is in orders-app.token" in place.shell(make)
        assert "orders-app may append, create topic:orders" in place.shell(allow)
        told = place.shell(f"cutwater whoami --servers {servers} --token-file admin.token")
        assert told.startswith("admin, an administrator\n")
        assert "give a token" in place.shell(f"cutwater token list --servers {servers}", code=40)
        # It starts again, though no token lies where --dir looks for it.
        place.shell("cutwater cluster stop --dir demo")
        place.shell("cutwater cluster start --dir demo")
        told = place.shell("cutwater whoami --dir demo --token-file admin.token")
        assert told.startswith("admin, an administrator\n")
        assert "give a token" in place.shell("cutwater token list --dir demo", code=40)
    finally:
        place.stop()
