"""An agent on a real cluster, with processes of jobs that run no Spark."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutwater.admin import local_cluster
from cutwater.runtime import processes
from tests.integration.running_agent import RunningAgent, Starting, is_alive, notes_in, starting_agents, until
from tests.integration.test_cli_jobs import PROGRAM, Commands

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("cluster")
    try:
        local_cluster.start(found, storage_nodes=1)
        yield found
    finally:
        processes.stop([member.pid for member in local_cluster.load(found).processes() if member.pid], 10.0)


@pytest.fixture
def agents(directory: Path, tmp_path: Path) -> Iterator[Starting]:
    with starting_agents(local_cluster.load(directory).servers, tmp_path) as starting:
        yield starting


@pytest.fixture
def cutwater(directory: Path) -> Commands:
    return Commands(directory)


class Job:
    """A job that a test submits. ``lives`` are the notes of its processes, the oldest first."""

    def __init__(self, cutwater: Commands, directory: Path, name: str) -> None:
        self.cutwater, self.name, self.notes = cutwater, name, directory / f"{name}.notes"
        self.program = directory / "program.py"
        self.program.write_text(PROGRAM)

    def submit(self, life: str = "good", *more: object, code: int = 0) -> str:
        words = ("--name", self.name, "--arg", f"as={life}", "--arg", f"notes={self.notes}", *more)
        return self.cutwater("job", "submit", self.program, *words, code=code)

    @property
    def lives(self) -> list[dict[str, Any]]:
        return [note for note in notes_in(self.notes) if "checkpoint" in note]

    def until_lives(self, count: int) -> dict[str, Any]:
        return until(lambda: self.lives[count - 1 :], f"{count} lives of {self.name}")[0]  # type: ignore[no-any-return]

    def described(self) -> Any:
        return self.cutwater.job(self.name)

    def until_phase(self, phase: str) -> Any:
        def has() -> Any:
            found = self.described()
            return found if found["phase"] == phase else None

        return until(has, f"{self.name} is {phase}")


@pytest.fixture
def job(cutwater: Commands, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(cutwater, tmp_path, f"j{abs(hash(request.node.name)) % 1_000_000}")
    yield made
    made.cutwater("job", "delete", made.name, "--no-wait")


def test_a_job_is_run_saved_validated_upgraded_and_stopped(cutwater: Commands, agents: Starting, job: Job) -> None:
    agent = agents("one", slots=3, limits=(0, 0.5))
    told = job.submit("good", "--parallelism", 2)
    assert "running on agent one" in told
    assert "pinned" in told, "its own roots are not shared"
    first = job.until_lives(1)
    assert first["files"] == ["program.py"]
    assert "CUTWATER_SECRET_OF_AGENT" not in first["variables"]
    assert "CUTWATER_JOB_MARK" in first["variables"]
    assert first["processors"] == 1, "half a processor is rounded up"
    assert first["directory"].startswith(str(agent.place / "jobs"))
    assert f"/{job.name}/begun-{first['epoch']}/epoch-{first['epoch']}" in first["checkpoint"]
    until(lambda: "hello from" in cutwater("job", "logs", job.name), "the log is stored")
    assert cutwater.json("agent", "describe", "one")["agent"]["description"]["limits"]

    cutwater("job", "savepoint", job.name)
    told = cutwater("job", "upgrade", job.name, "--arg", "region=us")
    assert "version 2" in told
    second = job.until_lives(2)
    assert second["savepoint"].endswith(cutwater.job(job.name)["job"]["savepoints"][-1]["path"])
    assert "version 1" in cutwater("job", "rollback", job.name), "the agent has validated the earlier program"
    third = job.until_lives(3)
    cutwater("job", "stop", job.name)
    for life in (first, second, third):
        assert not is_alive(life["pid"])
        assert not is_alive(life["other"])
    assert not os.listdir(agent.place / "jobs"), "directories of attempts go with them"
    agent.send(signal.SIGTERM)
    assert agent.ended() == 0


def test_attempts_that_fail_are_repeated_and_told(cutwater: Commands, agents: Starting, job: Job) -> None:
    agents("one")
    job.submit("crashes", "--restart", "fixed:delay=100ms,attempts=2", "--no-wait")
    assert job.until_lives(2)["attempt"] == 2
    found = job.until_phase("running")
    assert "SIGKILL" in found["job"]["attempts"][0]["failure"]["message"]
    assert not is_alive(job.lives[0]["other"]), "nothing of a dead attempt stays"


def test_a_failure_that_would_repeat_ends_the_job(cutwater: Commands, agents: Starting, job: Job) -> None:
    agents("one")
    job.submit("hopeless", code=39)
    found = job.until_phase("failed")
    assert found["job"]["failure"] == {"code": "pipeline_failed", "message": "boom", "glsn": 7}


def test_a_process_that_stays_or_takes_too_much_memory_is_ended(cutwater: Commands, agents: Starting, job: Job) -> None:
    agents("one", limits=(100_000_000, 0.0))
    job.submit("hungry", "--restart", "none", "--no-wait")
    found = job.until_phase("failed")
    assert "used more memory than the job may" in found["job"]["failure"]["message"]
    told = cutwater("job", "upgrade", job.name, "--memory", "1g", "--no-wait", code=32)
    assert told


def test_much_output_is_bounded_and_its_ends_are_kept(cutwater: Commands, agents: Starting, job: Job) -> None:
    agents("one")
    job.submit("prints")
    cutwater("job", "stop", job.name)
    until(lambda: "00039999 x" in cutwater("job", "logs", job.name), "the end of the log is stored")
    text = cutwater("job", "logs", job.name)
    assert "00000001 x" in text
    assert "bytes are left out" in text
    assert len(text) < 1_200_000


def test_a_killed_agent_leaves_no_process_and_its_job_goes_on_elsewhere(
    cutwater: Commands, agents: Starting, job: Job, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    first = agents("one", shared=shared)
    job.submit()
    before = job.until_lives(1)
    agents("two", shared=shared)
    first.process.kill()
    until(lambda: not is_alive(before["pid"]) and not is_alive(before["other"]), "the watchdog ends them", 5.0)
    after = job.until_lives(2)
    assert after["epoch"] > before["epoch"]
    assert after["predecessor"] == before["checkpoint"]
    assert job.described()["job"]["assignment"]["agent"] == "two"


def test_a_paused_agent_loses_its_job_before_another_one_has_it(
    cutwater: Commands, agents: Starting, job: Job, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    first = agents("one", shared=shared)
    job.submit()
    before = job.until_lives(1)
    agents("two", shared=shared)
    first.send(signal.SIGSTOP)
    until(lambda: not is_alive(before["pid"]) and not is_alive(before["other"]), "the watchdog ends them", 15.0)
    assert len(job.lives) == 1, "the other agent has it only later"
    job.until_lives(2)
    first.send(signal.SIGCONT)
    # It registers anew, and may have jobs again.
    until(lambda: cutwater.json("agent", "describe", "one")["agent"].get("is_alive", True), "it is back")
    time.sleep(1.0)
    assert len(job.lives) == 2


def test_an_agent_that_is_asked_to_end_gives_its_jobs_to_others(
    cutwater: Commands, agents: Starting, job: Job, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    first = agents("one", shared=shared)
    job.submit()
    job.until_lives(1)
    agents("two", shared=shared)
    begun = time.monotonic()
    first.send(signal.SIGTERM)
    assert first.ended() == 0
    job.until_lives(2)
    assert time.monotonic() - begun < 9.0, "nobody waits for the lease to end"


def test_a_second_signal_kills(agents: Starting, job: Job) -> None:
    agent = agents("one")
    job.submit("deaf")
    life = job.until_lives(1)
    agent.send(signal.SIGTERM)
    until(lambda: notes_in(job.notes)[-1].get("heard"), "it was told to stop")
    agent.send(signal.SIGTERM)
    agent.ended(10.0)
    assert not is_alive(life["pid"])


def test_an_agent_that_starts_again_ends_what_it_left(agents: Starting, job: Job) -> None:
    agent = agents("one")
    job.submit()
    before = job.until_lives(1)
    agent.process.kill()
    agent.ended()
    agent.start()
    assert not is_alive(before["pid"])
    after = job.until_lives(2)
    assert after["epoch"] > before["epoch"]


def test_two_agents_with_one_name(agents: Starting, tmp_path: Path) -> None:
    first = agents("one")
    second = RunningAgent(agents.servers, "one", tmp_path / "again")
    agents.started.append(second)
    assert first.ended() == 33, first.log.read_text()
    assert "another process" in first.log.read_text()


def test_one_directory_has_one_agent(agents: Starting, tmp_path: Path) -> None:
    agents("one")
    with pytest.raises(AssertionError, match="is in use by process"):
        RunningAgent(agents.servers, "two", tmp_path / "one")


def test_a_program_is_validated_by_a_process(cutwater: Commands, agents: Starting, job: Job) -> None:
    agents("one")
    job.program.write_text(PROGRAM)
    told = json.loads(cutwater("job", "validate", job.program, "--name", job.name, "-o", "json"))
    assert told["plan"] == f"plan of {job.name}"
    assert "no operator" in cutwater(
        "job", "validate", job.program, "--name", job.name, "--arg", "restores=no", code=32
    )
    job.submit()


def test_a_rollback_to_a_program_that_restores_nothing_is_refused(
    cutwater: Commands, agents: Starting, job: Job
) -> None:
    agents("one")
    job.submit("good", "--arg", "restores=no")
    job.until_lives(1)
    cutwater("job", "upgrade", job.name, "--arg", "restores=yes")
    second = job.until_lives(2)
    assert "no operator" in cutwater("job", "rollback", job.name, code=32)
    described = cutwater.job(job.name)
    assert (described["phase"], described["job"]["version"], len(job.lives)) == ("running", 2, 2)
    assert is_alive(second["pid"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes as other users")
def test_each_job_has_a_system_user_of_its_own(cutwater: Commands, agents: Starting, job: Job) -> None:
    place = agents.directory
    for parent in (place, *place.parents):
        if (
            parent.stat().st_uid == 0
            and parent != Path("/")
            and parent.is_relative_to("/tmp")
            and parent != Path("/tmp")
        ):
            parent.chmod(0o711)
    job.notes.touch()
    job.notes.chmod(0o666)
    agent = agents("one", job_users=["daemon", "games"])
    job.submit()
    life = job.until_lives(1)
    assert life["uid"] not in (0, os.getuid())
    assert Path(life["checkpoint"]).stat().st_uid == life["uid"]
    cutwater("job", "stop", job.name)
    assert not os.listdir(agent.place / "jobs")
