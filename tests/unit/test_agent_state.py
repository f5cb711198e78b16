"""An agent without a machine: leases, orders, reports, steps of operations, and random faults."""

from __future__ import annotations

import os
from random import Random

import pytest

from cutwater.agent import agent_events as e
from cutwater.agent.agent_state import RENEW_AGAIN_MS, AgentOptions, AgentState
from cutwater.agent.checkpoint_lines import before, next_checkpoint
from cutwater.agent.job_work import STEP_MS, WorkStage
from cutwater.agent.lease_clock import LeaseClock, margin_ms
from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.agents import JobIsolation
from cutwater.core.jobs.job_records import CheckpointPointer, JobPhase, JobVersion, RunEnd, StartPoint
from cutwater.core.jobs.operations import OperationError, OperationKind, OperationState
from cutwater.types import JobEpoch, JobNumber, Revision
from tests.unit.agent_kit import LEASE_MS, AgentDouble, World
from tests.unit.job_kit import J1, SPEC, agent


@pytest.fixture
def world() -> World:
    return World()


def submitted(world: World, name: str = "fraud", **life: str) -> AgentDouble:
    """Let an agent run a job."""
    made = world.add()
    made.life = {name: life.get("life", "run")}
    world.leader.submit(name)
    world.run(1_000)
    return made


def test_a_job_runs_after_its_attempt_is_decided_and_comes_up(world: World) -> None:
    made = submitted(world)
    job = world.leader.job()
    assert (job.phase, job.has_come_up, len(world.running()["fraud"])) == (JobPhase.RUNNING, True, 1)
    # The attempt was stored before the process was started, with a checkpoint of its own.
    told = [type(effect.request) if isinstance(effect, e.Ask) else type(effect) for effect in made.effects]
    order = (r.RegisterAgentRequest, e.SetDeadline, r.FetchAssignedRequest, r.BeginAttemptRequest, e.StartJob)
    assert sorted(order, key=told.index) == list(order)
    assert told.count(e.StartJob) == 1
    assert job.start.checkpoint == CheckpointPointer("default", "fraud/begun-1/epoch-1")


def test_the_lease_is_renewed_in_time_and_counts_from_the_sending(world: World) -> None:
    made = submitted(world)
    world.run(60_000)
    renewals = [request for request in made.asked if isinstance(request, r.RenewAgentRequest)]
    assert len(renewals) == pytest.approx(60_000 / (LEASE_MS / 3), abs=2)
    assert renewals[-1].progress[0].batch == 0
    deadlines = [effect.at_ms for effect in made.effects if isinstance(effect, e.SetDeadline)]
    assert deadlines[0] == LEASE_MS - margin_ms(LEASE_MS), "from when the registration was sent"
    assert made.state.lease.deadline_ms == made.state.lease.confirmed_ms + LEASE_MS - margin_ms(LEASE_MS)


def test_a_late_answer_to_an_old_renewal_does_not_shorten_the_lease() -> None:
    lease = LeaseClock()
    lease.confirm(100, 9_000)
    lease.confirm(50, 9_000)
    assert (lease.confirmed_ms, lease.renew_ms, lease.deadline_ms) == (100, 3_100, 9_100 - margin_ms(9_000))


def test_an_agent_that_is_cut_off_kills_before_its_lease_ends_and_registers_anew(world: World) -> None:
    made = submitted(world)
    first = made.state.session
    made.is_cut_off = True
    confirmed = made.state.lease.confirmed_ms
    world.run(confirmed + LEASE_MS - margin_ms(LEASE_MS) - 1)
    assert world.running()
    world.run(confirmed + LEASE_MS - margin_ms(LEASE_MS) + 20)
    assert not world.running()
    world.run(confirmed + 3 * LEASE_MS)
    assert world.leader.job().phase is JobPhase.WAITING
    made.is_cut_off = False
    world.run(world.now + 5_000)
    assert made.state.session != first
    assert (world.leader.job().phase, world.leader.epoch()) == (JobPhase.RUNNING, 2)
    # The next checkpoint is in the same line.
    assert world.leader.job().start.checkpoint == CheckpointPointer("default", "fraud/begun-1/epoch-2")


def test_an_agent_that_stood_still_kills_before_it_does_anything_else(world: World) -> None:
    made = submitted(world)
    other = world.add("b")
    made.is_paused = True
    made.deadline_ms = 10**9  # Its watchdog does not help.
    world.run(world.now + 2 * LEASE_MS)
    assert world.leader.job().assignment.agent == "b"  # type: ignore[union-attr]
    made.effects.clear()
    made.is_paused = False
    world.run(world.now + 300)
    told = [effect for effect in made.effects if not isinstance(effect, e.WakeAgent)]
    assert told[:2] == [e.KillJob((J1, JobEpoch(1))), told[1]]
    assert isinstance(told[1], e.FindSession)
    world.run(world.now + 5_000)
    assert [process.is_alive for process in made.processes] == [False]
    assert [process.is_alive for process in other.processes] == [True]


def test_two_agents_of_one_name_do_not_take_turns(world: World) -> None:
    first = submitted(world)
    second = world.add()
    world.run(world.now + 10_000)
    assert first.exit is not None
    assert first.exit.error is not None
    assert "another process on host-b runs as agent 'a' now: give each" in first.exit.error.message
    assert [process.is_alive for process in first.processes] == [False]
    assert (second.exit, len(world.running()["fraud"]), world.leader.epoch()) == (None, 1, 2)


def test_a_failed_attempt_is_repeated_as_the_strategy_says(world: World) -> None:
    made = world.add()
    made.life = {"fraud": "fail"}
    spec = type(SPEC)(SPEC.program, SPEC.entry, restart="fixed:delay=1s,attempts=2")
    world.leader.submit(spec=spec)
    world.run(30_000)
    job = world.leader.job()
    assert (job.phase, [attempt.number for attempt in job.attempts]) == (JobPhase.FAILED, [1, 2, 3])
    assert [attempt.end for attempt in job.attempts] == [RunEnd.FAILED] * 3
    assert job.failure is not None
    assert (job.failure.code, job.failure.message, job.failure.glsn) == ("pipeline_failed", "boom", 7)
    assert made.state.works == {}


@pytest.mark.parametrize(("life", "phase"), [("hopeless", JobPhase.FAILED), ("finish", JobPhase.FINISHED)])
def test_an_end_is_reported_once_and_only_when_no_process_is_left(world: World, life: str, phase: JobPhase) -> None:
    made = submitted(world, life=life)
    ends = [request for request in made.asked if isinstance(request, r.EndAssignmentRequest)]
    assert (world.leader.job().phase, len(ends), world.running()) == (phase, 1, {})


def test_a_restart_strategy_that_nobody_understands_ends_the_job(world: World) -> None:
    world.add()
    world.leader.submit(spec=type(SPEC)(SPEC.program, SPEC.entry, restart="sometimes"))
    world.run(1_000)
    job = world.leader.job()
    assert job.phase is JobPhase.FAILED
    assert job.failure is not None
    assert "no restart strategy" in job.failure.message


def test_a_savepoint_is_taken_while_the_job_runs_on(world: World) -> None:
    made = submitted(world)
    operation = world.leader.begin(OperationKind.SAVEPOINT)
    world.run(world.now + 2_000)
    job = world.leader.job()
    assert world.leader.operation(operation).state is OperationState.DONE
    (taken,) = job.savepoints
    assert (taken.path, taken.glsn, taken.batch, taken.bytes) == (f"fraud/{taken.id}", 9, 1, 100)
    assert (job.phase, made.processes[0].told) == (JobPhase.RUNNING, 1)


def test_a_stop_is_reported_with_its_savepoint_when_all_processes_are_gone(world: World) -> None:
    made = submitted(world)
    operation = world.leader.begin(OperationKind.STOP)
    world.run(world.now + 2_000)
    assert (world.leader.job().phase, world.leader.operation(operation).state) == (
        JobPhase.STOPPED,
        OperationState.DONE,
    )
    (noted,) = [request for request in made.asked if isinstance(request, r.NoteSavepointRequest)]
    assert (noted.has_ended, world.running(), made.state.works) == (True, {}, {})


def test_a_job_that_dies_between_its_savepoint_and_its_end_is_stopped_again(world: World) -> None:
    made = submitted(world)
    operation = world.leader.begin(OperationKind.STOP)
    made.life = {"fraud": "dies-saved"}
    world.run(world.now + 300)
    made.life = {}
    world.run(world.now + 60_000)
    assert world.leader.operation(operation).state is OperationState.DONE
    job = world.leader.job()
    assert (job.phase, len(job.savepoints), [one.end for one in job.attempts]) == (
        *(JobPhase.STOPPED, 1),
        [RunEnd.FAILED, RunEnd.STOPPED],
    )


def test_a_savepoint_that_the_cluster_does_not_take_makes_the_step_fail(world: World) -> None:
    made = submitted(world)
    for kind in (OperationKind.SAVEPOINT, OperationKind.STOP):
        operation = world.leader.begin(kind)
        made.life = {"fraud": "bad-size"}
        world.run(world.now + 10_000)
        known = world.leader.operation(operation)
        assert known.state is OperationState.FAILED
        assert known.error is not None
        assert "no negative size" in known.error.message
        assert world.leader.job().phase is JobPhase.RUNNING


def test_an_assignment_that_was_given_up_is_taken_up_again(world: World) -> None:
    """A report was refused, for a right that was missing for a moment, and the assignment is ordered still."""
    made = submitted(world)
    (key,) = made.state.works
    epoch = world.leader.epoch()
    moved = r.NoteCheckpointRequest("a", made.state.session, *key, CheckpointPointer("default", "not/../a path"))
    work = made.state.works[key]
    work.reports.append(moved)
    made.apply(work.unanswered(moved))
    world.run(world.now + 20_000)
    job = world.leader.job()
    assert (job.phase, world.leader.epoch()) == (JobPhase.RUNNING, epoch)
    assert [(one.number, one.end) for one in job.attempts] == [(1, RunEnd.LOST), (2, None)]
    assert len(world.running()["fraud"]) == 1


def test_a_renewal_that_is_refused_is_not_repeated_without_a_pause() -> None:
    state = AgentState(AgentOptions(agent()), Random(0))
    register = state.start()[0]
    assert isinstance(register, e.Ask)
    state.handle(e.RequestAnswered(register.request, r.AgentLease(LEASE_MS, Revision(1)), 0), 5)
    now = LEASE_MS // 3
    for _ in range(3):
        (renewal,) = [effect for effect in state.handle(e.Tick(), now) if isinstance(effect, e.Ask)]
        refused = e.RequestRefused(renewal.request, OperationError("refused", "no right"))
        assert state.handle(refused, now) == [e.WakeAgent(now + RENEW_AGAIN_MS)]
        now += RENEW_AGAIN_MS


def test_a_step_that_fails_leaves_the_job_running(world: World) -> None:
    made = submitted(world, life="unsavable")
    operation = world.leader.begin(OperationKind.STOP)
    world.run(world.now + 2_000)
    found = world.leader.operation(operation)
    assert (found.state, found.error.message) == (OperationState.FAILED, "cannot be written")  # type: ignore[union-attr]
    assert (world.leader.job().phase, made.processes[0].told) == (JobPhase.RUNNING, 1)


def test_a_step_that_a_job_does_not_answer_fails_when_its_time_is_up(world: World) -> None:
    submitted(world, life="deaf")
    operation = world.leader.begin(OperationKind.SAVEPOINT, timeout_ms=20_000)
    world.run(world.now + 19_000)
    assert world.leader.operation(operation).state is OperationState.RUNNING
    world.run(world.now + 35_000)
    assert world.leader.operation(operation).error.code == "deadline_exceeded"  # type: ignore[union-attr]
    assert STEP_MS > 20_000


def test_a_job_is_restarted_rescaled_and_cancelled(world: World) -> None:
    made = submitted(world)
    world.leader.begin(OperationKind.RESTART)
    world.run(world.now + 3_000)
    assert (world.leader.job().phase, world.leader.epoch()) == (JobPhase.RUNNING, 2)
    spec = type(SPEC)(SPEC.program, SPEC.entry, parallelism=3)
    operation = world.leader.begin(OperationKind.RESCALE, spec=spec, version=2, version_before=1, was_running=True)
    world.run(world.now + 5_000)
    assert world.leader.operation(operation).state is OperationState.DONE
    starts = [effect for effect in made.effects if isinstance(effect, e.StartJob)]
    assert [start.assigned.version.spec.parallelism for start in starts] == [1, 1, 3]
    assert [start.checkpoint.path for start in starts] == [
        "fraud/begun-1/epoch-1",
        "fraud/begun-1/epoch-2",
        "fraud/begun-3/epoch-3",
    ]
    world.leader.begin(OperationKind.CANCEL)
    world.run(world.now + 2_000)
    assert (world.leader.job().phase, world.running()) == (JobPhase.CANCELLED, {})


def test_a_job_that_moved_elsewhere_is_killed_and_not_reported(world: World) -> None:
    made = submitted(world)
    job = world.leader.job()
    world.leader.apply(j.EndAssignment(job.number, world.leader.epoch(), RunEnd.LOST))
    world.leader.state.agents["a"] = world.leader.state.agents["a"]
    world.run(world.now + 3_000)
    assert [process.is_alive for process in made.processes] == [False, True]
    assert not [request for request in made.asked if isinstance(request, r.EndAssignmentRequest)]


def test_an_agent_that_ends_gives_its_jobs_back_and_gets_none(world: World) -> None:
    made = submitted(world)
    other = world.add("b")
    world.run(world.now + 500)
    made.happen(e.DrainWanted())
    world.run(world.now + 5_000)
    assert (made.exit, made.state.works) == (e.ExitAgent(None), {})
    assert [attempt.end for attempt in world.leader.job().attempts] == [RunEnd.LOST, None]
    assert [process.is_alive for process in other.processes] == [True]


def test_an_agent_whose_jobs_do_not_stop_kills_them_when_its_time_is_up(world: World) -> None:
    made = submitted(world, life="deaf")
    made.happen(e.DrainWanted())
    world.run(world.now + 29_000)
    assert made.exit is None
    world.run(world.now + 5_000)
    assert (made.exit, world.running()) == (e.ExitAgent(None), {})
    other = world.add("c")
    world.run(world.now + 1_000)
    other.happen(e.KillWanted())
    world.run(world.now + 1_000)
    assert other.exit == e.ExitAgent(None)


def test_the_loss_of_the_watchdog_ends_everything(world: World) -> None:
    made = submitted(world)
    made.happen(e.WatchdogLost())
    world.run(world.now + 1_000)
    assert world.running() == {}
    assert made.exit is not None
    assert made.exit.error is not None


def test_jobs_of_another_owner_are_refused_without_users_of_their_own() -> None:
    state = AgentState(AgentOptions(agent(isolation=JobIsolation.ONE_OWNER)), Random(1))
    ask = state.start()[0]
    assert isinstance(ask, e.Ask)
    state.handle(e.RequestAnswered(ask.request, r.AgentLease(LEASE_MS, r.Revision(1)), 0), 1)
    orders = tuple(r.JobOrder(JobNumber(n), f"j{n}", JobEpoch(n), 1, r.OrderedAction.RUN) for n in (1, 2))
    watch = r.WatchAgentRequest("a", state.session, r.Revision(0), r.WAIT_MS_MAX)
    state.handle(e.RequestAnswered(watch, r.AgentOrders(r.Revision(2), orders), 1), 2)
    for number, owner in ((1, "ann"), (2, "bob")):
        job, epoch = JobNumber(number), JobEpoch(number)
        assigned = r.AssignedJob(job, f"j{number}", owner, epoch, JobVersion(1, SPEC), StartPoint())
        fetch = r.FetchAssignedRequest("a", state.session, job, epoch)
        effects = state.handle(e.RequestAnswered(fetch, assigned, 2), 3)
    (refused,) = [effect.request for effect in effects if isinstance(effect, e.Ask)]
    assert isinstance(refused, r.EndAssignmentRequest)
    assert refused.failure is not None
    assert (
        "runs jobs of another owner, and this one belongs to bob: start the agent with --shared-user"
        in refused.failure.message
    )


def test_a_checkpoint_is_in_the_line_of_the_one_before() -> None:
    def assigned(checkpoint: CheckpointPointer | None) -> r.AssignedJob:
        start = StartPoint(checkpoint)
        return r.AssignedJob(J1, "fraud", "ann", JobEpoch(9), JobVersion(1, SPEC), start)

    assert next_checkpoint(assigned(None)).path == "fraud/begun-9/epoch-9"
    assert next_checkpoint(assigned(CheckpointPointer("default", "fraud/begun-3/epoch-7"))).path == (
        "fraud/begun-3/epoch-9"
    )
    assert next_checkpoint(assigned(CheckpointPointer("default", "elsewhere"))).path == "fraud/begun-9/epoch-9"
    names = ["epoch-10", "epoch-9", "epoch-3", ".epoch-4.new", "epoch-x"]
    assert before(names, JobEpoch(10)) == ["epoch-9", "epoch-3"]


SEEDS = range(400) if os.environ.get("CUTWATER_SOAK") else range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_job_runs_twice_and_every_job_runs_in_the_end(seed: int) -> None:
    """Random faults. A failure is replayed by ``-k 'in_the_end[SEED]'``."""
    world = World(seed, loss=0.1)
    random = Random(seed)
    agents, drained = [world.add(name, 3) for name in "abc"], []
    for number in range(4):
        world.leader.submit(f"j{number}")

    def nothing_runs_twice() -> None:
        for name, processes in world.running().items():
            assert len(processes) <= 1, (seed, world.now, name, [process.key for process in processes])

    for _ in range(30):
        made = random.choice(agents)
        match random.choice(("cut", "pause", "fail", "operate", "wait", "drain", "restart")):
            case "cut":
                made.is_cut_off = not made.is_cut_off
            case "pause":
                made.is_paused = not made.is_paused
            case "fail":
                for process in made.processes:
                    if process.is_alive and random.random() < 0.5:
                        process.is_alive = False
                        made.happen(e.JobGone(process.key, "was killed (SIGKILL)"))
            case "operate":
                job = random.choice(list(world.leader.state.jobs.values()))
                kind = random.choice((OperationKind.SAVEPOINT, OperationKind.RESTART))
                if not job.operation and job.assignment is not None:
                    world.leader.begin(kind, job.name)
            case "drain" if random.random() < 0.3:
                drained.append(made)
                made.happen(e.DrainWanted())
            case "restart" if made.exit is not None or random.random() < 0.2:
                # The agent is killed, and so are its processes, by the watchdog.
                made.is_dead = True
                for process in made.processes:
                    process.is_alive = False
                again = world.add(made.name, 3)
                agents[agents.index(made)] = again
        world.run(world.now + random.randrange(200, 20_000), nothing_runs_twice)
    for place, made in enumerate(agents):
        made.is_cut_off = made.is_paused = False
        if made.exit is not None or made in drained:
            agents[place] = world.add(made.name, 3)
    world.loss = 0.0
    world.run(world.now + 120_000, nothing_runs_twice)
    assert {job.phase for job in world.leader.state.jobs.values()} == {JobPhase.RUNNING}, seed
    assert sorted(world.running()) == sorted(job.name for job in world.leader.state.jobs.values())
    for made in agents:
        assert all(work.stage is WorkStage.RUNNING for work in made.state.works.values())
