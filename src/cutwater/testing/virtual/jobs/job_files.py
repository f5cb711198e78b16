"""The checkpoints and savepoints of simulated jobs: what their processes have written, and where each may be read.

A checkpoint has what a micro-batch leaves in one of Spark: its range before it is staged, and the state after it when
it is published. Files of a root that is not shared exist on one machine.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.agent.checkpoint_lines import before
from cutwater.core.jobs.job_records import CheckpointPointer, JobSavepoint
from cutwater.testing.checkers.violation import Violation
from cutwater.types import InputRange, JobEpoch

SHARED, LOCAL = "default", "local"
"""Names of roots. The first one is the same on all machines."""


class ProgramState(Struct, frozen=True):
    """Where a job is in its input, and how many rows it has published."""

    position: int = 0
    rows: int = 0


class SimCheckpoint(Struct):
    """``planned`` and ``done`` have batches by number. ``origin`` is the state with which it began, and ``start_key``
    and ``start_batch`` name the batch of another run after which it goes on."""

    epoch: JobEpoch
    key: str = ""
    planned: dict[int, InputRange] = {}
    done: dict[int, ProgramState] = {}
    origin: ProgramState = ProgramState()
    start_key: str = ""
    start_batch: int = -1
    replays: bool = False
    predecessor: str = ""
    is_begun: bool = False

    @property
    def last_done(self) -> int:
        return max(self.done, default=-1)

    def state_before(self, batch: int) -> ProgramState:
        return self.done[batch - 1] if batch else self.origin


class SimSavepoint(Struct, frozen=True):
    state: ProgramState
    key: str
    batch: int


class JobFiles:
    """All files of all jobs, by root, machine and path."""

    def __init__(self) -> None:
        self._checkpoints: dict[tuple[str, str], dict[str, SimCheckpoint]] = {}
        self._savepoints: dict[tuple[str, str], SimSavepoint] = {}
        self.writers: dict[tuple[str, str], JobEpoch] = {}
        """Which assignment has written a checkpoint."""

    def checkpoint(self, root: str, machine: str, path: str, epoch: JobEpoch) -> SimCheckpoint:
        """Return the checkpoint that an assignment writes. No other one ever writes it."""
        place = _place(root, machine)
        line, _, name = path.rpartition("/")
        known = self._checkpoints.setdefault((place, line), {})
        if name not in known:
            known[name] = SimCheckpoint(epoch)
        if known[name].epoch != epoch:
            what = f"assignment {epoch} writes the checkpoint {path} of assignment {known[name].epoch}"
            raise Violation("job checkpoint", what)
        return known[name]

    def predecessor(self, root: str, machine: str, path: str, epoch: JobEpoch) -> SimCheckpoint | None:
        """Return the checkpoint of the same line that was begun last before this assignment."""
        line = path.rpartition("/")[0]
        known = self._checkpoints.get((_place(root, machine), line), {})
        for name in before(known, epoch):
            if known[name].is_begun:
                return known[name]
        return None

    def has(self, pointer: CheckpointPointer, machine: str) -> bool:
        line, _, name = pointer.path.rpartition("/")
        found = self._checkpoints.get((_place(pointer.root, machine), line), {}).get(name)
        return found is not None and found.is_begun

    def save(self, root: str, machine: str, path: str, savepoint: SimSavepoint) -> None:
        self._savepoints[_place(root, machine), path] = savepoint

    def saved(self, savepoint: JobSavepoint, machine: str) -> SimSavepoint:
        found = self._savepoints.get((_place(savepoint.root, machine), savepoint.path))
        if found is None:
            raise Violation("job output", f"{savepoint} is known, and its files are not on {machine}")
        return found


def _place(root: str, machine: str) -> str:
    return root if root == SHARED else f"{root} on {machine}"
