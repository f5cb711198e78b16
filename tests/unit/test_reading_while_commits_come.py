"""What a read says is complete is what it holds, also while commits are written beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.reading import find
from cutwater.types import GLSN, LLSN, CommitContext, Revision
from tests.unit.memory_storage import MemoryStorage
from tests.unit.storage_kit import commit_of, entries_from


class Growing(MemoryStorage):
    """Whenever someone has looked at the last commit, the next one is written."""

    def __init__(self, waiting: list[CommitContext]) -> None:
        super().__init__()
        self.waiting = waiting

    @property
    def last_commit(self) -> CommitContext | None:
        found = super().last_commit
        if self.waiting:
            self.memory.contexts.append(self.waiting.pop(0))
        return found


def reader(written: int) -> tuple[ReplicaDriver, list[CommitContext]]:
    """Of a replica that has applied four commits, of which so many are in its files."""
    storage = Growing([])
    commits: list[CommitContext] = []
    for i in range(4):
        entries = entries_from(1 + sum(commit.count for commit in commits), 2)
        storage.write(entries)
        storage.sync()
        commits.append(commit_of(entries, commits[-1] if commits else None))
        if i < written:
            storage.write_contexts(commits[-1:])
    storage.waiting = commits[written:]
    replica = SimpleNamespace(
        complete_through=commits[-1].high_watermark,
        revision=Revision(1),
        committed_end=commits[-1].last_llsn,
        hard_state=SimpleNamespace(base_llsn=LLSN(0), trimmed_before=GLSN(1)),
    )
    return cast(ReplicaDriver, SimpleNamespace(replica=replica, storage=storage)), commits


@pytest.mark.parametrize("written", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("to_glsn", [None, GLSN(3), GLSN(9), GLSN(10_000)])
def test_nothing_is_called_complete_that_was_not_read(written: int, to_glsn: GLSN | None) -> None:
    driver, commits = reader(written)
    found = find(driver, GLSN(1), to_glsn)
    part = driver.storage.read(found.first, found.end, 1_000_000) if found.first is not None else None
    last = part.last_llsn if part is not None else LLSN(0)
    through = found.complete(part.commits if part is not None else (), last)
    wanted = [c.first_llsn + i for c in commits for i in range(c.count) if c.first_glsn + i <= through]
    assert last >= max(wanted, default=0)
    assert through >= min(commits[written - 1].high_watermark if written else 0, to_glsn or 10_000)
    if to_glsn is not None and part is not None:
        first = part.frames[-1].header.first_llsn
        assert next(c.glsn_of(first) for c in commits if c.first_llsn <= first <= c.last_llsn) <= to_glsn
