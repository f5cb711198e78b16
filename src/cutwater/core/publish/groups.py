"""Groups in a log stream: where they lie, and which of them a replica remembers.

A group is a sequence of entries that one cut commits. Every entry but the last has ``more`` set, and the last has the
group's tag. What a replica remembers of groups is a pure function of the entries of one log stream and of their
commits, like all of its deduplication state. The memory

1. covers uncommitted groups: a repeated order finds the first one and waits with it;
2. is truncated together with the tail of the log, is checkpointed, and travels with sync;
3. holds the last group of each run, except groups that were decided before ``oldest`` of a later group. Only an order
   that was delayed for long can ask for such a group, and it is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct, structs

from cutwater.errors import Refused
from cutwater.types import GLSN, LLSN, BatchNumber, CommitContext, DecisionIndex, Entry, GroupTag, RunId


class RememberedGroup(Struct, frozen=True, array_like=True):
    """A group as it lies in the log; ``glsn`` is None until the group is committed."""

    run: RunId
    batch: BatchNumber
    decided: DecisionIndex
    oldest: DecisionIndex
    first_llsn: LLSN
    count: int
    glsn: GLSN | None

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.count - 1)


class GroupMemory:
    """The groups of one log stream that a later order may repeat, in the order of the log."""

    def __init__(self, groups: Iterable[RememberedGroup] = ()) -> None:
        """Begin with the groups of a checkpoint, all of them committed."""
        self._groups = deque(groups)
        self._committed = len(self._groups)
        """Number of groups, from the oldest on, that are committed."""
        self._settled = self._committed

    def find(self, tag: GroupTag) -> RememberedGroup | None:
        """Return the group with this tag, or None if it is new. Raise if it is older than the remembered groups."""
        oldest = max((group.oldest for group in self._groups), default=DecisionIndex(0))
        last = next((group for group in reversed(self._groups) if group.run == tag.run), None)
        if last is not None and last.decided == tag.decided:
            return last
        if tag.decided < oldest or (last is not None and tag.decided < last.decided):
            raise Refused(f"batch {tag.batch} of run {tag.run} was published long ago")
        return None

    def record(self, entry: Entry) -> None:
        """Record an entry that got its place in the stream. Call this for every entry that ends a group, in order."""
        tag = entry.batch.group
        if tag is not None:
            first = LLSN(entry.last_llsn - tag.count + 1)
            self._groups.append(RememberedGroup(tag.run, tag.batch, tag.decided, tag.oldest, first, tag.count, None))

    def commit(self, context: CommitContext) -> list[RememberedGroup]:
        """Give GLSNs to everything up to the end of this commit. Return the groups that it commits."""
        news: list[RememberedGroup] = []
        while self._committed < len(self._groups):
            group = self._groups[self._committed]
            if group.first_llsn > context.last_llsn:
                break
            # One cut commits a whole group. Of a group that is trimmed in part, the beginning may be missing.
            assert context.first_llsn <= group.first_llsn <= group.last_llsn <= context.last_llsn, (group, context)
            self._groups[self._committed] = structs.replace(group, glsn=context.glsn_of(group.first_llsn))
            news.append(self._groups[self._committed])
            self._committed += 1
        return news

    def settle(self, end: LLSN) -> None:
        """Forget the groups that became superfluous, once the commits up to ``end`` are on disk."""
        if self._committed == self._settled:
            return
        kept = _that_matter(self._upto(end))
        rest = [group for group in self._groups if group.last_llsn > end]
        self._groups = deque([*kept, *rest])
        self._committed = sum(1 for group in self._groups if group.glsn is not None)
        self._settled = len(kept)

    def truncate(self, end: LLSN) -> None:
        """Forget the groups above ``end``, whose entries were removed. They were never committed."""
        while self._groups and self._groups[-1].last_llsn > end:
            group = self._groups.pop()
            assert group.glsn is None, group

    def checkpoint(self, upto: LLSN) -> tuple[RememberedGroup, ...]:
        """Return the groups of the committed prefix that ends at ``upto``, without the superfluous ones."""
        return tuple(_that_matter(self._upto(upto)))

    def _upto(self, end: LLSN) -> list[RememberedGroup]:
        return [group for group in self._groups if group.glsn is not None and group.last_llsn <= end]


def _that_matter(groups: list[RememberedGroup]) -> list[RememberedGroup]:
    """Return the last group of each run, if an order may still repeat it, in the order of the log.

    The group with the highest ``oldest`` is always among them, since no group is older than its own ``oldest``.
    """
    oldest = max((group.oldest for group in groups), default=DecisionIndex(0))
    last: dict[RunId, RememberedGroup] = {}
    for group in groups:
        last.pop(group.run, None)
        last[group.run] = group
    return [group for group in last.values() if group.decided >= oldest]


class GroupBounds:
    """Tracks the groups that a replica has begun to write and that are not wholly on disk. The end that the replica
    reports must not lie inside a group."""

    def __init__(self) -> None:
        self._groups: deque[tuple[LLSN, LLSN]] = deque()
        """First and last LLSN of each group."""
        self._begun: LLSN | None = None
        """First LLSN of the group that is not completely written; None if there is none."""

    def add(self, entry: Entry) -> None:
        """Add an entry that was written. The caller passes every entry that belongs to a group, in LLSN order."""
        if entry.batch.more:
            self._begun = entry.first_llsn if self._begun is None else self._begun
        elif self._begun is not None:
            self._groups.append((self._begun, entry.last_llsn))
            self._begun = None

    def whole(self, end: LLSN) -> LLSN:
        """Return the last LLSN up to ``end`` that does not lie inside a partly durable group. Everything up to ``end``
        is on disk."""
        groups = self._groups
        while groups and groups[0][1] <= end:
            groups.popleft()
        first = groups[0][0] if groups else self._begun
        return end if first is None or end < first else LLSN(first - 1)

    def cut(self, end: LLSN) -> None:
        """Forget the groups above ``end``, whose entries were removed."""
        while self._groups and self._groups[-1][1] > end:
            first, _ = self._groups.pop()
            assert first > end, "a group is removed as a whole"
        if self._begun is not None:
            assert self._begun > end, "a group is removed as a whole"
            self._begun = None
