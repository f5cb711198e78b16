"""Directories that the log makes are durable before it is used, whatever process made them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cutwater.runtime.local_files import MachineFiles, make_directory, make_if_missing


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """Which directories were synced, and the names that were in them then."""
    done: list[tuple[Path, list[str]]] = []
    sync = MachineFiles.sync_dir

    def noted(self: MachineFiles, path: Path) -> None:
        done.append((path, sorted(os.listdir(path))))
        sync(self, path)

    monkeypatch.setattr(MachineFiles, "sync_dir", noted)
    return done


def test_the_names_of_new_directories_are_synced(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    assert synced[-3:] == [(tmp_path, ["a"]), (tmp_path / "a", ["b"]), (tmp_path / "a" / "b", ["c"])]


def test_the_name_of_a_directory_is_synced_that_another_process_may_have_just_made(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    (tmp_path / "a").mkdir()
    assert not make_if_missing(tmp_path / "a")
    assert synced == [(tmp_path, ["a"])]
    assert make_if_missing(tmp_path / "a" / "b")
    assert synced[1:] == [(tmp_path, ["a"]), (tmp_path / "a", ["b"])]


def test_a_directory_that_may_not_be_read_holds_directories_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: MachineFiles, path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(MachineFiles, "sync_dir", refuses)
    make_directory(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_a_sync_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: MachineFiles, path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(MachineFiles, "sync_dir", fails)
    with pytest.raises(OSError, match="Input/output error"):
        make_directory(tmp_path / "a")


def test_a_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "a")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "a" / "b")
