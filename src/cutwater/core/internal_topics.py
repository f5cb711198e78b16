"""Defines the internal topics: logs that the cluster keeps for itself, under names that begin with ``_``.

The leader makes them with ``MakeInternalTopicsRequest``; clients cannot, but for those of jobs, which the first client
that needs one asks for (``MakeJobTopicRequest``). A topic is internal because it was made that
way, not because of its name: earlier versions let users create such names. An internal topic has one log stream. It has
as many copies as there are storage nodes, up to ``replication``, and gets more by itself when storage nodes are added.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.types import REPLICATION_DEFAULT, SECOND, Retention

AUDIT_DAYS = 90
JOB_LOG_DAYS = 7
JOB_LOG_BYTES = 1024**3


class InternalTopic(Struct, frozen=True):
    """What an internal topic is made with. ``schema`` is a serialised Arrow schema, or empty for keys and values.
    Operators may change retention and replication later."""

    name: str
    schema: bytes = b""
    event_time: str = ""
    retention: Retention = Retention()
    replication: int = REPLICATION_DEFAULT


AUDIT = InternalTopic("_audit", retention=Retention(time_us=AUDIT_DAYS * 86_400 * SECOND))
PROGRAMS = InternalTopic("_programs")
"""Programs are kept until a decision trims them. The first one that is submitted makes the topic; the name is reserved,
and access control is not turned on while a user's topic has it (ADR 0056)."""
PROGRAM_ROWS_MAX = 1_024
"""A place with more records than this has no program: those have 64 MiB at most, in records of about 1 MiB."""
JOB_LOGS = InternalTopic("_job_logs", retention=Retention(JOB_LOG_DAYS * 86_400 * SECOND, JOB_LOG_BYTES))
"""What the programs of jobs printed."""
OF_JOBS = {topic.name: topic for topic in (PROGRAMS, JOB_LOGS)}
"""The topics that clients ask for, by name."""


def way_out(name: str, *, is_typed: bool) -> str:
    """Say how a user's topic with a reserved name gets out of the way."""
    copy = name.lstrip("_.-") or "copy"
    if is_typed:
        copying = (
            f"create topic {copy} with the columns that `cutwater topic describe {name}` shows, "
            f"`cutwater subscribe {name} -o value | cutwater append {copy} --format ndjson`"
        )
    else:
        copying = (
            f"`cutwater subscribe {name} -o value | cutwater append {copy} --create` for values that are lines, a "
            "program that subscribes and appends for other values and for keys and headers"
        )
    return f"copy its records, then delete it: {copying}; `cutwater topic delete {name}`"
