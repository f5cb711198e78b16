"""When a token may be used in a Spark application, and where it lies meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutwater.client.cluster.credentials import token_access
from cutwater.errors import InvalidArgument, Refused
from cutwater.runtime.local_files import write_secret
from cutwater.spark.options import where_of
from cutwater.spark.session.token_safety import file_of, refuse_tokens_in, refuse_unprotected, why_no_tokens

SERVERS = "cutwater://127.0.0.1:7000"
PROTECTED = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "TRUE",
    "spark.io.encryption.enabled": "true",
}
TOKEN = "cwt_0123456789abcdef_" + "5" * 64


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"spark.master": "local"}, ""),
        ({"spark.master": "local[*]"}, ""),
        ({"spark.master": "local[4,2]"}, ""),
        (PROTECTED | {"spark.master": "local-cluster[1,1,1024]"}, ""),
        (PROTECTED | {"spark.master": "spark://db1:7077", "spark.network.crypto.enabled": "false"},
         "with spark.network.crypto.enabled=true, as"),
        (PROTECTED | {"spark.master": "yarn", "spark.network.crypto.enabled": "", "spark.ssl.rpc.enabled": "true"}, ""),
        (PROTECTED | {"spark.master": "k8s://https://a", "spark.authenticate": ""}, "with spark.authenticate=true, as"),
        (PROTECTED | {"spark.master": "yarn", "spark.io.encryption.enabled": "no"},
         "with spark.io.encryption.enabled=true, as"),
        ({"spark.master": "local-cluster[1,1,1024]"},
         "with spark.authenticate=true, spark.network.crypto.enabled=true, spark.io.encryption.enabled=true, as"),
        ({}, "an unknown master"),
    ],
)  # fmt: skip
def test_other_processes_have_to_be_protected(settings: dict[str, str], missing: str) -> None:
    why = why_no_tokens(settings)
    assert missing in why
    assert bool(missing) == bool(why)


def test_only_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUTWATER_TOKEN", "CUTWATER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    plain, secured = where_of({"servers": SERVERS}), where_of({"servers": SERVERS, "token.file": "/t"})
    refuse_unprotected(plain, "why")
    refuse_unprotected(secured, "")
    with pytest.raises(Refused, match="why"):
        refuse_unprotected(secured, "why")
    monkeypatch.setenv("CUTWATER_TOKEN", TOKEN)
    with pytest.raises(Refused, match="why"):
        refuse_unprotected(plain, "why")


def test_a_token_is_no_setting_of_spark() -> None:
    refuse_tokens_in({"spark.executorEnv.CUTWATER_TOKEN_FILE": "/etc/cutwater/app.token"})
    with pytest.raises(
        InvalidArgument, match=r"the setting 'spark\.executorEnv\.X' of Spark contains a token"
    ) as raised:
        refuse_tokens_in({"spark.executorEnv.X": f"-Dtoken={TOKEN}"})
    assert TOKEN not in str(raised.value)


def test_a_text_becomes_a_file_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"spark.master": "local[2]"}
    path = Path(file_of(TOKEN, here))
    assert (path.read_text(), path.stat().st_mode & 0o777) == (f"{TOKEN}\n", 0o600)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert TOKEN not in str(path)
    assert file_of(TOKEN, {"spark.master": "local-cluster[1,1,1024]"}) == str(path)
    assert file_of("", {"spark.master": "yarn"}) == ""
    with pytest.raises(InvalidArgument, match="Spark runs on yarn: put it into a file at the same path") as raised:
        file_of(TOKEN, {"spark.master": "yarn"})
    assert TOKEN not in str(raised.value)
    monkeypatch.chdir(tmp_path)
    assert file_of(Path("app.token"), {"spark.master": "yarn"}) == str(tmp_path / "app.token")


def test_a_token_is_a_text_or_a_path() -> None:
    with pytest.raises(InvalidArgument, match="neither a text nor a path") as raised:
        token_access(None, TOKEN.encode(), insecure=False)
    assert TOKEN not in str(raised.value)


def test_a_token_file_may_be_replaced_while_it_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    access = token_access(None, file, insecure=False)
    with pytest.raises(InvalidArgument, match="does not exist"):
        access.shown_token()
    write_secret(file, TOKEN.encode() + b"\n")
    assert access.shown_token() == TOKEN
    # ``cp new token`` empties the file first; others remove it and make it again.
    file.write_bytes(b"")
    assert access.shown_token() == TOKEN
    file.unlink()
    assert access.shown_token() == TOKEN
    write_secret(file, b"another-token-in-its-place\n")
    assert access.shown_token() == "another-token-in-its-place"
    assert "another" not in repr(access)
    file.write_bytes(b"")
    with pytest.raises(InvalidArgument, match="holds no token"):
        token_access(None, file, insecure=False).shown_token()
