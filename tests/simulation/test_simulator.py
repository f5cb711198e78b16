"""The simulator itself: it says how to replay a run, its seeds turn on every fault, and the faults bite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from cutwater.admin.operations import Admin
from cutwater.testing import simulate as command
from cutwater.testing.checkers.record import SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.virtual.options import PROFILES, ShippedOptions, random_options
from cutwater.testing.virtual.simulation import ShippedSimulation, simulate_shipped
from cutwater.testing.virtual.system import run_simulated
from cutwater.testing.virtual.trace import Trace
from cutwater.types import ReplicaState, StorageNodeId

SHORT = ShippedOptions(seconds=0.5, metadata_nodes=1)


def lived(seed: int, options: ShippedOptions, act: Callable[[ShippedSimulation], Awaitable[None]]) -> None:
    """Found a cluster with clients, and let something happen to it."""

    async def run(world: ShippedSimulation) -> None:
        await world.cluster.found()
        await world._create_topics()
        world._start_clients()
        await act(world)

    def work(loop):
        loop.run_until_complete(run(ShippedSimulation(seed, options, loop)))

    run_simulated(work, Random(seed), Trace(None))


@pytest.mark.parametrize("seed", range(2))
def test_a_store_that_was_rolled_back_is_noticed_before_any_client_is_told(seed: int) -> None:
    assert simulate_shipped(seed, PROFILES["rollback"](seed)).violation is None


def test_another_seed_gives_another_trace() -> None:
    assert simulate_shipped(5, SHORT).trace_hash != simulate_shipped(6, SHORT).trace_hash


def test_many_in_parallel_equal_many_in_sequence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--seeds", "3", "--profile", "quiet", "--jobs", "1"]) == 0
    alone = capsys.readouterr().out.splitlines()[-1]
    assert command.main(["--seeds", "3", "--profile", "quiet", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == alone


def test_a_violation_fails_and_prints_the_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: ShippedSimulation) -> None:
        raise Violation("3 durable", "planted here")

    monkeypatch.setattr(ShippedSimulation, "run", broken)
    assert command.main(["--seed", "1"]) == 1
    assert command.main(["--seeds", "1", "--jobs", "1", "--profile", "quiet", "--first", "9"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION with seed 1: 3 durable: planted here" in out
    assert "replay it: make simulate SEED=1\n" in out
    assert "replay it: make simulate SEED=9 PROFILE=quiet\n" in out
    assert "reduce it: make simulate SEED=9 PROFILE=quiet ARGS=--shrink\n" in out


def test_changed_options_apply_to_many_seeds_and_are_in_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """More copies are wanted than there are storage nodes, so every run fails."""
    sets = ["--set", "seconds=0.2", "--set", "replication=3", "--set", "storage_nodes=1"]
    assert command.main(["--seeds", "2", "--first", "9", "--jobs", "2", "--profile", "quiet", *sets]) == 1
    out = capsys.readouterr().out
    for seed in (9, 10):
        assert f'replay it: make simulate SEED={seed} PROFILE=quiet ARGS="{" ".join(sets)}"\n' in out
        assert f'reduce it: make simulate SEED={seed} PROFILE=quiet ARGS="{" ".join(sets)} --shrink"\n' in out


def test_a_crash_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def crash(self: ShippedSimulation) -> None:
        raise ZeroDivisionError("in the simulator")

    monkeypatch.setattr(ShippedSimulation, "_recover", crash)
    assert simulate_shipped(1, SHORT).guarantee == "crash"


def test_seeds_turn_on_every_fault() -> None:
    """Each seed has a subset of the faults; together they have them all. A store that is put back ends the history that
    other faults need, so that fault has a profile of its own, and prompt subscribers need a cluster without faults. How
    often the watchdog looks is no fault. An embedded log is no cluster."""
    faults = {name for seed in range(300) for name in random_options(seed).faults()}
    faults |= set(PROFILES["rollback"](0).faults())
    faults |= {name for seed in range(10) for name in PROFILES["embedded"](seed).faults()}
    faults |= {name for seed in range(10) for name in PROFILES["jobs"](seed).faults()}
    assert faults >= set(ShippedOptions.__struct_fields__) - {"prompt_seconds", "look_every"}


def test_faults_bite() -> None:
    """The world is rough enough: unknown outcomes, refusals, seals and leader changes all happen."""
    options = ShippedOptions(kill_every=0.2, reset_every=0.1, timeout=0.3, down_seconds_max=0.3, seconds=2.0)
    results = [simulate_shipped(seed, options) for seed in range(3)]
    assert sum(result.appends[SimOutcome.UNKNOWN.value] for result in results) > 3
    assert sum(result.appends[SimOutcome.FAIL.value] for result in results) > 0
    assert sum(result.seals for result in results) > 10
    assert sum(result.leaders - 1 for result in results) > 3


def test_rare_things_happen() -> None:
    """Producers move, replicas are replaced, topics are deleted, sinks publish: what is checked of all that is
    checked of something."""
    options = ShippedOptions(
        storage_nodes=3,
        replication=2,
        is_hasty=True,
        producers=3,
        sinks=3,
        kill_every=0.3,
        power_all_every=0.5,
        seal_every=0.1,
        change_topics_every=0.2,
        kill_client_every=0.2,
        seconds=3.0,
    )
    wanted = ("MoveProducer", "DeleteTopic", "DecideBatch", "AssignReplicas", "Seal", "Cut")
    happened: Counter[str] = Counter()
    for seed in range(30):
        lived(seed, options, lambda world: _live_on(world, happened))
        if all(happened[name] for name in wanted):
            break
    assert all(happened[name] for name in wanted), happened


async def _live_on(world: ShippedSimulation, happened: Counter[str]) -> None:
    world.nemesis.start()
    await _sleep(world, world.options.seconds)
    world.nemesis.stop()
    happened.update(type(decision).__name__ for decision in world.cluster.store.history)


async def _sleep(world: ShippedSimulation, seconds: float) -> None:
    done = world.loop.create_future()
    world.loop.call_later(seconds, done.set_result, None)
    await done


def acknowledged(world: ShippedSimulation) -> int:
    return sum(op.outcome is SimOutcome.OK for op in world.history.appends)


def test_a_disk_that_hangs_does_not_hold_up_the_log() -> None:
    """The node goes on reporting, only its syncs do not end: its streams go on without it."""

    async def hang(world: ShippedSimulation) -> None:
        await _sleep(world, 0.5)
        world.cluster.nodes[0].disk.faults.add(DiskFaultRule(DiskFault.HUNG_SYNC, 1.0, seconds=(100.0, 100.0)))
        await _sleep(world, 4.0)
        before = acknowledged(world)
        await _sleep(world, 2.0)
        assert acknowledged(world) > before + 50
        leader = world.cluster.leader()
        assert leader is not None
        for stream in leader.state.streams.values():
            assert stream.is_open
            assert 1 not in stream.members

    lived(1, ShippedOptions(storage_nodes=4, streams=3, replication=2, append_pause=0.02, is_hasty=True), hang)


def test_a_replica_that_was_replaced_while_cut_off_hears_of_it() -> None:
    """It must not stay RUNNING in an epoch that is over, with waiters that hear nothing."""

    async def replace(world: ShippedSimulation) -> None:
        cluster, leader = world.cluster, world.cluster.leader()
        assert leader is not None
        (stream,) = leader.state.streams.values()
        old = stream.members[1]
        spare = next(StorageNodeId(n) for n in range(1, 5) if n not in stream.replicas)
        here = cluster.nodes[old - 1].host
        others = [host for host in world.nemesis._hosts() if host != here]
        for other in others:
            cluster.network.cut(here, other)
            cluster.network.cut(other, here)
        await cluster.operate(lambda admin: admin.seal(stream.stream))
        await _sleep(world, 0.5)
        await cluster.operate(lambda admin: admin.replace_replica(stream.stream, old, spare))
        await cluster.operate(lambda admin: admin.unseal(stream.stream))
        await _sleep(world, 1.0)
        for other in others:
            cluster.network.heal(here, other)
            cluster.network.heal(other, here)
        await _sleep(world, 3.0)
        replaced = world.replica(old, stream.stream)
        assert replaced is None or replaced.state is not ReplicaState.RUNNING
        if replaced is not None:
            assert replaced.hard_state.epoch == stream.epoch

    lived(2, ShippedOptions(storage_nodes=4, streams=1, replication=3, producers=0), replace)


def test_a_complete_replica_is_replaced_while_the_other_one_loses_its_state() -> None:
    """An operator replaces one of two replicas. The other one has just died, but the leader has not noticed yet, and
    its hard state is lost. So the replaced one is the last copy, and has to stay until the new one is complete."""

    async def replace(world: ShippedSimulation) -> None:
        cluster, leader = world.cluster, world.cluster.leader()
        assert leader is not None
        await _sleep(world, 0.5)
        (stream,) = leader.state.streams.values()
        other, old = stream.members
        (new,) = {StorageNodeId(n) for n in (1, 2, 3)} - set(stream.replicas)
        await cluster.operate(lambda admin: admin.seal(stream.stream))
        await _sleep(world, 0.3)
        machine = cluster.nodes[other - 1]
        # Without a word, so that the leader does not notice.
        machine.cut_power()
        world.nemesis._lose_state(machine)

        async def replace_replica(admin: Admin) -> None:
            await admin.replace_replica(stream.stream, old, new)

        await cluster.operate(replace_replica)
        machine.start()
        await cluster.operate(lambda admin: admin.unseal(stream.stream))
        world.nemesis.stop()
        world.is_healed = True
        world.loop.alarms.clear()
        await world._recover()
        assert set(stream.replicas) == set(stream.members) == {other, new}
        world._inspect()

    lived(2, ShippedOptions(storage_nodes=3, streams=1, replication=2, producers=0), replace)
