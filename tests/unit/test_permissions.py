"""Modes of what Cutwater makes: directories are their owner's, secrets too, and what others can use is closed."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutwater.errors import InvalidArgument
from cutwater.jobs.job_file import JobDirectory
from cutwater.jobs.locks import lock_checkpoint
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.runtime import permissions
from cutwater.runtime.local_files import make_directory, write_secret
from cutwater.runtime.permissions import check_secret, close_to_others
from cutwater.savepoints.files import LocalFiles
from cutwater.storage.files import OsFiles
from cutwater.storage.volume import NodeVolumes
from cutwater.types import ClusterId, StorageNodeId


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_its_owners_and_those_above_are_as_usual(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o755, 0o700)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0o755, 0o700), (0o777, 0o700), (0o701, 0o700), (0o750, 0o750), (0o770, 0o770), (0o700, 0o700)],
)
def test_a_directory_for_everyone_is_closed_and_one_for_a_group_stays(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "data"
    path.mkdir()
    path.chmod(before)
    make_directory(path)
    assert mode(path) == after


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o640), (0o666, 0o640), (0o600, 0o600), (0o640, 0o640)])
def test_a_file_for_everyone_is_closed(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(before)
    close_to_others(path)
    assert mode(path) == after
    close_to_others(tmp_path / "missing")


def test_what_belongs_to_another_user_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    path.chmod(0o755)
    another = os.geteuid() + 1
    monkeypatch.setattr(permissions.os, "geteuid", lambda: another)
    with caplog.at_level(logging.WARNING):
        close_to_others(path)
    assert mode(path) == 0o755
    assert f"chmod 700 {path}" in caplog.text


@pytest.mark.parametrize(
    ("directory", "file"), [(0o700, 0o600), (0o750, 0o640), (0o770, 0o640), (0o755, 0o600), (0o711, 0o600)]
)
def test_a_secret_is_the_groups_exactly_if_its_directory_is(tmp_path: Path, directory: int, file: int) -> None:
    tmp_path.chmod(directory)
    (tmp_path / "secret.new").write_text("left behind, and readable by all")
    write_secret(tmp_path / "secret", b"x")
    assert (mode(tmp_path / "secret"), (tmp_path / "secret").read_bytes()) == (file, b"x")
    assert not (tmp_path / "secret.new").exists()
    write_secret(tmp_path / "private key", b"x", is_lasting=True)
    assert mode(tmp_path / "private key") == 0o600


def test_a_secret_that_others_can_use_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch()
    for wrong in (0o644, 0o640, 0o620, 0o602):
        path.chmod(wrong)
        with pytest.raises(InvalidArgument, match=rf"{path}, a key, .*mode {wrong:04o}.*chmod 600 {path}"):
            check_secret(path, "a key")
    for right in (0o600, 0o400):
        path.chmod(right)
        check_secret(path, "a key")
    check_secret(tmp_path / "missing", "a key")


def test_files_of_jobs_checkpoints_and_savepoints_are_their_owners(tmp_path: Path) -> None:
    jobs = JobDirectory(tmp_path / "jobs", "p")
    jobs.lock().release()
    checkpoint = tmp_path / "checkpoint"
    lock = lock_checkpoint(str(checkpoint))
    assert lock is not None
    lock.release()
    savepoint = tmp_path / "savepoints" / "1"
    LocalFiles().write(str(savepoint / "manifest.json"), b"{}")
    assert [mode(path) for path in (jobs.path, checkpoint, savepoint)] == [0o700] * 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and mode(path) & 0o027]


def test_files_of_servers_are_their_owners(tmp_path: Path) -> None:
    SqliteDatabase(tmp_path / "metadata.sqlite", ClusterId(1)).close()
    volume = tmp_path / "volume"
    volume.mkdir()
    NodeVolumes([volume], ClusterId(1), StorageNodeId(1)).release()
    made = OsFiles().create(volume / "file").path
    assert mode(volume) == 0o755, "the volume is the operator's"
    assert mode(volume / "cid=1") == mode(volume / "cid=1" / "snid=1") == 0o700
    assert mode(made) == 0o640
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and mode(path) & 0o027]


def test_those_of_earlier_versions_are_closed(tmp_path: Path) -> None:
    node = tmp_path / "cid=1" / "snid=1"
    node.mkdir(parents=True)
    (tmp_path / "metadata.sqlite").touch()
    NodeVolumes([tmp_path], ClusterId(1), StorageNodeId(1)).release()
    SqliteDatabase(tmp_path / "metadata.sqlite", ClusterId(1)).close()
    assert (mode(node), mode(node.parent), mode(tmp_path / "metadata.sqlite")) == (0o700, 0o700, 0o640)
