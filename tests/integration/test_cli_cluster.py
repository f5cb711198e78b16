"""The command line against a real cluster: what it prints, what it returns, and that nothing is left running."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutwater import connect
from cutwater.admin import local_cluster
from cutwater.errors import AlreadyExists, DeadlineExceeded, OutputExists
from cutwater.runtime import processes

pytestmark = pytest.mark.timeout(180)


def cutwater(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cutwater.cli", *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stdout + done.stderr


def as_json(*arguments: str) -> Any:
    return json.loads(cutwater(*arguments, "-o", "json"))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("cluster")
    told = cutwater("cluster", "start", "--dir", str(found), "--storage-nodes", "2")
    try:
        assert "2 storage nodes and 1 metadata node on SQLite run; replication 2" in told
        yield found
    finally:
        pids = [member.pid for member in local_cluster.load(found).processes() if member.pid]
        processes.stop(pids, 10.0)


def test_the_description_of_the_cluster_is_a_file(directory: Path) -> None:
    told = json.loads((directory / "cluster.json").read_text())
    assert told["servers"].startswith("cutwater://127.0.0.1:")
    assert [set(member) >= {"id", "pid", "address"} for member in told["metadata"]] == [True]
    assert [member["id"] for member in told["storage_nodes"]] == [1, 2]


def test_a_cluster_that_runs_is_not_started_again(directory: Path) -> None:
    told = cutwater("cluster", "start", "--dir", str(directory), code=31)
    assert "runs already" in told
    assert "code already_exists" in told


def test_topics_and_streams(directory: Path) -> None:
    where = ("--dir", str(directory))
    created = cutwater("topic", "create", "orders", "--streams", "2", *where)
    assert "takes appends in log streams" in created
    assert "its records have 2 copies, as there are no more storage nodes" in created
    assert "`cutwater topic change orders --replication 3`" in created
    assert "exists already" in cutwater("topic", "create", "orders", *where, code=31)
    (topic,) = as_json("topic", "list", *where)
    assert (topic["name"], topic["streams"], topic["replication"]) == ("orders", 2, 2)
    assert (topic["records_ever"], topic["columns"]) == (0, None)
    streams = [stream["stream"] for stream in as_json("topic", "describe", "orders", *where)["streams"]]
    first = str(streams[0])
    assert "sealed in epoch 1 at LLSN 0" in cutwater("stream", "seal", first, *where)
    told = cutwater("stream", "describe", first, *where)
    assert "sealed by an operator" in told
    assert "takes appends" in cutwater("stream", "unseal", first, *where)
    assert as_json("stream", "describe", first, *where)["is_open"]
    assert "there is no log stream 99; log streams:" in cutwater("stream", "describe", "99", *where, code=30)
    assert "is complete already" in cutwater("stream", "sync", first, "--node", "1", *where, code=32)
    replace = ("stream", "replace", first, "--old", "1", "--new", "2", *where)
    assert "storage node 2 cannot become a replica" in cutwater(*replace, code=2)
    assert "takes appends" in cutwater("stream", "create", "orders", *where)
    changed = cutwater("topic", "change", "orders", "--retention-hours", "24", "--streams", "1", *where)
    assert f"topic 'orders' is changed, and has log stream {first}\n" in changed
    assert "retention 24 hours" in cutwater("topic", "describe", "orders", *where)
    assert "trim before GLSN 100000" in cutwater("topic", "trim", "orders", "--before", "100000", *where, code=2)
    more = cutwater("topic", "change", "orders", "--replication", "3", *where)
    assert "it gets 3 copies" in more
    assert "warning: there are 2 storage nodes, so there are 2 copies for now" in more
    told = cutwater("stream", "describe", first, *where)
    assert "copies:  2 of 3" in told
    assert "one more copy is made as soon as other storage nodes can be used" in told
    assert f"log stream {first} of topic 'orders' has 2 of 3 copies" in cutwater("cluster", "health", *where, code=3)
    assert "it gets one copy" in cutwater("topic", "change", "orders", "--replication", "1", *where)
    until(lambda: len(as_json("stream", "describe", first, *where)["replicas"]) == 1)
    assert "all is well" in cutwater("cluster", "health", *where)
    cutwater("topic", "delete", "orders", *where)
    assert as_json("topic", "list", *where) == []
    assert "reserved for topics of the cluster itself" in cutwater("topic", "create", "_x", *where, code=2)
    assert "there is no topic 'orders'; topics: none" in cutwater("topic", "describe", "orders", *where, code=30)


def test_runs(directory: Path) -> None:
    where = ("--dir", str(directory))
    cutwater("topic", "create", "published", *where)
    with connect(local_cluster.load(directory).servers) as log:
        run = log.open_run("totals", "a checkpoint")
        log.publish(run, 0, [log.stage(run, 0, "published", b"x")])
        part = log.stage(run, 1, "published", [b"not published"])
        assert part is not None
        log.open_run("", "no name")
    found = {one["run"]: one for one in as_json("run", "list", *where)}
    assert (found[run.run]["name"], found[run.run]["last_batch"]) == ("totals", 0)
    assert [share["node"] for share in found[run.run]["staged"]] == [1, 2]
    told = cutwater("run", "describe", str(run.run), *where)
    assert f"run {run.run} of 'totals': may publish" in told
    assert "staged on storage node 2:" in told
    assert "without a name" in cutwater("run", "describe", str(run.run + 1), *where)
    assert "there is no run 99" in cutwater("run", "describe", "99", *where, code=30)
    assert "holds nothing up" in cutwater("run", "drop", str(run.run), "--lose-rows", *where, code=32)
    with connect(local_cluster.load(directory).servers) as log, pytest.raises(DeadlineExceeded):
        # A part that nobody has.
        log.publish(run, 1, [structs.replace(part, part="f" * 32)], timeout=1)
    assert "say --lose-rows" in cutwater("run", "drop", str(run.run), *where, code=2)
    told = cutwater("run", "drop", str(run.run), "--lose-rows", *where)
    assert told.strip() == f"run {run.run} is over; lost: 1 row for topic 'published'"
    assert "over, it was dropped" in cutwater("run", "describe", str(run.run), *where)
    assert f"run {run.run} was dropped" in cutwater("cluster", "events", *where)
    with connect(local_cluster.load(directory).servers) as log:
        with pytest.raises(OutputExists, match="`cutwater run forget totals`"):
            log.open_run("totals", "another checkpoint")
        told = cutwater("run", "forget", "totals", *where)
        assert "forgot that 'totals' has published 1 row, the last at GLSN" in told
        assert log.open_run("totals", "another checkpoint").run > run.run
    assert "names that have: none" in cutwater("run", "forget", "totals", *where, code=30)
    assert "all is intact" in cutwater("verify", *where)


def test_events_say_why(directory: Path) -> None:
    where = ("--dir", str(directory))
    cutwater("topic", "create", "events", *where)
    told = as_json("cluster", "events", *where)["events"]
    kinds = [event["kind"] for event in told]
    assert kinds[0] == "FoundCluster"
    assert {"AddNode", "CreateTopic", "CreateStream", "Unseal"} <= set(kinds)
    assert all(event["reason"] for event in told if event["kind"] == "Unseal")
    assert "topic 'events' created" in cutwater("cluster", "events", *where)


def test_status_and_health_notice_a_dead_node(directory: Path) -> None:
    where = ("--dir", str(directory))
    cutwater("topic", "create", "watched", *where)
    assert "all is well" in cutwater("cluster", "health", *where)
    cluster = local_cluster.load(directory)
    os.kill(cluster.storage_nodes[1].pid, signal.SIGKILL)
    killed = time.time()
    told = cutwater("cluster", "health", *where, code=3)
    assert f"storage node 2 does not run (it was process {cluster.storage_nodes[1].pid})" in told
    assert f"`cutwater cluster restart --dir {directory}` starts it again" in told
    until(lambda: not as_json("cluster", "status", *where)["nodes"][1]["is_alive"])
    told = cutwater("cluster", "status", *where)
    metadata, first, second = cluster.metadata[0], *cluster.storage_nodes
    assert re.search(rf"1 +{metadata.address} +{metadata.pid} +leads", told)
    assert re.search(rf"1 +{first.address} +{first.pid} +READY", told)
    assert re.search(rf"2 +{second.address} +does not run +dead, (no server listens there|silent for [\d.]+ s)", told)
    stream = as_json("cluster", "status", *where)["streams"][0]["stream"]
    until(lambda: as_json("stream", "describe", str(stream), *where)["next_step"])
    told = cutwater("stream", "describe", str(stream), *where)
    assert "copies:  1 of 2, on storage node 1\n  missing: storage node 2\n  since:   20" in told
    assert "next:    it takes appends meanwhile; storage node 2 is dead: it joins again when it is back" in told
    assert "has 1 of 2 copies: it takes appends meanwhile" in cutwater("cluster", "health", *where, code=3)
    assert "has 1 of 2 copies" in cutwater("cluster", "health", "--servers", cluster.servers, code=3)
    (sealed, *_) = [e for e in reversed(as_json("cluster", "events", *where)["events"]) if e["kind"] == "Seal"]
    assert killed - 1 < sealed["time"] / 1e6 < time.time() + 1, "when it happened, not when the last record came"
    assert "started storage node 2" in cutwater("cluster", "restart", *where)
    servers = local_cluster.load(directory).servers
    nodes = as_json("cluster", "status", "--servers", servers)["nodes"]
    assert [(node["node"], node["state"], node["state_name"]) for node in nodes] == [(1, 0, "READY"), (2, 0, "READY")]


def test_whoever_names_no_cluster_is_told_how() -> None:
    told = cutwater("topic", "list", code=2)
    assert "which cluster? Say --servers cutwater://HOST:PORT" in told
    assert "or --path DIR of an embedded log" in told
    told = cutwater("cluster", "status", code=2)
    assert "--path" not in told
    assert "CUTWATER_PATH" not in told
    told = cutwater("cluster", "stop", "--dir", "/nonexistent-cutwater", code=30)
    assert "error: there is no local cluster in /nonexistent-cutwater\n" in told
    assert "names an embedded log" in cutwater("cluster", "health", "--path", "data", code=2)
    told = cutwater("cluster", "status", "--servers", "cutwater://127.0.0.1:1,127.0.0.1:2", code=34)
    assert "no server listens at 127.0.0.1:1, 127.0.0.1:2 (Connection refused): the cluster does not run" in told
    told = cutwater("subscribe", "orders", "--servers", "cutwater://127.0.0.1:1", code=34)
    assert "no server listens at 127.0.0.1:1" in told
    assert "does not name a cluster" in cutwater("topic", "list", "--servers", "http://x", code=2)


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path))
    assert "not 2" in cutwater("cluster", "start", *where, "--metadata", "2", code=2)
    told = cutwater("cluster", "start", *where, "--storage-nodes", "2", "--replication", "3", code=2)
    assert "replication 3 needs as many storage nodes, and there are 2" in told
    assert list(tmp_path.iterdir()) == []


def test_a_metadata_node_says_what_is_wrong_with_its_store(tmp_path: Path) -> None:
    start = ("mr", "start", "--cluster-id", "1", "--id", "1", "--listen", "127.0.0.1:0", "--store")
    assert "names no metadata store: write sqlite:PATH" in cutwater(*start, "mysql:x", code=2)
    told = cutwater(*start, f"sqlite:{tmp_path}/no/such/place", code=2)
    assert "no/such" in told


KILLED_AS_IT_STARTS = """
import os, signal, sys
from pathlib import Path
from cutwater.admin import local_cluster
local_cluster._join = lambda cluster, access: os.kill(os.getpid(), signal.SIGKILL)
local_cluster.start(Path(sys.argv[1]), storage_nodes=1)
"""


def test_a_start_that_is_killed_leaves_nothing_that_is_not_found(tmp_path: Path) -> None:
    left: list[int] = []
    try:
        killed = subprocess.run([sys.executable, "-c", KILLED_AS_IT_STARTS, str(tmp_path)], timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        cluster = local_cluster.load(tmp_path)
        left = cluster.running()
        assert len(left) == 2
        # While whoever starts it still runs, others let it be.
        cluster.starting = local_cluster.Starter(os.getpid(), processes.started_at(os.getpid()))
        cluster.save(tmp_path)
        with pytest.raises(AlreadyExists, match=f"is being started by process {os.getpid()}: wait"):
            local_cluster.start(tmp_path)
        cluster.starting = local_cluster.Starter()
        cluster.save(tmp_path)
        assert local_cluster.restart_dead(tmp_path) == ["storage node 1", "metadata node 1"]
        assert not any(map(processes.is_running, left))
        assert asyncio.run(local_cluster.health(local_cluster.load(tmp_path), tmp_path)) == []
        assert len(local_cluster.stop(tmp_path).stopped) == 2
    finally:
        processes.stop(left, 1.0)
        processes.stop(local_cluster.load(tmp_path).running(), 1.0)


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux tells the names of processes there")
def test_when_a_process_was_started_is_known_whatever_its_name_is() -> None:
    comm, started = Path("/proc/self/comm"), processes.started_at(os.getpid())
    name = comm.read_bytes()
    try:
        comm.write_bytes(b"\xff) (")
        assert processes.started_at(os.getpid()) == started > 0
    finally:
        comm.write_bytes(name.strip())


def test_of_two_that_start_a_cluster_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one leaves the description alone, by which the processes of the first are found."""
    first = local_cluster.LocalCluster("cutwater://127.0.0.1:1", [], [])

    def meanwhile(*_: object) -> None:
        first.save(tmp_path)

    monkeypatch.setattr(local_cluster, "check_may_hold", meanwhile)
    with pytest.raises(AlreadyExists, match="is being started by another process, too"):
        local_cluster.start(tmp_path, program=("-c", "no server"))
    assert local_cluster.load(tmp_path) == first


def test_a_stopped_cluster_starts_again_with_its_data(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path))
    cutwater("cluster", "start", *where, "--storage-nodes", "1")
    try:
        cutwater("topic", "create", "kept", *where)
        assert "stopped 2 processes\n" in cutwater("cluster", "stop", *where)
        assert cutwater("cluster", "stop", *where) == "nothing was running\n"
        again = f"no process of the cluster runs: `cutwater cluster restart --dir {tmp_path}` starts it again"
        for command in (("append", "kept"), ("cluster", "status")):
            assert again in cutwater(*command, *where, code=34)
        assert not any(member.pid for member in local_cluster.load(tmp_path).processes())
        cutwater("cluster", "start", *where)
        assert [topic["name"] for topic in as_json("topic", "list", *where)] == ["kept"]
    finally:
        pids = [member.pid for member in local_cluster.load(tmp_path).processes() if member.pid]
        processes.stop(pids, 10.0)
