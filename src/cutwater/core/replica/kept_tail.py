"""Entries above the committed end of a replica that has to learn. They are on disk but do not count yet.

Such an entry may be the last intact copy of a committed record, so none is removed before a source has shown which
entries are committed. One head gives out all LLSNs of an epoch, so two entries with the same LLSN range and epoch have
the same bytes. If the source sends such an entry, or says that it is committed but unreadable there, the local entry
counts.

There may be holes between the entries: entries that cannot be read here. They are filled when the source sends them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct

from cutwater.types import LLSN, Entry, Epoch


class Kept(Struct, frozen=True):
    first_llsn: LLSN
    last_llsn: LLSN
    epoch: Epoch
    checksum: int


class KeptTail:
    def __init__(self, end: LLSN, entries: Iterable[Entry] = ()) -> None:
        self._start = end
        self._kept: dict[LLSN, Kept] = {}
        self._holes: list[tuple[LLSN, LLSN]] = []
        for entry in entries:
            self.add(entry)

    @property
    def end(self) -> LLSN:
        """The last LLSN that is kept, or the one before the first."""
        return next(reversed(self._kept.values())).last_llsn if self._kept else self._start

    def add(self, entry: Entry) -> None:
        """Add an entry at the end. A gap between the previous entry and this one is a hole that cannot be read."""
        self._add(_kept(entry))

    def _add(self, kept: Kept) -> None:
        assert kept.first_llsn > self.end, (kept.first_llsn, self.end)
        if kept.first_llsn > self.end + 1:
            self._holes.append((LLSN(self.end + 1), LLSN(kept.first_llsn - 1)))
        self._kept[kept.first_llsn] = kept

    def holds(self, entry: Entry) -> bool:
        """Whether exactly this entry is here."""
        return self._kept.get(entry.first_llsn) == _kept(entry)

    def has_hole_for(self, entry: Entry) -> bool:
        """Whether the entry fits into a hole that begins where the entry begins."""
        return any(first == entry.first_llsn and entry.last_llsn <= last for first, last in self._holes)

    def fill(self, entry: Entry) -> None:
        """Put the entry into the hole that begins with it."""
        tail = KeptTail(self._start)
        for kept in sorted((*self._kept.values(), _kept(entry)), key=attrgetter("first_llsn")):
            tail._add(kept)
        self._kept, self._holes = tail._kept, tail._holes

    def covers(self, first_llsn: LLSN, last_llsn: LLSN, epoch: Epoch) -> bool:
        """Whether entries of this epoch are here that begin and end exactly at these LLSNs."""
        llsn = first_llsn
        while llsn <= last_llsn:
            found = self._kept.get(llsn)
            if found is None or found.epoch != epoch:
                return False
            llsn = LLSN(found.last_llsn + 1)
        return llsn == last_llsn + 1

    def beginning_at(self, first_llsn: LLSN) -> KeptTail:
        """Return the tail from this LLSN up to the first hole. It is empty unless an entry begins there."""
        tail = KeptTail(LLSN(first_llsn - 1))
        if first_llsn in self._kept:
            for kept in self._kept.values():
                if kept.first_llsn == tail.end + 1:
                    tail._add(kept)
        return tail

    def cut(self, end: LLSN) -> None:
        """Forget the entries above ``end``, which were removed."""
        while self._kept and self.end > end:
            self._kept.popitem()
        assert self.end <= end, (self.end, end)
        self._holes = [hole for hole in self._holes if hole[1] < self.end]

    def commit(self, end: LLSN) -> None:
        """Forget the entries up to ``end``, which are committed."""
        self._start = max(self._start, end)
        self._kept = {first: kept for first, kept in self._kept.items() if kept.last_llsn > end}
        self._holes = [hole for hole in self._holes if hole[0] > end]


def _kept(entry: Entry) -> Kept:
    return Kept(entry.first_llsn, entry.last_llsn, entry.epoch, entry.batch.checksum)
