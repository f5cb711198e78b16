"""Staged parts of a batch: rows that are on disk and in no log stream yet. Plain data.

A part holds the rows that one attempt of one task has written for one topic of a batch. It is invisible until the
metadata repository has decided on the batch. Then all of it becomes part of one group. A part consists of entries like
those of the log, and its bytes are the same on every node that holds it.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from cutwater.types import BatchNumber, JobEpoch, RunId, TopicId


class PartOrder(Struct, frozen=True):
    """How the rows of a part are put in order when it is published.

    ``schema`` is the Arrow schema of the part's batches, in IPC form: first the columns of the topic's schema
    ``number``, then the positions. Positions are compared byte by byte and are not stored in the log. ``event_time``
    names the column with event time; it is empty if there is none.
    """

    schema: bytes
    number: int
    event_time: str = ""
    compression: str = ""


class StagedPart(Struct, frozen=True):
    """Identifies a part. ``part`` is a name that no other attempt has: 32 hexadecimal digits. Without an ``order``, its
    entries go into the log unchanged. ``owner`` is the principal that stages it; the storage node sets it, if access
    control is on. ``job_epoch`` is the epoch under which the run was opened. Both fields are younger than the format,
    and not stored if they are not set."""

    run: RunId
    batch: BatchNumber
    generation: int
    topic: TopicId
    part: str
    order: PartOrder | None = None
    owner: str | UnsetType = UNSET
    job_epoch: JobEpoch | UnsetType = UNSET


class PartSize(Struct, frozen=True):
    """Size of a part."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0
