"""Parts of a batch as they are staged: rows that are on disk and in no log stream yet. Plain data.

A part is what one attempt of one task has of a batch for one topic. Nobody sees it before the metadata repository has
decided on the batch, and then all of it becomes part of one group. It consists of entries like those of the log, and
its bytes are the same on every node that holds it.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.types import BatchNumber, RunId, TopicId


class PartOrder(Struct, frozen=True):
    """How the rows of a part are put in order when it is published. ``schema`` is that of its batches, an Arrow schema
    in its IPC form: the columns of the topic's schema ``number``, and behind them the positions, which are compared
    byte by byte and are not stored in the log. ``event_time`` names the column with event time, if there is one."""

    schema: bytes
    number: int
    event_time: str = ""
    compression: str = ""


class StagedPart(Struct, frozen=True):
    """Which part it is. ``part`` is a name that no other attempt has: 32 hexadecimal digits. Without an ``order`` its
    entries go into the log as they are."""

    run: RunId
    batch: BatchNumber
    generation: int
    topic: TopicId
    part: str
    order: PartOrder | None = None


class PartSize(Struct, frozen=True):
    """How much there is of a part."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0
