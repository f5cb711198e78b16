"""The table of states against the diagram that it is meant to be::

(start) ─▶ SEALING ─ seal(L), local end = L ─▶ SEALED ─ unseal(epoch+1) ─▶ RUNNING
▲  │ ▲                                                            │
│  │ └── sync done ── LEARNING ◀── sync ──┐ (from SEALING)        │
│  └──────────────────────────────────────┘                       │
└──────────── any write/replicate/commit error, or seal(L) ahead ──┘
"""

from __future__ import annotations

from itertools import product

import pytest

from cutwater.core.messages import SyncBegin, SyncEnd
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.events import ReplicaEvent, StorageFailed
from cutwater.core.replica.states import TRANSITIONS, Step, diagram, next_state
from cutwater.core.replica.sync_ranges import Extent, SyncCase, SyncPlan
from cutwater.errors import InvalidTransition, NotSealed, Refused
from cutwater.types import GLSN, LLSN, ReplicaState
from tests.unit.replica_bench import STREAM, Bench, backup_with, exclude, learn, seal, unseal

SEALING, SEALED, RUNNING, LEARNING = (
    ReplicaState.SEALING,
    ReplicaState.SEALED,
    ReplicaState.RUNNING,
    ReplicaState.LEARNING,
)

IN_THE_DIAGRAM = {
    (SEALING, Step.SEAL_REACHED): SEALED,
    (SEALED, Step.UNSEAL): RUNNING,
    (SEALING, Step.LEARN): LEARNING,
    (LEARNING, Step.LEARNED): SEALING,
    (RUNNING, Step.FAULT): SEALING,
    (RUNNING, Step.SEAL_ASKED): SEALING,
}

IN_THE_TEXT = {
    # "Behind L: SEALING, catches up."
    (SEALING, Step.SEAL_ASKED): SEALING,
    # A sealed replica that missed an epoch hears of its seal: it is no longer at the newest sealed position.
    (SEALED, Step.SEAL_ASKED): SEALING,
    # "A replica outside the newest epoch's list first truncates durably to its own committed LLSN."
    (SEALING, Step.EXCLUDE): SEALING,
    (SEALED, Step.EXCLUDE): SEALING,
    (RUNNING, Step.EXCLUDE): SEALING,
    (LEARNING, Step.EXCLUDE): LEARNING,
    # "An fsync error fails the replica", whatever it is doing.
    (SEALING, Step.FAULT): SEALING,
    (SEALED, Step.FAULT): SEALING,
    (LEARNING, Step.FAULT): LEARNING,
    # "An interrupted sync leaves a replica that never counts until synced again."
    (LEARNING, Step.LEARN): LEARNING,
    # A sync that ended before it had touched the files leaves the replica as it was.
    (LEARNING, Step.NOTHING_LEARNED): SEALING,
}


def test_the_table_is_the_diagram_and_the_text_and_nothing_else() -> None:
    assert TRANSITIONS == IN_THE_DIAGRAM | IN_THE_TEXT


@pytest.mark.parametrize(("state", "step"), list(product(ReplicaState, Step)))
def test_every_other_step_is_forbidden(state: ReplicaState, step: Step) -> None:
    allowed = IN_THE_DIAGRAM | IN_THE_TEXT
    assert next_state(state, step) == allowed.get((state, step))


def test_running_is_entered_only_from_sealed_and_sealed_only_from_sealing() -> None:
    """What every replica must have gone through before it takes appends, whatever steps are added."""
    entered = {(before, step, after) for (before, step), after in TRANSITIONS.items() if before != after}
    assert {(b, s) for b, s, a in entered if a is RUNNING} == {(SEALED, Step.UNSEAL)}
    assert {(b, s) for b, s, a in entered if a is SEALED} == {(SEALING, Step.SEAL_REACHED)}
    assert {(b, s) for b, s, a in entered if a is LEARNING} == {(SEALING, Step.LEARN)}
    assert {(b, s) for b, s, a in entered if b is LEARNING} == {
        (LEARNING, Step.LEARNED),
        (LEARNING, Step.NOTHING_LEARNED),
    }


def test_the_diagram_of_the_docs_shows_every_arrow_once() -> None:
    lines = [line.strip() for line in diagram().splitlines()]
    assert lines[:3] == ["stateDiagram-v2", "[*] --> SEALING", "[*] --> LEARNING: hard state lost"]
    arrows = [f"{a.name} --> {b.name}: {step.name.lower()}" for (a, step), b in TRANSITIONS.items()]
    assert sorted(lines[3:]) == sorted(arrows)


# The machine itself, brought into each state and asked for each step.


def in_state(state: ReplicaState) -> Bench:
    """A backup in epoch 1 with LLSN 1 and 2 committed, in the given state."""
    bench = backup_with(2, committed=2)
    if state is SEALED:
        bench.do(seal(2))
    elif state is not RUNNING:
        bench.do(seal(4))
    if state is LEARNING:
        bench.do(learn())
    assert bench.replica.state is state
    return bench


def learned(bench: Bench) -> None:
    """The source says that nothing is missing."""
    nothing = SyncPlan(SyncCase.EQUAL, None, Extent(LLSN(3), LLSN(2)))
    bench.do(SyncBegin(STREAM, 1, nothing, GLSN(2)))
    bench.do(SyncEnd(STREAM, 1, (), DedupCheckpoint(LLSN(2), ()), GLSN(1)))


COMMANDS: dict[Step, ReplicaEvent] = {
    # A position ahead, so that the seal itself does not reach it; of the next epoch, so that it is always new.
    Step.SEAL_ASKED: seal(9, epoch=2),
    Step.UNSEAL: unseal(2, epoch=2),
    Step.EXCLUDE: exclude(),
    Step.LEARN: learn(),
}


@pytest.mark.parametrize(("state", "step"), list(product(ReplicaState, COMMANDS)))
def test_a_command_leads_where_the_table_says_or_is_refused(state: ReplicaState, step: Step) -> None:
    bench = in_state(state)
    target = next_state(state, step)
    if target is None:
        before = (bench.numbers(), bench.replica.hard_state)
        with pytest.raises((Refused, NotSealed, InvalidTransition)):
            bench.do(COMMANDS[step])
        assert bench.replica.state is state
        assert (bench.numbers(), bench.replica.hard_state) == before, "a refusal changes nothing"
    else:
        bench.do(COMMANDS[step])
        assert bench.replica.state is target


@pytest.mark.parametrize("state", list(ReplicaState))
def test_a_fault_leads_to_sealing_or_stays_silent(state: ReplicaState) -> None:
    replica = in_state(state).replica
    replica.handle(StorageFailed("I/O error"))
    assert replica.state is next_state(state, Step.FAULT)


def test_a_sync_that_is_done_leads_from_learning_to_sealing() -> None:
    bench = in_state(LEARNING)
    learned(bench)
    assert bench.replica.state is SEALING


@pytest.mark.parametrize("state", [SEALING, SEALED, RUNNING])
def test_the_end_of_a_sync_that_is_not_under_way_changes_nothing(state: ReplicaState) -> None:
    bench = in_state(state)
    learned(bench)
    assert bench.replica.state is state
