"""Access control on the command line: what is parsed, where tokens come from, and the recovery of an administrator."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cutwater.admin.access_calls import AccessCalls, CreatedToken, checked_id, new_token, parse_mode, parse_scope
from cutwater.admin.access_checks import check_tokens
from cutwater.admin.certificate_builder import AuthorityKind, issue_server
from cutwater.admin.certificate_rules import parse_certificate_rules
from cutwater.admin.cluster_certificates import (
    HOSTS,
    make_certificates,
    owner_access,
    server_flags,
)
from cutwater.admin.cluster_security import save_token
from cutwater.admin.doctor import Verdict
from cutwater.admin.private_authority import CertificatePaths, load_authority, make_authorities, now, write_issued
from cutwater.admin.proven_admin import proven_admin, read_server_key
from cutwater.cli.commands.quota import parse_amount
from cutwater.cli.commands.token import parse_expiry
from cutwater.cli.framework import config_file, security
from cutwater.cli.framework.security import Security
from cutwater.client.cluster.credentials import read_token_file, token_access
from cutwater.client.cluster.log_directory import FILES_OF_CLUSTER, other_files
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_handling import decide_access
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.principals import LOCAL_ADMIN, CertificateRule, token_hash, token_id
from cutwater.core.access.rights import RIGHTS_OF_KIND, THE_CLUSTER, parse_pattern
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import OrderState
from cutwater.core.requests import Request
from cutwater.errors import AlreadyExists, CutwaterError, Fenced, InvalidArgument, NotFound, Refused, Unavailable
from cutwater.metadata.admin_recovery import RECOVERY, recover_admin
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.types import ClusterId, CutTime, MetadataNodeId
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.server_keys import ServerKey

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOW_US = round(NOW.timestamp()) * 1_000_000


# Parsing.


@pytest.mark.parametrize(
    ("text", "later"),
    [("90d", timedelta(days=90)), ("1h30m", timedelta(minutes=90)), ("2026-02-01T00:00Z", timedelta(hours=12))],
)
def test_an_expiry_is_how_long_from_now_or_a_time(text: str, later: timedelta) -> None:
    assert parse_expiry(text, NOW) == NOW_US + later // timedelta(microseconds=1)


@pytest.mark.parametrize("text", ["2026-01-30", "-1h", "0s", "soon", "90", "never"])
def test_an_expiry_that_is_past_or_unclear_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_expiry(text, NOW)
    told = refused.value.message
    assert "--expires is" in told
    assert "ago" not in told
    if text in ("soon", "90", "never"):
        assert "such as '90d' or '12h'" in told


def test_an_expiry_after_the_year_9999_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"--expires is '4000000d', which is after the year 9999"):
        parse_expiry("4000000d", NOW)


@pytest.mark.parametrize(
    ("text", "amount"), [("500", 500), ("20MB", 20_000_000), ("1GiB", 2**30), ("3 kib", 3 * 1024), ("7m", 7_000_000)]
)
def test_amounts_have_units(text: str, amount: int) -> None:
    assert parse_amount(text, "--bytes-in") == amount


@pytest.mark.parametrize("text", ["", "fast", "1.5MB", "-3", "10 MB/s"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--bytes-in is"):
        parse_amount(text, "--bytes-in")


def test_a_scope_is_rights_and_a_resource() -> None:
    scope = parse_scope("describe,append topic:orders*")
    assert (scope.rights, scope.pattern) == (("append", "describe"), parse_pattern("topic:orders*"))
    for text in ("append", "append topic:a topic:b", "publish topic:orders", "append topic:", "fly cluster"):
        with pytest.raises(InvalidArgument):
            parse_scope(text)


def test_a_whole_token_is_no_id_and_is_not_repeated() -> None:
    token = new_token()
    with pytest.raises(InvalidArgument) as refused:
        checked_id(token)
    assert token not in refused.value.message
    assert checked_id(token_id(token) or "") == token_id(token)
    assert token not in repr(CreatedToken("1" * 16, "ann", 0, token))


def test_a_mode_is_one_of_three() -> None:
    assert parse_mode("permissive") is AccessMode.PERMISSIVE
    with pytest.raises(InvalidArgument, match="modes: off, permissive, enforced"):
        parse_mode("on")


def test_certificate_rules_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("# ours\n\ncn *.apps.example {1}\nsan URI:spiffe://a/ops ops\n")
    assert parse_certificate_rules(path) == (
        CertificateRule("cn", "*.apps.example", "{1}"),
        CertificateRule("san", "URI:spiffe://a/ops", "ops"),
    )
    path.write_text("cn *\n")
    with pytest.raises(InvalidArgument, match="line 1"):
        parse_certificate_rules(path)
    path.write_text("cn * a\nou * b\n")
    with pytest.raises(InvalidArgument, match="line 2: 'ou' is no part"):
        parse_certificate_rules(path)


# Where tokens come from.


def test_a_file_with_a_token_is_for_its_owner_only(tmp_path: Path) -> None:
    path, token = tmp_path / "token", new_token()
    save_token(path, token)
    assert (path.stat().st_mode & 0o777, read_token_file(path)) == (0o600, token)
    with pytest.raises(AlreadyExists, match="exists already"):
        save_token(path, token)
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match="can be used by other users") as refused:
        read_token_file(path)
    assert token not in refused.value.message
    path.chmod(0o600)
    path.write_text("two words\n")
    with pytest.raises(InvalidArgument, match="holds no token") as refused:
        read_token_file(path)
    assert "two words" not in refused.value.message
    with pytest.raises(InvalidArgument, match="does not exist"):
        read_token_file(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="is no directory"):
        save_token(tmp_path / "none" / "token", token)
    with pytest.raises(InvalidArgument, match="cannot be kept"):
        save_token(tmp_path / ("x" * 255), token)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("token_from", "file_from", "counts"),
    [
        ("COMMANDLINE", "ENVIRONMENT", "token"),
        ("ENVIRONMENT", "COMMANDLINE", "file"),
        ("ENVIRONMENT", "DEFAULT_MAP", "token"),
        ("DEFAULT_MAP", "ENVIRONMENT", "file"),
        ("ENVIRONMENT", "ENVIRONMENT", "neither"),
    ],
)
def test_the_closest_token_counts(
    token_from: str, file_from: str, counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_token(tmp_path / "token", "of-file")
    monkeypatch.setattr(security, "_said", {"token": token_from, "token_file": file_from})
    given = Security(token="of-token", token_file=tmp_path / "token")
    if counts == "neither":
        with pytest.raises(InvalidArgument, match="both given in the same place"):
            given.shown_token()
    else:
        assert given.shown_token() == f"of-{counts}"
    assert Security(token="alone").access().token == "alone"
    # As `--token "$(< file)"` and `open(file).read()` give it.
    assert Security(token="alone\n").access().token == "alone"
    assert token_access(None, "alone\r\n", insecure=False).token == "alone"
    assert "of-token" not in repr(given)


def test_a_token_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security.getpass, "getpass", lambda prompt: " typed ")
    assert Security(token_file=Path("-")).shown_token() == "typed"

    def no_terminal(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr(security.getpass, "getpass", no_terminal)
    with pytest.raises(InvalidArgument, match="no terminal"):
        Security(token_file=Path("-")).shown_token()


def test_token_in_a_configuration_is_an_option_or_the_table_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cutwater.toml"
    monkeypatch.setenv("CUTWATER_CONFIG", str(path))
    path.touch(0o600)
    path.write_text('token = "secret-secret-secret"\n')
    (file,) = config_file.read({"token"})
    assert config_file._table(file, ("token", "create")) == {}
    path.write_text('[token.create]\nexpires = "90d"\n')
    (file,) = config_file.read({"token"})
    assert config_file._table(file, ("token", "create")) == {"expires": "90d"}


# Certificates and proofs.


def test_certificates_of_a_local_cluster_are_made_once(tmp_path: Path) -> None:
    servers = [ServerName(1, METADATA_NODE, 1), ServerName(1, STORAGE_NODE, 1)]
    make_certificates(tmp_path, servers)
    folder = tmp_path / "certificates"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"mr1.pem", "sn1.key", "admin.pem", "servers-ca.pem", "clients-ca.key"} <= before.keys()
    make_certificates(tmp_path, [*servers, ServerName(1, STORAGE_NODE, 2)])
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"sn2.pem", "sn2.key"}
    flags = server_flags(tmp_path, servers[1])
    assert flags[:2] == ["--tls-certificate", str(folder / "sn1.pem")]
    assert all(Path(path).exists() for path in flags[1::2])
    assert owner_access(tmp_path).token == ""
    save_token(tmp_path / "admin.token", "of-the-owner")
    assert (owner_access(tmp_path).token, owner_access(tmp_path, "other").token) == ("of-the-owner", "other")


def test_certificates_of_a_local_cluster_are_replaced_before_they_expire(tmp_path: Path) -> None:
    servers = [ServerName(1, METADATA_NODE, 1), ServerName(1, STORAGE_NODE, 1)]
    make_certificates(tmp_path, servers)
    folder = tmp_path / "certificates"
    old = issue_server(load_authority(folder, AuthorityKind.SERVERS), servers[1], HOSTS, now=now(), days=29)
    write_issued(CertificatePaths(folder / "sn1.pem", folder / "sn1.key"), old, replace=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    make_certificates(tmp_path, servers)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"sn1.pem", "sn1.key"}
    # With nothing to issue, the keys of the authorities may be elsewhere.
    for kind in AuthorityKind:
        (folder / f"{kind}-ca.key").unlink()
    make_certificates(tmp_path, servers)


def test_an_interruption_leaves_no_half_of_an_authority(tmp_path: Path) -> None:
    half = tmp_path / "certificates.new"
    make_authorities(half)
    (half / "clients-ca.pem").unlink()
    assert other_files(tmp_path, FILES_OF_CLUSTER) == ""
    make_certificates(tmp_path, [ServerName(1, METADATA_NODE, 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["certificates"]
    assert (tmp_path / "certificates").stat().st_mode & 0o777 == 0o700
    load_authority(tmp_path / "certificates", AuthorityKind.CLIENTS)


def test_a_cluster_off_loopback_without_tls_is_not_secured() -> None:
    with pytest.raises(Refused, match=r"10\.1\.2\.3:7001 is not on this machine alone"):
        asyncio.run(proven_admin(["127.0.0.1:7001", "10.1.2.3:7001"], ServerKey.generate(), None))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mr.key"
    with pytest.raises(InvalidArgument, match="does not exist"):
        read_server_key(path)
    key = ServerKey.generate()
    path.write_bytes(key.to_pem())
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match="can be used by other users"):
        read_server_key(path)
    path.chmod(0o600)
    assert read_server_key(path).public == key.public


# Calls.


def test_lists_are_asked_for_page_by_page() -> None:
    state = AccessState()
    local = RequestOrigin(LOCAL_ADMIN)
    asked: list[str] = []

    async def ask(request: Request, expected: type, *, idempotent: bool = True) -> object:
        assert isinstance(request, q.AccessRequest)
        asked.append(type(request).__name__)
        decisions, answer = decide_access(request, state, CutTime(NOW_US), local)
        for decision in decisions:
            state.apply(decision, CutTime(NOW_US))
        assert isinstance(answer, expected)
        return answer

    async def run() -> None:
        calls = AccessCalls(ask)  # type: ignore[arg-type]
        count = q.PAGE_MAX + 5
        for number in range(count):
            await calls.allow(f"p{number}", ["append"], "topic:orders")
        asked.clear()
        assert len(await calls.rules()) == len(await calls.principals()) == count
        assert asked == ["ListRulesRequest"] * 2 + ["ListPrincipalsRequest"] * 2
        made = await calls.create_token("p0")
        (known,) = await calls.tokens()
        assert (known.id, known.principal) == (made.id, "p0")
        assert state.tokens[made.id].sha256 == token_hash(made.token)
        with pytest.raises(NotFound, match="has no quota of its own"):
            await calls.quota("p0")

    asyncio.run(run())


def test_whoami_tells_what_the_connection_has_proved() -> None:
    state = AccessState()

    def ask(request: q.AccessRequest, origin: RequestOrigin | None) -> q.AccessAnswer:
        decisions, answer = decide_access(request, state, CutTime(NOW_US), origin)
        for decision in decisions:
            state.apply(decision, CutTime(NOW_US))
        return answer

    local = RequestOrigin(LOCAL_ADMIN)
    assert ask(q.WhoAmIRequest(), None) == q.WhoAmI("", "", (), AccessMode.OFF)
    ask(q.AllowRequest("ann", ("cluster-admin",), THE_CLUSTER), local)
    ask(q.CreateTokenRequest("0" * 16, "0" * 64, "ann"), local)
    ask(q.CreateGroupRequest("ops", ("ann",)), local)
    ask(q.SetAccessModeRequest(AccessMode.ENFORCED), local)
    told = ask(q.WhoAmIRequest(), RequestOrigin("ann", "r1", "0" * 16))
    assert told == q.WhoAmI("ann", "0" * 16, ("ops",), AccessMode.ENFORCED, is_admin=True)
    assert ask(q.WhoAmIRequest(), RequestOrigin("bob")) == q.WhoAmI("bob", "", (), AccessMode.ENFORCED)


def test_doctor_tells_tokens_that_may_be_forgotten() -> None:
    def info(number: int, expires: int, day: int) -> q.TokenInfo:
        return q.TokenInfo(f"{number:016}", "ann", (), CutTime(expires), "", CutTime(0), day)

    (good,) = check_tokens([info(1, 5, 20_000)])
    assert good.verdict is Verdict.OK
    lasting, unused = check_tokens([info(1, 0, 20_000), info(2, 5, 0)])
    assert (lasting.found, lasting.verdict) == ("1 token (0000000000000001) without expiry", Verdict.NOTE)
    assert unused.found == "1 token (0000000000000002) never used"


# Recovery.


def test_an_administrator_is_recovered_beside_the_process_that_has_the_database(tmp_path: Path) -> None:
    path, cluster, token = tmp_path / "metadata.sqlite", ClusterId(3), new_token()
    identifier, sha256 = token_id(token) or "", token_hash(token)

    async def run() -> None:
        store = await SqliteStore.open(path, cluster)
        try:
            with pytest.raises(Unavailable, match="never had a leader"):
                await recover_admin(f"sqlite:{path}", cluster, "ann", identifier, sha256)
            epoch = await store.acquire(MetadataNodeId(1), "127.0.0.1:1", (await store.leader()).epoch)
            before = await store.load()
            made = await recover_admin(f"sqlite:{path}", cluster, "ann", identifier, sha256)
            assert (made.is_running, made.mode) == (True, "off")
            with pytest.raises(Fenced):
                await store.append(epoch, before.snapshot.index, ())
            after = await store.load()
            # It finds itself named as the leader, and so leads again at once.
            assert (after.leader.node, after.leader.address) == (MetadataNodeId(1), "127.0.0.1:1")
            access = OrderState(after.snapshot, after.decisions).access
            assert access.admins() == {"ann"}
            assert (access.tokens[identifier].sha256, access.tokens[identifier].creator) == (sha256, RECOVERY)
            assert await store.acquire(MetadataNodeId(1), "127.0.0.1:1", after.leader.epoch) == after.leader.epoch + 1
        finally:
            await store.close()
        other = new_token()
        made = await recover_admin(f"sqlite:{path}", cluster, "ann", token_id(other) or "", token_hash(other))
        assert not made.is_running
        wrong: list[tuple[str, type[CutwaterError]]] = [
            ("memory:", InvalidArgument),
            (f"sqlite:{tmp_path}/none", NotFound),
        ]
        for url, error in wrong:
            with pytest.raises(error):
                await recover_admin(url, cluster, "ann", identifier, sha256)
        with pytest.raises(InvalidArgument, match="cannot be the name of a principal"):
            await recover_admin(f"sqlite:{path}", cluster, "_recovery", identifier, sha256)

    asyncio.run(run())


# Documentation.


def test_the_table_of_rights_in_the_docs_is_the_one_in_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "access.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| kind \| rights \|\n\| --- \| --- \|\n((?:\|.*\|\n)+)", page)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]
    assert rows == [(str(kind), ", ".join(rights)) for kind, rights in RIGHTS_OF_KIND.items()]
