"""What the storage of a replica returns when it is read and verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from cutwater.format.entry_codec import EntryFrame, FrameHeader
from cutwater.types import LLSN, CommitContext


class EntryRange(Struct, frozen=True):
    """Consecutive entries as they are stored.

    ``data`` is all frames in one buffer, ``frames`` are its parts, and ``commits`` are the commit contexts that give
    them their GLSNs.
    """

    data: memoryview
    frames: tuple[EntryFrame, ...]
    commits: tuple[CommitContext, ...]

    @property
    def first_llsn(self) -> LLSN:
        return self.frames[0].header.first_llsn

    @property
    def last_llsn(self) -> LLSN:
        return self.frames[-1].header.last_llsn


class Located(Struct, frozen=True):
    """The place of consecutive entries in one file, from ``start`` to ``end``. Their bodies were not checked."""

    path: str
    start: int
    end: int
    headers: Sequence[FrameHeader]
    commits: Sequence[CommitContext]


class StorageFinding(Struct, frozen=True):
    """A fault that ``verify`` found, with the LLSNs that are affected, if they are known."""

    where: str
    what: str
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    is_content: bool = False
    """The bytes are as they were written, on all replicas, but their content is malformed. Nothing can repair them."""


FrameCheck = Callable[[EntryFrame], str]
"""Returns the fault in the content of an intact frame, or an empty string if it is sound."""


def malformed(where: str, problem: str, header: FrameHeader) -> StorageFinding:
    return StorageFinding(where, f"malformed content: {problem}", header.first_llsn, header.last_llsn, is_content=True)
