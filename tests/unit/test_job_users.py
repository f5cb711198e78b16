"""Directories of jobs that are given to system users, by an agent that runs as root: nothing else is given away."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cutwater.agent.processes.job_users import OwnPlace, SystemUser, find_users, give_place

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def user() -> SystemUser:
    return find_users(("daemon",))[0]


def test_a_directory_is_made_and_given_with_all_that_is_in_it(tmp_path: Path, user: SystemUser) -> None:
    kept = tmp_path / "fraud" / "epoch-1"
    kept.mkdir(parents=True)
    (kept / "state").write_text("x")
    give_place(OwnPlace(tmp_path, "fraud"), user)
    give_place(OwnPlace(tmp_path, "new/one"), user)
    given = (tmp_path / "fraud", kept, kept / "state", tmp_path / "new" / "one")
    assert [path.stat().st_uid for path in given] == [user.uid] * 4
    assert (tmp_path / "fraud").stat().st_mode & 0o777 == 0o711
    assert (tmp_path.stat().st_uid, (tmp_path / "new").stat().st_uid) == (0, 0)


def test_no_link_leads_the_agent_to_files_of_others(tmp_path: Path, user: SystemUser) -> None:
    """A job can put anything into its directory, such as a link in the place of a savepoint."""
    system, root = tmp_path / "etc", tmp_path / "root"
    system.mkdir(mode=0o700)
    (system / "shadow").write_text("secret")
    job = root / "fraud"
    job.mkdir(parents=True)
    (job / "savepoint").symlink_to(system)
    for below in ("fraud/savepoint", "fraud/savepoint/deeper"):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            give_place(OwnPlace(root, below), user)
    give_place(OwnPlace(root, "fraud"), user)
    assert [path.stat().st_uid for path in (system, system / "shadow")] == [0, 0]
    assert system.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(system)) == ["shadow"]
    (job / "another name").hardlink_to(system / "shadow")
    with pytest.raises(PermissionError, match="several names"):
        give_place(OwnPlace(root, "fraud"), user)
    assert (system / "shadow").stat().st_uid == 0


def test_a_job_that_swaps_directories_meanwhile_gets_nothing_else(tmp_path: Path, user: SystemUser) -> None:
    system, job = tmp_path / "etc", tmp_path / "root" / "fraud"
    system.mkdir()
    for number in range(20):
        (system / f"f{number}").touch()
    job.mkdir(parents=True)
    stop = threading.Event()

    def swap() -> None:
        real, link = job / "real", job / "link"
        (job / "d").mkdir()
        for number in range(20):
            (job / "d" / f"f{number}").touch()
        link.symlink_to(system)
        while not stop.is_set():
            (job / "d").rename(real)
            link.rename(job / "d")
            (job / "d").rename(link)
            real.rename(job / "d")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(200):
            try:
                give_place(OwnPlace(tmp_path / "root", "fraud"), user)
            except OSError:
                continue
    finally:
        stop.set()
        swapping.join()
    assert {path.stat().st_uid for path in (system, *system.iterdir())} == {0}
