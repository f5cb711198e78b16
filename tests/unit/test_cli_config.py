"""``cutwater.toml``: what it may say, what counts most, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutwater.cli import main
from cutwater.cli.framework import config_file
from cutwater.cli.framework.config_file import Setting
from cutwater.errors import InvalidArgument

NAMES = frozenset(main.ENTRIES)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's file; the current directory is another."""
    found = tmp_path / "config" / "cutwater"
    found.mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(config_file.VARIABLE, raising=False)
    return found


def settings(*words: str) -> dict[str, Setting]:
    command = main.load(words[0])
    for word in words[1:]:
        command = command.commands[word]
    return config_file.settings(config_file.read(NAMES), command, words)


def test_without_files_nothing_is_set(home: Path) -> None:
    assert config_file.read(NAMES) == ()
    assert settings("append") == {}


def test_the_nearer_file_and_the_commands_own_table_count_more(home: Path) -> None:
    (home / "cutwater.toml").write_text('timeout = 5\noutput = "json"\n[append]\ntimeout = 6\ncreate = true\n')
    Path("cutwater.toml").write_text("timeout = 7\n[topic.create]\nstreams = 3\n")
    own = f"{home / 'cutwater.toml'}"
    assert settings("append") == {
        "timeout": Setting(7, "cutwater.toml"),
        "output": Setting("json", own),
        "create": Setting(True, f"{own} [append]"),
    }
    assert settings("topic", "create")["streams"] == Setting(3, "cutwater.toml [topic.create]")
    topic = config_file.default_map(config_file.read(NAMES), main.load("topic"), ("topic",))
    assert topic["create"] == {"timeout": 7, "output": "json", "streams": 3}
    assert topic["list"] == {"timeout": 7, "output": "json"}


def test_whoever_names_a_place_takes_back_the_one_that_was_named_further_away(home: Path) -> None:
    (home / "cutwater.toml").write_text('servers = "cutwater://far:1"\n[tail]\ndir = "nearer"\n')
    Path("cutwater.toml").write_text('path = "here"\n[find]\nservers = "cutwater://own:1"\n')
    assert settings("tail") == {"path": Setting("here", "cutwater.toml")}
    assert settings("find") == {"servers": Setting("cutwater://own:1", "cutwater.toml [find]")}
    # A command without --path does not lose what it has for it.
    assert settings("stream", "seal")["servers"].value == "cutwater://far:1"


def test_one_file_can_be_named_instead(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cutwater.toml").write_text("timeout = 7\n")
    Path("other.toml").write_text("debug = true\n")
    monkeypatch.setenv(config_file.VARIABLE, "other.toml")
    assert settings("tail") == {"debug": Setting(True, "other.toml")}
    monkeypatch.setenv(config_file.VARIABLE, "none.toml")
    with pytest.raises(InvalidArgument, match=r"none\.toml cannot be read"):
        settings("tail")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("servrs = 'x'", "nothing is called 'servrs'; options of all commands are debug, dir"),
        ("append = 3", "'append' is a command: write a table [append]"),
        ("timeout = 'soon'", "timeout = 'soon' is invalid: Expected `float`, got `str`"),
        ("[append]\ncrate = true", "cutwater.toml [append]: there is no option 'crate'; there are create, debug"),
        ("[append]\ncreate = 1", "create = 1 is invalid: Expected `bool`, got `int`"),
        ("[append]\nformat = 'xml'", "format = 'xml' is invalid: Invalid enum value 'xml'"),
        ("[append]\ntimeout = [1]", "timeout = [1] is invalid"),
        ("this is not TOML", "cutwater.toml cannot be read as configuration"),
    ],
)
def test_what_cannot_be_is_refused_and_says_what_can(home: Path, text: str, told: str) -> None:
    Path("cutwater.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(told)):
        settings("append")


def shown(*args: str) -> str:
    return CliRunner().invoke(main.app, ["config", "show", *args]).output


@pytest.mark.parametrize(
    ("text", "variables", "told"),
    [
        ("timeout = nan", {}, "cutwater.toml: timeout = nan is invalid: Input should be greater than or equal to 0.1"),
        ("", {"CUTWATER_TIMEOUT": "abc"}, "CUTWATER_TIMEOUT: timeout = 'abc' is invalid: Input should be a valid"),
        ("path = 'a'\ndir = 'b'", {}, "--dir and --path each name a log, and several were said in cutwater.toml"),
        ("", {"CUTWATER_PATH": "a", "CUTWATER_DIR": "b"}, "CUTWATER_DIR and CUTWATER_PATH are set, and each names"),
    ],
)
def test_what_commands_refuse_is_not_shown_as_if_it_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str, variables: dict[str, str], told: str
) -> None:
    Path("cutwater.toml").write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert f"error: {told}" in shown()


@pytest.mark.parametrize("text", ['token = "secret-secret"', '[topic.create]\ntoken = "secret-secret"'])
def test_a_file_with_a_token_is_for_its_owner_only(home: Path, text: str) -> None:
    path = Path("cutwater.toml")
    path.write_text(text)
    path.chmod(0o640)
    told = shown()
    assert "cutwater.toml, a configuration with a token, can be used by other users" in told
    assert "secret-secret" not in told
    path.chmod(0o600)
    assert "(secret)" in shown()
    path.write_text('token-file = "own.token"')
    path.chmod(0o644)
    assert "own.token" in shown()


def test_programs_get_values_as_they_are(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cutwater.toml").write_text('path = "far"\n[append]\ncreate = true\n[sn.start]\nvolumes = ["a", "b"]\n')
    monkeypatch.setenv("CUTWATER_TOPIC_CREATE_STREAMS", "4")
    monkeypatch.setenv("CUTWATER_TOKEN", "t")
    found = {one["option"]: one["value"] for one in json.loads(shown("-o", "json"))}
    assert found == {"create": True, "path": "far", "streams": 4, "token": "(secret)", "volumes": ["a", "b"]}
    # Who names a log closer takes back the one that was named further away.
    monkeypatch.setenv("CUTWATER_DIR", "near")
    assert "far" not in shown()


def test_a_home_that_may_not_be_looked_into_has_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: object, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "stat", stat)
    assert config_file.read(NAMES) == ()


def test_a_noun_takes_tables_of_its_commands_only(home: Path) -> None:
    Path("cutwater.toml").write_text("[topic]\nstreams = 3\n")
    with pytest.raises(InvalidArgument, match=r"\[topic\] takes tables for change, create, .*, not 'streams'"):
        config_file.default_map(config_file.read(NAMES), main.load("topic"), ("topic",))


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    for name, entry in main.ENTRIES.items():
        command = main.load(name)
        assert command.help.partition("\n")[0] == entry.help, name


def test_every_command_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    for name in main.ENTRIES:
        verbs = getattr(main.load(name), "commands", None)
        for words in [name] if verbs is None else [f"{name} {verb}" for verb in verbs]:
            assert re.search(rf"`(cutwater )?{words}\b", text), words
