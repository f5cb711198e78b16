"""``cutwater savepoint``, on savepoints that were made without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cutwater.cli.main import app
from tests.unit.savepoints.kit import taken

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            app(["savepoint", *map(str, arguments)])
        told = capsys.readouterr()
        assert ended.value.code == code, told
        return told.out if code == 0 else told.err

    return command


@pytest.fixture
def place(tmp_path: Path) -> Path:
    taken(tmp_path / "s" / "one", 20)
    taken(tmp_path / "s" / "two", 30)
    (tmp_path / "s" / "half").mkdir()
    (tmp_path / "s" / "half" / "unfinished.json").write_text("{}\n")
    return tmp_path / "s"


def test_list_and_describe(run: Run, place: Path) -> None:
    assert f"there is no directory {place / 'nope'}" in " ".join(run("list", place / "nope", code=30).split())
    assert "is itself a savepoint" in " ".join(run("list", place / "one", code=2).split())
    listed = run("list", place)
    assert listed.startswith("savepoint ")
    assert "is a half-written savepoint" in " ".join(listed.split())
    by_name = {one["name"]: one for one in json.loads(run("list", place, "-o", "json"))}
    assert (by_name["one"]["pipeline"], by_name["one"]["glsn"], by_name["half"]["whole"]) == ("pays", 20, False)
    told = run("describe", place / "one")
    assert "of pipeline 'pays'" in told
    assert "last: value int" in " ".join(told.split())
    assert json.loads(run("describe", place / "one", "-o", "json"))["glsn"] == 20
    assert "is no savepoint: it has no manifest.json" in run("describe", place, code=30)
    assert "half-written" in run("describe", place / "half", code=32)


def test_inspect(run: Run, place: Path, tmp_path: Path) -> None:
    told = run("inspect", place / "one")
    assert "operator 'last': 7 keys" in told
    assert "operator 'w': 7 keys\nuser  timers               window start         window end           n  s" in told
    assert "\nu3    1970-01-01 00:00:19  1970-01-01 00:00:10  1970-01-01 00:00:20  2  16" in told
    assert '{"at":"1970-01-01 00:00:03","value":3}' in told
    (row,) = json.loads(run("inspect", place / "one", "--uid", "last", "--key", "u3", "-o", "json"))["last"]
    assert (row["key"], row["state_last"]) == ({"user": "u3"}, 6)
    assert "; the first 2" in run("inspect", place / "one", "--uid", "last", "-n", 2)
    for name in ("rows.parquet", "rows.json"):
        assert name in run("inspect", place / "one", "--uid", "last", "--out", tmp_path / name)
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 7
    assert len((tmp_path / "rows.json").read_text().splitlines()) == 7
    absent = run("inspect", place / "one", "--uid", "last", "--key", "u9", code=30)
    assert "operator 'last' has nothing of the key u9 in this savepoint: it has 7 keys" in absent
    assert "say which operator, with --uid: last, w" in run("inspect", place / "one", "--key", "u3", code=2)
    assert "has no operator 'x': it has last, w" in run("inspect", place / "one", "--uid", "x", code=30)
    assert "say --key 1 times, not 2" in run("inspect", place / "one", "--uid", "last", "--key", 1, "--key", 2, code=2)
    assert "as .parquet or .json" in run("inspect", place / "one", "--out", "rows.csv", code=2)


def test_verify_diff_and_delete(run: Run, place: Path) -> None:
    assert "is intact" in run("verify", place / "one")
    assert "the same state" in run("diff", place / "one", place / "one")
    told = run("diff", place / "one", place / "two")
    assert told.startswith("GLSN +10, watermark ")
    assert "~ operator 'last': 0 keys added, 0 removed, 7 changed" in told
    file = next((place / "one").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "is damaged" in run("verify", place / "one", code=20)
    for name in ("one", "half"):
        assert "deleted" in run("delete", place / name)
    assert sorted(path.name for path in place.iterdir()) == ["two"]
    assert "is no savepoint, so it is not deleted" in run("delete", place, code=30)
