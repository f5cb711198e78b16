"""The states of a log stream replica and the transitions between them.

The table is the specification: the state machine in ``replica.py`` consults it before every step, and the diagram in
``docs/protocol.md`` is drawn from it.
"""

from __future__ import annotations

import enum

from cutwater.types import ReplicaState


class Step(enum.Enum):
    """Why a replica changes its state."""

    SEAL_ASKED = "a seal arrived and the replica is not (or no longer) exactly at the sealed position"
    SEAL_REACHED = "everything up to the sealed position is committed on disk and nothing is beyond it"
    UNSEAL = "the next epoch opens with this replica in its list"
    FAULT = "a write, a replication or a commit failed"
    EXCLUDE = "the newest epoch goes on without this replica"
    LEARN = "the replica is told to copy what it lacks from a peer"
    NOTHING_LEARNED = "the sync ended before it had changed anything"
    LEARNED = "all committed entries of the source and their commit contexts are on disk"


TRANSITIONS: dict[tuple[ReplicaState, Step], ReplicaState] = {
    (ReplicaState.SEALING, Step.SEAL_ASKED): ReplicaState.SEALING,
    (ReplicaState.SEALING, Step.SEAL_REACHED): ReplicaState.SEALED,
    (ReplicaState.SEALING, Step.FAULT): ReplicaState.SEALING,
    (ReplicaState.SEALING, Step.EXCLUDE): ReplicaState.SEALING,
    (ReplicaState.SEALING, Step.LEARN): ReplicaState.LEARNING,
    (ReplicaState.SEALED, Step.SEAL_ASKED): ReplicaState.SEALING,
    (ReplicaState.SEALED, Step.UNSEAL): ReplicaState.RUNNING,
    (ReplicaState.SEALED, Step.EXCLUDE): ReplicaState.SEALING,
    (ReplicaState.SEALED, Step.FAULT): ReplicaState.SEALING,
    (ReplicaState.RUNNING, Step.SEAL_ASKED): ReplicaState.SEALING,
    (ReplicaState.RUNNING, Step.FAULT): ReplicaState.SEALING,
    (ReplicaState.RUNNING, Step.EXCLUDE): ReplicaState.SEALING,
    (ReplicaState.LEARNING, Step.LEARN): ReplicaState.LEARNING,
    (ReplicaState.LEARNING, Step.LEARNED): ReplicaState.SEALING,
    (ReplicaState.LEARNING, Step.NOTHING_LEARNED): ReplicaState.SEALING,
    (ReplicaState.LEARNING, Step.FAULT): ReplicaState.LEARNING,
    (ReplicaState.LEARNING, Step.EXCLUDE): ReplicaState.LEARNING,
}


def next_state(state: ReplicaState, step: Step) -> ReplicaState | None:
    """Return the state to which the step leads, or None if the current state forbids it."""
    return TRANSITIONS.get((state, step))


def diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> SEALING", "    [*] --> LEARNING: hard state lost"]
    lines += [f"    {a.name} --> {b.name}: {step.name.lower()}" for (a, step), b in TRANSITIONS.items()]
    return "\n".join(lines)
