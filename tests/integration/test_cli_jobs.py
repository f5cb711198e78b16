"""``cutwater job`` and ``cutwater agent`` against a real cluster, with an agent that runs no programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutwater.admin import local_cluster
from cutwater.cli.main import app
from cutwater.runtime import processes
from tests.integration.agent_double import AgentDouble

pytestmark = pytest.mark.timeout(180)
PROGRAM = 'from cutwater.pipeline import Pipeline\n\np = Pipeline("fraud", log="./data")\n'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("cluster")
    try:
        local_cluster.start(found, storage_nodes=1)
        yield found
    finally:
        processes.stop([member.pid for member in local_cluster.load(found).processes() if member.pid], 10.0)


@pytest.fixture(scope="module")
def agent(directory: Path) -> Iterator[AgentDouble]:
    with AgentDouble(local_cluster.load(directory).servers, is_shared=False) as double:
        yield double


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


class Commands:
    """Calls commands in this process. Each job has a name of its own, so tests do not see each other's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, *words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*map(str, words), "--dir", str(self._directory)], catch_exceptions=False)
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result.output

    def json(self, *words: object) -> Any:
        result = CliRunner().invoke(app, [*map(str, words), "-o", "json", "--dir", str(self._directory)])
        assert result.exit_code == 0, (words, result.output)
        return json.loads(result.stdout)

    def job(self, name: str) -> Any:
        return self.json("job", "describe", name)


@pytest.fixture
def cutwater(directory: Path, agent: AgentDouble) -> Commands:
    return Commands(directory)


def submitted(cutwater: Commands, program: Path, name: str, *more: str) -> str:
    return cutwater("job", "submit", program, "--name", name, "--arg", "as=good", *more)


def test_a_program_becomes_a_job_that_an_agent_runs(cutwater: Commands, program: Path) -> None:
    told = cutwater("job", "submit", program, "--parallelism", 2, "--label", "disk=ssd", "--restart", "none")
    assert "job 'fraud' is running on agent a1, version 1" in told
    assert "checkpoint root 'default' is not shared: the job is pinned" in told
    (job,) = (job for job in cutwater.json("job", "list") if job["name"] == "fraud")
    assert (job["phase"], job["version"], job["parallelism"], job["agent"]) == ("running", 1, 2, "a1")
    told = cutwater("job", "describe", "fraud")
    for part in ("job 'fraud': running", "version:     1, has ", "program.py", "agent:       a1", "attempt 1", "epoch"):
        assert part in told
    assert "fraud" in cutwater("job", "list", "--phase", "running")
    assert "fraud" not in cutwater("job", "list", "--phase", "failed")
    assert "exists" in cutwater("job", "submit", program, code=31)


def test_a_job_is_upgraded_and_rolled_back(cutwater: Commands, program: Path, agent: AgentDouble) -> None:
    submitted(cutwater, program, "up", "--parallelism", "3")
    assert "version 2" in cutwater("job", "upgrade", "up", "--arg", "region=us")
    assert cutwater.json("job", "versions", "up", 2)["spec"]["arguments"] == {"as": "good", "region": "us"}
    assert cutwater.json("job", "versions", "up", 2)["spec"]["parallelism"] == 3
    agent.seen.clear()
    assert "version 1" in cutwater("job", "rollback", "up")
    # Version 2 has published: what goes on is a new savepoint of it, which version 1 was asked about.
    actions = [action for name, action in agent.seen if name == "up"]
    assert actions.index("validate") < actions.index("stop") < actions.index("run 1")
    assert [v["number"] for v in cutwater.json("job", "versions", "up")["versions"]] == [1, 2]
    # And forward again.
    assert "version 2" in cutwater("job", "rollback", "up", "--to", 2)


def test_a_rollback_that_the_old_program_cannot_restore_is_refused_and_the_job_runs_on(
    cutwater: Commands, program: Path
) -> None:
    submitted(cutwater, program, "narrow", "--arg", "restores=no")
    cutwater("job", "upgrade", "narrow", "--arg", "restores=yes")
    epoch = cutwater.job("narrow")["job"]["epoch"]
    told = cutwater("job", "rollback", "narrow", code=32)
    assert "no operator 'count'" in told
    after = cutwater.job("narrow")
    assert (after["phase"], after["job"]["version"], after["job"]["epoch"]) == ("running", 2, epoch)


def test_an_upgrade_that_does_not_come_up_goes_back_by_itself(cutwater: Commands, program: Path) -> None:
    submitted(cutwater, program, "bad")
    told = cutwater("job", "upgrade", "bad", "--arg", "as=fails", code=39)
    assert "version 2 did not come up" in told
    assert "boom in function 'f'" in told
    until(lambda: cutwater.job("bad")["phase"] == "running")
    found = cutwater.job("bad")["job"]
    assert (found["version"], found["start"]["savepoint"]) == (1, found["savepoints"][-1]["id"])


def test_a_hanging_upgrade_is_ended_by_a_rollback_to_the_savepoint(
    cutwater: Commands, program: Path, agent: AgentDouble
) -> None:
    submitted(cutwater, program, "hangs")
    told = cutwater("job", "upgrade", "hangs", "--arg", "as=idle", "--timeout", 3, code=34)
    assert "step 3 of 3" in told
    assert "cutwater job wait hangs" in told
    (savepoint,) = cutwater.job("hangs")["job"]["savepoints"]
    agent.seen.clear()
    assert "version 1" in cutwater("job", "rollback", "hangs")
    found = cutwater.job("hangs")["job"]
    assert [taken["id"] for taken in found["savepoints"]] == [savepoint["id"]]
    assert found["start"]["savepoint"] == savepoint["id"]
    assert {"validate", "stop", "savepoint"}.isdisjoint(action for name, action in agent.seen if name == "hangs")
    assert "ended by a later operation" in cutwater("job", "wait", "hangs", upgrade_of(cutwater, "hangs"), code=32)


def upgrade_of(cutwater: Commands, name: str) -> str:
    operations = cutwater("job", "operations", name).splitlines()
    return next(line.split()[0] for line in operations if " upgrade" in line)


def test_stop_start_savepoint_cancel_restart_and_delete(cutwater: Commands, program: Path) -> None:
    submitted(cutwater, program, "whole")
    told = cutwater("job", "savepoint", "whole")
    assert "job 'whole' has savepoint" in told
    assert "below savepoint root 'default'" in told
    first = cutwater.job("whole")["job"]["epoch"]
    assert "is running on agent a1" in cutwater("job", "restart", "whole")
    second = cutwater.job("whole")["job"]["epoch"]
    assert "stopped, with savepoint" in cutwater("job", "stop", "whole")
    assert cutwater.job("whole")["phase"] == "stopped"
    assert "is running" in cutwater("job", "start", "whole")
    assert cutwater.job("whole")["job"]["epoch"] > second > first
    assert "is cancelled" in cutwater("job", "cancel", "whole")
    assert "is running" in cutwater("job", "start", "whole")
    assert "parallelism: 8" in cutwater("job", "rescale", "whole", "--parallelism", 8) + cutwater(
        "job", "describe", "whole"
    )
    assert "is deleted" in cutwater("job", "delete", "whole")
    assert "whole" in cutwater("job", "describe", "whole", code=30)


def test_a_program_that_finds_something_missing_is_told_as_failed(cutwater: Commands, program: Path) -> None:
    told = cutwater("job", "submit", program, "--name", "lacks", "--arg", "as=finds-nothing", code=30)
    assert "its program failed: there is no topic 'x'. The job has ended" in told


def test_a_stop_whose_savepoint_fails_leaves_the_job_running(cutwater: Commands, program: Path) -> None:
    submitted(cutwater, program, "stuck", "--arg", "as=unstoppable")
    told = cutwater("job", "stop", "stuck", code=34)
    assert "the stop of job 'stuck' failed at its step stop: the disk is full" in told
    assert cutwater.job("stuck")["phase"] == "running"


def test_a_job_that_no_agent_can_have_waits_and_says_for_what(cutwater: Commands, program: Path) -> None:
    told = submitted(cutwater, program, "large", "--slots", "100", "--no-wait")
    assert "100 slots" in told
    told = cutwater("job", "wait", "large", "--timeout", 1, code=34)
    assert "start" in told
    assert "100" in cutwater("job", "describe", "large")
    assert cutwater.job("large")["phase"] == "waiting"
    cutwater("job", "delete", "large")


def test_the_same_key_is_the_same_job(cutwater: Commands, program: Path) -> None:
    words = ("job", "submit", program, "--name", "once", "--idempotency-key", "deploy-1")
    first, again = cutwater.json(*words), cutwater.json(*words)
    assert first["operation"] == again["operation"]
    assert cutwater.job("once")["versions"] == [1]
    told = cutwater("job", "submit", program, "--name", "other", "--idempotency-key", "deploy-1", code=2)
    assert "deploy-1" in told


def test_a_job_begins_with_the_savepoint_of_another(cutwater: Commands, program: Path) -> None:
    submitted(cutwater, program, "one")
    cutwater("job", "stop", "one")
    taken = cutwater.job("one")["job"]["savepoints"][-1]["id"]
    submitted(cutwater, program, "two", "--from-savepoint", taken, "--from-job", "one")
    assert cutwater.job("two")["job"]["start"]["savepoint"] == taken
    assert "belong together" in cutwater("job", "submit", program, "--from-job", "one", code=2)


def test_questions_are_answered_by_an_agent(cutwater: Commands, program: Path) -> None:
    assert "pipeline fraud" in cutwater("job", "validate", program)
    assert "reads 'in': id string" in cutwater("job", "validate", program)
    assert "line 3: invalid syntax" in cutwater("job", "validate", program, "--arg", "as=fails", code=2)
    submitted(cutwater, program, "asked")
    cutwater("job", "savepoint", "asked")
    (taken,) = cutwater.json("job", "savepoints", "asked")
    assert taken["id"] in cutwater("job", "savepoints", "asked")
    assert taken["id"] in cutwater("job", "savepoints", "asked", taken["id"])
    assert "is intact: 3 files" in cutwater("job", "savepoints", "asked", taken["id"], "--verify")
    assert '"user":"ann"' in cutwater("job", "state", "asked", "--uid", "count")
    assert "deleted" in cutwater("job", "savepoints", "asked", taken["id"], "--delete")
    assert cutwater.json("job", "savepoints", "asked") == []


def test_who_stops_waiting_is_told_how_to_go_on(cutwater: Commands, program: Path, directory: Path) -> None:
    submitted(cutwater, program, "patient", "--slots", "100", "--no-wait")
    command = [sys.executable, "-m", "cutwater.cli", "job", "wait", "patient", "--dir", str(directory)]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout is not None
        assert "start on an agent" in waiting.stdout.readline()
        waiting.send_signal(signal.SIGINT)
        _, told = waiting.communicate(timeout=30)
    finally:
        waiting.kill()
    assert waiting.returncode == 130
    assert f"cutwater job wait patient --dir {directory}" in told
    cutwater("job", "delete", "patient")


def test_agents_are_listed_drained_and_removed(cutwater: Commands, program: Path, directory: Path) -> None:
    assert "a1" in cutwater("agent", "list")
    told = cutwater("agent", "describe", "a1")
    for part in ("agent 'a1': alive", "slots:      ", "disk=ssd", "'default' at /tmp/default, of this agent only"):
        assert part in told
    assert "'b'" in cutwater("agent", "describe", "b", code=30)
    assert "alive" in cutwater("agent", "remove", "a1", code=32)
    cutwater("agent", "drain", "a1")
    try:
        assert "draining" in cutwater("agent", "list")
        told = submitted(cutwater, program, "late", "--no-wait")
        assert "drains" in cutwater("job", "describe", "late")
    finally:
        cutwater("agent", "undrain", "a1")
    until(lambda: cutwater.job("late")["phase"] == "running")


def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
