"""Where the checkpoint of an assignment lies: ``<job>/begun-<epoch>/epoch-<epoch>`` below its root.

All assignments that go on with one another have their checkpoints in one directory, a *line*, which is named after the
epoch with which it began, anew or from a savepoint. So an agent that takes over finds the last checkpoint that was
begun in the line, even if agents before it died before they had begun theirs; and if none was, it knows that the
line still begins with its savepoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.core.jobs.job_records import CheckpointPointer
from cutwater.core.jobs.job_requests import AssignedJob
from cutwater.types import JobEpoch

LINE = "begun-"
EPOCH = "epoch-"


def next_checkpoint(assigned: AssignedJob) -> CheckpointPointer:
    """Return where the checkpoint of an assignment is to be."""
    line = line_of(assigned.start.checkpoint)
    if line is None:
        line = f"{assigned.name}/{LINE}{assigned.epoch}"
    return CheckpointPointer(assigned.version.spec.checkpoint_root, f"{line}/{EPOCH}{assigned.epoch}")


def line_of(pointer: CheckpointPointer | None) -> str | None:
    """Return the line of a checkpoint, as a path below the root, or None if it is in none."""
    if pointer is None:
        return None
    line, _, name = pointer.path.rpartition("/")
    is_line = line.rpartition("/")[2].startswith(LINE) and epoch_of(name) is not None
    return line if is_line else None


def epoch_of(name: str) -> JobEpoch | None:
    """Return the epoch in the name of a checkpoint's directory."""
    number = name.removeprefix(EPOCH)
    return JobEpoch(int(number)) if name.startswith(EPOCH) and number.isdecimal() else None


def before(names: Iterable[str], epoch: JobEpoch) -> list[str]:
    """Return the checkpoints of a line that were begun before an epoch, the last one first."""
    found = {known: name for name in names if (known := epoch_of(name)) is not None and known < epoch}
    return [found[known] for known in sorted(found, reverse=True)]
