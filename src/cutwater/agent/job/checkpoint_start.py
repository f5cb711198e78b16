"""Finds the checkpoint that an assignment goes on from: the last one in its line that has begun.

1. What this assignment has begun, it goes on with. An earlier attempt of it may have chosen already.
2. An agent may have died before it wrote anything, so a directory alone counts for nothing.
3. If no checkpoint of the line has begun, the line begins: with the savepoint, or anew. That is refused if the line has
   published a batch, since then its checkpoint is lost, or on another machine.
"""

from __future__ import annotations

from cutwater.agent.checkpoint_lines import LINE, before
from cutwater.client.client import Client
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.spark.savepoint.savepoints import absolute
from cutwater.spark.savepoint.succession import (
    begin_from,
    has_begun,
    mark_of,
    predecessor_in,
    require_nothing_decided,
)
from cutwater.types import JobEpoch


def begin_checkpoint(client: Client, name: str, checkpoint: Checkpoint, epoch: JobEpoch, given: str) -> None:
    """Begin the checkpoint of an assignment from the one before, if there is one. ``given`` is the path of the one that
    the cluster knows, or empty."""
    predecessor = _predecessor(checkpoint, epoch, given)
    if predecessor is not None:
        begin_from(client, name, checkpoint, predecessor, epoch)
    elif not has_begun(checkpoint):
        require_nothing_decided(client, name, checkpoint.path, _begun(checkpoint))


def _predecessor(checkpoint: Checkpoint, epoch: JobEpoch, given: str) -> str | None:
    mark = mark_of(checkpoint)
    if mark is not None:
        return predecessor_in(checkpoint, mark)
    if has_begun(checkpoint):
        return None
    line = checkpoint.path.rpartition("/")[0]
    places = [f"{line}/{name}" for name in before(checkpoint.files.list(line), epoch)]
    if given and absolute(given) not in (*places, checkpoint.path):
        places.append(absolute(given))
    return next((place for place in places if has_begun(Checkpoint(place, checkpoint.files))), None)


def _begun(checkpoint: Checkpoint) -> int:
    """Return the assignment with which the line began."""
    begun = checkpoint.path.split("/")[-2].removeprefix(LINE)
    return int(begun) if begun.isdecimal() else 1
