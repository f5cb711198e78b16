"""A sync goes in rounds, none of which needs much memory: neither commits nor entries of one are without bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.core.messages import SyncBegin, SyncEnd, SyncRequest
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.sync_ranges import Extent
from cutwater.storagenode.counters import NodeCounters
from cutwater.storagenode.repair import syncing
from cutwater.types import GLSN, LLSN, LogStreamId
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


@pytest.mark.parametrize(
    ("first", "destination", "expected"),
    [
        # All before LLSN 7 is trimmed here, and its last commit is kept. An empty destination gets that one too.
        (7, Extent(LLSN(1), LLSN(0)), [5, 7, 9]),
        (11, Extent(LLSN(1), LLSN(4)), [9]),
        # The trim went through the middle of a commit, which is sent whole.
        (8, Extent(LLSN(1), LLSN(0)), [7, 9]),
        # The destination has it.
        (7, Extent(LLSN(1), LLSN(6)), [7, 9]),
        # It began anew there, and the sync was broken off; or it has trimmed all, and ignores what it has.
        (7, Extent(LLSN(7), LLSN(6)), [5, 7, 9]),
        (5, Extent(LLSN(7), LLSN(6)), [5, 7, 9]),
        (7, Extent(LLSN(1), LLSN(8)), [9]),
    ],
)
def test_a_new_beginning_brings_the_commit_before_it(first: int, destination: Extent, expected: list[int]) -> None:
    """It says when the log stream last spoke, which decides whether it is idle."""
    storage = SimpleNamespace(contexts=[context(llsn, 2) for llsn in (3, 5, 7, 9)])
    part = syncing._next_round(storage, Extent(LLSN(first), LLSN(10)), destination)  # type: ignore[arg-type]
    assert [context.first_llsn for context in part.contexts] == expected
    assert part.end == 10


def test_every_round_but_the_last_says_that_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner keeps entries beyond a round only if it is told that the source has more."""
    monkeypatch.setattr(syncing, "ROUND_CONTEXTS_MAX", 4)
    contexts = [context(first, 1) for first in range(1, 11)]

    async def run(job: Callable[[], Any]) -> Any:
        return job()

    def read(llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> SimpleNamespace:
        return SimpleNamespace(data=b"", last_llsn=to_llsn)

    replica = SimpleNamespace(
        extent=Extent(LLSN(1), LLSN(10)),
        hard_state=SimpleNamespace(trimmed_before=GLSN(1), base_glsn=GLSN(0)),
        dedup=SimpleNamespace(checkpoint=lambda end: DedupCheckpoint(end, ())),
    )
    driver = SimpleNamespace(
        replica=replica,
        storage=SimpleNamespace(contexts=contexts, read=read),
        in_reader=run,
        in_writer=run,
        require_readable=lambda: None,
    )
    node = SimpleNamespace(counters=NodeCounters(), in_thread=run, driver=lambda stream: driver)

    async def sent(end: LLSN) -> tuple[LLSN, bool]:
        """Where the round ends that a learner gets which has everything up to ``end``, and whether there is more."""
        items: list[Any] = []

        async def send(item: object, body: bytes = b"") -> None:
            items.append(item)

        request = SyncRequest(LogStreamId(1), 1, Extent(LLSN(1), end))
        serving = syncing.Syncing(node)  # type: ignore[arg-type]
        await serving.serve(SimpleNamespace(argument=request), SimpleNamespace(send=send))  # type: ignore[arg-type]
        begin, last = items[0], items[-1]
        assert isinstance(begin, SyncBegin)
        assert isinstance(last, SyncEnd)
        return begin.plan.copy.end, last.more

    async def all_rounds() -> list[tuple[LLSN, bool]]:
        return [await sent(LLSN(end)) for end in (0, 4, 8, 10)]

    assert asyncio.run(all_rounds()) == [(4, True), (8, True), (10, False), (10, False)]
