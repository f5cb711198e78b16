"""Runs for a single batch that were forgotten after their batch was published.

A late retry must not publish the batch a second time. So of each such run a few bytes are kept for longer than the run
itself: its number, and hashes of its key and of its opener.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from cutwater.types import RunId

KEPT_MAX = 20_000
OPENERS_MIN = 10
"""The runs of one principal take up at most this fraction."""


class FinishedRun(Struct, frozen=True, array_like=True):
    """``opener`` is 0 if access control was off."""

    run: int
    key: int
    opener: int = 0


class FinishedRuns:
    """See the module. Every copy of the state keeps the same ones."""

    def __init__(self, kept: Iterable[FinishedRun] = ()) -> None:
        self._kept: dict[int, FinishedRun] = {}
        self._by_key: dict[int, int] = {}
        self._of_opener: dict[int, dict[int, None]] = {}
        for one in kept:
            self._add(one)

    def snapshot(self) -> tuple[FinishedRun, ...]:
        return tuple(self._kept.values())

    def add(self, run: RunId, key: str, opener: str) -> None:
        """Keep a run, and let the oldest go if there are too many."""
        made = FinishedRun(int(run), _hash(key, 8), _hash(opener, 4) if opener else 0)
        self._add(made)
        own = self._of_opener[made.opener]
        if made.opener and len(own) > KEPT_MAX // OPENERS_MIN:
            self._drop(next(iter(own)))
        if len(self._kept) > KEPT_MAX:
            self._drop(next(iter(self._kept)))

    def has(self, run: RunId) -> bool:
        return run in self._kept

    def with_key(self, key: str) -> RunId | None:
        found = self._by_key.get(_hash(key, 8))
        return None if found is None else RunId(found)

    def _add(self, made: FinishedRun) -> None:
        self._kept[made.run] = made
        self._by_key[made.key] = made.run
        self._of_opener.setdefault(made.opener, {})[made.run] = None

    def _drop(self, run: int) -> None:
        gone = self._kept.pop(run)
        if self._by_key.get(gone.key) == run:
            del self._by_key[gone.key]
        own = self._of_opener[gone.opener]
        del own[run]
        if not own:
            del self._of_opener[gone.opener]


def _hash(text: str, size_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size_bytes).digest())
