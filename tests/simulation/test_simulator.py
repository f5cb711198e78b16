"""Clusters under random faults keep their promises; the simulator itself is deterministic and says how to replay."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from cutwater.core.requests import Done, ReplaceRequest, SealRequest, UnsealRequest
from cutwater.testing import simulate as command
from cutwater.testing.checkers.record import SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.simulator.cluster import SimCluster, simulate
from cutwater.testing.simulator.options import PROFILES, Options, random_options
from cutwater.types import ReplicaState
from tests.soak import rounds

RANDOM_SEEDS = rounds(240, 2_000)
STORM_SEEDS = rounds(60, 500)
SEEDS_PER_TEST = 20


@pytest.mark.parametrize("first", range(0, RANDOM_SEEDS, SEEDS_PER_TEST))
def test_random_faults(first: int) -> None:
    check("random", first)


@pytest.mark.parametrize("first", range(0, STORM_SEEDS, SEEDS_PER_TEST))
def test_everything_at_once(first: int) -> None:
    check("storm", first)


def test_a_store_that_was_rolled_back_is_noticed_before_anybody_is_told() -> None:
    check("rollback", 0)


def check(profile: str, first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        result = simulate(seed, PROFILES[profile](seed))
        suffix = "" if profile == "random" else f" PROFILE={profile}"
        assert result.violation is None, f"{result.violation}\nreplay it: make simulate SEED={seed}{suffix}"


def test_a_quiet_cluster_acknowledges_everything() -> None:
    result = simulate(1, Options())
    assert result.violation is None
    assert result.appends["unknown"] == 0
    assert result.appends["ok"] > 200


@pytest.mark.parametrize("seed", [3, 4])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    """Also in another process, with another hash seed for strings."""
    here = simulate(seed, random_options(seed)).trace_hash
    program = [sys.executable, "-m", "cutwater.testing.simulate", "--seed", str(seed)]
    there = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert there[-1] == here
    assert int(here, 16) >= 0


def test_another_seed_gives_another_trace() -> None:
    assert simulate(5, Options()).trace_hash != simulate(6, Options()).trace_hash


def test_many_in_parallel_equal_many_in_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "6", "--jobs", "1"]) == 0
    alone = capsys.readouterr().out.splitlines()[-1]
    assert command.main(["--seeds", "6", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == alone


def test_a_violation_fails_and_prints_the_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SimCluster) -> None:
        raise Violation("3 durable", "planted here")

    monkeypatch.setattr(SimCluster, "_inspect", broken)
    assert command.main(["--seed", "1"]) == 1
    assert command.main(["--seeds", "1", "--jobs", "1", "--profile", "quiet", "--first", "9"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION with seed 1: 3 durable: planted here" in out
    assert "replay it: make simulate SEED=1\n" in out
    assert "replay it: make simulate SEED=9 PROFILE=quiet\n" in out


def test_a_crash_of_the_core_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: SimCluster) -> None:
        raise ZeroDivisionError("in the core")

    monkeypatch.setattr(SimCluster, "_recover", crash)
    assert simulate(1, Options()).guarantee == "crash"


def test_seeds_turn_on_every_fault() -> None:
    """Each seed has a subset of the faults; together they have them all. A store that is put back to an older state
    ends a cluster, so that fault has a profile of its own."""
    faults = {name for seed in range(300) for name in random_options(seed).faults()}
    faults |= set(PROFILES["rollback"](0).faults())
    assert faults >= set(Options.__struct_fields__) - {"duration_us"}


def test_faults_bite() -> None:
    """The world is rough enough: unknown outcomes, definite failures, seals and leader changes all happen."""
    results = [simulate(seed, random_options(seed)) for seed in range(30)]
    assert sum(result.appends[SimOutcome.UNKNOWN.value] for result in results) > 30
    assert sum(result.appends[SimOutcome.FAIL.value] for result in results) > 30
    assert sum(result.seals for result in results) > 100
    assert sum(result.leaders - 1 for result in results) > 20


def test_rare_things_happen() -> None:
    """Producers move, lose their topics and have batches refused, topics are deleted, subscribers are told that
    something is trimmed, records of unknown outcome are in the log: what is checked of all that is checked of
    something."""
    options = Options(
        metadata_nodes=3,
        producers=3,
        subscribers=2,
        message_loss=0.02,
        crash_storage_every_us=300_000,
        crash_metadata_every_us=300_000,
        store_us_max=30_000,
        finalize_every_us=300_000,
        seal_every_us=300_000,
        trim_every_us=40_000,
        topics_come_and_go_every_us=200_000,
        reopen_producer_every_us=400_000,
        event_time_ahead_us=25_000,
    )
    wanted = ("MoveProducer", "DeleteTopic", "FENCED", "GONE", "gaps", "ended", "races", "refused")
    happened: Counter[str] = Counter()
    for seed in range(60):
        if seed >= 6 and all(happened[name] for name in wanted):
            break
        cluster = SimCluster(seed, options)
        cluster.run()
        happened.update(type(decision).__name__ for decision in cluster.store.decisions)
        happened.update(producer.session.phase.name for producer in cluster.producers)
        happened["gaps"] += sum(len(seen.gaps) for seen in cluster.record.subscribers.values())
        happened["ended"] += sum(len(seen.ended) for seen in cluster.record.subscribers.values())
        happened["refused"] += sum(
            op.producer is not None and op.outcome is SimOutcome.FAIL for op in cluster.record.appends
        )
        happened["races"] += sum(node.races_lost for node in cluster.metadata_nodes)
    for name in wanted:
        assert happened[name] > 0, (name, happened)


def test_what_is_rare_about_groups_happens() -> None:
    """Groups move to other streams, staged rows expire, sinks are fenced, batches are repeated with other rows."""
    options = Options(
        metadata_nodes=3,
        sinks=3,
        message_loss=0.02,
        crash_storage_every_us=300_000,
        finalize_every_us=300_000,
        seal_every_us=80_000,
        crash_sink_every_us=150_000,
    )
    wanted = ("MoveGroup", "ExpireStaged", "GroupPublished", "fenced", "published", "repeated")
    happened: Counter[str] = Counter()
    for seed in range(40):
        if seed >= 4 and all(happened[name] for name in wanted):
            break
        cluster = SimCluster(seed, options)
        cluster.run()
        happened.update(type(decision).__name__ for decision in cluster.store.decisions)
        happened["fenced"] += sum(sink.fenced for sink in cluster.sinks)
        happened["published"] += len(cluster.record.published)
        told = Counter((answer.run, answer.batch) for answer in cluster.record.published)
        happened["repeated"] += sum(1 for times in told.values() if times > 1)
    for name in wanted:
        assert happened[name] > 0, (name, happened)


def acknowledged_since(cluster: SimCluster, since: int) -> int:
    return sum(1 for op in cluster.record.appends if op.outcome is SimOutcome.OK and op.completed >= since)


def test_a_disk_that_hangs_does_not_hold_up_the_log() -> None:
    """The node goes on reporting, only its syncs never end: its streams go on without it."""
    cluster = SimCluster(1, Options(storage_nodes=4, streams=3, appenders=3))
    cluster._set_up()
    cluster._start_clients()
    world = cluster.world
    world.run_until(world.now + 500_000)
    hung = cluster.storage_nodes[0]
    hung._synced = lambda *arguments: None  # type: ignore[method-assign]
    world.run_until(world.now + 2_000_000)
    assert acknowledged_since(cluster, world.now - 1_000_000) > 50
    leader = cluster.leader()
    assert leader is not None
    assert all(stream.is_open and hung.node not in stream.members for stream in leader.state.streams.values())


def test_a_replica_that_was_replaced_while_cut_off_hears_of_it() -> None:
    """It must not stay RUNNING in an epoch that is over, with waiters that hear nothing."""
    cluster = SimCluster(2, Options(storage_nodes=4, streams=1, appenders=2))
    cluster._set_up()
    cluster._start_clients()
    world, leader = cluster.world, cluster.leader()
    assert leader is not None
    (stream,) = leader.state.streams.values()
    old = stream.members[1]
    spare = next(node.node for node in cluster.storage_nodes if node.node not in stream.replicas)
    others = [address for address in world.processes if address != ("sn", old)]
    for address in others:
        world.blocked |= {(address, ("sn", old)), (("sn", old), address)}
    cluster.operator.insist(SealRequest(stream.stream), lambda outcome: None)
    world.run_until(world.now + 500_000)
    done: list[object] = []
    cluster.operator.insist(ReplaceRequest(stream.stream, old, spare), done.append)
    cluster.operator.insist(UnsealRequest(stream.stream), done.append)
    world.run_until(world.now + 1_000_000)
    assert done == [Done(), Done()]
    world.blocked.clear()
    world.run_until(world.now + 1_000_000)
    replaced = cluster.storage_nodes[old - 1].replicas[stream.stream]
    assert replaced.state is ReplicaState.SEALING
    assert replaced.hard_state.epoch == stream.epoch


def test_a_complete_replica_is_replaced_while_the_other_one_loses_its_state() -> None:
    """Random seed 1660 found it. An operator replaces one of two replicas. The other one has just died, but the leader
    has not noticed yet, and its hard state is lost. So the replaced one is the last copy, and has to stay until the new
    one is complete."""
    cluster = SimCluster(2, Options(storage_nodes=3, streams=1, replication=2, appenders=2))
    cluster._set_up()
    cluster._start_clients()
    world, leader = cluster.world, cluster.leader()
    assert leader is not None
    world.run_until(world.now + 500_000)
    (stream,) = leader.state.streams.values()
    other, old = (cluster.storage_nodes[node - 1] for node in stream.members)
    (new,) = {node.node for node in cluster.storage_nodes} - set(stream.replicas)
    done: list[object] = []
    cluster.operator.insist(SealRequest(stream.stream), done.append)
    world.run_until(world.now + 300_000)
    other.kill()
    other.disks[stream.stream].lose_hard_state()
    cluster.operator.insist(ReplaceRequest(stream.stream, old.node, new), done.append)
    world.run_until(world.now + 100_000)
    other.start()
    cluster.operator.insist(UnsealRequest(stream.stream), done.append)
    cluster.nemesis.stop()
    cluster._recover()
    cluster._inspect()
    assert done[1:] == [Done(), Done()]
    assert set(stream.replicas) == set(stream.members) == {other.node, new}
