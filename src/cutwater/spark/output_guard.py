"""Whether the output of a pipeline has come further than the savepoint that it is started from.

It is looked at twice. When a pipeline is started: a refusal there disturbs nobody. And in the tasks of its first
micro-batch, after they have opened the run: from then on no other run can publish under the name, so what is seen there
is the last word, and nothing of this run is published yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from cutwater.client.runs import Run
from cutwater.errors import Refused
from cutwater.savepoints.manifest import RunPoint


class OutputGuard(Struct, frozen=True):
    """``point``: how far the output had come in the savepoint."""

    name: str
    savepoint: str
    point: RunPoint

    def require_nothing_beyond(self, runs: Iterable[Run], own: str | None) -> None:
        """``runs`` are all that the name has had, also those that are over; ``own`` is the key of the one that asks.

        What was published by runs before the savepoint's own is behind it. Those after it began at the savepoint or
        elsewhere, so whatever they have published is past it. A savepoint without a run is before all of them.
        """
        known = list(runs)
        taken_in = next((run for run in known if run.key == self.point.key), None)
        if taken_in is not None and taken_in.last_batch > self.point.batch:
            raise self._past(
                f"its micro-batch {taken_in.last_batch} is published, and the savepoint is after micro-batch "
                f"{self.point.batch}"
            )
        first = 0 if taken_in is None else taken_in.run
        if any(run.run > first and run.last_batch >= 0 and run.key != own for run in known):
            raise self._past("another run than the savepoint's has published under this name")

    def _past(self, why: str) -> Refused:
        return Refused(
            f"the output of {self.name!r} is past {self.savepoint}: {why}. What came after it would be in the output "
            "topics twice. Start under another name, from a newer savepoint, or say that this is wanted: "
            "replay_output=True (--replay-output)"
        )
