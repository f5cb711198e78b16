"""Where checkpoints lie that nobody names: one place per user and log, and the working directory of before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutwater.cli.commands import pipeline as commands
from cutwater.errors import InvalidArgument, NotFound
from cutwater.jobs.checkpoint_hold import Hold
from cutwater.jobs.job_file import JobDirectory, JobState
from cutwater.jobs.places import all_jobs, find, root_of, state_directory


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def stopped(root: Path | str, name: str, log: str | None = None) -> JobDirectory:
    """A job at rest, with a checkpoint that is of this log."""
    directory = JobDirectory(root, name)
    job = directory.of_program(None)
    directory.change(job, JobState.STOPPED)
    if log is not None:
        Path(job.checkpoint).mkdir()
        (Path(job.checkpoint) / "cutwater.json").write_text(f'{{"log": "{log}", "more": 1}}')
    return directory


def test_a_checkpoint_is_found_from_every_working_directory(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Hold("p", None, None, root_of("log-1", "p"))
    first.let_go()
    assert first.place == str(places / "state" / "cutwater" / "jobs" / "log-1" / "p" / "run-1")
    monkeypatch.chdir(places)
    again = Hold("p", None, None, root_of("log-1", "p"))
    again.let_go()
    assert again.place == first.place
    assert Hold("p", None, None, root_of("log-2", "p")).place != first.place, "another log has checkpoints of its own"
    assert stat.S_IMODE(state_directory().stat().st_mode) == 0o700


def test_without_the_variable_it_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert str(state_directory()) == "/home/somebody/.local/state/cutwater/jobs"


def test_a_job_of_before_goes_on_where_it_lies(places: Path) -> None:
    stopped("checkpoints", "p", "log-1")
    assert root_of("log-1", "p") == places / "work" / "checkpoints"
    assert root_of("log-2", "p") == state_directory() / "log-2", "it is of another log"
    assert root_of("log-1", "q") == state_directory() / "log-1", "there is none of this name"
    stopped("checkpoints", "without a note")
    assert root_of("log-1", "without a note") == places / "work" / "checkpoints"
    # As it was before there were jobs: the checkpoint is the directory itself.
    os.makedirs("checkpoints/oldest/offsets")
    assert root_of("log-1", "oldest") == places / "work" / "checkpoints"
    # What is in the place of the log goes first.
    stopped(state_directory() / "log-1", "p", "log-1")
    assert root_of("log-1", "p") == state_directory() / "log-1"


def test_commands_find_a_job_by_its_name(places: Path) -> None:
    with pytest.raises(NotFound, match=r"no job is called 'p': there are none; `cutwater pipeline list` shows"):
        find("p").require()
    first = stopped(state_directory() / "log-1", "p", "log-1")
    assert find("p").path == first.path
    stopped("checkpoints", "older", "log-1")
    with pytest.raises(
        NotFound, match=r"no job is called 'oldr': there are older, p \(is 'older' meant\?\); `cutwater"
    ):
        find("oldr").require()
    assert [job.pipeline for job in all_jobs()] == ["older", "p"]
    assert find("older").root == places / "work" / "checkpoints"
    second = stopped(state_directory() / "log-2", "p", "log-2")
    with pytest.raises(InvalidArgument, match=rf"several jobs are called 'p': .*--jobs-dir {first.root} or --jobs-dir"):
        find("p")
    hold = Hold("p", None, None, second.root)
    assert find("p").path == second.path, "the one that runs is meant"
    hold.let_go()
    told = CliRunner().invoke(commands.app, ["list"]).output
    assert sum(line.startswith("p  ") for line in told.splitlines()) == 2
    assert "older" in told
