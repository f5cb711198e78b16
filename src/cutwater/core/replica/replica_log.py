"""The log of one replica: where entries and commits end, as written and as on disk, and the effects that change files.

``Replica`` decides what happens. This part keeps the positions, and it is all that a learner sees of its replica.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.core.replica import events as e
from cutwater.core.replica.events import Effects
from cutwater.core.replica.kept_tail import KeptTail
from cutwater.core.replica.recovery import Invalid, Valid
from cutwater.core.replica.sync_ranges import Extent
from cutwater.types import GLSN, LLSN, CommitContext, Entry

DurableEnds = tuple[LLSN | None, LLSN | None]
"""Where the durable entries and the durable commits end; None if that is unknown."""


class ReplicaLog:
    def __init__(
        self, recovered: Valid | Invalid, first_llsn: LLSN, tail: Iterable[Entry], files_end: LLSN | None
    ) -> None:
        self.trusted = isinstance(recovered, Valid)
        intact = recovered if isinstance(recovered, Valid) else recovered.kept
        self.has_lost_entries = intact is None
        """Whether some committed entries are missing, so that a sync has to begin anew."""
        self.first_llsn = first_llsn
        self.committed_end = self.durable_committed_end = intact.committed_end if intact else LLSN(0)
        self.durable_high_watermark = intact.high_watermark if intact else GLSN(0)
        self._empty_at = self.committed_end if intact is None or intact.lacks_commits else None
        """The committed end while no commit is stored."""
        self.kept = KeptTail(self.committed_end, () if self.trusted else tail)
        """The entries of a learning replica above its committed end."""
        self.written_end = self.durable_end = recovered.keep_end if isinstance(recovered, Valid) else self.kept.end
        self._files_end = LLSN(0) if self.trusted else files_end or LLSN(0)
        self.generation = self.commits_generation = 0
        """How often entries, and how often commit contexts, were removed from the files. Writes from an earlier
        generation no longer count when they become durable."""
        self._ends_before: DurableEnds | None = None
        """The durable ends before the effects last returned removed something. If those effects fail, only this is
        known to be durable."""

    @property
    def lacks_commits(self) -> bool:
        return self.committed_end == self._empty_at

    @property
    def extent(self) -> Extent:
        """The committed entries that this replica holds."""
        return Extent(self.first_llsn, self.committed_end)

    def _durable_ends(self) -> DurableEnds:
        """Return what is known to be on disk. For a replica that has lost entries this is nothing: it is unknown where
        the good part ends, and a peer may need the rest."""
        return (None, None) if self.has_lost_entries else (self.durable_end, self.durable_committed_end)

    def _begin_removal(self) -> None:
        self._ends_before = self._ends_before or self._durable_ends()
        self.generation += 1

    def _write(self, entry: Entry) -> e.WriteEntry:
        assert entry.first_llsn == self.written_end + 1
        self.written_end = entry.last_llsn
        return e.WriteEntry(entry, self.generation)

    def _restart(self, first_llsn: LLSN, base_glsn: GLSN) -> e.Restart:
        """Begin anew at ``first_llsn``, with what is kept from there on. Nothing is committed yet."""
        self._begin_removal()
        self.commits_generation += 1
        self.first_llsn = first_llsn
        self.kept, self._files_end = self.kept.beginning_at(first_llsn), LLSN(0)
        self.written_end = self.durable_end = self.kept.end
        self.committed_end = self.durable_committed_end = self._empty_at = LLSN(first_llsn - 1)
        self.durable_high_watermark = base_glsn
        self.has_lost_entries = False
        return e.Restart(first_llsn, self.generation, self.kept.end)

    # A copy from a peer, for the learner.

    def write_copy(self, entry: Entry) -> Effects:
        """Write the next committed entry, unless it is kept here."""
        if self.kept.has_hole_for(entry):
            self.kept.fill(entry)
            return [e.FillEntry(entry)]
        if self.kept.holds(entry):
            return []
        # From here on, the kept tail differs from the log: its epoch went on without these entries.
        dropped = self.drop_kept(LLSN(entry.first_llsn - 1))
        self.kept.add(entry)
        return [*dropped, self._write(entry)]

    def drop_kept(self, end: LLSN) -> Effects:
        """Remove the entries above ``end``: they are not committed, or the committed entries there are different ones.
        This also removes unreadable entries behind the tail, and everything behind those."""
        if max(self.written_end, self._files_end) <= end:
            return []
        self._begin_removal()
        self._files_end = LLSN(0)
        self.kept.cut(end)
        # The barrier makes everything up to ``end`` durable.
        self.written_end = self.durable_end = end
        return [e.Truncate(end, self.generation)]

    def commit_copy(self, contexts: list[CommitContext], end: LLSN) -> Effects:
        assert end <= self.durable_end
        self.committed_end = end
        if contexts:
            self._empty_at = None
        self.kept.commit(end)
        return [e.WriteCommit(context, self.commits_generation) for context in contexts]
