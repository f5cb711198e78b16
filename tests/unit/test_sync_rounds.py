"""A sync goes in rounds, none of which needs much memory: neither commits nor entries of one are without bound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cutwater.core.replica.sync_ranges import Extent
from cutwater.storagenode.repair import syncing
from cutwater.types import LLSN
from tests.unit.replica_bench import context


def rounds(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the commits that each round brings a learner that has nothing."""
    monkeypatch.setattr(syncing, "ROUND_CONTEXTS_MAX", 4)
    monkeypatch.setattr(syncing, "ROUND_LLSNS_MAX", 10)
    contexts, first = [], 1
    for count in counts:
        contexts.append(context(first, count))
        first += count
    storage, own = SimpleNamespace(contexts=contexts), Extent(LLSN(1), LLSN(first - 1))
    found, end = [], LLSN(0)
    while end < own.end:
        part = syncing._next_round(storage, own, Extent(LLSN(1), end))  # type: ignore[arg-type]
        found.append([context.count for context in part.contexts])
        assert part.end == end + sum(found[-1])
        end = part.end
    return found


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1] * 6, [[1] * 4, [1] * 2]),
        ([5, 5, 1], [[5, 5], [1]]),
        ([4, 4, 4, 4], [[4, 4], [4, 4]]),
        ([50, 3, 60], [[50], [3], [60]]),
    ],
)
def test_a_round_ends_after_so_many_commits_or_records(
    counts: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rounds(counts, monkeypatch) == expected
