"""Where Spark is found: links to what is installed, without the archive that each process would compile anew."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest

from cutwater.spark.session.spark_home import provide_home

INSTALLED = Path(pyspark.__file__).resolve().parent


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_HOME", "to be restored")
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_links_lead_to_what_is_installed() -> None:
    provide_home()
    home = Path(os.environ["SPARK_HOME"])
    assert (home / "jars").resolve() == INSTALLED / "jars"
    assert (home / "bin" / "spark-submit").is_file()
    assert not (home / "python").exists()


def test_what_is_there_is_used_again_and_what_leads_elsewhere_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provide_home()
    home = Path(os.environ["SPARK_HOME"])
    before = (home / "bin").lstat().st_ino
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path)
    monkeypatch.delenv("SPARK_HOME")
    provide_home()
    assert Path(os.environ["SPARK_HOME"]) == home
    assert (home / "bin").lstat().st_ino == before
    assert (home / "jars").resolve() == INSTALLED / "jars"
    assert sorted(path.name for path in home.iterdir()) == ["bin", "jars"]


def test_a_spark_that_someone_chose_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    provide_home()
    assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert not list(tmp_path.iterdir())


def test_without_a_place_for_links_spark_is_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    provide_home()
    assert "SPARK_HOME" not in os.environ
