"""What a trim of the topic of programs may take away: no program that a job needs, or is about to need.

A program is *live* if a version of a job names it, or if it was stored in the last 24 hours: between storing a program
and submitting the job there is no other trace of it. Before a trim, the leader copies live programs behind its position
(``metadata.internal``). The rule here makes that safe: a trim that would take the last known place of a live
program is refused, whatever the leader has done before.
"""

from __future__ import annotations

from cutwater.core.internal_topics import PROGRAMS
from cutwater.core.jobs.job_records import ProgramPlace
from cutwater.core.order.state import OrderState, TopicState
from cutwater.errors import Refused
from cutwater.types import GLSN, SECOND, CutTime

NEW_US = 24 * 3_600 * SECOND
NAMES_SHOWN_MAX = 5


def is_of_programs(topic: TopicState | None) -> bool:
    return topic is not None and topic.is_internal and topic.name == PROGRAMS.name


def live_programs(state: OrderState) -> dict[str, tuple[ProgramPlace, ...]]:
    """Return the programs that have to be kept, by their SHA-256, with all their places."""
    named = state.jobs.programs()
    # The marks of the clock are some seconds apart, so a program may count as new for some seconds more.
    old_until = state.clock.last_until(CutTime(state.cut_time - NEW_US))
    return {
        sha256: places
        for sha256, places in state.jobs.programs_stored.items()
        if sha256 in named or any(place.glsn > old_until for place in places)
    }


def lost_by_trim(state: OrderState, before: GLSN) -> list[str]:
    """Return the live programs of which no place would be left."""
    return [sha256 for sha256, places in live_programs(state).items() if all(place.glsn < before for place in places)]


def check_program_trim(state: OrderState, before: GLSN) -> None:
    lost = lost_by_trim(state, before)
    if lost:
        shown = ", ".join(sorted(lost)[:NAMES_SHOWN_MAX]) + (", …" if len(lost) > NAMES_SHOWN_MAX else "")
        raise Refused(
            f"a trim of {PROGRAMS.name!r} before GLSN {before} would take {len(lost)} programs that versions of jobs "
            f"name, or that were stored in the last 24 hours ({shown}), and that were not copied behind it: trim again "
            "when they are, or delete the jobs first"
        )
