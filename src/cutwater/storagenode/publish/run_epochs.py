"""The newest assignments of jobs that a storage node knows of, by run: it takes no parts of earlier ones.

The leader decides who may publish, so this saves work and room only: a driver that was replaced notices it with its
next message, and not when it publishes. The node learns epochs from groups that it publishes, from answers about
staged parts, and from the parts themselves. A part counts only among those of the same principal, because what a
client says about an epoch is not checked here.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from cutwater.core.publish.staged import StagedPart
from cutwater.errors import RunFenced
from cutwater.types import JobEpoch, RunId

RUNS_MAX = 10_000


class RunEpochs:
    def __init__(self) -> None:
        self._known: dict[tuple[RunId, str], JobEpoch] = {}
        """By run and owner, in the order in which they changed. The leader is the owner ''."""

    def note(self, run: RunId, epoch: JobEpoch | UnsetType) -> None:
        """Note an epoch that the leader has told."""
        if epoch is not UNSET:
            self._note((run, ""), epoch)

    def note_part(self, part: StagedPart) -> None:
        if part.job_epoch is not UNSET:
            self._note((part.run, part.owner or ""), part.job_epoch)

    def check(self, part: StagedPart) -> None:
        """Raise if the part belongs to an assignment that is over."""
        own = part.job_epoch or JobEpoch(0)
        newest = max(self._known.get((part.run, owner), own) for owner in ("", part.owner or ""))
        if newest > own:
            raise RunFenced.of_epoch("", part.run, own, newest)

    def _note(self, key: tuple[RunId, str], epoch: JobEpoch) -> None:
        if epoch > self._known.get(key, 0):
            self._known.pop(key, None)
            self._known[key] = epoch
            if len(self._known) > RUNS_MAX:
                del self._known[next(iter(self._known))]
