"""Agents of a local cluster, and of one with access control."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import authority_file
from cutwater.runtime import processes
from tests.integration.running_agent import starting_agents, until
from tests.integration.test_agent import Job
from tests.integration.test_cli_jobs import Commands

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "cluster"
    yield found
    processes.stop([member.pid for member in local_cluster.load(found).processes() if member.pid], 20.0)


@pytest.fixture
def cutwater(directory: Path) -> Commands:
    return Commands(directory)


def agents_of(cutwater: Commands) -> dict[str, Any]:
    return {found["agent"]["description"]["name"]: found["agent"] for found in cutwater.json("agent", "list")}


def test_agents_belong_to_a_local_cluster(cutwater: Commands, directory: Path) -> None:
    told = cutwater("cluster", "start", "--storage-nodes", 1, "--agents", 1)
    assert "1 agent runs jobs: agent-1" in told
    assert list(agents_of(cutwater)) == ["agent-1"]
    assert "started 1 agent" in cutwater("cluster", "start", "--agents", 2)
    assert "nothing was started" in cutwater("cluster", "start", "--agents", 2)
    assert "has 2 agents already" in cutwater("cluster", "start", "--agents", 1, code=2)
    assert "has 1 storage nodes" in cutwater("cluster", "start", "--agents", 2, "--storage-nodes", 3, code=2)
    roots = agents_of(cutwater)["agent-2"]["description"]["checkpoint_roots"]
    assert roots == [{"name": "default", "is_shared": True, "place": str(directory / "jobs" / "checkpoints")}]

    second = local_cluster.load(directory).agents[1]
    os.kill(second.pid, signal.SIGKILL)
    until(lambda: not local_cluster.is_up(second), "it is dead")
    assert "agent 2 does not run" in cutwater("cluster", "health", code=3)
    assert "started agent-2" in cutwater("cluster", "restart")
    cutwater("cluster", "health")

    running = local_cluster.load(directory).running()
    assert len(running) == 4
    assert "stopped 4 processes" in cutwater("cluster", "stop")
    assert not any(map(processes.is_running, running))
    assert "2 agents run jobs" in cutwater("cluster", "start"), "it knows its agents"


def test_agents_and_jobs_of_a_secured_cluster_have_tokens_of_their_own(
    cutwater: Commands, directory: Path, tmp_path: Path
) -> None:
    cutwater("cluster", "start", "--storage-nodes", 1, "--agents", 1, "--secure")
    assert agents_of(cutwater)["agent-1"]["principal"] == "agent-1"
    (token,) = directory.glob("agent1.token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "run-jobs" in cutwater("acl", "list", "agent-1")

    extra = tmp_path / "extra.token"
    cutwater("token", "create", "extra", "--save", extra)
    cutwater("acl", "allow", "extra", "run-jobs", "cluster")
    cutwater("agent", "drain", "agent-1")
    ca = str(authority_file(directory))
    servers = local_cluster.load(directory).servers
    with starting_agents(servers, tmp_path) as agents:
        agent = agents("extra", token_file=str(extra), tls_ca=ca)
        job = Job(cutwater, tmp_path, "secured")
        job.submit()
        life = job.until_lives(1)
        assert life["token"]
        (file,) = agent.place.glob("jobs/*/token")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        kept = tmp_path / "kept.token"
        kept.write_text(file.read_text())
        kept.chmod(0o600)
        as_job = ("whoami", "--token-file", kept)
        assert "job:secured" in cutwater(*as_job)
        cutwater("job", "cancel", job.name)
        assert not file.exists()
        until(lambda: _is_over(cutwater, as_job), "the token ends with the assignment")
        told = cutwater("job", "validate", job.program, "--name", job.name)
        assert "plan of secured" in told
        cutwater("job", "delete", job.name)


def _is_over(cutwater: Commands, words: tuple[object, ...]) -> bool:
    try:
        cutwater(*words, code=32)
    except AssertionError:
        return False
    return True
